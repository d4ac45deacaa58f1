"""Samples, their order and the batches made of them.

`SampleOrder` and `Cursor` are arithmetic: using them does not import torch; the other names are
loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.data.cache.cached_source import CachedSource as CachedSource
    from headway.data.cache.cached_source import CacheWarning as CacheWarning
    from headway.data.cache.cached_source import cached as cached
    from headway.data.cache.statistics import CacheStatistics as CacheStatistics
    from headway.data.examples import as_examples as as_examples
    from headway.data.loader import Loader as Loader
    from headway.data.loader import MicroBatch as MicroBatch
    from headway.data.loader import RankBatch as RankBatch
    from headway.data.loader import StepFact as StepFact
    from headway.data.order import Cursor as Cursor
    from headway.data.order import SampleOrder as SampleOrder
    from headway.data.order import take as take
    from headway.data.slabs.slab_source import Hdf5Slabs as Hdf5Slabs
    from headway.data.slabs.slab_source import NpySlabs as NpySlabs
    from headway.data.slabs.slab_source import SampleParts as SampleParts
    from headway.data.slabs.slab_source import SlabCut as SlabCut
    from headway.data.slabs.slab_source import SlabReader as SlabReader
    from headway.data.slabs.slab_source import SlabSource as SlabSource
    from headway.data.slabs.slab_source import ZarrSlabs as ZarrSlabs
    from headway.data.slabs.slab_source import slabs_in as slabs_in
    from headway.data.slabs.slab_store import SlabStore as SlabStore
    from headway.data.source import ArraySource as ArraySource
    from headway.data.source import DatasetSource as DatasetSource
    from headway.data.source import MemmapSource as MemmapSource
    from headway.data.source import SeededSource as SeededSource
    from headway.data.source import Source as Source
    from headway.data.source import TensorSource as TensorSource
    from headway.data.source import as_source as as_source
    from headway.data.stateful_source import StatefulSource as StatefulSource
    from headway.data.stream import StreamSource as StreamSource
    from headway.data.torch_loader import LoaderSource as LoaderSource


_HOMES = {
    name: module
    for module, names in {
        "cache.cached_source": "CacheWarning CachedSource cached",
        "cache.statistics": "CacheStatistics",
        "examples": "as_examples",
        "loader": "Loader MicroBatch RankBatch StepFact",
        "order": "Cursor SampleOrder take",
        "slabs.slab_source": (
            "Hdf5Slabs NpySlabs SampleParts SlabCut SlabReader SlabSource ZarrSlabs slabs_in"
        ),
        "slabs.slab_store": "SlabStore",
        "stateful_source": "StatefulSource",
        "stream": "StreamSource",
        "torch_loader": "LoaderSource",
        "source": (
            "ArraySource DatasetSource MemmapSource SeededSource Source TensorSource as_source"
        ),
    }.items()
    for name in names.split()
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headway.data.{_HOMES[name]}"), name)
