"""Lanes: who starts the operations of buckets, and who waits for them.

The order of operations on each process group is the same on all ranks and independent of timing.
`InlineLane` starts a bucket from the training thread as soon as it is ready and finishes it when
its sum is needed. A `ProgressLane` has a thread that keeps `credit` chunks in flight in a planned
order and hands finished buckets on (to the optimizer, say); the n-th chunk of a step uses route n
modulo credit.

`SingleRoundLane`: for plain and rounded sums. Whoever has something to start does it, and the
thread sleeps in the operation that was started first, because only its route can be used next. A
chunk costs one hand-over between threads; with an inbox and torch's futures it is three, each
contending for the GIL. `MultiRoundLane`: the thread sleeps on an inbox that futures and the
training thread write to, so that methods of several rounds progress independently of each other.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from headway.comm.algorithms.method import (
    FusedBuffer,
    PendingOperation,
    PointToPointOperations,
    finish,
    wait,
)
from headway.comm.lanes.buckets import Bucket
from headway.errors import RunError


class Lane(ABC):
    """What an exchange asks of a lane."""

    @abstractmethod
    def ready(self, bucket: Bucket) -> None:
        """The content of a bucket is complete; called in any order, once a step and bucket."""

    @abstractmethod
    def land(self, bucket: Bucket) -> None:
        """Wait until a bucket's sum is there; raises what went wrong in the exchange."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way; no thread is left behind."""


class InlineLane(Lane):
    """Everything happens in the training thread; buckets leave in order of their number."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._ready = [False] * len(buckets)
        self._next = 0
        self._rounds: dict[int, tuple[Iterator[PendingOperation], PendingOperation | None]] = {}
        self._leave: dict[int, float] = {}

    def ready(self, bucket: Bucket) -> None:
        self._ready[bucket.number] = True
        while self._next < len(self._buckets) and self._ready[self._next]:
            self._start(self._buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        bucket.flight.sent = perf_counter()
        if bucket.reserve is not None:
            self._leave[bucket.number] = bucket.reserve(1.0)
        rounds = bucket.method.rounds(bucket.fused, bucket.routes[0])
        self._rounds[bucket.number] = (rounds, next(rounds, None))
        self._next = bucket.number + 1

    def land(self, bucket: Bucket) -> None:
        rounds, waiting = self._rounds.pop(bucket.number)
        while waiting is not None:
            wait(waiting)
            waiting = next(rounds, None)
        if bucket.reserve is not None:
            sleep(max(0.0, self._leave[bucket.number] - monotonic()))
        bucket.flight.received = perf_counter()
        # The last bucket of the step: the next step begins with bucket 0 again.
        if not self._rounds and self._next == len(self._buckets):
            self._ready, self._next = [False] * len(self._buckets), 0

    def close(self) -> None:
        self._rounds.clear()


@dataclass(slots=True, eq=False)
class ChunkTask:
    """One chunk of one bucket.

    Attributes:
        ready_step: The step whose content is complete.
        rounds: The method at work; None: not in flight.
        leave: On an emulated link: when its bytes have left.
    """

    bucket: Bucket
    chunk: FusedBuffer
    ready_step: int = 0
    rounds: Iterator[PendingOperation] | None = None
    waiting: PendingOperation | None = None
    leave: float = 0.0

    @property
    def share(self) -> float:
        """Of the bucket's bytes."""
        return self.chunk.buffer.numel() / self.bucket.fused.buffer.numel()

    def start_rounds(self, place: int) -> Iterator[PendingOperation]:
        """The method, to be started on the route of a place in flight."""
        bucket = self.bucket
        bucket.flight.sent = bucket.flight.sent or perf_counter()
        self.leave = bucket.reserve(self.share) if bucket.reserve is not None else 0.0
        return bucket.method.rounds(self.chunk, bucket.routes[place])


@dataclass(slots=True)
class _BucketProgress:
    landed_step: int = 0
    done: int = 0
    chunks: int = 1


class ProgressLane(Lane):
    """A lane with a thread of its own.

    Args:
        order: The chunks in sending order, each as (bucket number, chunk).
        credit: Chunks in flight; every bucket has as many routes.
        landed: Called in the thread when a bucket's sum is there.
        idle: Called in the thread whenever nothing can be started: returns whether it did some
            work (and may have more).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: Sequence[tuple[int, FusedBuffer]],
        *,
        credit: int,
        landed: Callable[[Bucket], None] | None = None,
        idle: Callable[[], bool] | None = None,
        threads: int = 1,
    ) -> None:
        for bucket in buckets:
            # Two chunks in flight on one group could be in another order on another rank.
            if len(bucket.routes) < credit:
                raise RunError(f"bucket {bucket.number}: {len(bucket.routes)} routes for {credit}")
        self._tasks = [ChunkTask(buckets[number], chunk) for number, chunk in order]
        self._of_bucket: dict[int, list[ChunkTask]] = {bucket.number: [] for bucket in buckets}
        for task in self._tasks:
            self._of_bucket[task.bucket.number].append(task)
        self._states = {
            number: _BucketProgress(chunks=len(tasks)) for number, tasks in self._of_bucket.items()
        }
        self._credit = credit
        self._on_landed = landed
        self._idle = idle
        self._step = 1
        self._position = 0
        self._in_flight: list[ChunkTask | None] = [None] * credit
        self._opened = threading.Event()
        self._condition: Callable[[], bool] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(threads,), name="headway-lane", daemon=True
        )

    @abstractmethod
    def nudge(self) -> None:
        """Something that `idle` looks at has changed."""

    def land(self, bucket: Bucket) -> None:
        state = self._states[bucket.number]
        self.wait_for(lambda: state.landed_step >= bucket.step)

    def wait_for(self, met: Callable[[], bool]) -> None:
        """Sleep until a condition holds that this lane's thread brings about.

        Raises:
            BaseException: What went wrong in the thread.
        """
        if not met():
            self._opened.clear()
            self._condition = lambda: met() or self._error is not None
            while not self._condition():
                self._opened.wait()
                self._opened.clear()
            self._condition = None
        if self._error is not None:
            raise self._error

    def tell(self) -> None:
        """In this lane's thread: wake the training thread if what it waits for has happened."""
        # It sets its condition before it looks, and this looks after the change was made: one of
        # the two sees the other.
        condition = self._condition
        if condition is not None and condition():
            self._opened.set()

    def close(self) -> None:
        self._stop()
        # A thread that waits for a rank that has vanished ends with the process.
        self._thread.join(timeout=5.0)

    @abstractmethod
    def _stop(self) -> None:
        """Let `_work` return."""

    def _run(self, threads: int) -> None:
        try:
            # With OpenMP a new thread does not inherit the number that the training thread has set.
            torch.set_num_threads(threads)
            with torch.no_grad():
                self._work()
        # Raised where the training thread next waits, which otherwise would wait for ever.
        except BaseException as error:
            self._error = error
            self.tell()

    @abstractmethod
    def _work(self) -> None:
        """Until `_stop`."""

    def _next(self) -> int | None:
        """The place of the next chunk if it can be started, which is then in flight."""
        if self._position == len(self._tasks):
            if any(task is not None for task in self._in_flight):
                return None
            # Places count from a step's first chunk: none of the last step may be in flight.
            self._step, self._position = self._step + 1, 0
        task, place = self._tasks[self._position], self._position % self._credit
        if self._in_flight[place] is not None or task.ready_step < self._step:
            return None
        self._position += 1
        self._in_flight[place] = task
        return place

    def _count(self, bucket: Bucket) -> None:
        """A chunk is done; with the last one the bucket has landed."""
        state = self._states[bucket.number]
        state.done += 1
        if state.done < state.chunks:
            return
        state.done = 0
        bucket.flight.received = perf_counter()
        if self._on_landed is not None:
            self._on_landed(bucket)
        # After the callback, because this lets the training thread go on.
        state.landed_step = bucket.step
        self.tell()


class SingleRoundLane(ProgressLane):
    """For methods of one round (plain and rounded sums): the least work per chunk."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._starting = threading.Lock()
        self._ended = 0  # of the chunks of this step
        self._asleep = False
        self._stopping = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._thread.start()

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._start_all()
        self.nudge()

    def nudge(self) -> None:
        # The thread sets the flag before it looks for work a last time: no call is missed.
        if self._asleep:
            self._asleep = False
            self._bell.put(None)

    def _stop(self) -> None:
        self._stopping = True
        self._bell.put(None)

    def _start_all(self) -> None:
        """Start chunks in order for as long as the next one is ready and its place is free."""
        # Both threads come here: the operations of a route must begin in the planned order.
        with self._starting:
            while (place := self._next()) is not None:
                task = self._in_flight[place]
                assert task is not None
                task.rounds = task.start_rounds(place)
                task.waiting = next(task.rounds)

    def _work(self) -> None:
        while not self._stopping:
            self._start_all()
            self._asleep = True
            # The oldest chunk: only its route can be used next.
            task = self._in_flight[self._ended % self._credit]
            if task is not None:
                self._asleep = False
            # Updates fill the time in which the oldest chunk is still on its way.
            if (task is None or not _is_done(task)) and self._idle is not None and self._idle():
                continue
            if task is None:
                self._bell.get()
            else:
                self._end(task)

    def _end(self, task: ChunkTask) -> None:
        """Wait for the oldest chunk; its place is free then."""
        assert task.rounds is not None
        assert task.waiting is not None
        finish(task.rounds, task.waiting)
        if task.leave:
            sleep(max(0.0, task.leave - monotonic()))
        place = self._ended % self._credit
        task.rounds = task.waiting = None
        self._ended = (self._ended + 1) % len(self._tasks)
        # Last: from here on the training thread may start the next chunk on this route.
        self._in_flight[place] = None
        self._count(task.bucket)


def _is_done(task: ChunkTask) -> bool:
    return isinstance(task.waiting, dist.Work) and task.waiting.is_completed()


_STOP = object()
_NUDGE = object()


class MultiRoundLane(ProgressLane):
    """For methods of several rounds: each is resumed as soon as its operation is done."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._thread.start()

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._inbox.put(_NUDGE)

    def nudge(self) -> None:
        self._inbox.put(_NUDGE)

    def _stop(self) -> None:
        self._inbox.put(_STOP)

    def _work(self) -> None:
        busy = False
        while True:
            try:
                item = self._inbox.get(block=not busy)
            except Empty:
                busy = self._idle() if self._idle is not None else False
                continue
            if item is _STOP:
                return
            if isinstance(item, int):
                self._resume(item)
            while (place := self._next()) is not None:
                self._start(place)
            # Messages come first: `idle` works only while the inbox is empty.
            busy = self._idle is not None

    def _start(self, place: int) -> None:
        task = self._in_flight[place]
        assert task is not None
        method = task.bucket.method
        task.rounds = task.start_rounds(place)
        if method.blocking:
            finish(task.rounds)
            sleep(max(0.0, task.leave - monotonic()) if task.leave else 0.0)
            self._end(task, place)
        else:
            self._go_on(task, place)

    def _resume(self, place: int) -> None:
        task = self._in_flight[place]
        assert task is not None
        assert task.waiting is not None
        wait(task.waiting)  # returns at once, because it is done; raises its error
        self._go_on(task, place)

    def _go_on(self, task: ChunkTask, place: int) -> None:
        """Run the method until it has to wait for the network or is done."""
        assert task.rounds is not None
        task.waiting = next(task.rounds, None)
        if task.waiting is None:
            self._end(task, place)
            return
        assert not isinstance(task.waiting, PointToPointOperations)
        self._call_when_done(task.waiting, place, task.leave)

    def _call_when_done(self, work: dist.Work, place: int, leave: float) -> None:
        """Put the place into the inbox; on an emulated link not before the bytes have left."""
        inbox = self._inbox

        # Runs in a thread of torch, which must not drive the method: it only reports.
        def done(_: object) -> None:
            late = leave - monotonic() if leave else 0.0
            if late > 0:
                threading.Timer(late, inbox.put, (place,)).start()
            else:
                inbox.put(place)

        work.get_future().add_done_callback(done)

    def _end(self, task: ChunkTask, place: int) -> None:
        self._in_flight[place] = task.rounds = None
        self._count(task.bucket)
