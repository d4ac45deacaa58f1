"""The exchange across the border of the step: each layer waits for its own parameters only.

When a step is released, the optimiser is stepped bucket by bucket, in the order in which the next
forward pass needs the parameters, as soon as their sums have landed, while the training thread is
already in that forward pass. Exact, not stale: every module waits for its own
parameters (`waits`), and a bucket takes new gradients only after its old ones have been used.
ByteScheduler's and P3's idea with the user's own optimiser (`slices`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from time import perf_counter

import torch
from torch import nn
from torch.optim import Optimizer

from headway.comm.buckets import Bucket
from headway.comm.exchange import GradientExchange, _Slot
from headway.comm.flight import Flight
from headway.comm.progress import ProgressLane
from headway.comm.slices import OptimizerSlices
from headway.comm.waits import ForwardWaits


class Applier:
    """Steps the parameters of landed buckets, most urgent first.

    The lane's thread does it when nothing is to be sent; a bucket that the training thread stands
    still for is left to that thread, which has nothing else to do.

    Args:
        urgency: Of each bucket, by number: smaller is needed earlier.
    """

    def __init__(self, urgency: dict[int, int]) -> None:
        self._urgency = urgency
        self._lock = threading.Lock()
        self._landed: dict[int, Bucket] = {}
        self._usable: list[tuple[int, int]] = []  # a heap of (urgency, number); some are gone
        self._early: list[Bucket] = []  # landed before their step was released
        self._released = 0
        self._factor = 1.0
        self._discard = False
        self._awaited = -1
        self.applied: dict[int, int] = dict.fromkeys(urgency, 0)
        self.slices: OptimizerSlices | None = None
        self.tell: Callable[[], None] = lambda: None

    def landed(self, bucket: Bucket) -> None:
        """In the lane's thread: a sum is there."""
        with self._lock:
            self._landed[bucket.number] = bucket
            if bucket.step <= self._released:
                self._offer(bucket)
            else:
                self._early.append(bucket)

    def release(self, step: int, factor: float, *, discard: bool) -> None:
        """In the training thread: sums of this step may be used, multiplied by `factor`."""
        with self._lock:
            self._factor, self._discard, self._released = factor, discard, step
            for bucket in self._early:
                self._offer(bucket)
            self._early.clear()

    def _offer(self, bucket: Bucket) -> None:
        heappush(self._usable, (self._urgency[bucket.number], bucket.number))

    def _may_be_used(self, number: int) -> bool:
        """An entry that the training thread has forestalled may meet the sums of the next step."""
        landed = self._landed.get(number)
        return landed is not None and landed.step <= self._released

    def apply_one(self) -> bool:
        """In the lane's thread: use a landed bucket; False: there is none."""
        bucket = None
        with self._lock:
            while self._usable and bucket is None:
                _, number = heappop(self._usable)
                if number != self._awaited and self._may_be_used(number):
                    bucket = self._landed.pop(number)
        if bucket is None:
            return False
        self._apply(bucket)
        self.tell()
        return True

    def stand_still(self, bucket: Bucket, wait_for: Callable[[Callable[[], bool]], None]) -> None:
        """In the training thread: return when a released bucket has been used."""
        number = bucket.number
        self._awaited = number
        wait_for(lambda: number in self._landed or self.applied[number] == bucket.step)
        with self._lock:
            mine = self._landed.pop(number, None)
            self._awaited = -1
        if mine is not None:
            with torch.no_grad():
                self._apply(mine)
        else:  # the other thread was about to
            wait_for(lambda: self.applied[number] == bucket.step)

    def _apply(self, bucket: Bucket) -> None:
        if not self._discard:
            if self._factor != 1.0:
                bucket.fused.gradients.mul_(self._factor)
            assert self.slices is not None
            self.slices.step(bucket, bucket.used)
        bucket.flight.applied = perf_counter()
        self.applied[bucket.number] = bucket.step


class CrossingExchange(GradientExchange):
    """As `GradientExchange`, but `release` takes the place of `receive`, `settle` and the update.

    Args:
        buckets: In forward order.
        lane: A thread whose hooks are those of `applier`.
        applier: As given to the lane.
        model: The whole model; gets forward hooks.
        optimizer: Steps are made by slices of it.
    """

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        lane: ProgressLane,
        applier: Applier,
        *,
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(buckets, lane)
        self._thread = lane
        self._applier = applier
        self._optimizer = optimizer
        applier.slices = OptimizerSlices(optimizer, buckets)
        applier.tell = lane.tell
        named = {
            name: parameter
            for bucket in buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        }
        self.waits = ForwardWaits(model, named, self._await)
        self._home = {name: bucket for bucket in buckets for name in bucket.names}
        self._released = 0
        self._flights: tuple[Flight, ...] = ()

    def begin(self) -> None:
        """A step begins; the last one's buckets may still be on their way."""
        self._armed = False
        self.step += 1

    @property
    def _start(self) -> float:
        return self.waits.began

    def _await(self, names: Iterable[str]) -> None:
        for name in names:
            bucket = self._home[name]
            if self._pending(bucket):
                self._stand_still(bucket)

    def _pending(self, bucket: Bucket) -> bool:
        """Its update has been released and not been made; gradients of a step may still gather."""
        return self._applier.applied[bucket.number] < bucket.step <= self._released

    def _stand_still(self, bucket: Bucket) -> None:
        flight = bucket.flight
        start = perf_counter()
        flight.needed = flight.needed or start
        self.doing("waits for bucket %d (%s ...)", bucket.number, bucket.names[0])
        self._applier.stand_still(bucket, self._thread.wait_for)
        flight.waited += perf_counter() - start

    def _bucket_of(self, slot: _Slot) -> Bucket:
        """The bucket, opened for this step; its old content has been used by now, or is awaited."""
        bucket = slot.bucket
        self.waits.check(slot.name)
        if bucket.step != self.step:
            self._open(bucket)
        return bucket

    def _open(self, bucket: Bucket) -> None:
        if self._pending(bucket):
            self._stand_still(bucket)
        bucket.open(self.step)

    def send(self) -> None:
        """Hand over every bucket that has not left; from here on gradients belong to the lane."""
        for bucket in self.buckets:
            if bucket.step != self.step:
                self._open(bucket)
        super().send()
        self._hide_gradients()

    def _hide_gradients(self) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def release(self, factor: float = 1.0, *, discard: bool = False) -> tuple[Flight, ...]:
        """Let the lane use the sums of this step; returns at once.

        Args:
            factor: Sums are multiplied by it.
            discard: No update is made of them.

        Returns:
            What happened to the buckets of the step before.
        """
        before, self._flights = self._flights, tuple(b.flight for b in self.buckets)
        if not discard:
            assert self._applier.slices is not None
            self._applier.slices.release()
            # Runs the optimiser's own hooks and counters; without gradients it changes nothing.
            self._optimizer.step()
        self._released = self.step
        self._applier.release(self.step, factor, discard=discard)
        self._thread.nudge()
        self.waits.next_step()
        return before

    def flush(self) -> None:
        """Wait until every released update has been made."""
        for bucket in self.buckets:
            if self._pending(bucket):
                self._stand_still(bucket)
        self.waits.settled()

    def discard(self) -> None:
        """Let the sums of this step go unused; parameters stay those of the step before."""
        self.release(discard=True)
        self.flush()
        self._hide_gradients()

    def close(self) -> None:
        """Wait for what was released; take all hooks off; end the thread."""
        self.waits.close()
        super().close()
