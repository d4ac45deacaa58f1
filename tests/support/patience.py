"""Time limits that grow with how slow the machine is at this moment.

A limit is written for a quiet machine of two cores at 2.5 GHz. On a slower or a busy one, the same
test needs more: a limit that does not grow turns load into a failure. What is measured is the wall
time of a loop of known work, so that a slower clock, a quota of the processor and other processes
all count.
"""

from __future__ import annotations

import time

REFERENCE_SECONDS = 0.1
"""Of `_known_work` on the machine for which limits are written (measured 2026-11-22)."""
VALID_SECONDS = 30.0
"""After so long it is measured again: 0.1 s of every 30 s is a cost that nobody notices."""
MAX_SLOWNESS = 20.0
"""A hang must end some time, whatever the machine."""


class _Clock:
    """The newest measurement of this process, and the one before it."""

    def __init__(self) -> None:
        self.until = 0.0
        self.last = self.now = 1.0

    def slowness(self) -> float:
        if time.monotonic() > self.until:
            self.last, self.now = self.now, measure_slowness()
            self.until = time.monotonic() + VALID_SECONDS
        # Load comes and goes within a test: the slower of two measurements counts.
        return max(self.last, self.now)


_CLOCK = _Clock()


def _known_work() -> int:
    total = 0
    for number in range(1_000_000):
        total = (total * 31 + number) & 0xFFFF
    return total


def measure_slowness() -> float:
    """How many times slower than the reference this machine works now: 1 to `MAX_SLOWNESS`."""
    start = time.perf_counter()
    _known_work()
    return min(max((time.perf_counter() - start) / REFERENCE_SECONDS, 1.0), MAX_SLOWNESS)


def patient(seconds: float) -> float:
    """A limit for a quiet machine, stretched to what this one needs.

    Args:
        seconds: What the limit would be on a quiet machine.
    """
    return seconds * _CLOCK.slowness()
