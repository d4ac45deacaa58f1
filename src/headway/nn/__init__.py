"""Layers for models with very large tables: rows that appear with their keys.

The names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.nn.dynamic_bag import DynamicEmbeddingBag
    from headway.nn.dynamic_table import DynamicTable

_HOMES = {
    "dynamic_bag": "DynamicEmbeddingBag",
    "dynamic_table": "DynamicTable",
}

__all__ = [
    "DynamicEmbeddingBag",
    "DynamicTable",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"headway.nn.{module}"), name)
    raise AttributeError(f"module 'headway.nn' has no attribute {name!r}")
