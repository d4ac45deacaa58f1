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
    "cache.cached_source": "CacheWarning CachedSource cached",
    "cache.statistics": "CacheStatistics",
    "loader": "Loader MicroBatch RankBatch",
    "order": "Cursor SampleOrder take",
    "slabs.slab_source": (
        "Hdf5Slabs NpySlabs SampleParts SlabCut SlabReader SlabSource ZarrSlabs slabs_in"
    ),
    "slabs.slab_store": "SlabStore",
    "source": ("ArraySource DatasetSource MemmapSource SeededSource Source TensorSource as_source"),
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
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"headway.data.{module}"), name)
    raise AttributeError(f"module 'headway.data' has no attribute {name!r}")
