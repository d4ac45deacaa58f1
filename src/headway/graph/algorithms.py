"""The ways to compute a model's layers, and what they cost at one minibatch, as data.

Invariant: times and sizes are from 0 upwards. Source: Zou et al. 2017, the integer programme of its
algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a layer: T_kl seconds with M_kl bytes of work space."""

    name: str
    seconds: float
    bytes: float


Layers = Mapping[str, Sequence[Algorithm]]
"""For each layer its algorithms."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured, or predicted, at one minibatch.

    Attributes:
        layers: Their algorithms.
        rest: Seconds of an iteration beside those layers.
        features: M_FM, bytes of feature maps.
        parameters: M_MP, bytes of parameters, gradients and copies of the optimiser.
        classifier: M_C, bytes of the fully connected layers.
    """

    layers: Layers
    rest: float
    features: float
    parameters: float
    classifier: float = 0.0
