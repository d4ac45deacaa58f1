"""Samples, their order and the batches made of them.

`Order` and `Cursor` are arithmetic: using them does not import torch; the other names are loaded
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ArraySource": "headway.data.source",
    "CacheStatistics": "headway.data.cache_counters",
    "CacheWarning": "headway.data.cache",
    "CachedSource": "headway.data.cache",
    "Cursor": "headway.data.cursor",
    "DatasetSource": "headway.data.source",
    "Hdf5Slabs": "headway.data.slab_readers",
    "Loader": "headway.data.loader",
    "MemmapSource": "headway.data.source",
    "MicroBatch": "headway.data.loader",
    "NpySlabs": "headway.data.slab_readers",
    "Order": "headway.data.order",
    "Parts": "headway.data.slabs",
    "RankBatch": "headway.data.loader",
    "SeededSource": "headway.data.source",
    "SlabCut": "headway.data.slabs",
    "SlabReader": "headway.data.slab_readers",
    "SlabSource": "headway.data.slabs",
    "SlabStore": "headway.data.slab_store",
    "Source": "headway.data.source",
    "TensorSource": "headway.data.source",
    "ZarrSlabs": "headway.data.slab_readers",
    "as_source": "headway.data.source",
    "cached": "headway.data.cache",
    "slabs_in": "headway.data.slab_readers",
    "take": "headway.data.cursor",
}

__all__ = [
    "ArraySource",
    "CacheStatistics",
    "CacheWarning",
    "CachedSource",
    "Cursor",
    "DatasetSource",
    "Hdf5Slabs",
    "Loader",
    "MemmapSource",
    "MicroBatch",
    "NpySlabs",
    "Order",
    "Parts",
    "RankBatch",
    "SeededSource",
    "SlabCut",
    "SlabReader",
    "SlabSource",
    "SlabStore",
    "Source",
    "TensorSource",
    "ZarrSlabs",
    "as_source",
    "cached",
    "slabs_in",
    "take",
]

if TYPE_CHECKING:
    from headway.data.cache import CachedSource, CacheWarning, cached
    from headway.data.cache_counters import CacheStatistics
    from headway.data.cursor import Cursor, take
    from headway.data.loader import Loader, MicroBatch, RankBatch
    from headway.data.order import Order
    from headway.data.slab_readers import (
        Hdf5Slabs,
        NpySlabs,
        SlabReader,
        ZarrSlabs,
        slabs_in,
    )
    from headway.data.slab_store import SlabStore
    from headway.data.slabs import Parts, SlabCut, SlabSource
    from headway.data.source import (
        ArraySource,
        DatasetSource,
        MemmapSource,
        SeededSource,
        Source,
        TensorSource,
        as_source,
    )


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
