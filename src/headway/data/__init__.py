"""Samples, their order and the batches made of them.

`SampleOrder` and `Cursor` are arithmetic: using them does not import torch; the other names are
loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.cache.cached_source import CachedSource, CacheWarning, cached
    from headway.data.cache.statistics import CacheStatistics
    from headway.data.loader import Loader, MicroBatch, RankBatch
    from headway.data.order import Cursor, SampleOrder, take
    from headway.data.slabs.slab_source import (
        Hdf5Slabs,
        NpySlabs,
        SampleParts,
        SlabCut,
        SlabReader,
        SlabSource,
        ZarrSlabs,
        slabs_in,
    )
    from headway.data.slabs.slab_store import SlabStore
    from headway.data.source import (
        ArraySource,
        DatasetSource,
        MemmapSource,
        SeededSource,
        Source,
        TensorSource,
        as_source,
    )


_HOMES = {
    "ArraySource": "headway.data.source",
    "CacheStatistics": "headway.data.cache.statistics",
    "CacheWarning": "headway.data.cache.cached_source",
    "CachedSource": "headway.data.cache.cached_source",
    "Cursor": "headway.data.order",
    "DatasetSource": "headway.data.source",
    "Hdf5Slabs": "headway.data.slabs.slab_source",
    "Loader": "headway.data.loader",
    "MemmapSource": "headway.data.source",
    "MicroBatch": "headway.data.loader",
    "NpySlabs": "headway.data.slabs.slab_source",
    "SampleOrder": "headway.data.order",
    "SampleParts": "headway.data.slabs.slab_source",
    "RankBatch": "headway.data.loader",
    "SeededSource": "headway.data.source",
    "SlabCut": "headway.data.slabs.slab_source",
    "SlabReader": "headway.data.slabs.slab_source",
    "SlabSource": "headway.data.slabs.slab_source",
    "SlabStore": "headway.data.slabs.slab_store",
    "Source": "headway.data.source",
    "TensorSource": "headway.data.source",
    "ZarrSlabs": "headway.data.slabs.slab_source",
    "as_source": "headway.data.source",
    "cached": "headway.data.cache.cached_source",
    "slabs_in": "headway.data.slabs.slab_source",
    "take": "headway.data.order",
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
    "RankBatch",
    "SampleOrder",
    "SampleParts",
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


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
