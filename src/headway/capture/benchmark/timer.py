"""Timing on a device: short repeated runs, and rounds in which all ranks measure together.

Shared machines change their speed within seconds: on a virtual processor an undisturbed product in
the cache runs at full rate now and at 0.65 of it then (the host's other hyperthread). The shortest
time of a burst never sees that, a training step does. So `time_in_rounds` times everything again
over half a minute on all ranks of a machine at once. As ranks wait for each other in every step,
each round counts the times of the rank that took longest for that round; the slowest rank kernel by
kernel would be slower than any rank is for a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

MIN_REPEATS = 3


@dataclass(frozen=True)
class DeviceTimer:
    """A stop-watch that waits for the device."""

    device: torch.device
    seconds: float = 0.04

    @property
    def on_host(self) -> bool:
        """Whether kernels run where they are issued."""
        return self.device.type == "cpu"

    def wait(self) -> None:
        if not self.on_host:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def times(self, call: Callable[[], object]) -> list[float]:
        """Seconds of each of several calls, after one that does not count."""
        self.once(call)
        end, found = time.perf_counter() + self.seconds, list[float]()
        while len(found) < MIN_REPEATS or time.perf_counter() < end:
            found.append(self.once(call))
        return found

    def best(self, call: Callable[[], object], count: int = 1) -> float:
        """The shortest time of `count` calls in a row, for one of them."""

        def several() -> None:
            for _ in range(count):
                call()

        return min(self.times(several)) / count

    def spread(self, call: Callable[[], object]) -> float:
        """Usual over shortest time of a call; 1 on a quiet machine."""
        found = self.times(call)
        return median(found) / min(found)

    def sum_of(
        self, ahead: Callable[[int], object], call: Callable[[int], object], count: int
    ) -> float:
        """Seconds of `call` with 0, 1, ..., each after `ahead`, which does not count.

        Where kernels queue, everything is made ahead, so that the queue never runs empty.
        """
        if self.on_host:
            seconds = 0.0
            for number in range(count):
                ahead(number)
                seconds += self.once(lambda number=number: call(number))  # type: ignore[misc]
            return seconds
        for number in range(count):
            ahead(number)
        self.wait()
        return self.once(lambda: [call(number) for number in range(count)])


Visit = Callable[[], tuple[float, ...]]
"""Times something for a moment; seconds, always as many."""
Slowest = Callable[[list[float]], list[float]]
"""The longest of all ranks' times, place by place; all ranks of a machine call it together."""
ROUNDS_SECONDS = 30.0
_FEWEST, _DISTURBED = 2, 2.0


def slowest_of_one(times: list[float]) -> list[float]:
    """`Slowest` of a rank without others."""
    return times


def time_in_rounds(
    visits: Sequence[Visit], slowest: Slowest, seconds: float = ROUNDS_SECONDS
) -> list[tuple[float, ...]]:
    """The usual seconds of each: the mean of the rounds but the first, in which kernels are made,
    and but those of twice the median, which others disturb.

    A step is a sum of many kernels, so that its usual time is the sum of their means.

    Args:
        slowest: Of the ranks that share the machine.
        seconds: No round begins later, but for the second.
    """
    start, end = time.perf_counter(), 0.0
    rounds: list[list[tuple[float, ...]]] = []
    while len(rounds) < _FEWEST or end < seconds:
        found = []
        for visit in visits:
            slowest([0.0])  # in step
            found.append(visit())
        own = [n for times in found for n in times]
        # The same on all ranks, so that all of them stop after the same round.
        end, longest = slowest([time.perf_counter() - start, sum(own)])
        # Zeros of all others: the maximum is then, place by place, the slowest rank's own times.
        each = iter(slowest(own if sum(own) >= longest else [0.0] * len(own)))
        rounds.append([tuple(next(each) for _ in times) for times in found])
    return [tuple(map(_usual, zip(*times, strict=True))) for times in zip(*rounds[1:], strict=True)]


def _usual(times: tuple[float, ...]) -> float:
    middle = median(times)
    return fmean(seconds for seconds in times if seconds <= _DISTURBED * middle)
