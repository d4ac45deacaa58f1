"""The data loader: global batches, of which each rank reads its share, here or in workers.

The union of the ranks' shares is the global batch, each sample of an epoch is in exactly one batch,
and neither ranks, workers nor micro-batches change which samples those are or what they look like.

Workers are those of torch's DataLoader, with three additions: whatever goes wrong in a worker
arrives as the `HeadwayError` that it is; signals meant for the rank (Ctrl-C, a scheduler's SIGTERM)
do not take its workers away while it still writes a checkpoint; and a worker ends with its rank,
also when the rank is killed or the data set hangs.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from headway.data.order import (
    Cursor,
    GlobalBatch,
    GlobalBatches,
    Indices,
    SampleOrder,
    sample_seeds,
)
from headway.data.sampler_order import SamplerOrder
from headway.data.source import SeededSource, Source, reading
from headway.data.stateful_source import StatefulSource, absorber
from headway.data.torch_loader import LoaderSource, known_length, stream_of
from headway.errors import DataError, HeadwayError
from headway.plans import BatchSplit
from headway.units import counted

_BLOCK = 1024
"""Places of an epoch permuted at once: 0.4 ms, where 32 places alone take 0.15 ms."""

_GRACE = 2.0
"""Seconds that a worker gets to finish what it is reading when its loader is closed."""

_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM)
"""Sent to a whole process group or job; the rank decides what becomes of its workers."""


@dataclass(frozen=True)
class FetchRequest:
    """One micro-batch: places of one epoch, and which samples a user's sampler has put there."""

    epoch: int
    positions: range
    drawn: tuple[int, ...] | None = None


_BUS_ERROR = (
    "A mapped file was cut short in the moment of reading, or /dev/shm is full: look at both, then "
    "start again from the last checkpoint."
)


class MicroBatchReader(Dataset[Any]):
    """Reads micro-batches; to torch's DataLoader a data set whose items they are."""

    def __init__(self, source: Source, order: SampleOrder) -> None:
        self._source = source
        self._seeded = source if isinstance(source, SeededSource) else None
        self._order = order
        self._epoch, self._start = -1, 0
        self._block: Indices = order.indices(0, 0, 0)

    def read(self, request: FetchRequest) -> Any:
        """The data of a micro-batch.

        Raises:
            DataError: The source cannot read it.
        """
        epoch, places = request.epoch, request.positions
        # A sampler is drawn from in one process, and never again in a worker.
        drawn = request.drawn
        indices = self._indices(epoch, places).tolist() if drawn is None else list(drawn)
        with reading(self._source, indices):
            if self._seeded is None:
                return self._source.read(indices)
            seeds = sample_seeds(self._order.seed, epoch, places.start, places.stop)
            return self._seeded.read_seeded(indices, seeds)

    def __getitem__(self, request: FetchRequest) -> Any:
        """As `read`, in a worker; an error comes back as a value."""
        # torch would turn an exception of a worker into one with its text alone.
        try:
            return self.read(request)
        except HeadwayError as error:
            return _Failure(error, "".join(traceback.format_exception(error)))

    def _indices(self, epoch: int, places: range) -> Indices:
        """Which samples stand at the places; a block of the order is kept for the next."""
        within = self._start <= places.start and places.stop <= self._start + len(self._block)
        if epoch != self._epoch or not within:
            stop = min(max(places.stop, places.start + _BLOCK), self._order.length)
            self._block = self._order.indices(epoch, places.start, stop)
            self._epoch, self._start = epoch, places.start
        return self._block[places.start - self._start : places.stop - self._start]


class InProcessFetcher:
    """Reads each micro-batch when it is asked for."""

    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader: MicroBatchReader | None = reader

    def fetch(self, request: FetchRequest) -> Any:
        if self._reader is None:
            raise _closed()
        return self._reader.read(request)

    def close(self) -> None:
        self._reader = None


class WorkerFetcher:
    """Reads micro-batches ahead in processes of its own."""

    def __init__(
        self, reader: MicroBatchReader, requests: Iterable[FetchRequest], workers: int
    ) -> None:
        self._workers = workers
        self._listen, self._tell = multiprocessing.Pipe(duplex=False)
        loader = DataLoader(
            # No batches of torch's making: an item of this data set is a whole micro-batch.
            reader,
            batch_size=None,
            sampler=requests,
            num_workers=workers,
            # torch's default for single items, `default_convert`, would turn numpy arrays into
            # tensors.
            collate_fn=_as_it_is,
            worker_init_fn=functools.partial(_enter_worker, self._listen, self._tell),
            # Without a generator of its own it would take a number from the global one: training
            # with workers would then draw other random numbers than without.
            generator=torch.Generator(),
        )
        # The difference is this loader's workers; torch keeps them to itself.
        before = set(multiprocessing.active_children())
        self._items: Iterator[Any] | None = _started(loader)
        self._processes = set(multiprocessing.active_children()) - before
        # Before multiprocessing's own exit function, which waits for the workers to end.
        atexit.register(self.close)

    def fetch(self, _: FetchRequest) -> Any:
        """The next micro-batch: they are asked for in the order of the requests."""
        if self._items is None:
            raise _closed()
        try:
            item = next(self._items)
        except BaseException as error:
            # Its frames hold torch's iterator, which ends the workers when it is deleted.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, RuntimeError):
                raise DataError(
                    "a data-loading process died",
                    why=str(error),
                    fix=_BUS_ERROR
                    if "Bus error" in str(error)
                    else "Look for a lack of memory; use fewer workers, or none.",
                ) from error
            raise
        if isinstance(item, _Failure):
            raise item.error from _WorkerTrace(item.trace)
        return item

    def close(self) -> None:
        """End all workers and wait for them; again is harmless."""
        if self._items is None:
            return
        atexit.unregister(self.close)
        os.write(self._tell.fileno(), b"." * self._workers)  # a byte for each to read
        self._items = None  # torch's iterator ends the workers when it is deleted
        for process in self._processes:
            # Longer than `_GRACE`, after which a worker that still reads ends itself (`_leave`).
            process.join(_GRACE + 1)
            if process.is_alive():  # stuck in the data set, or stopped
                process.kill()
                process.join()
        self._listen.close()
        self._tell.close()


@dataclass(frozen=True)
class _Failure:
    error: HeadwayError
    trace: str


class _WorkerTrace(Exception):
    """The cause of an error in a worker, as text: tracebacks do not travel."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers, with the signals for the rank blocked until they ignore them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)
    try:
        with warnings.catch_warnings():
            # Python 3.12 on warns of every fork in a process with threads, which torch always has.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _closed() -> RuntimeError:
    return RuntimeError("the loader was closed, or iterated anew, while this iteration went on")


def _as_it_is(item: Any) -> Any:
    return item


def _enter_worker(listen: Connection, tell: Connection, _: int) -> None:
    """Make a worker ignore signals meant for its rank, and end with it."""
    tell.close()  # the inherited end: while it is open, a dead rank would not be an end of file
    for number in _FOR_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_RANK)
    sys.excepthook = functools.partial(_print_unless_rank_lost, sys.excepthook)
    threading.Thread(target=_leave, args=(listen.fileno(),), daemon=True).start()


def _print_unless_rank_lost(
    print_error: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """In place of `sys.excepthook`: a rank that is killed while it fetches a tensor is no error."""
    # multiprocessing's thread that hands out the tensors' memory prints by this function. Its only
    # client is the rank, whose death the launcher reports; if it lives, it has the other end of
    # the broken connection, and raises.
    served = threading.current_thread() is not threading.main_thread()
    if not (served and isinstance(error, (ConnectionError, EOFError))):
        print_error(kind, error, trace)


def _leave(listen: int) -> None:
    """End this process: at once if the rank has died (end of file), later if it says so."""
    if os.read(listen, 1):  # a byte: the loader was closed; nothing: its end of the pipe is gone
        time.sleep(_GRACE)
    os._exit(0)  # not sys.exit, which would only end this thread


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a rank passes through the model at once.

    Attributes:
        data: What the source read: tensors whose dimension 0 counts the samples.
        positions: The places of these samples in the epoch.
        absorb: Takes the network's outputs for these samples, once; None: nobody waits for them.
    """

    data: Any
    positions: range
    absorb: Callable[[Any], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StepFact:
    """What ranks compare in the step's own reduction, in place of an exchange before it.

    Attributes:
        numbers: Equal on all ranks, if nothing is wrong.
        compare: Called on all ranks where they differ; raises the error that names the ranks.
    """

    numbers: tuple[int, ...]
    compare: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """A rank's part of one global batch; in a ragged batch it may be empty.

    Attributes:
        micros: The rank's micro-batches, in the order of the data.
        after: Where the next one begins: the cursor to save once this batch is used.
        passes: The most micro-batches that any rank has of it.
        fact: What the step has yet to compare; None: nothing.
        length: Samples of its epoch, as this rank counts them; None: not known.
    """

    micros: tuple[MicroBatch, ...]
    samples: int
    start: Cursor
    after: Cursor
    passes: int
    fact: StepFact | None = None
    length: int | None = field(default=None, compare=False)


class Loader:
    """An iterable of `RankBatch`, endless unless `epochs` is given.

    Every iteration begins at `cursor`. One goes on at a time: a new one ends the one before.

    Args:
        split: The global batch and its micro-batches.
        shuffle: Visit the samples of an epoch in an order that depends on (seed, epoch) alone;
            otherwise as they lie. Of a torch DataLoader its sampler decides.
        drop_last: Leave out the ragged last batch of every epoch.
        workers: Processes that read ahead; 0 reads when a batch is asked for.
        epochs: End before this epoch, counted from the beginning of the run; None: never end.
        limit: Most samples of an epoch, taken from the beginning of the source; None: all.
        agree: Called by this rank with a fact that all ranks must have, and what it is: the order
            that a sampler has drawn, the first sample of a stream, where one without a length
            ends; None: not compared.
        in_step: Where a stream ends is compared by the step that uses the batch
            (`RankBatch.fact`), without an exchange of its own: for steps that need no rank's
            samples but its own before their reduction.
        skip: Batches from `cursor` on that are left out.

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
        agree: Agree | None = None,
        in_step: bool = False,
        skip: int = 0,
    ) -> None:
        self._drawn: SamplerOrder | None = None
        self._pin = False
        self._stream = stream_of(source)
        if self._stream is not None:
            shuffle = False
            self._stream.resume(cursor)
            if workers:
                raise DataError(
                    f"a stream is read in the rank's own process, and not by {workers} workers",
                    why="Worker processes would read the same samples, or others than one does.",
                    fix="Set num_workers=0 in the DataLoader, or workers=0.",
                )
        if isinstance(source, StatefulSource):
            shuffle = False
            if workers:
                raise DataError(
                    f"a {type(source).__name__} is read in the rank's own process, and not by "
                    f"{workers} workers",
                    why="Its next example depends on what the network makes of the last one.",
                    fix="Set workers=0.",
                )
        if isinstance(source, LoaderSource):
            self._drawn, self._pin = source.order(cursor.seed), source.pin
            shuffle = shuffle and source.shuffle
        length = checked_length(source, split.samples, limit, drawn=self._drawn is not None)
        self._limit = limit
        # Of a stream without a length, reading says where an epoch ends.
        self._order = self._drawn if length is not None else self._stream
        self._length = length
        length = length or 0
        self._batches = GlobalBatches(
            cursor, length, split.samples, drop_last, epochs, order=self._order
        )
        self._split, self._rank, self._ranks = split, rank, ranks
        self._workers, self._agree, self._in_step = workers, agree, in_step
        self._skip = skip
        self._source = source
        self._reader = MicroBatchReader(source, SampleOrder(length, cursor.seed, shuffle=shuffle))
        self._current: InProcessFetcher | WorkerFetcher | None = None  # one iteration at a time

    def __iter__(self) -> Iterator[RankBatch]:
        self.close()
        fetched = self._current = self._fetched()
        epoch: int | None = None
        try:
            for batch in self._global_batches():
                fact = self._compare(batch, first=batch.start.epoch != epoch)
                epoch = batch.start.epoch
                micros = tuple(
                    MicroBatch(
                        data=pinned(fetched.fetch(request), self._pin),
                        positions=part,
                        absorb=absorber(self._source, part),
                    )
                    for part, request in self._requests(batch)
                )
                yield RankBatch(
                    micros=micros,
                    samples=batch.count,
                    start=batch.start,
                    after=self._marked(batch.after),
                    passes=self._split.passes(self._ranks, batch.count),
                    fact=fact,
                    length=self._length,
                )
        finally:
            fetched.close()

    def _compare(self, batch: GlobalBatch, *, first: bool) -> StepFact | None:
        """Let the ranks compare what must be the same on all.

        Args:
            first: It is the first batch of its epoch that is read here.

        Returns:
            What is left for the step to compare.
        """
        stream = self._stream
        if stream is not None:
            stream.enter(batch.start)
        if self._agree is None:
            return None
        if self._drawn and first:
            self._agree(f"order of {self._drawn.kind}", self._drawn.digest(batch.start.epoch))
        if stream is not None and first:
            self._agree(f"first sample of {stream.kind}", stream.fingerprint(batch.start))
        if stream is not None and self._order is stream:
            # In each batch: a rank whose stream has ended would make other steps than the others.
            ends = batch.count, batch.after.epoch
            compare = functools.partial(self._agree, f"end of {stream.kind}", ends)
            if self._in_step:
                return StepFact(ends, compare)
            compare()
        return None

    def _marked(self, after: Cursor) -> Cursor:
        """The cursor with the state of the stream, where it has one."""
        if self._stream is None:
            return after
        return replace(after, stream=self._stream.mark(after))

    def close(self) -> None:
        """End the iteration that goes on, and its worker processes."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fetched(self) -> InProcessFetcher | WorkerFetcher:
        if not self._workers:
            return InProcessFetcher(self._reader)
        # A second walk over the same batches: the workers run ahead of `__iter__`.
        requests = (
            request for batch in self._global_batches() for _, request in self._requests(batch)
        )
        return WorkerFetcher(self._reader, requests, self._workers)

    def _requests(self, batch: GlobalBatch) -> Iterator[tuple[range, FetchRequest]]:
        """This rank's micro-batches of a batch: their places, and what is read there."""
        for part in self._parts(batch):
            yield (
                part,
                FetchRequest(batch.start.epoch, part, self._drawn_at(batch.start.epoch, part)),
            )

    def _global_batches(self) -> Iterator[GlobalBatch]:
        """All batches; of an order with batches of its own those that begin within the limit."""
        limited = self._limit is not None and self._order is not None
        for batch in itertools.islice(self._batches, self._skip, None):
            if not limited:
                yield batch
            elif batch.start.position < (self._limit or 0):
                left = (self._limit or 0) - batch.start.position
                yield replace(batch, count=min(batch.count, left))

    def _drawn_at(self, epoch: int, part: range) -> tuple[int, ...] | None:
        if self._stream is not None:
            return tuple(part)
        if self._drawn is None:
            return None
        return tuple(self._drawn.indices(epoch, part.start, part.stop).tolist())

    def _parts(self, batch: GlobalBatch) -> tuple[range, ...]:
        share, first = self._split.share(self._rank, self._ranks, batch.count), batch.start.position
        parts = self._split.microbatches(share)
        return tuple(range(first + part.start, first + part.stop) for part in parts)


Agree = Callable[[str, Any], None]
"""Compares a fact with that of the other ranks; collective. Its first argument says what it is."""


def pinned(data: Any, wanted: bool) -> Any:
    """The batch in page-locked memory, where there is an accelerator that it pays for."""
    if not (wanted and torch.cuda.is_available()):
        return data
    return tree_map(lambda t: t.pin_memory() if isinstance(t, torch.Tensor) else t, data)


def checked_length(
    source: Source, batch: int, limit: int | None = None, *, drawn: bool = False
) -> int | None:
    """Samples of an epoch; None: not known before it was read.

    Args:
        drawn: A sampler decides, so that batches need not be full.

    Raises:
        DataError: There are none, or less than one batch of them.
    """
    known = known_length(source)
    if known is None:
        return None
    length = known if limit is None else min(known, limit)
    if length == 0:
        raise DataError(
            "the data set is empty",
            where=type(source).__name__,
            fix="Check the path or the filter that selects its samples.",
        )
    if length < batch and not drawn:
        raise DataError(
            "the data set is smaller than one batch",
            where=type(source).__name__,
            why=f"It has {counted(length, 'sample')}; the global batch has {batch}.",
            fix=f"Set the batch to at most {counted(length, 'sample')}, or give more data.",
        )
    return length
