"""Training with large batches: LARS, LAMB, divided norms, and the learning rates that belong to it.

The names are loaded when they are first used: the rules of `scaling` are arithmetic without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.optim.layerwise import LAMB, LARS, fit_exchange, parallel_norms
    from headway.optim.lr_scaling import (
        Scaling,
        adasum_rate,
        check_scaling,
        linear,
        scale_rates,
        square_root,
    )
    from headway.optim.parallel_operator import ParallelOperator
    from headway.optim.warmup import WarmUp, correct_momentum


_HOMES = {
    "LAMB": "headway.optim.layerwise",
    "LARS": "headway.optim.layerwise",
    "ParallelOperator": "headway.optim.parallel_operator",
    "Scaling": "headway.optim.lr_scaling",
    "WarmUp": "headway.optim.warmup",
    "adasum_rate": "headway.optim.lr_scaling",
    "check_scaling": "headway.optim.lr_scaling",
    "correct_momentum": "headway.optim.warmup",
    "fit_exchange": "headway.optim.layerwise",
    "linear": "headway.optim.lr_scaling",
    "parallel_norms": "headway.optim.layerwise",
    "scale_rates": "headway.optim.lr_scaling",
    "square_root": "headway.optim.lr_scaling",
}

__all__ = [
    "LAMB",
    "LARS",
    "ParallelOperator",
    "Scaling",
    "WarmUp",
    "adasum_rate",
    "check_scaling",
    "correct_momentum",
    "fit_exchange",
    "linear",
    "parallel_norms",
    "scale_rates",
    "square_root",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway.optim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
