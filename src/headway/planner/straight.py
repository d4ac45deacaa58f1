"""1F1B as `timetable` has it, for any sizes at once: no table is written, nothing looked for.

With a second for each pass, F of micro-batch k on rank r of p ends at r + k while the pipeline
fills (k < p - r), at 2 k + r from then on, and B at 2 p - 1 - r + 2 k: in that order everything
comes behind what it waits for, and cells of one second are of different ranks. Invariant: `play`
and `peaks` are those of `Timetable` for the schedule that `schedule` makes. Source: Narayanan et
al. 2019 (PipeDream, 1F1B).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from headway.planner.timetable import Played, Timetable, Wire, Work

WIDE = 64
"""Ranks from which on all cells of one second are played at once."""


class Straight(Timetable):
    """1F1B on `ranks` ranks; attributes as of `Timetable`."""

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.stages, self.microbatches = ranks, microbatches
        self.hosted = self.holders = tuple((rank,) for rank in range(ranks))
        self.peaks = tuple(((min(microbatches, ranks - rank),),) for rank in range(ranks))
        self.computed = ((microbatches,),) * ranks
        self.joins = tuple(((rank, rank + 1),) for rank in range(ranks - 1))
        self.splits = False
        self._links = 2 * (ranks - 1)

    @property
    def cells(self) -> int:
        return 2 * self.stages * self.microbatches

    def play(self, work: Work, wire: Wire | None = None, sums: Sequence[float] = ()) -> Played:
        """As `Timetable.play`."""
        if self.stages < WIDE:
            return super().play(work, wire, sums)
        done = self._swept(work, wire)
        ready = {(rank, rank): end for rank, end in enumerate(done)}
        return Played(tuple(done), ready, max(self._summed(done, ready, sums)))

    @cached_property
    def _sweeps(self) -> list[tuple[bool, slice]]:
        """One after the other: whether ranks have a backward, and which."""
        both = (
            (back, ranks) for cells in self._seconds_of_cells() for back, ranks in enumerate(cells)
        )
        return [(bool(back), ranks) for back, ranks in both if ranks.stop > (ranks.start or 0)]

    def _seconds_of_cells(self) -> Iterator[tuple[slice, slice]]:
        """Of every second the ranks with a forward and those with a backward."""
        p, m = self.stages, self.microbatches
        for time in range(2 * (p + m) - 2):
            if time < p:
                yield slice(max(0, time - m + 1), time + 1), slice(0)
                continue
            last = min(m - 1, time - p, time // 2)  # micro-batches of the forwards
            first = max(0, -(-(time - p + 1) // 2))
            ahead = slice(time - 2 * last, time - 2 * first + 1, 2) if first <= last else slice(0)
            first = max(0, -(-(time - 2 * p + 1) // 2))
            last = min(m - 1, (time - p) // 2)
            low = 2 * p - 1 + 2 * first - time
            back = slice(low, low + 2 * (last - first) + 1, 2) if first <= last else slice(0)
            yield ahead, back

    def _swept(self, work: Work, wire: Wire | None) -> list[float]:
        """When each rank has done its compute."""
        p = self.stages
        forward, backward = np.array(work.forward), np.array(work.backward)
        delay, sent = np.zeros((2, p))
        if wire is not None:
            delay[:-1], sent[:-1] = wire
        delay_back, sent_back = np.roll(delay, 1), np.roll(sent, 1)  # of the border in front
        clock, free, free_back = np.zeros((3, p))
        there, there_back = np.zeros((2, p + 1))  # of rank r: from r - 1 at r, from r + 1 at r + 1
        ways = (
            (forward, there[:-1], free, sent, delay, there[1:]),
            (backward, there_back[1:], free_back, sent_back, delay_back, there_back[:-1]),
        )
        for back, ranks in self._sweeps:
            seconds, come, link, wire_, wait, go = ways[back]
            time, left = clock[ranks], link[ranks]
            np.maximum(time, come[ranks], out=time)
            time += seconds[ranks]
            np.maximum(left, time, out=left)
            left += wire_[ranks]
            np.add(left, wait[ranks], out=go[ranks])
        found: list[float] = clock.tolist()
        return found

    @cached_property
    def _cells(self) -> list[tuple[int, int, int, int, int, int]]:  # type: ignore[override]
        """As `Timetable` has them."""
        p = self.stages
        cells: list[tuple[int, int, int, int, int, int]] = []
        last, come, back_ = [-1] * p, [-1] * (p + 1), [-1] * (p + 1)
        for ahead, back in self._seconds_of_cells():
            for rank in reversed(range(p)[ahead]):
                link = 2 * rank if rank < p - 1 else -1
                edge = rank if rank < p - 1 else -1
                cells.append((last[rank], come[rank], rank, link, edge, rank))
                last[rank] = come[rank + 1] = len(cells) - 1
            for rank in range(p)[back]:
                link = 2 * rank - 1 if rank else -1
                cells.append((last[rank], back_[rank + 1], p + rank, link, rank - 1, rank))
                last[rank] = back_[rank] = len(cells) - 1
        self.ends = tuple(last)
        self.last = {(rank, rank): cell for rank, cell in enumerate(last)}
        return cells
