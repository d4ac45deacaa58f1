"""Pipeline schedules as the search times them, for any number of micro-batches.

A schedule's table is made once for its sizes and played for many cuts of a model by
`schedule.timing.FixedOrder`; the seconds are those of `schedule.timing` for the lowered table,
all-reduces included.

A table of more than `LIMIT` cells is timed for fewer micro-batches: from some number on, each round
takes as long as the one before, since such systems grow linearly in the end (max-plus algebra;
Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from headway.errors import PlanError
from headway.schedule.generators.registry import PLAIN, ScheduleOption, make_schedule
from headway.schedule.pipeline_schedule import COMPUTE_KINDS, ActionKind, PipelineSchedule
from headway.schedule.timing import (
    AllReduceLanes,
    FixedOrder,
    OneFOneBOrder,
    StageMessages,
    StagePasses,
)

# Backward in one action, or the gradients of weights behind those of inputs (zero bubble): only
# then does a micro-batch's memory go.
_LAST = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})


@dataclass(frozen=True, kw_only=True)
class PointStage:
    """One stage of a point: units `start` to before `stop`; seconds of one micro-batch, bytes of a
    device.

    Attributes:
        price: The number of its strategy among those of the interval.
        recompute: Whether its units keep only what enters them.
        seconds: Of both passes.
        tail: Seconds of a step for gradients and update.
        state: Weights, gradients and optimiser.
        kept: For backward, of all micro-batches in flight.
        transient: Above these, while a micro-batch passes.
        params: Parameters alone.
        weight: Of `seconds`, those of the gradients of weights.
        after: Of `tail`, what follows when the gradients have been summed.
        passing: Bytes above `state` while the update runs, when nothing is kept.
        gradients: Of `state`, bytes that are made in the first backward of a step, where all
            micro-batches are in flight before it; 0: some are not.
        first: Bytes above `state` and `kept` in that backward; may be below 0.
        flights: Micro-batches in flight.
    """

    start: int
    stop: int
    price: int
    recompute: bool
    seconds: float
    tail: float
    state: float
    kept: float
    transient: float
    params: float
    forward: float = 0.0
    weight: float = 0.0
    after: float = 0.0
    passing: float = 0.0
    gradients: float = 0.0
    first: float = 0.0
    flights: int = 1

    @property
    def moment(self) -> float:
        """Transient bytes at the fullest moment."""
        if not self.gradients:
            return self.transient
        # Later backwards find all gradients made, and one micro-batch less in flight.
        if self.flights == 1:
            return self.first
        return max(self.first, self.transient - self.kept / self.flights)

    @property
    def bytes(self) -> float:
        return self.state + max(self.kept + self.moment, self.passing)


@dataclass(frozen=True)
class Timetable:
    """A table that the search times: what its ranks hold, and the order of their actions.

    Attributes:
        hosted: Of each rank: the stages that it has, ascending.
        holders: Of each stage: the ranks that have it.
        peaks: Of each rank: micro-batches held of each of its stages, at the moments at which no
            other moment holds as many of all.
        computed: Of each rank: how many micro-batches of each of its stages it computes.
        joins: Of each border between stages: the pairs of ranks that it lies between.
        schedule: Compute alone, with a flush; None: 1F1B, of which no table is written.
    """

    hosted: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    peaks: tuple[tuple[tuple[int, ...], ...], ...]
    computed: tuple[tuple[int, ...], ...]
    joins: tuple[tuple[tuple[int, int], ...], ...]
    schedule: PipelineSchedule | None = None

    @property
    def stages(self) -> int:
        return len(self.holders)

    @cached_property
    def order(self) -> FixedOrder | OneFOneBOrder:
        """What plays it; made when it is first asked for, since many tables are only measured."""
        if self.schedule is None:
            return OneFOneBOrder(self.stages, self.computed[0][0])
        return FixedOrder.of(self.schedule)

    @cached_property
    def _eager(self) -> frozenset[tuple[int, int]]:
        """(stage, rank) whose sum starts before the rank's compute has ended, as in the
        executor."""
        # A rank of one stage has no compute behind that stage's last backward.
        if self.schedule is None or all(len(stages) == 1 for stages in self.hosted):
            return frozenset()
        assert isinstance(self.order, FixedOrder)
        ahead = [len(self.hosted) / self.stages] * self.stages
        back = [2 * one for one in ahead]
        idle = self.order.idle(StagePasses(ahead, back, ahead))
        return frozenset(key for key, seconds in idle.items() if seconds > 0)

    def play(
        self, work: StagePasses, wire: StageMessages | None = None, sums: Sequence[float] = ()
    ) -> float:
        """Seconds after which all compute and all sums have ended.

        Args:
            wire: Of the borders; None: messages take no time.
            sums: Seconds of the sum of each stage's gradients over its copies. It starts when all
                of them are ready: right behind the last backward where the rank would idle
                ("eager-opt"), else behind the rank's compute; sums of one rank follow each other.
        """
        done, gradients = self.order.play(work, wire)
        ready = {key: end if key in self._eager else done[key[1]] for key, end in gradients.items()}
        return max(self._summed(done, ready, sums), default=0.0)

    def at_least(self, work: StagePasses, wire: StageMessages, sums: Sequence[float]) -> float:
        """Seconds below which `play` is never, without playing; 0: of 1F1B nothing is known here.

        Of every rank: the way of the first micro-batch to it, all that it computes, and the way
        back of its last gradient, or the sums that follow its compute.
        """
        if self.schedule is None:
            return 0.0
        sent = [a + b for a, b in zip(*wire, strict=True)]
        apart = [one if far else 0.0 for one, far in zip(sent, self._apart, strict=True)]
        back = [b - w for b, w in zip(work.backward, work.weight, strict=True)]
        to = [0.0, *accumulate(a + b for a, b in zip(work.forward, apart, strict=False))]
        home = [0.0, *accumulate(a + b for a, b in zip(back, apart, strict=False))]
        most = 0.0
        for rank, row in enumerate(self.schedule.order):
            each = zip(self.computed[rank], self.hosted[rank], strict=True)
            own = sum(n * (work.forward[s] + work.backward[s]) for n, s in each)
            last = row[-1]
            returned = 0.0 if last.kind == ActionKind.WEIGHT_GRAD else home[last.stage]
            late = sum(sums[s] for s in self.hosted[rank] if (s, rank) not in self._eager)
            most = max(most, to[row[0].stage] + own + max(returned, late))
        return most

    @cached_property
    def _apart(self) -> tuple[bool, ...]:
        """Of each border whether it lies between two ranks in every pipe."""
        assert self.schedule is not None
        return tuple(
            all(one.placement[s] != one.placement[s + 1] for one in self.schedule.pipes)
            for s in range(self.stages - 1)
        )

    def _summed(
        self, done: Sequence[float], ready: dict[tuple[int, int], float], sums: Sequence[float]
    ) -> list[float]:
        free = list(done)
        if not any(sums):
            return free
        lanes = AllReduceLanes(len(done))
        begins = [
            (max(ready.get((stage, rank), done[rank]) for rank in ranks), stage)
            for stage, ranks in enumerate(self.holders)
        ]
        for begin, stage in sorted(begins):
            ranks = self.holders[stage]
            _, end = lanes.reduce(begin, ranks, sums[stage])
            for rank in ranks:
                free[rank] = max(free[rank], end)
        return free


def timetable_of(schedule: PipelineSchedule) -> Timetable:
    hosted = tuple(
        tuple(sorted({stage for _, stage in schedule.hosted(rank)}))
        for rank in range(schedule.ranks)
    )
    rows = list(zip(schedule.order, hosted, strict=True))
    return Timetable(
        hosted=hosted,
        holders=tuple(map(schedule.holders, range(schedule.stages))),
        peaks=tuple(_peaks([(a.kind, a.stage) for a in row], stages) for row, stages in rows),
        computed=tuple(
            tuple(sum(a.kind == ActionKind.FORWARD and a.stage == s for a in row) for s in stages)
            for row, stages in rows
        ),
        joins=tuple(
            tuple(
                dict.fromkeys(
                    pair
                    for pipe in schedule.pipes
                    for pair in [(pipe.placement[stage], pipe.placement[stage + 1])]
                    # Where the placement turns (ZB-V), neighbouring stages share a rank and send
                    # nothing.
                    if pair[0] != pair[1]
                )
            )
            for stage in range(schedule.stages - 1)
        ),
        schedule=schedule,
    )


def one_f_one_b_timetable(ranks: int, microbatches: int) -> Timetable:
    """`timetable_of` 1F1B in closed form: its table would have millions of cells."""
    each = tuple((rank,) for rank in range(ranks))
    return Timetable(
        hosted=each,
        holders=each,
        peaks=tuple(((min(microbatches, ranks - rank),),) for rank in range(ranks)),
        computed=((microbatches,),) * ranks,
        joins=tuple(((rank, rank + 1),) for rank in range(ranks - 1)),
    )


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
            # Counts are largest where a forward is followed by a release; other moments hold less.
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


# Cells of a table that is simulated as a whole; longer ones have a steady state.
LIMIT = 5_000


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
        pairs = zip(self.table.peaks, self.before.peaks, strict=True)
        return tuple(
            tuple(self._extrapolated(x, y) for x, y in zip(now, past, strict=True))
            for now, past in pairs
        )

    @property
    def computed(self) -> tuple[tuple[int, ...], ...]:
        if self.before is None:
            return self.table.computed
        pairs = zip(self.table.computed, self.before.computed, strict=True)
        return tuple(self._extrapolated(now, past) for now, past in pairs)

    def _extrapolated(self, now: Sequence[int], past: Sequence[int]) -> tuple[int, ...]:
        return tuple(a + self.rounds * (a - b) for a, b in zip(now, past, strict=True))

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
    ) -> float:
        """As `Timetable.play`, for all micro-batches."""
        seconds = self.table.play(work, wire, sums)
        if self.before is None:
            return seconds
        # Each round that is left out takes as long as the last one.
        return seconds + self.rounds * (seconds - self.before.play(work, wire, sums))

    def held(self, rank: int, kept: Sequence[float]) -> float:
        """Most bytes that a rank keeps for backward."""
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
    # Whole units of Chimera and whole turns of a looped schedule, which both take p micro-batches.
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
    # Not in its steady state yet: rounds do not repeat.
    if any(len(a) != len(b) for a, b in zip(now.peaks, past.peaks, strict=True)):
        whole = _table(scheme, ranks, microbatches)
        return None if whole is None else PeriodicTable(whole)
    return PeriodicTable(now, past, rounds)


@lru_cache(maxsize=512)
def _table(scheme: ScheduleOption, ranks: int, microbatches: int) -> Timetable | None:
    name, virtual, pipes = scheme
    # In closed form: the search prices thousands of 1F1B pipelines.
    if scheme == PLAIN:
        return one_f_one_b_timetable(ranks, microbatches)
    try:
        made = make_schedule(
            name, stages=ranks, microbatches=microbatches, virtual=virtual, pipes=pipes
        )
    except PlanError:
        return None
    return timetable_of(made) if _whole(made) else None


def _whole(schedule: PipelineSchedule) -> bool:
    """Whether every rank computes something, so that no device stands by."""
    return all(any(a.kind in COMPUTE_KINDS for a in actions) for actions in schedule.order)
