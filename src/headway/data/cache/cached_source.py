"""A source whose samples are kept on a local disk and in memory after the first read.

    source (remote)  ->  node-local disk  ->  host memory  ->  batches

The first epoch reads the source and fills the levels, later ones find their samples there. Kept are
samples after `prepare` and before `augment`, so that only what is the same in every epoch is kept.
Batches are bit for bit those of the source without the cache; a stored sample that is damaged, or
that the source no longer gives, is read again and never delivered. Shi et al. 2021, "Towards
Scalable Distributed Training of Deep Learning on Public Cloud Clusters", section 3.4.

A torch data set has single samples and a collate function. Any other source has batches whose rows
are its samples; that they are is checked, because a source that pads to the longest row of a batch,
say, has rows that depend on their neighbours.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from headway.data.cache.blob_store import CacheLevelLost, DamagedBlob, StoreKey
from headway.data.cache.levels import CacheLevel, DiskLevel, MemoryLevel
from headway.data.cache.serialization import Decoder, Encoded, encode
from headway.data.cache.statistics import CacheCounters, CacheStatistics
from headway.data.source import (
    Collate,
    DatasetSource,
    GlobalGenerators,
    SeededSource,
    Source,
    as_source,
    explained,
    join_samples,
    reading,
)
from headway.errors import DataError
from headway.units import format_bytes, parse_bytes

ReadSamples = Callable[[Sequence[int]], list[Any]]


def sample_access_of(
    source: Source, *, collate: Collate | None, prepared: bool
) -> tuple[ReadSamples, Collate]:
    """What reads single samples of a source, and what makes batches of them.

    Args:
        collate: Makes batches; None: as the source does, or as torch does if they are prepared.
        prepared: Whether the samples will be changed before they are joined.

    Raises:
        DataError: The source takes seeds of its own, so its samples are random; or its batches are
            no rows that belong to samples.
    """
    if isinstance(source, DatasetSource):
        # With `list` as its collate function it gives single samples, with its own errors.
        return DatasetSource(source.dataset, collate=list).read, collate or source.collate
    if isinstance(source, SeededSource):
        raise DataError(
            f"a {type(source).__name__} cannot be cached",
            why="It takes a seed for each sample (read_seeded), so its samples are random.",
            fix="Cache the source below it, and give the random part as `augment`.",
        )
    collate = collate or (default_collate if prepared else None)
    _check_rows(source, stacked=collate is None)
    return functools.partial(_read_rows, source), collate or _stacked


def _read_rows(source: Source, indices: Sequence[int]) -> list[Any]:
    with reading(source, indices):
        batch = source.read(indices)
    return _split(batch, len(indices))


def _check_rows(source: Source, *, stacked: bool) -> None:
    """Read some samples together and alone, and compare them bit for bit."""
    # A source that pads to the longest row of a batch has rows that depend on their neighbours.
    count = len(source)
    some = sorted({0, count // 2, count - 1}) if count else []
    if not some:
        return
    with reading(source, some):
        batch = source.read(some)
    rows = _split(batch, len(some))
    why = ""
    for place in {0, len(some) // 2}:
        if not _same_bytes(_read_rows(source, [some[place]])[0], rows[place]):
            why = f"Sample {some[place]} read alone is not its row of a batch of {len(some)}."
            break
    if not why and stacked and not _same_bytes(_stacked(rows), batch):
        why = "Its batches have strides other than those of stacked rows."
    if why:
        raise DataError(
            f"the batches of {type(source).__name__} are no rows that belong to samples",
            why=why,
            fix="Cache a map-style data set, and give what makes batches of samples as `collate`.",
        )


def _split(batch: Any, count: int) -> list[Any]:
    """The rows of a batch: nestings like it, with the entries of dimension 0."""
    if isinstance(batch, Tensor | np.ndarray):
        if not batch.ndim or len(batch) != count:
            raise DataError(
                f"a batch of {count} samples has a part of shape {tuple(batch.shape)}",
                fix="Dimension 0 of everything that `read` returns counts the samples.",
            )
        return [batch[row, ...] for row in range(count)]
    if type(batch) is dict:
        parts = {key: _split(value, count) for key, value in batch.items()}
        return [{key: rows[row] for key, rows in parts.items()} for row in range(count)]
    if type(batch) in (tuple, list):
        columns = [_split(value, count) for value in batch]
        return [type(batch)(rows[row] for rows in columns) for row in range(count)]
    raise DataError(
        f"a batch holds a {type(batch).__name__}",
        why="Rows can only be taken from tensors and arrays, in dict, list and tuple.",
        fix="Cache a map-style data set instead.",
    )


def _stacked(rows: list[Any]) -> Any:
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.stack(rows)
    if isinstance(first, np.ndarray):
        return np.stack(rows)
    if type(first) is dict:
        return {key: _stacked([row[key] for row in rows]) for key in first}
    return type(first)(_stacked(list(column)) for column in zip(*rows, strict=True))


def _same_bytes(one: Any, other: Any) -> bool:
    """Bits, types and layout of two samples or batches are the same."""
    return encode(one).to_bytes() == encode(other).to_bytes()


Change = Callable[[Any], Any]
"""From sample to sample."""

_FORMAT = 1
_STALE, _DAMAGED, _LOST = range(3)
"""What is warned of once, whichever process sees it first."""


class CacheWarning(UserWarning):
    """The data cache lost something; the samples are right, but come more slowly."""


class CachedSource:
    """A source whose samples are kept on a local disk and in memory; itself a source.

    Args:
        source: Where samples come from: a `Source` whose rows are its samples, or any map-style
            data set wrapped by `as_source`. Its samples must draw no random numbers.
        name: Of the data: with `version`, the number of samples and the name of `prepare`, it says
            which stored samples are those of this source. Give train and validation data different
            ones.
        memory: Most bytes of host memory, "2 GiB"; 0: none. The processes of a machine that cache
            the same data share them.
        disk: A directory on a local disk; None: none. It may be deleted at any time.
        disk_limit: Most bytes of everything in that directory; None: half of what is free there.
        version: Change it when the data or `prepare` change.
        prepare: From a sample of the source to the sample that is kept. Draws no random numbers.
        augment: From the kept sample to the one that is delivered, in every epoch anew. Its random
            numbers (of torch, numpy and random) belong to the sample, as in any data set.
        collate: Makes a batch of a list of samples; by default as without the cache.

    Raises:
        DataError: No level, a level that cannot be made, a source that cannot be cached.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        *,
        memory: int | str = 0,
        disk: str | Path | None = None,
        disk_limit: int | str | None = None,
        version: int | str = "1",
        prepare: Change | None = None,
        augment: Change | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.source = source
        self.prepare, self.augment = prepare, augment
        self._read, self.collate = sample_access_of(
            source, collate=collate, prepared=prepare is not None
        )
        self._key = _key(source, name, version, prepare)
        self._counters = CacheCounters()
        self._decoder = Decoder()
        self._levels: list[CacheLevel] = []
        bytes_of_memory = _bytes(memory, "memory")
        if not bytes_of_memory and disk is None:
            raise DataError(
                f"the data cache {name!r} has nowhere to keep samples",
                fix='Give memory="2 GiB", disk="/local/directory", or both.',
            )
        # Memory first: a sample is looked for in the faster level.
        if bytes_of_memory:
            try:
                self._levels.append(MemoryLevel(bytes_of_memory, self._key))
            except CacheLevelLost as error:
                self._warn(_LOST, "memory", f"no samples are kept in memory: {error}")
        if disk is not None:
            limit = None if disk_limit is None else _bytes(disk_limit, "disk_limit")
            self._levels.append(DiskLevel(Path(disk), limit, self._key))
        self._check_levels()

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Sequence[int]) -> Any:
        """The samples as one batch; `augment` draws from the global generators as they are.

        Raises:
            DataError: A sample cannot be read or stored, draws random numbers, or does not fit.
        """
        return join_samples(self.collate, indices, self.__getitems__(indices))

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Any:
        """As `read`, with one 64-bit seed per sample; the global generators stay as they were."""
        if self.augment is None:
            return self.read(indices)
        samples = self.samples(indices)
        generators = GlobalGenerators()
        try:
            for place, seed in enumerate(seeds):
                generators.seed(seed)
                samples[place] = self.augment(samples[place])
            # For a collate function that draws, as in `DatasetSource`.
            generators.seed(seeds[0])
            return join_samples(self.collate, indices, samples)
        finally:
            generators.restore()

    def __getitem__(self, index: int) -> Any:
        """One sample, so that this is a map-style data set for torch's DataLoader, too."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = self.samples(indices)
        return samples if self.augment is None else [self.augment(s) for s in samples]

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """The samples before `augment`, each in memory of its own or the source's."""
        found: dict[int, Any] = {}
        # A copy, because `_give_up` removes a level from the list.
        for level in list(self._levels):
            self._look(level, [i for i in indices if i not in found], found)
        missing = list(dict.fromkeys(i for i in indices if i not in found))  # each once
        if missing:
            self._fetch(missing, found)
        return [found[index] for index in indices]

    def statistics(self) -> CacheStatistics:
        """What was found where, of this process and those that it was copied to by a fork."""
        return self._counters.statistics()

    def explain(self) -> str:
        """Name, levels and statistics in one line."""
        levels = [
            f"{level.name} {format_bytes(level.size)} of {format_bytes(level.limit)}"
            for level in self._levels
        ]
        return f"data cache {self._key.name!r} ({', '.join(levels)}): {self.statistics().explain()}"

    def close(self) -> None:
        """Close the files; again is harmless. Reading goes on, from the source."""
        for level in self._levels:
            level.close()
        self._levels = []

    def _look(self, level: CacheLevel, wanted: list[int], found: dict[int, Any]) -> None:
        start, size, cost, hits = perf_counter_ns(), 0, 0, 0
        for index in wanted:
            try:
                blob = level.get(index)
            except DamagedBlob as error:
                self._damaged(level, error)
                continue
            except CacheLevelLost as error:
                self._give_up(level, error)
                break
            if blob is None:
                continue
            hits, size, cost = hits + 1, size + len(blob.payload), cost + blob.cost
            above = self._levels[0]  # memory gets what was only on the disk
            if above is not level:
                self._put(above, index, Encoded((blob.payload,), len(blob.payload)), blob.cost)
            found[index] = self._decoder.decode(blob.payload)
        if hits:
            seconds = (perf_counter_ns() - start) / 1e9
            self._counters.add(
                **{f"{level.name}_samples": hits, f"{level.name}_bytes": size},
                **{f"{level.name}_seconds": seconds},
                saved_seconds=cost / 1e9 - seconds,
            )

    def _fetch(self, missing: list[int], found: dict[int, Any]) -> None:
        start = perf_counter_ns()
        samples = self._prepared(missing)
        took = perf_counter_ns() - start
        size = 0
        for index, sample in zip(missing, samples, strict=True):
            encoded = self._encoded(index, sample)
            size += encoded.size
            for level in list(self._levels):
                self._put(level, index, encoded, took // len(missing))
            found[index] = sample
        self._counters.add(
            remote_samples=len(missing), remote_bytes=size, remote_seconds=took / 1e9
        )

    def _prepared(self, indices: Sequence[int]) -> list[Any]:
        """Samples of the source as they are kept."""
        generators = GlobalGenerators()
        where = f"data cache {self._key.name!r}"
        samples = self._read(indices)
        if self.prepare is not None:
            for place, index in enumerate(indices):
                with explained(f"sample {index} cannot be prepared", where):
                    samples[place] = self.prepare(samples[place])
        if generators.used():
            generators.restore()  # as if the sample had not been read
            raise DataError(
                "samples that draw random numbers cannot be cached",
                where=where,
                why="They would be the same in every epoch.",
                fix="Give the random part as `augment`: it follows after the cache, in every epoch "
                "anew.",
            )
        return samples

    def _encoded(self, index: int, sample: Any) -> Encoded:
        try:
            return encode(sample)
        except DataError as error:
            error.where = f"sample {index}{error.where.removeprefix('sample')}"
            raise

    def _put(self, level: CacheLevel, index: int, encoded: Encoded, cost: int) -> None:
        try:
            stored = level.put(index, encoded, cost)
        except CacheLevelLost as error:
            self._lose(level, error)
            return
        if stored:
            self._counters.add(**{f"{level.name}_stored": 1})
        elif stored is False:
            self._counters.add(not_stored=1)

    def _check_levels(self) -> None:
        """Compare one stored sample of each level with the source: has the data changed?"""
        for level in list(self._levels):
            try:
                self._check_level(level)
            except DamagedBlob as error:
                self._damaged(level, error)
            except CacheLevelLost as error:
                self._give_up(level, error)

    def _check_level(self, level: CacheLevel) -> None:
        index = level.any_sample()
        blob = None if index is None else level.get(index)
        if index is None or blob is None:
            return
        if blob.payload != self._encoded(index, self._prepared([index])[0]).to_bytes():
            level.renew()  # one changed sample: the others cannot be trusted either
            self._warn(
                _STALE,
                level.name,
                f"sample {index} in {level.name} is not what the source gives now; the stored "
                "samples are thrown away. Change `version` when the data or `prepare` change",
            )

    def _damaged(self, level: CacheLevel, error: DamagedBlob) -> None:
        self._counters.add(damaged=1)
        self._warn(
            _DAMAGED,
            level.name,
            f"a stored sample in {level.name} was damaged and is read again ({error}); further "
            "ones are only counted",
        )

    def _lose(self, level: CacheLevel, error: CacheLevelLost) -> None:
        """Go on without storing into a level that fails; what it holds can still be read."""
        self._warn(_LOST, level.name, f"no more samples are stored in {level.name}: {error}")
        level.freeze()

    def _give_up(self, level: CacheLevel, error: CacheLevelLost) -> None:
        self._warn(_LOST, level.name, f"{level.name} is no longer used: {error}")
        self._levels.remove(level)

    def _warn(self, kind: int, level: str, text: str) -> None:
        # One bit for each kind and level: warned of once, whichever process sees it first.
        if self._counters.first(2 * kind + (level == DiskLevel.name)):
            warnings.warn(f"data cache {self._key.name!r}: {text}", CacheWarning, stacklevel=2)


def cached(examples: Any, name: str, **options: Any) -> CachedSource:
    """What a user gave as data, kept on a local disk and in memory after it has been read once.

    Raises:
        DataError: See `as_source` and `CachedSource`.
    """
    return CachedSource(as_source(examples), name, **options)


def _bytes(amount: int | str, name: str) -> int:
    try:
        return parse_bytes(amount)
    except ValueError as error:
        raise DataError(f"{name} of the data cache: {error}") from None


def _key(source: Source, name: str, version: int | str, prepare: Change | None) -> StoreKey:
    """What decides what a stored sample is."""
    # A callable object has no name of its own; its class stands for it.
    kind = prepare if hasattr(prepare, "__qualname__") else type(prepare)
    facts: dict[str, object] = {
        "name": name,
        "version": str(version),
        "samples": len(source),
        "prepare": prepare and f"{kind.__module__}:{getattr(kind, '__qualname__', '')}",
    }
    # The format belongs to the key, so that samples stored in another one are not found.
    text = json.dumps([_FORMAT, facts], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return StoreKey(name=name, digest=digest, facts=facts, samples=len(source))
