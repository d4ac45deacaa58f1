"""Global batches, of which each rank reads its share.

The law: the union over the ranks of the places of a global batch is the batch, each sample of an
epoch is in exactly one batch, and neither ranks, workers nor micro-batches change which samples
those are or what they look like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway.data.cursor import Cursor, take
from headway.data.fetch import InProcess, Reader, Request, WorkerProcesses
from headway.data.order import Order
from headway.data.source import Source
from headway.errors import DataError
from headway.plan import BatchSplit


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a rank passes through the model at once.

    Attributes:
        data: What the source read: tensors whose dimension 0 counts the samples.
        positions: The places of these samples in the epoch.
    """

    data: Any
    positions: range


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """A rank's part of one global batch; in a ragged batch it may be empty.

    Attributes:
        micros: The rank's micro-batches, in the order of the data.
        samples: Samples of the global batch, over all ranks.
        start: Where the global batch begins.
        after: Where the next one begins: the cursor to save once this batch is used.
        passes: The most micro-batches that any rank has of it.
    """

    micros: tuple[MicroBatch, ...]
    samples: int
    start: Cursor
    after: Cursor
    passes: int


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A `RankBatch` before its data are read."""

    parts: tuple[range, ...]
    samples: int
    start: Cursor
    after: Cursor
    passes: int


class Loader:
    """An iterable of `RankBatch`, endless unless `epochs` is given.

    Every iteration begins at `cursor`. One goes on at a time: a new one ends the one before.

    Args:
        source: The samples.
        split: The global batch and its micro-batches.
        rank: Position on the data axis.
        ranks: Size of the data axis.
        cursor: Where to begin.
        shuffle: Visit the samples of an epoch in an order that depends on (seed, epoch) alone;
            otherwise as they lie.
        drop_last: Leave out the ragged last batch of every epoch.
        workers: Processes that read ahead; 0 reads when a batch is asked for.
        epochs: End before this epoch, counted from the beginning of the run; None: never end.
        limit: Most samples of an epoch, taken from the beginning of the source; None: all.

    Raises:
        DataError: There are no samples, less than one batch of them, or the cursor lies outside.
    """

    def __init__(
        self,
        source: Source,
        split: BatchSplit,
        *,
        rank: int,
        ranks: int,
        cursor: Cursor,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        epochs: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._length = checked_length(source, split.samples, limit)
        take(cursor, self._length, split.samples, drop_last)
        self._split, self._rank, self._ranks = split, rank, ranks
        self._cursor, self._drop_last, self._epochs = cursor, drop_last, epochs
        self._workers = workers
        self._reader = Reader(source, Order(self._length, cursor.seed, shuffle=shuffle))
        self._current: InProcess | WorkerProcesses | None = None

    def __iter__(self) -> Iterator[RankBatch]:
        self.close()
        fetched = self._current = self._fetched()
        try:
            for step in self._steps():
                yield RankBatch(
                    micros=tuple(
                        MicroBatch(data=next(fetched), positions=part) for part in step.parts
                    ),
                    samples=step.samples,
                    start=step.start,
                    after=step.after,
                    passes=step.passes,
                )
        finally:
            fetched.close()

    def close(self) -> None:
        """End the iteration that goes on, and its worker processes."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fetched(self) -> InProcess | WorkerProcesses:
        requests = (
            Request(step.start.epoch, part) for step in self._steps() for part in step.parts
        )
        if self._workers:
            return WorkerProcesses(self._reader, requests, self._workers)
        return InProcess(self._reader, requests)

    def _steps(self) -> Iterator[_Step]:
        """This rank's part of every global batch from the cursor on."""
        cursor = self._cursor
        while self._epochs is None or cursor.epoch < self._epochs:
            count, after = take(cursor, self._length, self._split.samples, self._drop_last)
            if count:
                share = self._split.share(self._rank, self._ranks, count)
                first = cursor.position
                parts = tuple(
                    range(first + part.start, first + part.stop)
                    for part in self._split.microbatches(share)
                )
                passes = self._split.passes(self._ranks, count)
                yield _Step(parts=parts, samples=count, start=cursor, after=after, passes=passes)
            cursor = after


def checked_length(source: Source, batch: int, limit: int | None = None) -> int:
    """Samples of an epoch.

    Raises:
        DataError: There are none, or less than one batch of them.
    """
    length = len(source) if limit is None else min(len(source), limit)
    if length == 0:
        raise DataError(
            "the data set is empty",
            where=type(source).__name__,
            fix="Check the path or the filter that selects its samples.",
        )
    if length < batch:
        raise DataError(
            "the data set is smaller than one batch",
            where=type(source).__name__,
            why=f"It has {length} samples; the global batch has {batch}.",
            fix=f"Set the batch to at most {length} samples, or give more data.",
        )
    return length
