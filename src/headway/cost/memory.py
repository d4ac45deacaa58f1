"""Bytes per parameter of a training step: weights, gradients and the state of torch's optimisers.

What a step needs beside them follows from the graph (`headway.graph.liveness`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HALF_PRECISION_BYTES = 2.0
"""Bytes of a number in fp16 or bf16: weights, activations and gradients."""
WEIGHTS, GRADIENTS = 2.0, 4.0
"""Bytes per parameter of a model in 16 bits: gradients are summed in 32 (Megatron)."""


@dataclass(frozen=True)
class OptimiserMemory:
    """What an optimiser keeps and needs, in parameters' sizes.

    Attributes:
        together: Temporaries with `foreach`, for all parameters at once.
    """

    state: int = 0
    together: int = 0


OPTIMISER_MEMORY: Mapping[str, OptimiserMemory] = {
    "sgd": OptimiserMemory(),
    "sgd, weight decay": OptimiserMemory(together=1),
    "momentum": OptimiserMemory(state=1),
    "momentum, weight decay": OptimiserMemory(state=1, together=1),
    "adam": OptimiserMemory(state=2, together=1),
    "adam, weight decay": OptimiserMemory(state=2, together=1),
    "adamw": OptimiserMemory(state=2, together=1),
}
"""Of torch.optim 2.11 to 2.14."""
