"""Level 3 of the search: where to cut a row of units into stages.

    T = min over cuts of  sum of t_i + (m - 1) max t_i

by enumeration of the largest stage time: for each bound the dynamic programme F(s, i), the least
sum for the units from i on with s stages left, over stages within the bound; bounds rise from the
least that is possible, and end where they alone cost more than what is known. Invariant: the result
is the minimum over all cuts. Source: Zheng et al. 2022 (Alpa), equations 2 to 4 and section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from headway.planner.operators import Floats

_CELLS = 5_000_000
"""Stages times pairs of borders up to which the least longest stage is sought within the highest
bound at once."""
_LAID_OUT = 1_000_000
"""The same, up to which all their times are laid out at once: more do not fit into a cache."""


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
    lines: np.ndarray | None = None,
) -> Cuts | None:
    """The best cut into `len(times)` stages.

    Args:
        of: (L, L + 1): the class of the units from i to before j; -1 where j <= i.
        times: (p, classes): row s is of a stage that has s more behind it; infinite where it does
            not fit.
        microbatches: m.
        floor: What the stage times of any cut add up to at least, where that is known.
        known: What is not of interest: a cut that takes as long, or longer.
        lines: `by_number` of `of`, where somebody has it.

    Returns:
        None where no cut fits, or none is faster than `known`.
    """
    stages, length = len(times), len(of)
    if stages > length:
        return None
    if stages == 1:
        only = float(times[0, of[0, length]])
        return Cuts(borders=(0, length), total=only, slowest=only) if np.isfinite(only) else None
    programme = _Programme(by_number(of) if lines is None else lines, times)
    if floor is None:
        free = programme.solve(np.inf)
        floor = free.total if free else 0.0
    most = (known - floor) / (microbatches - 1) if microbatches > 1 else np.inf
    differs = np.append(True, (times[1:] != times[:-1]).any(axis=1))
    some = times[differs]
    least = floor / stages * (1 - 1e-9)  # what the slowest stage takes at least
    bounds = np.unique(some[np.isfinite(some) & (some >= least) & (some < most)])
    first = _least_bound(programme, bounds)
    if first is None:
        return None
    return _best(programme, bounds[first:], microbatches, floor)


def _best(programme: _Programme, bounds: Floats, microbatches: int, floor: float) -> Cuts | None:
    """The best cut within any of these bounds; of equals, that within the least bound.

    A higher bound gives no greater sum: all bounds between two cost at least the sum within the
    upper one, and m - 1 times the lower one.
    """
    m = microbatches - 1
    best, place = programme.solve(float(bounds[0])), 0
    if best is None:
        return None
    last = int(np.searchsorted(floor + m * bounds, best.seconds(microbatches))) - 1
    waiting = [(0, last + 1, floor)]
    while waiting:
        low, high, total = waiting.pop()  # open at both ends
        if high - low < 2:
            continue
        least, known = total + m * bounds[low + 1], best.seconds(microbatches)
        if least > known or (least == known and place <= low):
            continue
        middle = last if high > last else (low + high) // 2
        found = programme.solve(float(bounds[middle]))
        if found is None:  # the least bound has a cut: so have all
            continue
        same = int(np.searchsorted(bounds, found.slowest))  # the same cut from here on
        if (found.seconds(microbatches), same) < (known, place):
            best, place = found, same
        waiting.append((middle, high, total))
        waiting.append((low, same, found.total))
    return best


def _least_bound(programme: _Programme, bounds: Floats) -> int | None:
    """The place of the least bound with which there is a cut: that of the least longest stage,
    sought within the lowest bound first, then within one 5 % higher, 10 %, 20 % and so on."""
    if not len(bounds):
        return None
    high = len(bounds) - 1 if programme.small else 0
    step = 1.05
    longest = programme.longest(float(bounds[high]))
    while not np.isfinite(longest) and high < len(bounds) - 1:
        further = int(np.searchsorted(bounds, bounds[high] * step))
        high = min(max(further, high + 1), len(bounds) - 1)
        longest = programme.longest(float(bounds[high]))
        step *= step
    return int(np.searchsorted(bounds, longest)) if np.isfinite(longest) else None


class _Programme:
    """F(s, i) for one row of units, with any bound."""

    def __init__(self, classes: np.ndarray, times: Floats) -> None:
        self.length = len(classes)
        self.times = np.concatenate([times, np.full((len(times), 1), np.inf)], axis=1)
        self.classes = classes
        self.least = self.times.min(axis=0)[self.classes].min(axis=0)  # of each number of units
        self.small = self.classes.size * len(times) <= _CELLS
        few = self.classes.size * len(times) <= _LAID_OUT
        self._cells = self.times[:, self.classes] if few else None
        self._rows = np.arange(self.length)

    def longest(self, bound: float) -> float:
        """The least longest stage of all cuts; infinite if it is above the bound."""
        left, done = np.inf, 0
        for _, _, each, rest, put in self._stages(bound, -np.inf):
            left, done = put(np.maximum(each, rest).min(axis=1)), done + 1
        return left if done == len(self.times) and left <= bound else np.inf

    def solve(self, bound: float) -> Cuts | None:
        """The least sum of stage times of which none is above the bound."""
        left, picks = np.inf, []
        for low, high, each, rest, put in self._stages(bound, 0.0):
            sums = each + rest
            sums[each > bound] = np.inf
            pick = sums.argmin(axis=1)
            left = put(sums[self._rows[: high - low], pick])
            picks.append((low, pick))
        whole = len(picks) == len(self.times) and np.isfinite(left)
        return self._unrolled(picks) if whole else None

    def _stages(
        self, bound: float, nothing: float
    ) -> Iterator[tuple[int, int, Floats, Floats, Callable[[Floats], float]]]:
        """From the last stage: where one can begin that has so many behind it (low, high), times
        of those by number of units, values of what is left behind each, and where to put its own,
        which tells that of the whole row; ends early where there is no cut."""
        fitting = np.flatnonzero(self.least <= bound)
        if not len(fitting):
            return
        width = int(fitting[-1]) + 1  # no stage has more units
        left = np.full(self.length + width + 1, np.inf)
        left[self.length] = nothing
        stages, step = len(self.times), left.itemsize
        for behind in range(stages):
            low = max(0, self.length - (behind + 1) * width)
            high = min(self.length - 1 - behind, (stages - 1 - behind) * width) + 1
            if low >= high:
                return
            each = (
                self.times[behind][self.classes[low:high, :width]]
                if self._cells is None
                else self._cells[behind, low:high, :width]
            )
            rest: Floats = np.ndarray(
                (high - low, width), left.dtype, left, (low + 1) * step, (step, step)
            )

            def put(values: Floats, low: int = low, high: int = high) -> float:
                left.fill(np.inf)
                left[low:high] = values
                return float(left[0])

            yield low, high, each, rest, put

    def _unrolled(self, picks: list[tuple[int, np.ndarray]]) -> Cuts:
        borders, each = [0], []
        for stage in range(len(picks) - 1, -1, -1):
            start = borders[-1]
            low, pick = picks[stage]
            number = int(pick[start - low])
            each.append(float(self.times[stage, self.classes[start, number]]))
            borders.append(start + number + 1)
        return Cuts(borders=tuple(borders), total=float(sum(each)), slowest=max(each))


def by_number(of: np.ndarray) -> np.ndarray:
    """(L, L): the class of the k + 1 units from i on; -1 where there are no more so many."""
    length, step = len(of), of.itemsize
    lines = np.concatenate([of.ravel(), np.full(length, -1, of.dtype)])
    # behind the end of a line are the first columns of the next one, up to its diagonal: -1
    return np.ndarray((length, length), of.dtype, lines, step, ((length + 2) * step, step))
