"""Lanes: who starts the operations of the buckets, and who waits for them.

`InlineLane` starts a bucket from the training thread as soon as it is ready and finishes it when
its sum is asked for: nothing else runs, as little as possible is paid. `ThreadLane` is a progress
thread: it keeps `credit` chunks in flight in a planned order, resumes methods of several rounds,
and hands landed buckets on (to the optimiser, say) while the training thread computes. Invariant:
the order of operations on each process group is the same on all ranks and independent of timing:
buckets start in the lane's order, and the n-th chunk uses route n modulo credit.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, sleep

import torch
import torch.distributed as dist

from headway.comm.buckets import Bucket
from headway.comm.method import Blocking, Fused, Route, Waiting, complete, wait
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
        self._rounds: dict[int, tuple[Iterator[Waiting], Waiting | None]] = {}
        self._leave: dict[int, float] = {}

    def ready(self, bucket: Bucket) -> None:
        self._ready[bucket.number] = True
        while self._next < len(self._buckets) and self._ready[self._next]:
            self._start(self._buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        bucket.flight.sent = perf_counter()
        if bucket.toll is not None:
            self._leave[bucket.number] = bucket.toll.reserve(1.0)
        rounds = bucket.method.rounds(bucket.fused, bucket.routes[0])
        self._rounds[bucket.number] = (rounds, next(rounds, None))
        self._next = bucket.number + 1

    def land(self, bucket: Bucket) -> None:
        rounds, waiting = self._rounds.pop(bucket.number)
        while waiting is not None:
            wait(waiting)
            waiting = next(rounds, None)
        if bucket.toll is not None:
            sleep(max(0.0, self._leave[bucket.number] - monotonic()))
        bucket.flight.received = perf_counter()
        if not self._rounds and self._next == len(self._buckets):
            self._ready, self._next = [False] * len(self._buckets), 0

    def close(self) -> None:
        self._rounds.clear()


@dataclass(slots=True, eq=False)
class _Task:
    """One chunk of one bucket."""

    bucket: Bucket
    chunk: Fused
    ready_step: int = 0
    rounds: Iterator[Waiting] | None = None
    waiting: Waiting | None = None
    leave: float = 0.0

    @property
    def share(self) -> float:
        """Of the bucket's bytes."""
        return self.chunk.buffer.numel() / self.bucket.fused.buffer.numel()


@dataclass(slots=True)
class _State:
    """What the training thread waits for, of one bucket."""

    landed_step: int = 0
    done: int = 0
    chunks: int = 1


_STOP = object()
_NUDGE = object()


class ThreadLane(Lane):
    """A progress thread.

    Args:
        buckets: In order of their number.
        order: The chunks in sending order, each as (bucket number, chunk).
        credit: Chunks in flight; every bucket has as many routes.
        landed: Called in the thread when a bucket's sum is there; may take its time, but urgent
            operations are started before.
        idle: Called in the thread whenever nothing can be started: returns whether it did some
            work (and may have more).
        threads: torch's threads for the arithmetic of this lane.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: Sequence[tuple[int, Fused]],
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
        self._tasks = [_Task(buckets[number], chunk) for number, chunk in order]
        self._of_bucket: dict[int, list[_Task]] = {bucket.number: [] for bucket in buckets}
        for task in self._tasks:
            self._of_bucket[task.bucket.number].append(task)
        self._states = {
            number: _State(chunks=len(tasks)) for number, tasks in self._of_bucket.items()
        }
        self._credit = credit
        self._on_landed = landed
        self._idle = idle
        self._step = 1
        self._position = 0
        self._flying: list[_Task | None] = [None] * credit
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._live, args=(threads,), name="headway-lane", daemon=True
        )
        self._thread.start()

    # -- called by the training thread ---------------------------------------------------------

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._inbox.put(_NUDGE)

    def nudge(self) -> None:
        """Something that `idle` looks at has changed."""
        self._inbox.put(_NUDGE)

    def land(self, bucket: Bucket) -> None:
        state = self._states[bucket.number]
        self.wait_for(lambda: state.landed_step >= bucket.step)

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Sleep until a condition holds that this lane's thread brings about.

        Raises:
            BaseException: What went wrong in the thread.
        """
        if not true():
            with self._changed:
                self._changed.wait_for(lambda: true() or self._error is not None)
        if self._error is not None:
            raise self._error

    def tell(self) -> None:
        """Wake those who wait; called in this lane's thread."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self._inbox.put(_STOP)
        # A thread that waits for a rank that has vanished ends with the process.
        self._thread.join(timeout=5.0)

    # -- the thread --------------------------------------------------------------------------

    def _live(self, threads: int) -> None:
        try:
            torch.set_num_threads(threads)
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self._error = error
            self.tell()

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
            self._start_all()
            busy = self._idle is not None

    def _start_all(self) -> None:
        """Start chunks in order for as long as the next one is ready and its place is free."""
        while True:
            if self._position == len(self._tasks):
                if any(task is not None for task in self._flying):
                    return
                self._step, self._position = self._step + 1, 0
            task = self._tasks[self._position]
            place = self._position % self._credit
            if self._flying[place] is not None or task.ready_step < self._step:
                return
            self._position += 1
            self._flying[place] = task
            self._start(task, place)

    def _start(self, task: _Task, place: int) -> None:
        flight = task.bucket.flight
        flight.sent = flight.sent or perf_counter()
        route: Route = task.bucket.routes[place]
        toll = task.bucket.toll
        task.leave = toll.reserve(task.share) if toll is not None else 0.0
        if task.bucket.method.blocking:
            complete(task.bucket.method, task.chunk, route)
            sleep(max(0.0, task.leave - monotonic()) if task.leave else 0.0)
            self._flying[place] = None
            self._count(task.bucket)
            return
        task.rounds = task.bucket.method.rounds(task.chunk, route)
        self._go_on(task, place)

    def _resume(self, place: int) -> None:
        task = self._flying[place]
        assert task is not None
        assert task.waiting is not None
        wait(task.waiting)  # is done: returns at once, and raises what went wrong
        self._go_on(task, place)

    def _go_on(self, task: _Task, place: int) -> None:
        """Run the method until it has to wait for the network or is done."""
        assert task.rounds is not None
        task.waiting = next(task.rounds, None)
        if task.waiting is not None:
            assert not isinstance(task.waiting, Blocking)
            self._call_when_done(task.waiting, place, task.leave)
            return
        self._flying[place] = task.rounds = None
        self._count(task.bucket)

    def _call_when_done(self, work: dist.Work, place: int, leave: float) -> None:
        """Put the place into the inbox; on an emulated link not before the bytes have left."""
        inbox = self._inbox

        def done(_: object) -> None:
            late = leave - monotonic() if leave else 0.0
            if late > 0:
                threading.Timer(late, inbox.put, (place,)).start()
            else:
                inbox.put(place)

        work.get_future().add_done_callback(done)

    def _count(self, bucket: Bucket) -> None:
        state = self._states[bucket.number]
        state.done += 1
        if state.done < state.chunks:
            return
        state.done = 0
        bucket.flight.received = perf_counter()
        if self._on_landed is not None:
            self._on_landed(bucket)
        state.landed_step = bucket.step
        self.tell()
