"""Pipeline schedules as the search times them, for any number of micro-batches.
A schedule's table is made once for its sizes and kept as plain lists (cells, what they wait for,
what they send), so that it can be timed for many cuts of a model; the seconds are those of
`schedule.timing` for the lowered table, all-reduces included.

1F1B needs no table: with a second for each pass, F of micro-batch k on rank r of p ends at r + k
    while the pipeline
fills (k < p - r), at 2 k + r from then on, and B at 2 p - 1 - r + 2 k (Narayanan et al. 2019,
PipeDream).

A table of more than `LIMIT` cells is timed for fewer micro-batches: from some number on, each round
takes as long as the one before, since such systems grow linearly in the end (max-plus algebra;
Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from headway.errors import PlanError
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.pipeline_schedule import COMPUTE_KINDS, ActionKind, PipelineSchedule

_LAST = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})
_PIECE = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.INPUT_GRAD: 2,
    ActionKind.WEIGHT_GRAD: 3,
}


class StagePasses(NamedTuple):
    """Seconds of one micro-batch by stage; `weight` is part of `backward`."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]


class StageMessages(NamedTuple):
    """Messages of one micro-batch: latency of each border, and seconds of its bytes."""

    latency: Sequence[float]
    wire: Sequence[float]


@dataclass(frozen=True, slots=True)
class TableSeconds:
    """Seconds.

    Attributes:
        ends: When each rank has done its compute.
        ready: When the gradients of each stage can leave each rank that has it: (stage, rank).
        finish: When all compute and all sums have ended.
    """

    ends: tuple[float, ...]
    ready: dict[tuple[int, int], float]
    finish: float

    def plus(self, before: TableSeconds, times: int) -> TableSeconds:
        """After `times` more rounds like the one from `before` to this."""
        return TableSeconds(
            tuple(b + times * (b - a) for a, b in zip(before.ends, self.ends, strict=True)),
            {key: b + times * (b - before.ready[key]) for key, b in self.ready.items()},
            self.finish + times * (self.finish - before.finish),
        )


class Timetable:
    """A table as lists.

    Args:
        schedule: Compute alone, with a flush.

    Attributes:
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
                sum(a.kind == ActionKind.FORWARD and a.stage == stage for a in actions)
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
        self.splits = any(a.kind == ActionKind.WEIGHT_GRAD for _, a in schedule.actions())
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
                stage, ahead = action.stage, action.kind == ActionKind.FORWARD
                source, needs = -1, None
                if ahead and stage:
                    needs = (action.pipe, stage - 1, action.microbatch, True)
                elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) and stage < end:
                    needs = (action.pipe, stage + 1, action.microbatch, False)
                if needs is not None:
                    if needs not in place:
                        waiting.setdefault(needs, []).append(rank)
                        break
                    source = place[needs]
                link, edge = -1, -1
                if action.kind != ActionKind.WEIGHT_GRAD:
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
        work = StagePasses(ones, [2.0 * part] * self.stages, ones)
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

    def play(
        self, work: StagePasses, wire: StageMessages | None = None, sums: Sequence[float] = ()
    ) -> TableSeconds:
        """When everything ends.

        Args:
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
        return TableSeconds(done, ready, max(self._summed(done, ready, sums), default=0.0))

    @staticmethod
    def _seconds(work: StagePasses) -> list[float]:
        """Of F, B, I and W of each stage."""
        split = [b - w for b, w in zip(work.backward, work.weight, strict=True)]
        return [*work.forward, *work.backward, *split, *work.weight]

    def _run(
        self, work: StagePasses, wire: StageMessages | None
    ) -> tuple[list[float], list[float]]:
        """When each cell ends, and when what it sends is there."""
        seconds = self._seconds(work)
        delay, sent = wire or StageMessages([0.0] * self.stages, [0.0] * self.stages)
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


def _peaks(
    row: Sequence[tuple[ActionKind, int]], hosted: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The counts that no other moment of a row has as many of; hosted stages in order."""
    held = dict.fromkeys(hosted, 0)
    found: set[tuple[int, ...]] = set()
    rising = False
    for kind, stage in row:
        if kind == ActionKind.FORWARD:
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


# 1F1B as `timetable` has it, for any sizes at once: no table is written, nothing looked for.


WIDE = 64
"""Ranks from which on all cells of one second are played at once."""


class OneFOneBTable(Timetable):
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

    def play(
        self, work: StagePasses, wire: StageMessages | None = None, sums: Sequence[float] = ()
    ) -> TableSeconds:
        """As `Timetable.play`."""
        if self.stages < WIDE:
            return super().play(work, wire, sums)
        done = self._swept(work, wire)
        ready = {(rank, rank): end for rank, end in enumerate(done)}
        return TableSeconds(tuple(done), ready, max(self._summed(done, ready, sums)))

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

    def _swept(self, work: StagePasses, wire: StageMessages | None) -> list[float]:
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


# The schedules that the search can price, and their tables for any number of micro-batches.


LIMIT = 5_000
"""Cells of a table that is played as a whole."""


class ScheduleOption(NamedTuple):
    """A schedule with its options, as `Degrees` have it.

    Attributes:
        name: A key of `schedule.named.SCHEDULES`.
        virtual: Stages of one pipe on a rank.
    """

    name: str
    virtual: int = 1
    pipes: int = 1

    def __str__(self) -> str:
        option = {"virtual": self.virtual, "pipes": self.pipes}
        words = [f"{key} {option[key]}" for key in SCHEDULES[self.name].options if key in option]
        return " ".join([self.name, *words])


PLAIN = ScheduleOption("1f1b")
SCHEDULE_OPTIONS = (
    PLAIN,
    ScheduleOption("gpipe"),
    ScheduleOption("interleaved", virtual=2),
    ScheduleOption("interleaved", virtual=4),
    ScheduleOption("zb-h1"),
    ScheduleOption("zbv", virtual=2),
    ScheduleOption("dualpipe-v", virtual=2),
    ScheduleOption("chimera", pipes=2),
    ScheduleOption("chimera", pipes=4),
)
"""All that the search can price and the executor can run."""


def schedule_option(name: str, virtual: int, pipes: int) -> ScheduleOption:
    """A schedule of which the search has a price.

    Args:
        name: Of one in `SCHEDULE_OPTIONS`.
        virtual: Stages of a rank, where the schedule leaves that open.
    """
    known = next(scheme for scheme in SCHEDULE_OPTIONS if scheme.name == name)
    takes = SCHEDULES[name].options
    return ScheduleOption(
        name,
        virtual if "virtual" in takes else known.virtual,
        pipes if "pipes" in takes else known.pipes,
    )


def schedule_options(words: Sequence[str]) -> tuple[ScheduleOption, ...]:
    """Those of some names, with all their options; "all": all.

    Raises:
        PlanError: No price is known for a name.
    """
    known = {scheme.name for scheme in SCHEDULE_OPTIONS}
    if unknown := [word for word in words if word not in {*known, "all"}]:
        raise PlanError(
            "the search has no price for a schedule",
            problems=unknown,
            fix=f"Take some of {', '.join(sorted(known))}, or all.",
        )
    return tuple(s for s in SCHEDULE_OPTIONS if s.name in words or "all" in words)


@dataclass(frozen=True)
class PeriodicTable:
    """A table of any number of micro-batches: whole, or the last two rounds of a shorter one.

    Attributes:
        table: Of all micro-batches, or of `rounds` rounds fewer.
        before: Of one round fewer than `table`; None where `table` is whole.
        rounds: Rounds that are left out.
    """

    table: Timetable
    before: Timetable | None = None
    rounds: int = 0

    @property
    def peaks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """As of `Timetable`, for all micro-batches."""
        if self.before is None:
            return self.table.peaks
        return tuple(
            now
            if now == past
            else tuple(
                tuple(a + self.rounds * (a - b) for a, b in zip(x, y, strict=True))
                for x, y in zip(now, past, strict=True)
            )
            for now, past in zip(self.table.peaks, self.before.peaks, strict=True)
        )

    @property
    def computed(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batches that each rank computes of each of its stages."""
        if self.before is None:
            return self.table.computed
        return tuple(
            tuple(a + self.rounds * (a - b) for a, b in zip(now, past, strict=True))
            for now, past in zip(self.table.computed, self.before.computed, strict=True)
        )

    def in_flight(self) -> tuple[int, ...]:
        """Of each stage, on the rank that holds most micro-batches of it."""
        peaks = self.peaks
        return tuple(
            max(
                vector[self.table.hosted[rank].index(stage)]
                for rank in ranks
                for vector in peaks[rank]
            )
            for stage, ranks in enumerate(self.table.holders)
        )

    def play(
        self, work: StagePasses, wire: StageMessages | None = None, sums: Sequence[float] = ()
    ) -> TableSeconds:
        """As `Timetable.play`, for all micro-batches."""
        played = self.table.play(work, wire, sums)
        if self.before is None:
            return played
        return played.plus(self.before.play(work, wire, sums), self.rounds)

    def held(self, rank: int, kept: Sequence[float]) -> float:
        """Most bytes that a rank keeps for backward.

        Args:
            kept: Of one micro-batch, by stage.
        """
        own = [kept[stage] for stage in self.table.hosted[rank]]
        return max(
            sum(number * size for number, size in zip(vector, own, strict=True))
            for vector in self.peaks[rank]
        )


def make_periodic_table(
    scheme: ScheduleOption, ranks: int, microbatches: int, limit: int = LIMIT
) -> PeriodicTable | None:
    """The table of a schedule; None where it cannot have these sizes.

    Args:
        limit: Cells that are played at most, where the table has a steady state to go on from.
    """
    per = 2 * ranks * scheme.virtual  # cells of a micro-batch
    round_ = 2 * ranks
    least = 2 * round_
    most = max(limit // per, least + round_)
    if microbatches <= most:
        whole = _table(scheme, ranks, microbatches)
        return None if whole is None else PeriodicTable(whole)
    rounds = -(-(microbatches - most) // round_)
    now, past = (_table(scheme, ranks, microbatches - n * round_) for n in (rounds, rounds + 1))
    if now is None or past is None:
        return None
    if any(len(a) != len(b) for a, b in zip(now.peaks, past.peaks, strict=True)):
        whole = _table(scheme, ranks, microbatches)
        return None if whole is None else PeriodicTable(whole)
    return PeriodicTable(now, past, rounds)


@lru_cache(maxsize=512)
def _table(scheme: ScheduleOption, ranks: int, microbatches: int) -> Timetable | None:
    name, virtual, pipes = scheme
    if scheme == PLAIN:
        return OneFOneBTable(ranks, microbatches)
    try:
        made = make_schedule(
            name, stages=ranks, microbatches=microbatches, virtual=virtual, pipes=pipes
        )
    except PlanError:
        return None
    return Timetable(made) if _whole(made) else None


def _whole(schedule: PipelineSchedule) -> bool:
    """Whether every rank computes something, so that no device stands by."""
    return all(any(a.kind in COMPUTE_KINDS for a in actions) for actions in schedule.order)
