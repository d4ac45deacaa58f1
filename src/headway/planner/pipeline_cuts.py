"""Level 3 of the search: where to cut a row of units into stages.

    T = min over cuts of  sum of t_i + (m - 1) max t_i

by enumeration of the largest stage time: for each bound the dynamic programme F(s, i), the least
sum for the units from i on with s stages left, over stages within the bound; bounds rise from the
least that is possible, and end where they alone cost more than what is known. Invariant: the result
is the minimum over all cuts. Source: Zheng et al. 2022 (Alpa), equations 2 to 4 and section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.planner.operators import Floats


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """A cut.

    Attributes:
        borders: 0, the first unit of every further stage, and the number of units.
        total: Sum of the stage times.
        slowest: The longest one.
    """

    borders: tuple[int, ...]
    total: float
    slowest: float

    def seconds(self, microbatches: int) -> float:
        return self.total + (microbatches - 1) * self.slowest


def cut(
    of: np.ndarray,
    times: Floats,
    microbatches: int,
    floor: float | None = None,
    known: float = np.inf,
) -> Cuts | None:
    """The best cut into `len(times)` stages.

    Args:
        of: (L, L + 1): the class of the units from i to before j; -1 where j <= i.
        times: (p, classes): row s is of a stage that has s more behind it; infinite where it does
            not fit.
        microbatches: m.
        floor: What the stage times of any cut add up to at least, where that is known.
        known: What is not of interest: a cut that takes as long, or longer.

    Returns:
        None where no cut fits, or none is faster than `known`.
    """
    stages, length = len(times), len(of)
    if stages > length:
        return None
    if stages == 1:
        only = float(times[0, of[0, length]])
        return Cuts(borders=(0, length), total=only, slowest=only) if np.isfinite(only) else None
    programme = _Programme(of, times)
    bounds = np.unique(times[np.isfinite(times)])
    if floor is None:
        free = programme.solve(np.inf)
        floor = free.total if free else 0.0
    most = (known - floor) / max(microbatches - 1, 1)
    bounds = bounds[bounds < most] if microbatches > 1 else bounds
    first = _least_bound(programme, bounds, floor / stages)
    if first is None:
        return None
    best: Cuts | None = None
    for bound in bounds[first:]:
        if best and floor + (microbatches - 1) * bound >= best.seconds(microbatches):
            break
        found = programme.solve(float(bound))
        if found and (best is None or found.seconds(microbatches) < best.seconds(microbatches)):
            best = found
    return best


def _least_bound(programme: _Programme, bounds: Floats, start: float) -> int | None:
    """The place of the least bound with which there is a cut: upwards by 10 %, then by halving."""
    high = low = min(int(np.searchsorted(bounds, start * (1 - 1e-9))), len(bounds) - 1)
    if low < 0 or programme.solve(float(bounds[-1])) is None:
        return None
    while programme.solve(float(bounds[high])) is None:
        if high == len(bounds) - 1:
            return None
        low = high + 1
        further = int(np.searchsorted(bounds, bounds[high] * 1.1))
        high = min(max(further, low), len(bounds) - 1)
    while low < high:
        middle = (low + high) // 2
        if programme.solve(float(bounds[middle])) is None:
            low = middle + 1
        else:
            high = middle
    return low


class _Programme:
    """F(s, i) for one row of units, with any bound."""

    def __init__(self, of: np.ndarray, times: Floats) -> None:
        self.length = len(of)
        self.times = np.concatenate([times, np.full((len(times), 1), np.inf)], axis=1)
        starts = np.arange(self.length)[:, None]
        self.stops = starts + np.arange(1, self.length + 1)[None, :]
        inside = self.stops <= self.length
        stops = np.minimum(self.stops, self.length)
        self.classes = np.where(inside, of[starts, stops], times.shape[1])
        self.stops = stops
        least = self.times.min(axis=0)[self.classes]
        self.least = least.min(axis=0)  # of each number of units

    def solve(self, bound: float) -> Cuts | None:
        """The least sum of stage times of which none is above the bound."""
        fitting = np.flatnonzero(self.least <= bound)
        if not len(fitting):
            return None
        width = int(fitting[-1]) + 1
        classes, stops = self.classes[:, :width], self.stops[:, :width]
        left = np.full(self.length + 1, np.inf)
        left[self.length] = 0.0
        picks = []
        for times in self.times:
            sums = np.where(times <= bound, times, np.inf)[classes] + left[stops]
            pick = sums.argmin(axis=1)
            picks.append(pick)
            left = np.append(sums[np.arange(self.length), pick], np.inf)
        if not np.isfinite(left[0]):
            return None
        return self._unrolled(picks)

    def _unrolled(self, picks: list[np.ndarray]) -> Cuts:
        borders, each = [0], []
        for stage in range(len(picks) - 1, -1, -1):
            start = borders[-1]
            number = int(picks[stage][start])
            each.append(float(self.times[stage, self.classes[start, number]]))
            borders.append(start + number + 1)
        return Cuts(borders=tuple(borders), total=float(sum(each)), slowest=max(each))
