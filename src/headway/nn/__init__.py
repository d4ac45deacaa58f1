"""Layers for models with very large tables: rows that appear with their keys, and what is made of
rows: factorisation machines, cross layers, dots of pairs.

The names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.nn.compressed import ProjectedBag, QuotientRemainderBag
    from headway.nn.cross import CrossLayer, CrossLayerV2
    from headway.nn.dots import PairwiseDots
    from headway.nn.dynamic_bag import DynamicEmbeddingBag
    from headway.nn.dynamic_split import split_dynamic_tables
    from headway.nn.dynamic_table import DynamicTable
    from headway.nn.factorization import FactorizationMachine, FieldAwareFactorizationMachine
    from headway.nn.keys_of_fields import field_keys

_HOMES = {
    "compressed": "ProjectedBag QuotientRemainderBag",
    "cross": "CrossLayer CrossLayerV2",
    "dots": "PairwiseDots",
    "dynamic_bag": "DynamicEmbeddingBag",
    "dynamic_split": "split_dynamic_tables",
    "dynamic_table": "DynamicTable",
    "factorization": "FactorizationMachine FieldAwareFactorizationMachine",
    "keys_of_fields": "field_keys",
}

__all__ = [
    "CrossLayer",
    "CrossLayerV2",
    "DynamicEmbeddingBag",
    "DynamicTable",
    "FactorizationMachine",
    "FieldAwareFactorizationMachine",
    "PairwiseDots",
    "ProjectedBag",
    "QuotientRemainderBag",
    "field_keys",
    "split_dynamic_tables",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"headway.nn.{module}"), name)
    raise AttributeError(f"module 'headway.nn' has no attribute {name!r}")
