"""Large batches: LARS, LAMB, divided norms, learning rates; row-wise Adagrad for tables.

The names are loaded when they are first used: `lr_scaling` is arithmetic without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.optim.framework_rates import deepspeed_rates, torchtitan_rates
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
    from headway.optim.row_wise import RowWiseAdagrad, tables_by_row
    from headway.optim.warmup import WarmUp, correct_momentum, warmup_hold_decay


_HOMES = {
    "framework_rates": "deepspeed_rates torchtitan_rates",
    "layerwise": "LAMB LARS fit_exchange parallel_norms",
    "lr_scaling": "Scaling adasum_rate check_scaling linear scale_rates square_root",
    "parallel_operator": "ParallelOperator",
    "row_wise": "RowWiseAdagrad tables_by_row",
    "warmup": "WarmUp correct_momentum warmup_hold_decay",
}

__all__ = [
    "LAMB",
    "LARS",
    "ParallelOperator",
    "RowWiseAdagrad",
    "Scaling",
    "WarmUp",
    "adasum_rate",
    "check_scaling",
    "correct_momentum",
    "deepspeed_rates",
    "fit_exchange",
    "linear",
    "parallel_norms",
    "scale_rates",
    "square_root",
    "tables_by_row",
    "torchtitan_rates",
    "warmup_hold_decay",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"headway.optim.{module}"), name)
    raise AttributeError(f"module 'headway.optim' has no attribute {name!r}")
