"""Lanes: who starts the operations of the buckets, and who waits for them.

`InlineLane` starts a bucket from the training thread as soon as it is ready and finishes it when
its sum is asked for: nothing else runs, as little as possible is paid. The other lanes have a
thread (`progress`). Invariant of all: the order of operations on each process group is the same on
all ranks and independent of timing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import monotonic, perf_counter, sleep

from headway.comm.buckets import Bucket
from headway.comm.method import Waiting, wait


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
