"""Times as a step sees them: in rounds, all ranks of a machine at once, the slowest counts.

Shared machines change their pace within seconds: on a virtual processor an undisturbed product in
the cache runs at its full rate now and at 0.65 of it then (a host's hyperthread taken by others).
The shortest time of a burst never sees that, a step does. So everything is timed again and again
over half a minute, and as ranks wait for each other in every step, each round has the times of the
rank that took longest for it: of every kernel the slowest rank's would be more than any rank takes
for a step. Invariant: every rank has the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

Visit = Callable[[], tuple[float, ...]]
"""Times something for a moment; seconds, always as many."""
Slowest = Callable[[list[float]], list[float]]
"""The longest of all ranks' times, place by place; all ranks of a machine call it together."""
SECONDS = 30.0
_FEWEST, _DISTURBED = 2, 2.0


def alone(times: list[float]) -> list[float]:
    """`Slowest` of a rank without others."""
    return times


def in_rounds(
    visits: Sequence[Visit], slowest: Slowest, seconds: float = SECONDS
) -> list[tuple[float, ...]]:
    """The usual seconds of each: the mean of the rounds but the first, in which kernels are made,
    and but those of twice the median, which others disturb.

    A step is a sum of many kernels, so that its usual time is the sum of their means.

    Args:
        visits: In the same order on all ranks.
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
        end, longest = slowest([time.perf_counter() - start, sum(own)])
        each = iter(slowest(own if sum(own) >= longest else [0.0] * len(own)))
        rounds.append([tuple(next(each) for _ in times) for times in found])
    return [tuple(map(_usual, zip(*times, strict=True))) for times in zip(*rounds[1:], strict=True)]


def _usual(times: tuple[float, ...]) -> float:
    middle = median(times)
    return fmean(seconds for seconds in times if seconds <= _DISTURBED * middle)
