"""headway: plan, check and run distributed PyTorch training; prove it equal to the serial run.

The public names are listed in `__all__`. Importing `headway` does not import torch: the names of
the torch plane are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.capture.annotations import replicate, set_default_strategy, split, stage
    from headway.channel import Channel
    from headway.comm.backend.process_group import register_backend
    from headway.comm.exchange.ddp_hook import register_comm_hook
    from headway.data.source import MemmapSource, Source
    from headway.errors import HeadwayError
    from headway.plan import Plan, data_parallel
    from headway.run.exchange import Exchange
    from headway.run.executor import Executor
    from headway.run.recipe.recipe import Recipe, criterion
    from headway.timeline import Timeline


__version__ = "0.1.0"

_HOMES = {
    "Channel": "headway.channel",
    "Exchange": "headway.run.exchange",
    "Executor": "headway.run.executor",
    "HeadwayError": "headway.errors",
    "MemmapSource": "headway.data.source",
    "Plan": "headway.plan",
    "Recipe": "headway.run.recipe.recipe",
    "Source": "headway.data.source",
    "Timeline": "headway.timeline",
    "criterion": "headway.run.recipe.recipe",
    "data_parallel": "headway.plan",
    "register_backend": "headway.comm.backend.process_group",
    "register_comm_hook": "headway.comm.exchange.ddp_hook",
    "replicate": "headway.capture.annotations",
    "set_default_strategy": "headway.capture.annotations",
    "split": "headway.capture.annotations",
    "stage": "headway.capture.annotations",
}

__all__ = [
    "Channel",
    "Exchange",
    "Executor",
    "HeadwayError",
    "MemmapSource",
    "Plan",
    "Recipe",
    "Source",
    "Timeline",
    "criterion",
    "data_parallel",
    "register_backend",
    "register_comm_hook",
    "replicate",
    "set_default_strategy",
    "split",
    "stage",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (keeps `import headway` free of torch)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
