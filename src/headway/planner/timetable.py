"""Pipeline schedules as the search prices them: the table of a name, played with stages' seconds.

A table is made once for its sizes and kept as plain lists (cells, what they wait for, what they
send), so that it can be played for many cuts of a model. Invariant: `play` gives what
`schedule.timing` gives for the lowered table, all-reduces included, and `peaks` what the order of
each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from headway.errors import PlanError
from headway.schedule import PipelineSchedule
from headway.schedule.action import Kind

_LAST = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})
_PIECE = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT_GRAD: 2, Kind.WEIGHT_GRAD: 3}


class Work(NamedTuple):
    """Seconds of one micro-batch by stage; `weight` is part of `backward`."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]


class Wire(NamedTuple):
    """Messages of one micro-batch: latency of each border, and seconds of its bytes."""

    latency: Sequence[float]
    wire: Sequence[float]


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds.

    Attributes:
        ends: When each rank has done its compute.
        ready: When the gradients of each stage can leave each rank that has it: (stage, rank).
        finish: When all compute and all sums have ended.
    """

    ends: tuple[float, ...]
    ready: dict[tuple[int, int], float]
    finish: float

    def plus(self, before: Played, times: int) -> Played:
        """After `times` more rounds like the one from `before` to this."""
        return Played(
            tuple(b + times * (b - a) for a, b in zip(before.ends, self.ends, strict=True)),
            {key: b + times * (b - before.ready[key]) for key, b in self.ready.items()},
            self.finish + times * (self.finish - before.finish),
        )


class Timetable:
    """A table as lists.

    Args:
        schedule: Compute alone, with a flush.

    Attributes:
        stages: Of a pipe.
        hosted: Of each rank: the stages that it has, ascending.
        holders: Of each stage: the ranks that have it.
        peaks: Of each rank: micro-batches held of each of its stages, at the moments at which no
            other moment holds as many of all.
        computed: Of each rank: how many micro-batches of each of its stages it computes.
        joins: Of each border between stages: the pairs of ranks that it lies between.
        splits: Whether backward is split, so that gradients of weights may come later.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.stages = schedule.stages
        self.hosted = tuple(
            tuple(sorted({stage for _, stage in schedule.hosted(rank)}))
            for rank in range(schedule.ranks)
        )
        self.holders = tuple(schedule.holders(stage) for stage in range(schedule.stages))
        self.peaks = tuple(
            _peaks([(a.kind, a.stage) for a in actions], hosted)
            for actions, hosted in zip(schedule.order, self.hosted, strict=True)
        )
        self.computed = tuple(
            tuple(
                sum(a.kind == Kind.FORWARD and a.stage == stage for a in actions)
                for stage in hosted
            )
            for actions, hosted in zip(schedule.order, self.hosted, strict=True)
        )
        self.joins = tuple(
            tuple(
                dict.fromkeys(
                    pair
                    for pipe in schedule.pipes
                    for pair in [(pipe.placement[stage], pipe.placement[stage + 1])]
                    if pair[0] != pair[1]
                )
            )
            for stage in range(schedule.stages - 1)
        )
        self.splits = any(a.kind == Kind.WEIGHT_GRAD for _, a in schedule.actions())
        self._wire(schedule)

    def _wire(self, schedule: PipelineSchedule) -> None:
        """Cells in an order in which each comes behind what it waits for."""
        place: dict[tuple[str, int, int, bool], int] = {}
        cells: list[tuple[int, int, int, int, int, int]] = []
        last: list[int] = [-1] * schedule.ranks
        position = [0] * schedule.ranks
        links: dict[tuple[int, int], int] = {}
        placement = {pipe.name: pipe.placement for pipe in schedule.pipes}
        self.last: dict[tuple[int, int], int] = {}
        end = schedule.stages - 1
        waiting: dict[tuple[str, int, int, bool], list[int]] = {}
        able = list(range(schedule.ranks - 1, -1, -1))
        while able:
            rank = able.pop()
            row = schedule.order[rank]
            while position[rank] < len(row):
                action = row[position[rank]]
                stage, ahead = action.stage, action.kind == Kind.FORWARD
                source, needs = -1, None
                if ahead and stage:
                    needs = (action.pipe, stage - 1, action.microbatch, True)
                elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage < end:
                    needs = (action.pipe, stage + 1, action.microbatch, False)
                if needs is not None:
                    if needs not in place:
                        waiting.setdefault(needs, []).append(rank)
                        break
                    source = place[needs]
                link, edge = -1, -1
                if action.kind != Kind.WEIGHT_GRAD:
                    other = stage + 1 if ahead else stage - 1
                    if 0 <= other <= end:
                        target = placement[action.pipe][other]
                        edge = min(stage, other)
                        if target != rank:
                            link = links.setdefault((rank, target), len(links))
                    key = (action.pipe, stage, action.microbatch, ahead)
                    place[key] = len(cells)
                    able += waiting.pop(key, ())
                if action.kind in _LAST:
                    self.last[stage, rank] = len(cells)
                kind = _PIECE[action.kind] * schedule.stages + stage
                cells.append((last[rank], source, kind, link, edge, rank))
                last[rank] = len(cells) - 1
                position[rank] += 1
        if any(position[rank] < len(row) for rank, row in enumerate(schedule.order)):
            raise PlanError("the schedule cannot go on", problems=[schedule.name])
        self.ends = tuple(last)
        self._cells = cells
        self._links = len(links)

    @cached_property
    def _eager(self) -> frozenset[tuple[int, int]]:
        """(stage, rank) whose sum starts before the rank's compute has ended: `lowering` of
        "eager-opt" at the habitual costs, as the executor has it."""
        if all(len(stages) == 1 for stages in self.hosted):
            return frozenset()
        part = len(self.hosted) / self.stages
        ones = [part] * self.stages
        work = Work(ones, [2.0 * part] * self.stages, ones)
        seconds, ends = self._seconds(work), self._run(work, None)[0]
        most = 1e-9 * max(ends)
        idle: dict[tuple[int, int], float] = {}
        for number, (before, _, kind, _, _, rank) in enumerate(self._cells):
            gap = ends[number] - seconds[kind] - (ends[before] if before >= 0 else 0.0)
            for stage in self.hosted[rank]:
                if number > self.last.get((stage, rank), number):
                    idle[stage, rank] = idle.get((stage, rank), 0.0) + gap
        return frozenset(key for key, gap in idle.items() if gap > most)

    @property
    def cells(self) -> int:
        return len(self._cells)

    def play(self, work: Work, wire: Wire | None = None, sums: Sequence[float] = ()) -> Played:
        """When everything ends.

        Args:
            work: Of the stages.
            wire: Of the borders; None: messages take no time.
            sums: Seconds of the sum of each stage's gradients over its copies. It starts when all
                of them are ready: right behind the last backward where the rank would idle
                ("eager-opt"), else behind the rank's compute; sums of one rank follow each other.
        """
        ends, _ = self._run(work, wire)
        done = tuple(ends[cell] if cell >= 0 else 0.0 for cell in self.ends)
        ready = {
            key: ends[cell] if key in self._eager else done[key[1]]
            for key, cell in self.last.items()
        }
        return Played(done, ready, max(self._summed(done, ready, sums), default=0.0))

    @staticmethod
    def _seconds(work: Work) -> list[float]:
        """Of F, B, I and W of each stage."""
        split = [b - w for b, w in zip(work.backward, work.weight, strict=True)]
        return [*work.forward, *work.backward, *split, *work.weight]

    def _run(self, work: Work, wire: Wire | None) -> tuple[list[float], list[float]]:
        """When each cell ends, and when what it sends is there."""
        seconds = self._seconds(work)
        delay, sent = wire or Wire([0.0] * self.stages, [0.0] * self.stages)
        free = [0.0] * self._links
        ends: list[float] = []
        there: list[float] = []
        for before, source, kind, link, edge, _ in self._cells:
            time = ends[before] if before >= 0 else 0.0
            if source >= 0 and there[source] > time:
                time = there[source]
            time += seconds[kind]
            ends.append(time)
            if link >= 0:
                left = free[link]
                left = (left if left > time else time) + sent[edge]
                free[link] = left
                time = left + delay[edge]
            there.append(time)
        return ends, there

    def _summed(
        self, done: Sequence[float], ready: dict[tuple[int, int], float], sums: Sequence[float]
    ) -> list[float]:
        """When each rank has its sums."""
        free = list(done)
        if not any(sums):
            return free
        lane = [0.0] * len(done)
        begins = [
            (max(ready.get((stage, rank), done[rank]) for rank in ranks), stage)
            for stage, ranks in enumerate(self.holders)
        ]
        for begin, stage in sorted(begins):
            ranks = self.holders[stage]
            end = max([begin, *(lane[rank] for rank in ranks)]) + sums[stage]
            for rank in ranks:
                lane[rank] = end
                free[rank] = max(free[rank], end)
        return free


def _peaks(row: Sequence[tuple[Kind, int]], hosted: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The counts that no other moment of a row has as many of; hosted stages in order."""
    held = dict.fromkeys(hosted, 0)
    found: set[tuple[int, ...]] = set()
    rising = False
    for kind, stage in row:
        if kind == Kind.FORWARD:
            held[stage] += 1
            rising = True
        elif kind in _LAST:
            if rising:
                found.add(tuple(held.values()))
            rising = False
            held[stage] -= 1
    return tuple(
        sorted(
            one
            for one in found
            if not any(
                other != one and all(a >= b for a, b in zip(other, one, strict=True))
                for other in found
            )
        )
    )
