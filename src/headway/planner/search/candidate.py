"""One combination of degrees: its lower bounds, its stages and cuts, and its best plans.

A cut is the best one by Alpa's sum of stages; its price is what the schedule's table takes with
these stages, their messages and sums. Without a pipeline the exchange behind the last backward
counts as far as nothing hides it.

Lower bounds are never above what the combination's best plan costs, so what they drop could not
have been on the Pareto front. The strategies of an interval are kept in the order of their times,
each with the number of micro-batches under way up to which it fits; what fits is then found in one
sweep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headway.cost.device import Number
from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees, late_per_byte
from headway.planner.estimate.gradient_exchange import BUCKETS, ModelParameters
from headway.planner.estimate.operators import (
    Floats,
)
from headway.planner.estimate.partition import (
    bar_intervals,
    cut_stages,
    forced_stage_starts,
)
from headway.planner.estimate.pipeline_time import PeriodicTable, make_periodic_table
from headway.planner.estimate.pricing import IntervalRows, Pricing
from headway.planner.estimate.segments import SegmentTables
from headway.planner.estimate.stage_capacity import ROUNDING
from headway.planner.search.plan_point import CopyClass, Point, PointStage
from headway.schedule.generators.registry import SCHEDULES, ScheduleOption


def lower_hull_bound(seconds: Floats, held: Floats, cap: float) -> tuple[float, float]:
    """(least seconds within the cap, least bytes) of all mixtures of some strategies."""
    fits = held <= cap
    if not fits.any():
        return np.inf, float(held.min())
    own, other = seconds[fits], seconds[~fits][:, None]
    share = (cap - held[fits]) / (held[~fits][:, None] - held[fits])
    mixed = own + share * (other - own)
    return min(float(own.min()), float(mixed.min(initial=np.inf))), float(held.min())


def step_lower_bound(degrees: Degrees, forward: Floats, backward: Floats) -> Floats:
    """Seconds that a table takes at least for a model whose passes take so long on one device.

    Of any table: all ranks together compute m micro-batches, and no micro-batch passes faster than
    its chain of forwards. GPipe, for ranks r and q: all stages once, m - 1 more forwards on r and
    backwards on q; the mean over the ranks is (m + p - 1) / p. 1F1B with m > p has for every rank r
    the path to the last rank and back, then r's row, then to the last rank and back again: stages
    before r once, those behind it twice, r itself m - p + 1 + r times; weights
    w(r+1) = w(r) (m - p - 1 + r) / (m - p + 1 + r) of these paths make every stage count
    (m + p - 1) / p times. With fewer micro-batches, for every r: all stages once and m - 1 more
    forwards, or backwards, on r.

    Args:
        forward: Of one micro-batch in all stages.
    """
    m, p = degrees.microbatches, degrees.pipeline
    both = forward + backward
    if p == 1:
        return m * both
    held = SCHEDULES[degrees.schedule].held
    if held == "all" or (held == "depth" and m > p):
        return both * (m + p - 1) / p
    whole = both * m / p
    if held == "depth":
        return np.maximum(whole, both + (m - 1) / p * np.maximum(forward, backward))
    return np.maximum(whole, forward)


def one_f_one_b_lower_bound(
    microbatches: int,
    under_way: Floats,
    forward: Floats,
    seconds: Floats,
    wire: Floats,
    sums: Floats,
) -> float:
    """Seconds that a table of 1F1B takes at least with these stages: for every rank the first
    micro-batch's way to it, all that it computes, and the last one's way back, or its sum; and the
    way to the last rank and back, the rest of a rank's row, and the way back.

    Args:
        microbatches: m.
        under_way: Micro-batches that each rank holds at most.
        forward: Seconds of each stage, of one micro-batch.
        seconds: The same, of both passes.
        wire: Seconds of a message at each border.
        sums: Seconds of the sum of each stage's gradients.
    """
    backward = seconds - forward
    before = np.concatenate([[0.0], np.cumsum(forward[:-1] + wire)])
    behind = np.concatenate([[0.0], np.cumsum(backward[:-1] + wire)])
    own = before + microbatches * seconds + np.maximum(behind, sums)
    through = before[-1] + behind[-1] + seconds[-1]
    rest = (microbatches - under_way) * forward + (microbatches - 1) * backward
    return float(max(own.max(), through + rest.max()) * (1.0 - ROUNDING))


def indivisible_units_bound(tables: SegmentTables, degrees: Degrees) -> float:
    """Seconds below which no step is, because units are not divided: of n units of one kind some
    rank has at least n / p, rounded up; with copies, some ranks that have the same stages together.
    """
    p, pipes = degrees.pipeline, degrees.pipes
    counts, seconds = tables.kinds
    most = (degrees.microbatches // pipes) * -(-counts * pipes // p)
    return float((most * seconds).max())


# The strategies of stretches in the order of their times, so that what fits is found in one
# sweep.


FEW = 8
"""Numbers of micro-batches under way up to which each is looked up of its own."""


class StrategiesByTime(NamedTuple):
    """(classes, n) strategies, the fastest first, and (classes, n + 1): behind them one that takes
    for ever.

    Attributes:
        seconds: Of a micro-batch, with the share in a step's end.
        state: Bytes.
        kept: Bytes of one micro-batch.
        more: Bytes for a moment.
        updated: Bytes while the update runs.
        all: How many are all micro-batches of a step.
        first: As `more`, with all of them under way; None: the same.
    """

    place: np.ndarray
    seconds: Floats
    state: Floats
    kept: Floats
    more: Floats
    updated: Floats
    all: int
    first: Floats | None = None

    def fitting(self, cap: float, most: int) -> np.ndarray:
        """(classes, n): how many micro-batches under way fit into so many bytes, at most `most`."""

        def fits(number: np.ndarray | int) -> np.ndarray:
            return self.state + number * self.kept + self.more <= cap

        room = cap - self.more - self.state
        with np.errstate(divide="ignore", invalid="ignore"):
            number = np.where(self.kept > 0, room / self.kept, most * fits(0))
        found = np.clip(number, 0, most).astype(np.int64)
        found += (found < most) & fits(found + 1)  # what rounding has taken
        found -= (found > 0) & ~fits(found)
        found[self.updated > cap] = 0
        return found

    def picked(self, cap: float, flights: np.ndarray) -> tuple[Floats, np.ndarray]:
        """(numbers, classes): the least seconds with so many micro-batches under way, infinite
        where nothing fits, and the strategy.

        Args:
            cap: Bytes of a device.
            flights: Numbers of micro-batches, ascending.
        """
        upto = np.maximum.accumulate(self.fitting(cap, int(flights[-1])), axis=1)
        ways = _first_above(upto, flights)
        if self.first is not None and flights[-1] == self.all:
            held = self.state + self.all * self.kept + self.first
            fits = (held <= cap) & (self.updated <= cap)
            ways[:, -1] = np.where(fits.any(axis=1), fits.argmax(axis=1), fits.shape[1])
        lines = np.arange(len(ways))[:, None]
        return self.seconds[lines, ways].T, self.place[lines, ways].T


def sort_strategies(
    rows: Floats,
    microbatches: int,
    passing: float,
    first: Floats | None = None,
    waiting: Floats | float = 0.0,
) -> StrategiesByTime:
    """From rows (classes, ways, K, columns) as `IntervalRows` says.

    Args:
        rows: Without recomputation, and with it where that may be.
        microbatches: Over which a step's end is spread.
        passing: Bytes that the update needs for a moment, per byte of state.
        first: (classes, ways, K) bytes for a moment with all micro-batches under way.
        waiting: (classes, 1) bytes above what the update needs, as `DeviceMemory.waiting`.
    """
    flat = (len(rows), -1)
    value = (rows[..., IntervalRows.SECONDS] + rows[..., IntervalRows.TAIL] / microbatches).reshape(
        flat
    )
    order = value.argsort(axis=1, kind="stable")
    state, kept, more = (
        np.take_along_axis(rows[..., column].reshape(flat), order, 1)
        for column in (IntervalRows.STATE, IntervalRows.KEPT, IntervalRows.MORE)
    )
    none = ((0, 0), (0, 1))
    seconds = np.take_along_axis(value, order, 1)
    return StrategiesByTime(
        np.pad(order, none),
        np.pad(seconds, none, constant_values=np.inf),
        state,
        kept,
        more,
        state * (1.0 + passing) + waiting,
        microbatches,
        None if first is None else np.take_along_axis(first.reshape(flat), order, 1),
    )


def _first_above(upto: np.ndarray, flights: np.ndarray) -> np.ndarray:
    """(classes, flights): the first place at which a rising row (classes, n) is as high."""
    most = int(flights[-1])
    if len(flights) <= FEW:
        return np.stack([(upto < flight).sum(axis=1) for flight in flights], axis=1)
    steps = np.diff(upto, axis=1, prepend=0, append=most)
    places = np.tile(np.arange(steps.shape[1]), len(steps))
    whole = np.repeat(places, steps.ravel()).reshape(len(upto), most)
    return whole[:, flights - 1]


# One combination of degrees: its strategies, what bounds its plans, and its best cuts.


WIDTH = 4
"""Times the mean number of units of a stage: cuts with longer stages are sought later."""


SHARES = 2
"""How often the memory of a rank with several stages is divided between them in another way."""


FINER = 0.75
"""Plans are sought in bands of memory, each this share of the one before."""


class PlanCandidate:
    """A combination of degrees, ready to be asked for the fastest plan within a memory.

    Args:
        tables: Of its tensor degree and micro-batch.
        itemsize: Bytes of a parameter.
        shared: Facts of the model; made where not given.
        may_recompute: Whether units may keep only what enters them.
        kind: The type of the devices, where the request has groups.
        limit: Bytes of such a device that may be used.
    """

    band = FINER
    left_out = np.inf
    exhausted = False

    def __init__(
        self,
        tables: SegmentTables,
        degrees: Degrees,
        itemsize: int,
        shared: ModelParameters | None = None,
        *,
        may_recompute: bool = True,
        kind: str = "",
        limit: float = np.inf,
    ) -> None:
        self.kind = kind
        self.limit = limit
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.shared = shared or ModelParameters(tables.setting.work, tables.row, tables.classes)
        self.pricing = Pricing(tables, degrees, itemsize, self.shared)
        self.late = late_per_byte(itemsize, degrees)
        self._passes = (0, 1) if may_recompute else (0,)
        self._known: dict[tuple[str, int], tuple[Floats, np.ndarray]] = {}
        self._orders: dict[tuple[str, int], StrategiesByTime] = {}
        self.least_rows = self.pricing.rows(tables.least(self.shared.whole))[0]

    @cached_property
    def book(self) -> PeriodicTable | None:
        """The schedule's table; None where it cannot have these sizes."""
        d = self.degrees
        return make_periodic_table(
            ScheduleOption(d.schedule, d.virtual, d.pipes), d.pipeline, d.microbatches
        )

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Units that must begin a stage."""
        return forced_stage_starts(self.tables.setting.force, self.tables.row)

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        """Micro-batches under way of each stage, on the rank that holds most of it."""
        return (1,) if self.book is None else self.book.in_flight()

    def bound(self, cap: float = np.inf) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `cap` is below.

        The stages' bytes add up to at most p caps, so that their seconds are at least those of the
        lower hull of the whole model's strategies. All ranks compute m / p micro-batches and sum
        their gradients behind them, or wait as the table says.
        """
        least, need = lower_hull_bound(*self._spread, min(cap, self.limit))
        return max(least, self._crowded), need

    @cached_property
    def _spread(self) -> tuple[Floats, Floats]:
        """(seconds, bytes) of the whole model's strategies, evenly spread over the ranks."""
        degrees, rows = self.degrees, self.least_rows[list(self._passes)]
        p, m = degrees.pipeline, degrees.microbatches
        seconds = step_lower_bound(
            degrees, rows[..., IntervalRows.FORWARD], self.pricing.backward(rows)
        )
        seconds = seconds + rows[..., IntervalRows.AFTER] / p
        if degrees.virtual * degrees.pipes == 1:  # else sums may leave while a rank computes
            own = m * rows[..., IntervalRows.SECONDS] + rows[..., IntervalRows.TAIL]
            seconds = np.maximum(seconds, own / p)
        held = (degrees.pipes * self.there(rows) + rows[..., IntervalRows.KEPT]) / p
        return seconds.ravel(), held.ravel()

    def there(self, rows: Floats) -> Floats:
        """Bytes of state at any moment of a step; rows (..., columns) as `IntervalRows` says."""
        found: Floats = rows[..., IntervalRows.STATE] * (
            1.0 - self.late / self.pricing.memory.per_byte
        )
        return found

    def is_late(self, stage: int) -> bool:
        """Whether a stage holds all its micro-batches before its gradients are made."""
        return self.late > 0 and self._in_flight[stage] == self.degrees.microbatches

    def first(self, rows: Floats) -> Floats | None:
        """(classes, 2, K) bytes for a moment above state and kept ones, of a late stage; None:
        none is late. In the second backward all gradients are there, and a micro-batch less.

        Args:
            rows: (classes, 2, K, 9) as `IntervalRows` says.
        """
        if not self.late:
            return None
        first = self.pricing.memory.first[: len(rows), :, None]
        first = np.asarray(self.early(first, rows[..., IntervalRows.MORE]))
        if self.degrees.microbatches == 1:
            return np.broadcast_to(first, rows.shape[:-1])
        return np.maximum(first, rows[..., IntervalRows.MORE] - rows[..., IntervalRows.KEPT])

    def early(self, first: Number, more: Number) -> Number:
        """Bytes for a moment in the first backward of a step, as a rank keeps its gradients.

        Args:
            first: As `Pricing.first` has it, where all gradients are kept.
            more: Where they are there already, as `IntervalRows` says.
        """
        share = self.degrees.gradient_share
        return share * first + (1.0 - share) * more

    @cached_property
    def _crowded(self) -> float:
        return indivisible_units_bound(self.tables, self.degrees)

    def _enough(self, cap: float, known: float) -> bool:
        """Whether there may be a plan within `cap` that is faster than `known`."""
        room = self.tables.room
        places = self.places(cap, known, float(room.whole.sum()))
        return bool((places.sum(axis=1) >= room.counts[:, 0]).all())

    def places(self, cap: float, known: float, whole: float) -> Floats:
        """(kinds, stages): `Room.places` of this combination; arguments as there."""
        per_byte = self.pricing.memory.per_byte
        return self.tables.room.places(
            self.degrees,
            self._in_flight,
            self._passes,
            state=per_byte,
            passing=self.pricing.memory.passing,
            tied=float(self.shared.whole[0]) / self.degrees.tensor * per_byte,
            late=self.late,
            cap=cap,
            known=known,
            whole=whole,
        )

    def _prepared(self, border: str, width: int = 0) -> tuple[Floats, np.ndarray]:
        """(classes, 2, K, 9) as `IntervalRows` says, and the prices; of stretches of at most
        `width` units,
        0: of all."""
        key = border, width
        if key not in self._known:
            several = self.degrees.pipeline > 1
            doubled = self.shared.doubles if several else self.shared.whole
            if width:
                doubled = doubled[: self.tables.classes.lengths[width - 1][1]]
            cells = self.tables.cells(border if several else "", doubled)
            self._known[key] = self.pricing.rows(cells), cells.prices
        return self._known[key]

    def _order(self, border: str, width: int) -> StrategiesByTime:
        """The strategies of every class, the fastest first."""
        key = border, width
        if key not in self._orders:
            rows = self._prepared(border, width)[0]
            first, some = self.first(rows), len(self._passes)
            self._orders[key] = sort_strategies(
                rows[:, :some],
                self.degrees.microbatches,
                self.pricing.memory.passing,
                None if first is None else first[:, :some],
                self.pricing.memory.waiting[: len(rows), None],
            )
        return self._orders[key]

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        """How many units a stage may have, as a cut is sought first, then, and (0) any number."""
        length = len(self.tables.row)
        few = [WIDTH * -(-length // self.degrees.stages)]
        while few[-1] < length / 2:
            few.append(few[-1] * WIDTH)
        return (0,) if self._starts else (*few[:-1], 0)

    def _most_units(self, cap: float) -> int:
        """No stage with more units fits into so many bytes."""
        counts = self.tables.room.counts
        places = self.places(cap, np.inf, float(self.tables.room.whole.sum()))
        return int(np.minimum(places, counts).sum(axis=0).max())

    def _picked(self, border: str, cap: float, width: int = 0) -> tuple[Floats, np.ndarray]:
        """(stages, classes): the least time of a stage with so many behind it, and its strategy;
        `width` as in `_prepared`."""
        counts = np.array(self._in_flight[::-1])
        flights, place = np.unique(counts, return_inverse=True)
        times, picks = self._order(border, width).picked(cap, flights)
        return times[place], picks[place]

    def fastest(self, cap: float, known: float = np.inf, *, parts: bool = True) -> Point | None:
        """The fastest plan of which no device needs more than `cap` bytes.

        Args:
            cap: Bytes.
            known: Seconds of a plan that is known; others are not of interest unless faster.
            parts: False: what of a step is messages and so on is left open, see `detailed`.
        """
        cap = min(cap, self.limit)
        if self.degrees.pipeline == 1:
            return None if self._starts else self._alone(cap)
        if self.book is None or not self._enough(cap, known):
            return None
        best: Point | None = None
        value = np.inf
        for border in self.tables.borders:
            for point, sums in self._within(border, cap, value, known):
                value = min(value, sums)
                if point is not None and point.seconds < known:
                    best, known = point, point.seconds
        return self.detailed(best) if best and parts else best

    def detailed(self, point: Point) -> Point:
        """A point with all parts of its step."""
        return point if point.busy else self._point(point.border, point.stages)

    def _alone(self, cap: float) -> Point | None:
        """Without a pipeline: strategies by what they take at least, until none can be faster."""
        rows, _ = self._prepared("R")
        own = rows[0, list(self._passes)]
        value = (
            self.degrees.microbatches * own[..., IntervalRows.SECONDS] + own[..., IntervalRows.TAIL]
        )
        held = own[..., IntervalRows.STATE] + own[..., IntervalRows.KEPT]
        first = self.first(rows)
        more = own[..., IntervalRows.MORE] if first is None else first[0, list(self._passes)]
        held = np.maximum(held + more, self.pricing.updated(own))
        value = np.where(held <= cap, value, np.inf).ravel()
        best: Point | None = None
        for place in np.argsort(value, kind="stable").tolist():
            if value[place] >= (np.inf if best is None else best.seconds):
                break
            again, price = divmod(place, rows.shape[2])
            chosen = [(0, len(self.tables.row), 0, again, price)]
            point = self._point("R", self._stages("R", chosen))
            if best is None or point.seconds < best.seconds:
                best = point
        return best

    def _within(
        self, border: str, cap: float, sums: float, known: float
    ) -> Iterator[tuple[Point | None, float]]:
        """Plans within the memory, with Alpa's sum of their stages; None: not faster than `known`.

        Where a rank has several stages, each may first have all of the memory; if they do not fit
        together, shares between that and equal ones are tried.
        """
        assert self.book is not None
        several = max(map(len, self.book.table.hosted))
        found = self._cut(border, cap, sums, known)
        if found is None or found[0] is None or found[0].bytes <= cap:
            if found is not None:
                yield found
            return
        least, most = cap / several, cap
        found = self._cut(border, least, np.inf, known)
        if found is None:
            return
        yield found
        for _ in range(SHARES):
            middle = (least + most) / 2
            found = self._cut(border, middle, np.inf, known)
            if found is not None and found[0] is not None and found[0].bytes <= cap:
                least = middle
                yield found
            else:
                most = middle

    def _cut(
        self, border: str, cap: float, sums: float, known: float, barred: Collection[int] = ()
    ) -> tuple[Point | None, float] | None:
        """The best cut of which no stage alone needs more than `cap`, without the parts of its
        step (None: not faster than `known`), and Alpa's sum.

        Args:
            cap: Bytes.
            sums: Alpa's sum of a cut that is known; others are not of interest unless smaller.
            known: Seconds of a plan that is known, as in `fastest`.
            barred: Units at which no stage begins.
        """
        degrees, of = self.degrees, self.tables.classes.of
        m, chunks = degrees.microbatches, degrees.virtual
        least = self.least_rows[list(self._passes)]
        floor = float((least[..., IntervalRows.SECONDS] + least[..., IntervalRows.TAIL] / m).min())
        # m chunks t_max + (sum - chunks t_max) / chunks, times chunks; all cuts of one micro-batch
        # have one sum: the longest stage, whose gradients are last, counts once more
        weight = max(2, chunks * (m * chunks - 1) + 1)
        if chunks * degrees.pipes == 1:  # no rank ends before its m micro-batches and its sum
            sums = min(sums, floor + (weight - 1) * known / m)
        free = not self._starts and not barred
        for width in self._widths if free else (0,):
            times, picks = self._picked(border, cap, width)
            if not free:
                own = bar_intervals(of, self._starts, barred)
                cuts = cut_stages(own, times, weight, floor, sums)
            else:
                cuts = cut_stages(of, times, weight, floor, sums, self.tables.classes.within(width))
            found = sums if cuts is None else cuts.seconds(weight)
            if not width or floor + (weight - 1) * self.tables.least_of(width + 1) > found:
                break  # no longer stage is of use
            if width >= self._most_units(cap):
                break  # none fits
        if cuts is None:
            return None
        if not barred and not self.shared.nameless.isdisjoint(cuts.borders[1:-1]):
            return self._cut(border, cap, sums, known, self.shared.nameless)
        prices = len(self._prepared(border, width)[1])
        chosen = []
        for place, (start, stop) in enumerate(pairwise(cuts.borders)):
            number = int(of[start, stop])
            again, price = divmod(int(picks[len(times) - 1 - place, number]), prices)
            chosen.append((start, stop, number, again, price))
        stages = self._stages(border, chosen, width)
        ahead = sum(stage.forward for stage in stages)
        back = sum(stage.seconds - stage.forward for stage in stages)
        if step_lower_bound(degrees, np.asarray(ahead), np.asarray(back)) >= known:
            return None
        late = self._at_least(border, stages) >= known
        return None if late else self._point(border, stages, parts=False), cuts.seconds(weight)

    def _at_least(self, border: str, stages: tuple[PointStage, ...]) -> float:
        """Seconds below which the table does not take, without playing it; of 1F1B alone."""
        depth = SCHEDULES[self.degrees.schedule].held == "depth"
        if not depth or self.book is None or self.book.rounds:
            return 0.0
        starts = [stage.start for stage in stages]
        params = np.array([stage.params for stage in stages])
        least = one_f_one_b_lower_bound(
            self.degrees.microbatches,
            np.array(self._in_flight),
            np.array([stage.forward for stage in stages]),
            np.array([stage.seconds for stage in stages]),
            np.array(self.pricing.wire(self.book, border, starts)).sum(axis=0),
            np.array(self.pricing.sums(starts, params)),
        )
        return least + max(stage.after for stage in stages)

    def planned(
        self,
        borders: Sequence[int],
        recompute: Collection[int] = (),
        *,
        buckets: Sequence[float] = BUCKETS,
        overlap: bool = True,
    ) -> Point:
        """The plan that is cut there, whether it fits or not; whole tensors cross its borders.

        Args:
            borders: The first unit of each stage, and the number of units.
            recompute: Numbers of the stages whose units keep only what enters them.
            buckets: Bytes of a bucket of gradients to choose from.
            overlap: Whether gradients leave while backward goes on, without a pipeline.

        Raises:
            PlanError: The schedule cannot have these sizes.
        """
        of, degrees = self.tables.classes.of, self.degrees
        if degrees.pipeline > 1 and self.book is None:
            raise PlanError(
                "the search has no price for this plan",
                problems=[f"{degrees.schedule}: {degrees.pipeline} ranks, {degrees.microbatches}"],
            )
        rows, _ = self._prepared("R")
        value = (
            rows[..., IntervalRows.SECONDS] + rows[..., IntervalRows.TAIL] / degrees.microbatches
        )
        chosen = []
        for place, (start, stop) in enumerate(pairwise(borders)):
            number = int(of[start, stop]) if degrees.pipeline > 1 else 0
            again = int(place in recompute)
            chosen.append((start, stop, number, again, int(value[number, again].argmin())))
        stages = self._stages("R", chosen)
        return self._point("R", stages, buckets=buckets, overlap=overlap)

    def _stages(
        self, border: str, chosen: Sequence[tuple[int, int, int, int, int]], width: int = 0
    ) -> tuple[PointStage, ...]:
        """From (start, stop, class, recomputation, place among the prices) of each; `width` as in
        `_prepared`."""
        rows, prices = self._prepared(border, width)
        setting, several = self.tables.setting, self.degrees.pipeline > 1
        firsts, made = (
            self.pricing.memory.first,
            self.tables.transients.first(setting, several=several)[1],
        )
        starts, stops, numbers, agains, places = np.array(chosen).T
        own = rows[numbers, agains, places]
        firsts = np.asarray(self.early(firsts[numbers, agains], own[:, IntervalRows.MORE]))
        columns = np.stack(
            [
                self.pricing.backward(own),
                firsts,
                made[numbers, agains],
                self.shared.weight_shares(starts, stops),
                prices[places],
                self.pricing.memory.waiting[numbers],
            ]
        )
        stages = []
        for place, (start, stop, _, again, _) in enumerate(chosen):
            seconds, tail, state, kept, forward, compute, params, after, more = own[place].tolist()
            backward, first, gradients, share, price, waiting = columns[:, place].tolist()
            passes = self.pricing.split_passes(start, stop, again, int(price), border)
            if passes is not None:
                forward, backward = passes
                seconds = forward + backward
            stages.append(
                PointStage(
                    start=start,
                    stop=stop,
                    price=int(price),
                    recompute=bool(again),
                    seconds=seconds,
                    tail=tail,
                    state=state,
                    kept=kept * self._in_flight[place],
                    transient=more,
                    first=first,
                    gradients=gradients if self.is_late(place) else 0.0,
                    flights=self._in_flight[place],
                    passing=state * self.pricing.memory.passing + waiting,
                    params=params,
                    forward=forward,
                    weight=share * max(backward - again * compute, 0.0),
                    after=after,
                )
            )
        return tuple(stages)

    def _point(
        self,
        border: str,
        stages: tuple[PointStage, ...],
        *,
        buckets: Sequence[float] = BUCKETS,
        overlap: bool = True,
        parts: bool = True,
    ) -> Point:
        """The price of these stages; `parts`: with what of it is messages, and so on."""
        if self.degrees.pipeline == 1:
            only = stages[0]
            price = self.pricing.alone(
                int(only.recompute),
                only.price,
                only.params,
                after=only.after,
                buckets=buckets,
                overlap=overlap,
            )
            ranks: tuple[float, ...] = (only.bytes,)
        else:
            assert self.book is not None
            price = self.pricing.pipeline(
                self.book,
                border,
                starts=[stage.start for stage in stages],
                forward=[stage.forward for stage in stages],
                seconds=[stage.seconds for stage in stages],
                weight=[stage.weight for stage in stages],
                params=[stage.params for stage in stages],
                after=[stage.after for stage in stages],
                parts=parts,
            )
            ranks = self._ranks(stages)
        classes: tuple[CopyClass, ...] = ()
        amounts: tuple[tuple[str, int], ...] = ()
        if self.kind:
            one = CopyClass(
                kinds=(self.kind,) * len(stages),
                copies=tuple(range(self.degrees.data)),
                microbatch=self.degrees.microbatch,
                stages=stages,
            )
            classes, amounts = (one,), ((self.kind, self.degrees.devices),)
        return Point(
            degrees=self.degrees,
            border=border,
            stages=stages,
            seconds=price.seconds,
            messages=price.messages,
            exchange=price.exposed,
            hidden=price.hidden,
            update=price.update,
            reading=price.reading,
            busy=price.busy,
            ranks=ranks,
            bucket=price.bucket,
            amounts=amounts,
            classes=classes,
        )

    def _ranks(self, stages: tuple[PointStage, ...]) -> tuple[float, ...]:
        """Bytes of each rank: of all its stages, at the fullest moment."""
        assert self.book is not None
        kept = [stage.kept / n for stage, n in zip(stages, self._in_flight, strict=True)]
        return tuple(
            sum(stages[number].state for number in hosted)
            + max(
                self.book.held(rank, kept) + max(stages[number].moment for number in hosted),
                sum(stages[number].passing for number in hosted),
            )
            for rank, hosted in enumerate(self.book.table.hosted)
        )
