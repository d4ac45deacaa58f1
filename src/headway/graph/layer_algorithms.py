"""Algorithms of a model's layers, with time and work space at one minibatch size, as data.

The input of the integer program of Zou et al. 2017 (minibatch size and convolution algorithms
under a memory limit): T_kl seconds and M_kl bytes for layer k and algorithm l.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerAlgorithm:
    """One way to compute a layer: T_kl seconds with M_kl bytes of work space."""

    name: str
    seconds: float
    bytes: float


LayerAlgorithms = Mapping[str, Sequence[LayerAlgorithm]]
"""For each layer its algorithms."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmProfile:
    """What was measured, or predicted, at one minibatch.

    Attributes:
        rest: Seconds of an iteration beside those layers.
        features: M_FM, bytes of feature maps.
        parameters: M_MP, bytes of parameters, gradients and copies of the optimiser.
        classifier: M_C, bytes of the fully connected layers.
    """

    layers: LayerAlgorithms
    rest: float
    features: float
    parameters: float
    classifier: float = 0.0
