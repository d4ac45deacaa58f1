"""Samples read a second time: from the tensors, files and data sets below headway's own sources.

The reference reads its samples so, one by one, past caches and mapped windows: what a source makes
of them otherwise is a difference. Sources of the user's own are asked themselves.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import default_collate

from headway.data import (
    ArraySource,
    CachedSource,
    DatasetSource,
    Hdf5Slabs,
    LoaderSource,
    MemmapSource,
    NpySlabs,
    SeededSource,
    SlabSource,
    Source,
    StreamSource,
    TensorSource,
    ZarrSlabs,
)
from headway.data.one_process import as_one_process
from headway.data.torch_loader import known_length, stream_of
from headway.errors import NotEqual


def read_batch(
    source: Source, indices: Sequence[int], seeds: Sequence[int], *, epoch: int = 0
) -> Any:
    """Samples as one batch, each read by itself.

    Args:
        seeds: Of each sample, for what is drawn in it.
        epoch: Of a stream.
    """
    below, collate = _data_set(source, epoch)
    if below is not None and collate is not default_collate:
        # Its own collate function sees a batch as a whole: padding, lists, packed sequences.
        joined: Any = collate(
            [_drawn(below, i, seed) for i, seed in zip(indices, seeds, strict=True)]
        )
        return joined
    drawn = [(i, seed) for i, seed in zip(indices, seeds, strict=True)]
    if stream_of(source) is None:
        singles = [_read_alone(source, i, seed) for i, seed in drawn]
    else:
        singles = [collate([_drawn(below, i, seed)]) for i, seed in drawn]
    joined = _joined(singles)
    if joined is not None:
        return joined
    if below is not None:  # samples of several shapes, or no tensors
        return default_collate(
            [_drawn(below, i, seed) for i, seed in zip(indices, seeds, strict=True)]
        )
    return _given(source, indices, seeds)


def _data_set(source: Source, epoch: int) -> tuple[Any, Any]:
    """The data set below a source, and what joins its samples; None: there is none."""
    stream = stream_of(source)
    if stream is not None:
        return stream_pass(stream, epoch), stream.collate
    if type(source) is LoaderSource:
        loader = source.loader
        samples = source.samples
        if isinstance(samples, DatasetSource):
            return loader.dataset, samples.collate
        return loader.dataset, loader.collate_fn
    if type(source) is DatasetSource:
        return source.dataset, source.collate
    return None, None


class StreamPass:
    """An epoch of a stream by numbers, read by a path of its own: from the beginning on, anew where
    an earlier sample is asked for."""

    def __init__(self, stream: Any, epoch: int) -> None:
        self._stream, self._epoch = stream, epoch
        self._samples: Iterator[Any] = iter(())
        self._place = sys.maxsize
        self._last: Any = None

    def __getitem__(self, index: int) -> Any:
        with as_one_process():
            if index < self._place - 1:
                self._samples, self._place = self._begun(), 0
            while self._place <= index:
                self._last = next(self._samples)
                self._place += 1
        return self._last

    def length(self, most: int) -> int:
        """How many samples there are, at most `most`."""
        with as_one_process():
            return sum(1 for _ in islice(self._begun(), most))

    def _begun(self) -> Iterator[Any]:
        # What remembers its place begins at it again: the one that was given is never read.
        remembers = hasattr(self._stream, "load_state_dict")
        stream = copy.copy(self._stream) if remembers else self._stream
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch)
        return iter(stream)


@lru_cache(maxsize=4)
def stream_pass(source: StreamSource, epoch: int) -> StreamPass:
    """An epoch of a stream; the last ones are kept, so that batch follows batch."""
    return StreamPass(source.stream, epoch)


def check_source(source: Source) -> None:
    """Hold what a source of headway's gives against what lies below it, for a few samples.

    They are read twice, the second time with others and in another order, as from a cache.

    Raises:
        NotEqual: The number of samples, or a sample, is another one.
    """
    kind = type(source)
    if kind not in _READERS and kind is not StreamSource:
        return
    stream = stream_of(source)
    if stream is not None and stream.length is None:
        count = stream_pass(stream, 0).length(2)
    else:
        count = len(source) if stream is not None else _count(source)
    # Of a loader a sampler says how many there are in an epoch.
    if kind is not LoaderSource and known_length(source) not in (count, None):
        raise NotEqual(
            f"the {kind.__name__} has {len(source)} samples in place of the {count} below it"
        )
    some = sorted({0, count // 2, count - 1, min(1, count - 1)}) if count else []
    for chosen in (some[:2], some[::-1]):
        seeds = [(place + 1) * 0x9E3779B97F4A7C15 % 2**64 for place in range(len(chosen))]
        if chosen and not _same(_given(source, chosen, seeds), read_batch(source, chosen, seeds)):
            raise NotEqual(
                f"samples {', '.join(map(str, chosen))} of the {kind.__name__} are not what lies "
                "below it",
                why="Read one by one from its tensors, files or data set they have other numbers, "
                "or draw others.",
                fix="A data set must give the same sample each time, but for what it draws from "
                "the generators of torch, numpy and random.",
            )


def _given(source: Source, indices: Sequence[int], seeds: Sequence[int]) -> Any:
    if isinstance(source, SeededSource):
        return source.read_seeded(indices, seeds)
    return source.read(indices)


def _read_alone(source: Any, index: int, seed: int) -> Any:
    """A batch of one sample."""
    # By the exact type: a class that is derived from one of them may read otherwise.
    own = _READERS.get(type(source))
    return _given(source, [index], [seed]) if own is None else own(source, index, seed)


def _of_data_set(source: DatasetSource, index: int, seed: int) -> Any:
    return source.collate([_drawn(source.dataset, index, seed)])


def _of_loader(source: LoaderSource, index: int, seed: int) -> Any:
    dataset: Any = source.loader.dataset
    if isinstance(dataset, Source):
        return _read_alone(dataset, index, seed)
    return default_collate([_drawn(dataset, index, seed)])


def _of_tensors(source: TensorSource, index: int, _: int) -> Any:
    return [tensor[index : index + 1] for tensor in source.tensors]


def _of_tokens(source: MemmapSource, index: int, _: int) -> Any:
    begin = source.offset + index * source.window * source.dtype.itemsize
    tokens = np.fromfile(source.path, source.dtype, source.window + 1, offset=begin)
    words = torch.from_numpy(tokens.astype(np.int64))[None]
    return words[:, :-1], words[:, 1:]


def _of_arrays(source: ArraySource, index: int, _: int) -> Any:
    rows = tuple(_tensor(_npy(path)[index : index + 1]) for path in source.paths)
    return rows if len(rows) > 1 else rows[0]


def _of_slabs(source: SlabSource, index: int, seed: int) -> Any:
    if source.cut.parts > 1:
        return source.read([index])
    arrays = tuple(_tensor(_stored(reader, index))[None] for reader in source.readers)
    if source.finish is not None:
        return source.finish(arrays)
    return arrays if len(arrays) > 1 else arrays[0]


def _stored(reader: Any, index: int) -> Any:
    """The whole array of a sample."""
    if type(reader) not in (NpySlabs, Hdf5Slabs, ZarrSlabs):
        return reader.read(index, [(0, size) for size in reader.shape])
    path = reader.paths[index] if len(reader.paths) > 1 else reader.paths[0]

    def of_sample(array: Any) -> Any:
        return np.asarray(array[index] if array.ndim > len(reader.shape) else array[()])

    if type(reader) is NpySlabs:
        return of_sample(_npy(path))
    if type(reader) is ZarrSlabs:
        zarr = importlib.import_module("zarr")
        return of_sample(zarr.open_array(str(path), path=reader.array, mode="r"))
    h5py = importlib.import_module("h5py")
    with h5py.File(path, "r") as file:
        return of_sample(file[reader.dataset])


def _of_cache(source: CachedSource, index: int, seed: int) -> Any:
    below = source.source
    if type(below) is DatasetSource:
        sample = below.dataset[index]
    else:
        sample = tree_map(lambda rows: rows[0], _read_alone(below, index, seed))
    if source.prepare is not None:
        sample = source.prepare(sample)
    if source.augment is not None:
        with drawing(seed):
            sample = source.augment(sample)
    return source.collate([sample])


_READERS: dict[type, Callable[[Any, int, int], Any]] = {
    DatasetSource: _of_data_set,
    TensorSource: _of_tensors,
    MemmapSource: _of_tokens,
    ArraySource: _of_arrays,
    SlabSource: _of_slabs,
    CachedSource: _of_cache,
    LoaderSource: _of_loader,
}


def _count(source: Any) -> int:
    """Samples of what lies below a source."""
    match source:
        case CachedSource():
            return _count(source.source) if type(source.source) in _READERS else len(source.source)
        case DatasetSource():
            return len(source.dataset)
        case LoaderSource():
            return len(source.loader.dataset)  # type: ignore[arg-type]
        case TensorSource():
            return int(source.tensors[0].shape[0])
        case MemmapSource():
            held = source.path.stat().st_size - source.offset
            # A sample needs the first token of the next one as well.
            return (held // source.dtype.itemsize - 1) // source.window
        case ArraySource():
            return int(_npy(source.paths[0]).shape[0])
    return len(source.readers[0])


@lru_cache(maxsize=64)
def _npy(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


def _tensor(array: Any) -> Tensor:
    """A copy, in the byte order of this machine."""
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))


def _drawn(dataset: Any, index: int, seed: int) -> Any:
    with drawing(seed):
        return dataset[index]


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Inside, the generators of torch, numpy and random follow from 64 bits."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed % 2**32, seed // 2**32])
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _joined(singles: Sequence[Any]) -> Any:
    """Batches of one sample as one batch; None where they are not tensors that fit together."""
    flat = [tree_flatten(single) for single in singles]
    leaves, form = flat[0]
    columns = list(zip(*(values for values, _ in flat), strict=False))
    if any(other != form for _, other in flat):
        return None
    fits = all(
        isinstance(value, Tensor)
        and value.ndim
        and len(value) == 1
        and value.shape == column[0].shape
        for column in columns
        for value in column
    )
    if not fits or len(columns) != len(leaves):
        return None
    return tree_unflatten([torch.cat(column) for column in columns], form)


def _same(one: Any, other: Any) -> bool:
    """Equal structure and equal values; two that are no numbers count as equal."""
    (leaves, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_equal, leaves, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.cpu(), other.cpu()
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    return bool(one == other)
