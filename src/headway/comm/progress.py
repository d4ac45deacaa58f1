"""The progress thread of an exchange: what its two lanes have in common.

A lane with a thread keeps `credit` chunks in flight in a planned order and hands landed buckets on
(to the optimiser, say) while the training thread computes. Invariant: chunks start in the lane's
order, and the n-th chunk of a step uses route n modulo credit, so that the order of operations on
each process group is the same on all ranks, whatever the timing.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from headway.comm.buckets import Bucket
from headway.comm.lane import Lane
from headway.comm.method import Fused, Waiting
from headway.errors import RunError


@dataclass(slots=True, eq=False)
class Task:
    """One chunk of one bucket.

    Attributes:
        bucket: Whose.
        chunk: What is exchanged.
        ready_step: The step whose content is complete.
        rounds: The method at work; None: not in flight.
        waiting: What it waits for.
        leave: On an emulated link: when its bytes have left.
    """

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

    def embark(self, place: int) -> Iterator[Waiting]:
        """The method, about to be started with the route of a place in flight."""
        bucket = self.bucket
        bucket.flight.sent = bucket.flight.sent or perf_counter()
        self.leave = bucket.toll.reserve(self.share) if bucket.toll is not None else 0.0
        return bucket.method.rounds(self.chunk, bucket.routes[place])


@dataclass(slots=True)
class _State:
    """What the training thread waits for, of one bucket."""

    landed_step: int = 0
    done: int = 0
    chunks: int = 1


class Gate:
    """Where the training thread sleeps until the other thread has brought something about."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._condition: Callable[[], bool] | None = None

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Sleep until a condition holds."""
        self._opened.clear()
        self._condition = true
        while not true():
            self._opened.wait()
            self._opened.clear()
        self._condition = None

    def tell(self) -> None:
        """Something has changed: wake the sleeper if it is what he waits for.

        He sets his condition before he looks, and this looks after the change was made: one of the
        two sees the other.
        """
        condition = self._condition
        if condition is not None and condition():
            self._opened.set()


class ProgressLane(Lane):
    """A lane with a thread of its own.

    Args:
        buckets: In order of their number.
        order: The chunks in sending order, each as (bucket number, chunk).
        credit: Chunks in flight; every bucket has as many routes.
        landed: Called in the thread when a bucket's sum is there.
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
        self._tasks = [Task(buckets[number], chunk) for number, chunk in order]
        self._of_bucket: dict[int, list[Task]] = {bucket.number: [] for bucket in buckets}
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
        self._flying: list[Task | None] = [None] * credit
        self._gate = Gate()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._live, args=(threads,), name="headway-lane", daemon=True
        )

    # -- called by the training thread ---------------------------------------------------------

    @abstractmethod
    def nudge(self) -> None:
        """Something that `idle` looks at has changed."""

    def land(self, bucket: Bucket) -> None:
        state = self._states[bucket.number]
        self.wait_for(lambda: state.landed_step >= bucket.step)

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Sleep until a condition holds that this lane's thread brings about.

        Raises:
            BaseException: What went wrong in the thread.
        """
        if not true():
            self._gate.wait_for(lambda: true() or self._error is not None)
        if self._error is not None:
            raise self._error

    def tell(self) -> None:
        """Wake who waits, if it is for what has happened; called in this lane's thread."""
        self._gate.tell()

    def close(self) -> None:
        self._stop()
        # A thread that waits for a rank that has vanished ends with the process.
        self._thread.join(timeout=5.0)

    @abstractmethod
    def _stop(self) -> None:
        """Let `_work` return."""

    # -- the thread --------------------------------------------------------------------------

    def _live(self, threads: int) -> None:
        try:
            torch.set_num_threads(threads)
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self._error = error
            self.tell()

    @abstractmethod
    def _work(self) -> None:
        """Until `_stop`."""

    def _next(self) -> int | None:
        """The place of the next chunk if it can be started, which is then in flight."""
        if self._position == len(self._tasks):
            if any(task is not None for task in self._flying):
                return None
            self._step, self._position = self._step + 1, 0
        task, place = self._tasks[self._position], self._position % self._credit
        if self._flying[place] is not None or task.ready_step < self._step:
            return None
        self._position += 1
        self._flying[place] = task
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
        state.landed_step = bucket.step
        self.tell()
