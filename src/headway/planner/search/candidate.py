"""One combination of degrees: its bounds from its own tables, its cuts, and its best plans.

A cut is the best one by Alpa's sum of stages; its price is what the schedule's table takes with
these stages, their messages and sums. Without a pipeline the exchange behind the last backward
counts as far as nothing hides it.

`PlanCandidate` stands on devices of one type. `ShareCandidate` has copies on several types, with
micro-batches of different sizes: every stage is as slow as its slowest copy, and of all strategies
of a stage the one counts that is best for that copy.

Sources: Zheng et al. 2022 (Alpa), the cuts; Jia et al. 2022 (Whale), balancing inside and between
task graphs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from headway.cost.device import Array, Number
from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees, late_per_byte
from headway.planner.estimate.gradient_exchange import BUCKETS, ModelParameters
from headway.planner.estimate.pipeline_time import PeriodicTable, PointStage, make_periodic_table
from headway.planner.estimate.pricing import (
    IntervalRows,
    Pricing,
    StrategiesByTime,
    sort_strategies,
)
from headway.planner.estimate.segments import ROUNDING, SegmentTables
from headway.planner.estimate.stage_cut import (
    bar_intervals,
    cut_stages,
    forced_stage_starts,
    unnameable_units,
)
from headway.planner.search.bounds import (
    lower_hull_bound,
    one_f_one_b_lower_bound,
    step_lower_bound,
)
from headway.planner.search.device_layout import Combination
from headway.planner.search.plan_point import CopyClass, Point, uniform_class
from headway.planner.whale.load_balance import slowest_stage
from headway.schedule.generators.registry import SCHEDULES, ScheduleOption
from headway.schedule.timing import StagePasses

# Times the mean number of units of a stage: cuts with longer stages are sought later, as most plans
# are nearly even.
WIDTH = 4
# How often the memory of a rank with several stages is divided between them in another way.
SHARES = 2
FINER = 0.75
"""Plans are sought in bands of memory, each this share of the one before."""


SLACK = 1e-13
"""Of bytes: the same sum in another order differs by less, and by less than a byte of 1 TB."""


def with_rounding(cap: float) -> float:
    """Bytes up to which a plan fits into `cap`, however its bytes were added up."""
    return cap * (1.0 + 2 * SLACK)


def whole_bytes(size: float) -> int:
    """The least whole bytes into which a plan of this size fits."""
    return math.ceil(size * (1.0 - SLACK))


class PlanCandidate:
    """A combination of degrees, ready to be asked for the fastest plan within a memory.

    Args:
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
        self._known: dict[tuple[str, int], tuple[Array, np.ndarray]] = {}
        self._orders: dict[tuple[str, int], StrategiesByTime] = {}
        self.least_rows = self.pricing.rows(tables.least(self.shared.whole))[0]

    @cached_property
    def book(self) -> PeriodicTable | None:
        """The schedule's table; None where it cannot have these sizes."""
        d = self.degrees
        return make_periodic_table(
            ScheduleOption(d.schedule, d.virtual, d.pipes), d.pipeline, d.microbatches
        )

    @property
    def exists(self) -> bool:
        """Whether its schedule can have these sizes."""
        return self.degrees.pipeline == 1 or self.book is not None

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return forced_stage_starts(self.tables.setting.force, self.tables.row)

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        """Micro-batches in flight of each stage, on the rank that holds most of it."""
        return (1,) if self.book is None else self.book.in_flight()

    def bound(self, cap: float = np.inf) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `cap` is below."""
        # The stages' bytes add up to at most p caps, so their seconds are at least those of the
        # lower hull of the whole model's strategies. All ranks compute m / p micro-batches and sum
        # their gradients behind them, or wait as the table says.
        least, need = lower_hull_bound(*self._spread, min(cap, self.limit))
        return max(least, self._indivisible), need

    @cached_property
    def _spread(self) -> tuple[Array, Array]:
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

    def there(self, rows: Array) -> Array:
        """Bytes of state at any moment of a step."""
        found: Array = rows[..., IntervalRows.STATE] * (
            1.0 - self.late / self.pricing.memory.per_byte
        )
        return found

    def is_late(self, stage: int) -> bool:
        """Whether a stage holds all its micro-batches before its gradients are made."""
        return self.late > 0 and self._in_flight[stage] == self.degrees.microbatches

    def first(self, rows: Array) -> Array | None:
        """(classes, 2, K) transient bytes of a late stage above state and kept ones; None: none is
        late.

        Args:
            rows: (classes, 2, K, 9) as `IntervalRows` says.
        """
        if not self.late:
            return None
        first = self.pricing.memory.first[: len(rows), :, None]
        first = np.asarray(self.early(first, rows[..., IntervalRows.MORE]))
        if self.degrees.microbatches == 1:
            return np.broadcast_to(first, rows.shape[:-1])
        # In the second backward all gradients are made, and a micro-batch less is in flight.
        return np.maximum(first, rows[..., IntervalRows.MORE] - rows[..., IntervalRows.KEPT])

    def early(self, first: Number, more: Number) -> Number:
        """Transient bytes in the first backward of a step, as a rank keeps its gradients."""
        share = self.degrees.gradient_share
        return share * first + (1.0 - share) * more

    @cached_property
    def _indivisible(self) -> float:
        """Seconds below which no step is, because units are not divided."""
        p, pipes = self.degrees.pipeline, self.degrees.pipes
        counts, seconds = self.tables.kinds
        # Of n units of one kind some rank has at least n / p, rounded up; with copies, some ranks
        # that have the same stages together.
        most = (self.degrees.microbatches // pipes) * -(-counts * pipes // p)
        return float((most * seconds).max())

    def _enough(self, cap: float, known: float) -> bool:
        """Whether there may be a plan within `cap` that is faster than `known`."""
        room = self.tables.room
        places = self.places(cap, known, float(room.whole.sum()))
        return bool((places.sum(axis=1) >= room.counts[:, 0]).all())

    def places(self, cap: float, known: float, whole: float) -> Array:
        """(kinds, stages): how many units of a kind each stage has room for.

        Args:
            known: Seconds of a step that are too many.
            whole: Seconds that all units take at least.
        """
        room, memory = self.tables.room, self.pricing.memory
        number = np.array(self._in_flight, dtype=np.float64)
        own, places = room.params * memory.per_byte, np.zeros((len(room.counts), len(number)))
        # Units count the state of what is tied more than once.
        cap = cap + float(self.shared.whole[0]) / self.degrees.tensor * memory.per_byte
        with np.errstate(divide="ignore", invalid="ignore"):
            longest = self._longest(number, known, whole)
            updated = cap / (own * (1.0 + memory.passing))
            for again in self._passes:
                late = number == self.degrees.microbatches
                there = own - np.where(late, room.params * self.late, 0.0)
                # A late stage may need less than its kept bytes at its first backward: without
                # `peak` this stays a bound.
                left = cap - room.peak[again] * (there == own)
                held = np.where(left < 0, 0.0, left / (there + (number - 1.0) * room.kept[again]))
                fits = np.minimum(np.minimum(held, updated), longest / room.seconds[again])
                # 0 / 0: units without bytes or seconds fit in any number.
                places = np.maximum(places, np.nan_to_num(fits, nan=np.inf, posinf=np.inf))
        return np.asarray(np.floor(places * (1.0 + ROUNDING)))

    def _longest(self, in_flight: Array, known: float, whole: float) -> Array:
        """Seconds of a micro-batch that each stage may take at most."""
        degrees, m = self.degrees, self.degrees.microbatches
        # Its rank has all micro-batches to compute; with 1F1B one goes to the last rank and back
        # before the others' backwards.
        longest = np.full(len(in_flight), known / max(1, m // degrees.pipes))
        if SCHEDULES[degrees.schedule].held == "depth" and m > 1:
            times = (m - 1) - (in_flight - 1.0) * self.tables.room.ahead
            longest = np.minimum(longest, max(known - whole, 0.0) / times)
        return longest

    def _prepared(self, border: str, width: int = 0) -> tuple[Array, np.ndarray]:
        """(classes, 2, K, 9) as `IntervalRows` says, and the prices.

        Args:
            width: Intervals of at most so many units; 0: all.
        """
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
        """How many units a stage may have, as cuts are sought; 0, at last: any number."""
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

    def _picked(self, border: str, cap: float, width: int = 0) -> tuple[Array, np.ndarray]:
        """(stages, classes): the least time of a stage with so many behind it, and its strategy."""
        # Reversed: row s of `cut_stages` is the stage with s behind it.
        counts = np.array(self._in_flight[::-1])
        # Stages with as many micro-batches in flight have the same times.
        flights, place = np.unique(counts, return_inverse=True)
        times, picks = self._order(border, width).picked(cap, flights)
        return times[place], picks[place]

    def fastest(self, cap: float, known: float = np.inf, *, parts: bool = True) -> Point | None:
        """The fastest plan of which no device needs more than `cap` bytes.

        Args:
            known: Seconds of a known plan; others are not of interest unless faster.
            parts: False: how the step divides into messages and so on is left open, see `detailed`.
        """
        cap = with_rounding(min(cap, self.limit))
        if self.degrees.pipeline == 1:
            return None if self._starts else self._alone(cap)
        if self.book is None or not self._enough(cap, known):
            return None
        best: Point | None = None
        value = np.inf
        for border in self.tables.borders:
            for point, sums in self._within(border, cap, value, known):
                # A cut that is not fastest still bounds the sums of the next placement.
                value = min(value, sums)
                if point is not None and point.seconds < known:
                    best, known = point, point.seconds
        return self.detailed(best) if best and parts else best

    def detailed(self, point: Point) -> Point:
        """A point with all parts of its step."""
        # A plan priced without its parts has `busy` 0; a complete one computes for some time.
        return point if point.busy else self._point(point.border, point.stages)

    def _alone(self, cap: float) -> Point | None:
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
        # By what strategies take at least, until none can be faster than the best one.
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
        """Plans within the memory, with Alpa's sum of their stages; None: not faster than
        `known`."""
        assert self.book is not None
        several = max(map(len, self.book.table.hosted))
        # Each stage of a rank may first have all of its memory. If they do not fit together, shares
        # between that and equal ones are tried.
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
        """The best cut of which no stage alone needs more than `cap`, without the parts of its step
        (None: not faster than `known`), and Alpa's sum.

        Args:
            sums: Alpa's sum of a known cut; others are not of interest unless smaller.
        """
        degrees, of = self.degrees, self.tables.classes.of
        m, chunks = degrees.microbatches, degrees.virtual
        least = self.least_rows[list(self._passes)]
        floor = float((least[..., IntervalRows.SECONDS] + least[..., IntervalRows.TAIL] / m).min())
        # m chunks t_max + (sum - chunks t_max) / chunks, times chunks. All cuts of one micro-batch
        # have one sum: the longest stage, whose gradients are last, counts once more.
        weight = max(2, chunks * (m * chunks - 1) + 1)
        if chunks * degrees.pipes == 1:  # no rank ends before its m micro-batches and its sum
            sums = min(sums, floor + (weight - 1) * known / m)
        # Lines of short intervals exist only where every border is allowed.
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
        # Plans name borders by modules; most cuts need no second run without the other borders.
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
        """Seconds that the table of a cut takes at least, without simulating it; 0: not known."""
        book = self.book
        if book is None or book.rounds:
            return 0.0
        wire, sums = self.pricing.wire(book, border, stages), self.pricing.sums(stages)
        forward, seconds = ([getattr(one, n) for one in stages] for n in ("forward", "seconds"))
        if SCHEDULES[self.degrees.schedule].held == "depth":
            least = one_f_one_b_lower_bound(
                self.degrees.microbatches,
                np.array(self._in_flight),
                np.array(forward),
                np.array(seconds),
                np.array(wire).sum(axis=0),
                np.array(sums),
            )
        else:
            backward = [both - one for both, one in zip(seconds, forward, strict=True)]
            work = StagePasses(forward, backward, [one.weight for one in stages])
            least = book.table.at_least(work, wire, sums) * (1.0 - ROUNDING)
        return least + max(
            sum(stages[number].after for number in hosted) for hosted in book.table.hosted
        )

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
            PlanError: The schedule does not exist for these sizes.
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
        """From (start, stop, class, recomputation, place among the prices) of each."""
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
        if self.degrees.pipeline == 1:
            only = stages[0]
            price = self.pricing.alone(only, buckets=buckets, overlap=overlap)
            ranks: tuple[float, ...] = (only.bytes,)
        else:
            assert self.book is not None
            price = self.pricing.pipeline(self.book, border, stages, parts=parts)
            ranks = self._ranks(stages)
        point = Point(
            degrees=self.degrees,
            border=border,
            stages=stages,
            ranks=ranks,
            amounts=((self.kind, self.degrees.devices),) if self.kind else (),
            **vars(price),
        )
        return replace(point, classes=(uniform_class(point),)) if self.kind else point

    def _ranks(self, stages: tuple[PointStage, ...]) -> tuple[float, ...]:
        """Bytes of each rank at its fullest moment, with all of its stages."""
        assert self.book is not None
        # `kept` is of all micro-batches in flight; the table counts those of each stage on a rank.
        kept = [stage.kept / n for stage, n in zip(stages, self._in_flight, strict=True)]
        return tuple(
            sum(stages[number].state for number in hosted)
            + max(
                self.book.held(rank, kept) + max(stages[number].moment for number in hosted),
                sum(stages[number].passing for number in hosted),
            )
            for rank, hosted in enumerate(self.book.table.hosted)
        )


Cell = tuple[int, str]
"""Number of a class of copies, and a type of devices."""
Picks = MutableMapping[PlanCandidate, dict[tuple[str, float], tuple[Array, np.ndarray]]]
"""By border and bytes allowed: (stages, classes) times, and recomputation with strategy."""


@dataclass(frozen=True)
class ShareCandidate:
    """A combination with the micro-batch of each class of copies, ready to be cut.

    Attributes:
        sizes: Samples of a micro-batch, class by class.
        candidate: Gives the tables of a type with these degrees.
        starts: First units that must begin a stage.
        picks: Strategies of stages on one type, which other layouts have, too.
    """

    combination: Combination
    sizes: tuple[int, ...]
    candidate: Callable[[str, Degrees], PlanCandidate]
    starts: tuple[int, ...] = ()
    picks: Picks = field(default_factory=WeakKeyDictionary)
    _candidates: dict[Cell, PlanCandidate] = field(default_factory=dict)
    _known_lines: dict[tuple[Cell, str, int], _CellIntervals] = field(default_factory=dict)
    _mixed: dict[
        tuple[tuple[Cell, ...], str, tuple[float, ...]], dict[int, tuple[Array, np.ndarray]]
    ] = field(default_factory=dict)

    def of(self, cell: Cell) -> PlanCandidate:
        if cell not in self._candidates:
            number, kind = cell
            degrees = self.combination.sized(self.sizes[number])
            self._candidates[cell] = self.candidate(kind, degrees)
        return self._candidates[cell]

    def least(self, caps: Mapping[str, float] | None = None) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `caps` is below."""
        combination = self.combination
        p, m = combination.degrees.pipeline, combination.degrees.microbatches
        seconds, held = 0.0, np.inf
        for number, (kinds, _) in enumerate(self.combination.classes):
            stages = Counter(kinds)
            own = [self.of((number, kind)) for kind in stages]
            rows = [one.least_rows[list(one._passes)] for one in own]
            held = min(
                held,
                *(
                    float((one.there(r) + r[..., IntervalRows.KEPT]).min()) / p
                    for one, r in zip(own, rows, strict=True)
                ),
            )
            # Copies on one type have their own bound, those on several that of their units.
            if len(stages) == 1:
                cap = np.inf if caps is None else caps[kinds[0]]
                seconds = max(seconds, self.of((number, kinds[0])).bound(cap)[0])
            else:
                units = [self.of((number, kind)).tables.kinds for kind in stages]
                tails = [[[row[..., IntervalRows.TAIL].min() / m]] for row in rows]
                counts, each = units[0][0], np.stack([one[:, None] for _, one in units])
                on = np.array(list(stages.values()))
                found = slowest_stage(each, counts, on)
                alike, through = float(found[0][0]), float(found[1][0])
                with_sums = np.concatenate([each, tails], axis=1)
                busy = m * float(slowest_stage(with_sums, np.append(counts, 1), on)[0][0])
                seconds = max(seconds, busy, (m - 1) * alike + through)
        return seconds, held

    def fastest(
        self,
        caps: Mapping[str, float],
        useful: Callable[[float, float], bool] | None = None,
        known: float = np.inf,
    ) -> Point | None:
        """The fastest plan of which no device needs more than its type's `caps`.

        Args:
            useful: Whether a plan may be of use that takes about so many seconds (Alpa's sum of its
                stages) and so many bytes of a device; None: every one.
            known: Seconds from which on no plan is of use.
        """
        caps = {kind: with_rounding(cap) for kind, cap in caps.items()}
        several = self.combination.degrees.pipeline > 1
        if several and not self._enough(caps, known):
            return None
        cells = sorted({cell for s in self._stages for cell in self.combination.types_of(s)})
        borders = {b for cell in cells for b in self.of(cell).tables.borders} if several else {"R"}
        best: Point | None = None
        for border in sorted(borders):
            point = self._within(border, caps, useful, known)
            if point is not None and point.seconds < known:
                best, known = point, point.seconds
        return best

    def planned(self, borders: Sequence[int], recompute: Collection[int] = ()) -> Point:
        """As `PlanCandidate.planned`."""
        tables = self.of(next(iter(self.combination.types_of(0)))).tables
        chosen = []
        for stage, (start, stop) in enumerate(pairwise(borders)):
            number = int(tables.classes.of[start, stop]) if len(borders) > 2 else 0
            again = int(stage in recompute)
            cells = sorted(self.combination.types_of(stage))
            lines = [self._lines(cell, "R", again) for cell in cells]
            prices = [int(line.seconds[number].argmin()) for line in lines]
            chosen.append((start, stop, number, [again, *prices]))
        return self._point("R", chosen)

    def _enough(self, caps: Mapping[str, float], known: float) -> bool:
        """Whether the stages of every copy may have room for all units."""
        for number, (kinds, _) in enumerate(self.combination.classes):
            own = {kind: self.of((number, kind)) for kind in kinds}
            rooms = [candidate.tables.room for candidate in own.values()]
            whole = float(np.min([room.whole for room in rooms], axis=0).sum())
            each = {kind: one.places(caps[kind], known, whole) for kind, one in own.items()}
            places = sum(each[kind][:, stage] for stage, kind in enumerate(kinds))
            if (places < rooms[0].counts[:, 0]).any():
                return False
        return True

    @property
    def _stages(self) -> range:
        return range(self.combination.degrees.pipeline)

    def _within(
        self,
        border: str,
        caps: Mapping[str, float],
        useful: Callable[[float, float], bool] | None,
        known: float,
    ) -> Point | None:
        combination = self.combination
        p, m = combination.degrees.pipeline, combination.degrees.microbatches
        tables = self.of(next(iter(self.combination.types_of(0)))).tables
        of = tables.classes.of
        numbers = of if p > 1 else np.where(of == of[0, -1], 0, -1)
        picked = [self._picked(stage, border, caps) for stage in reversed(self._stages)]
        times = np.stack([best for best, _ in picked])
        numbers = bar_intervals(numbers, self.starts)
        times = np.where(times < known / m, times, np.inf)  # all ranks have m, and their sums
        cuts = cut_stages(numbers, times, m)
        # As in `PlanCandidate._cut`: most cuts need no second run without these borders.
        barred = unnameable_units(tables.row)
        if cuts is not None and not barred.isdisjoint(cuts.borders[1:-1]):
            cuts = cut_stages(bar_intervals(numbers, (), barred), times, m)
        if cuts is None:
            return None
        chosen = []
        for stage, (start, stop) in enumerate(pairwise(cuts.borders)):
            number = int(of[start, stop]) if p > 1 else 0
            chosen.append((start, stop, number, picked[p - 1 - stage][1][number].tolist()))
        if useful and not useful(cuts.seconds(m), self._fullest(border, chosen)):
            return None
        return self._point(border, chosen)

    def _fullest(self, border: str, chosen: Sequence[tuple[int, int, int, list[int]]]) -> float:
        most = 0.0
        for stage, (_, _, number, (again, *prices)) in enumerate(chosen):
            cells = sorted(self.combination.types_of(stage))
            for cell, price in zip(cells, prices, strict=True):
                line = self._lines(cell, border, again)
                held = line.held(np.array([number]), self.of(cell)._in_flight[stage])
                most = max(most, float(held[0, price]))
        return most

    def _picked(
        self, stage: int, border: str, caps: Mapping[str, float]
    ) -> tuple[Array, np.ndarray]:
        """(classes of intervals,): the least time of a stage, infinite where it does not fit; and
        (classes, 1 + cells): whether it recomputes, and the strategy in each cell.
        """
        cells = tuple(sorted(self.combination.types_of(stage)))
        if len(cells) == 1:
            return self._alone(cells[0], stage, border, caps[cells[0][1]])
        key = (cells, border, tuple(caps[kind] for _, kind in cells))
        if key not in self._mixed:
            self._mixed[key] = self._slowest_of_cells(cells, border, caps)
        return self._mixed[key][stage]

    def _slowest_of_cells(
        self, cells: tuple[Cell, ...], border: str, caps: Mapping[str, float]
    ) -> dict[int, tuple[Array, np.ndarray]]:
        stages = [s for s in self._stages if sorted(self.combination.types_of(s)) == [*cells]]
        every = np.arange(len(self.of(cells[0])._prepared(border)[0]))
        times = np.full((len(stages), len(every)), np.inf)
        picks = np.zeros((*times.shape, 1 + len(cells)), dtype=np.int64)

        passes = self.of(cells[0])._passes
        lines = {again: [self._lines(c, border, again) for c in cells] for again in passes}
        mismatches = {again: self._mismatches(own) for again, own in lines.items()}

        def pick(place: int, some: np.ndarray) -> None:
            for again, own in lines.items():
                values = tuple(
                    line.seconds_within(some, self.of(c)._in_flight[stages[place]], caps[c[1]])
                    for c, line in zip(cells, own, strict=True)
                )
                best, ways = _together(values, tuple(one[some] for one in mismatches[again]))
                better = best < times[place, some]
                times[place, some[better]] = best[better]
                picks[place, some[better], 0] = again
                picks[place, some[better], 1:] = ways[better]

        # Stages that hold all micro-batches before their gradients are made may have room where
        # those with fewer have none. They are equal and come first, so they are looked at by
        # themselves.
        late = sum(self.of(cells[0]).is_late(stage) for stage in stages)
        if late:
            pick(0, every)
            times[1:late], picks[1:late] = times[0], picks[0]
        # What takes as long with few as with many micro-batches in flight takes as long between
        # them: the stages between two equal ones are never priced.
        last = len(stages) - 1
        waiting = [(late, last, every)] if late <= last else []
        for place in {late, last} if waiting else ():
            pick(place, every)
        while waiting:
            low, high, some = waiting.pop()
            same = times[low, some] == times[high, some]
            times[low:high, some[same]] = times[low, some[same]]
            picks[low : high + 1, some[same]] = picks[low, some[same]]  # fits the fullest: fits all
            some, middle = some[~same], (low + high) // 2
            if len(some) and middle > low:
                pick(middle, some)
                waiting += [(low, middle, some), (middle, high, some)]
        return {stage: (times[n], picks[n]) for n, stage in enumerate(stages)}

    def _alone(self, cell: Cell, stage: int, border: str, cap: float) -> tuple[Array, np.ndarray]:
        """`_picked`, where all copies of a stage are on one type."""
        candidate = self.of(cell)
        known, key = self.picks.setdefault(candidate, {}), (border, cap)
        if key not in known:
            rows, _ = candidate._prepared(border)
            times, picks = candidate._picked(border, cap)
            known[key] = times, np.stack(np.divmod(picks, rows.shape[2]), axis=-1)
        times, picks = known[key]
        behind = self.combination.degrees.pipeline - 1 - stage
        return times[behind], picks[behind]

    def _lines(self, cell: Cell, border: str, again: int) -> _CellIntervals:
        key = (cell, border, again)
        if key not in self._known_lines:
            candidate = self.of(cell)
            every = candidate._prepared(border)[0]
            rows, first = every[:, again], candidate.first(every)
            waiting = candidate.pricing.memory.waiting[: len(rows), None]
            m = self.combination.degrees.microbatches
            self._known_lines[key] = _CellIntervals(
                seconds=rows[..., IntervalRows.SECONDS] + rows[..., IntervalRows.TAIL] / m,
                state=rows[..., IntervalRows.STATE],
                kept=rows[..., IntervalRows.KEPT],
                more=rows[..., IntervalRows.MORE],
                updated=candidate.pricing.updated(rows) + waiting,
                all=m,
                first=None if first is None else first[:, again],
            )
        return self._known_lines[key]

    def _mismatches(self, lines: Sequence[_CellIntervals]) -> tuple[Array, ...]:
        """Of each cell but the first, (classes, K, K): 0 where its strategy holds as many bytes of
        parameters as one of the first, else infinite; nothing without a tensor axis.
        """
        if self.combination.degrees.tensor == 1:
            return ()
        first = lines[0].state[:, :, None]
        others = [line.state[:, None, :] for line in lines[1:]]
        return tuple(np.where(np.abs(first - o) <= 1e-6 * o, 0.0, np.inf) for o in others)

    def _point(self, border: str, chosen: Sequence[tuple[int, int, int, list[int]]]) -> Point:
        """From (start, stop, class, [recomputation, strategy of each cell]) of each stage."""
        layout = self.combination
        parts: dict[Cell, tuple[PointStage, ...]] = {}
        for cell in sorted({cell for s in self._stages for cell in layout.types_of(s)}):
            own = []  # the strategy in this cell of every stage that has one
            for s, (start, stop, number, (again, *prices)) in enumerate(chosen):
                places = sorted(layout.types_of(s))
                price = prices[places.index(cell)] if cell in places else 0
                own.append((start, stop, number, again, price))
            parts[cell] = self.of(cell)._stages(border, own)
        members: dict[tuple[str, ...], list[int]] = {}
        for copy, kinds in enumerate(layout.copies):
            members.setdefault(kinds, []).append(copy)
        classes = tuple(
            CopyClass(
                kinds=kinds,
                copies=tuple(members[kinds]),
                microbatch=self.sizes[number],
                stages=tuple(parts[number, kind][s] for s, kind in enumerate(kinds)),
            )
            for number, (kinds, _) in enumerate(layout.classes)
        )
        slowest = (
            self._slowest_alone(border, {cell: own[0] for cell, own in parts.items()})
            if len(chosen) == 1
            else self._slowest(border, classes)
        )
        degrees = self.combination.sized(max(self.sizes))
        return replace(slowest, degrees=degrees, classes=classes, amounts=self.combination.amounts)

    def _slowest_alone(self, border: str, steps: Mapping[Cell, PointStage]) -> Point:
        # The slowest update follows the slowest copy's passes and sums, and may be another copy's.
        after = max(stage.after for stage in steps.values())
        points = [
            self.of(cell)._point(
                border, (replace(one, after=after, tail=one.tail + after - one.after),)
            )
            for cell, one in steps.items()
        ]
        held = max(stage.bytes for stage in steps.values())
        return replace(max(points, key=lambda one: one.seconds), ranks=(held,))

    def _slowest(self, border: str, classes: Sequence[CopyClass]) -> Point:
        """A step of a pipeline as if every copy were as slow as the slowest."""
        largest = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        candidate = self.of((largest, classes[largest].kinds[0]))
        stages = zip(*(one.stages for one in classes), strict=True)
        return candidate._point(border, tuple(map(_slowest, stages)))


class _CellIntervals(NamedTuple):
    """(classes, K) strategies in a cell, as `IntervalRows` and `StrategiesByTime` say."""

    seconds: Array
    state: Array
    kept: Array
    more: Array
    updated: Array
    all: int
    first: Array | None

    def held(self, some: np.ndarray, under_way: int) -> Array:
        late = self.first is not None and under_way == self.all
        more = self.first if self.first is not None and late else self.more
        held = self.state[some] + under_way * self.kept[some] + more[some]
        return np.asarray(np.maximum(held, self.updated[some]))

    def seconds_within(self, some: np.ndarray, under_way: int, cap: float) -> Array:
        fits = self.held(some, under_way) <= cap
        return np.asarray(np.where(fits, self.seconds[some], np.inf))


def _together(values: tuple[Array, ...], mismatches: tuple[Array, ...]) -> tuple[Array, np.ndarray]:
    """(classes,) the least longest time, and (classes, cells) the strategies."""
    if not mismatches:
        # Nothing ties the cells' strategies together: the slowest of each cell's own best counts.
        picks = np.stack([value.argmin(axis=1) for value in values], axis=1)
        each = [np.take_along_axis(v, picks[:, n, None], 1)[:, 0] for n, v in enumerate(values)]
        return reduce(np.maximum, each), picks
    longest, chosen = values[0], []
    for value, mismatch in zip(values[1:], mismatches, strict=True):
        matched = value[:, None, :] + mismatch
        best = matched.argmin(axis=2)
        chosen.append(best)
        longest = np.maximum(longest, np.take_along_axis(matched, best[..., None], 2)[..., 0])
    first = longest.argmin(axis=1)[:, None]
    ways = [first, *(np.take_along_axis(pick, first, 1) for pick in chosen)]
    return np.take_along_axis(longest, first, 1)[:, 0], np.concatenate(ways, axis=1)


def _slowest(some: Sequence[PointStage]) -> PointStage:
    """One copy of a stage, as slow in everything as the slowest, as full as the fullest."""
    forward = max(one.forward for one in some)
    return replace(
        max(some, key=lambda one: one.bytes),
        forward=forward,
        seconds=forward + max(one.seconds - one.forward for one in some),
        tail=max(one.tail for one in some),
        after=max(one.after for one in some),
        weight=min(one.weight for one in some),
        params=max(one.params for one in some),
    )
