"""How long something takes on a device: once to get warm, then again and again for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

LEAST = 3


@dataclass(frozen=True)
class Clock:
    """A stop-watch that waits for the device.

    Attributes:
        device: Whose work is timed.
        seconds: For the repetitions of one thing.
    """

    device: torch.device
    seconds: float = 0.04

    @property
    def on_host(self) -> bool:
        """Whether kernels run where they are issued."""
        return self.device.type == "cpu"

    def wait(self) -> None:
        """Until the device has done what was issued."""
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
        while len(found) < LEAST or time.perf_counter() < end:
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
