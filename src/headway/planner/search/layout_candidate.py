"""A combination on devices of several types: what its stages cost, and its best cut.

Every stage is as slow as its slowest copy: copies take micro-batches of different sizes, priced on
the tables of the type that they stand on. Of all strategies of a stage the one counts that is best
for its slowest copy; with a tensor axis only strategies go together that hold as many bytes of
parameters. A stage on one type has the ordinary price.

Sources: Jia et al. 2022 (Whale), balancing inside and between task graphs, and Algorithm 1 for
`balance = "whale"`; Zheng et al. 2022 (Alpa), the cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from headway.cost.transformer import Machine
from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees, least_state_per_byte
from headway.planner.estimate.operators import Floats
from headway.planner.estimate.partition import (
    LayerUnit,
    bar_intervals,
    cut_stages,
    unnameable_units,
)
from headway.planner.estimate.pricing import IntervalRows
from headway.planner.search.candidate import PlanCandidate
from headway.planner.search.device_layout import Combination, DeviceLayout
from headway.planner.search.plan_point import CopyClass, Point, PointStage
from headway.planner.search.request import PlanRequest
from headway.planner.whale.load_balance import (
    DeviceShare,
    algorithm_1,
    slowest_stage,
    whole_filling,
)

DENSE = 1024
"""Up to so many samples of a micro-batch each has a bound of its own, beyond only some."""
BAND = 0.5
"""Plans are sought in bands of memory, each this share of the one before."""
MISSES = 2
"""Shares that do not fit, after which a combination is left, without `proof`."""
TRIES = 6
"""Shares of a batch that are priced for one combination, without `proof`."""
WORTH = 0.99
"""Other shares are priced where they are estimated to take at most so much of the best."""


class TypeBounds(Protocol):
    """What is known of the devices of one type, as `SearchBounds` has it."""

    question: PlanRequest
    row: tuple[LayerUnit, ...]

    @property
    def work(self) -> tuple[np.ndarray, np.ndarray]: ...
    @property
    def held(self) -> int: ...
    @property
    def kept(self) -> float: ...
    @property
    def crossing(self) -> float: ...


def layout_of(combination: Combination) -> DeviceLayout:
    """The layout of a combination on devices of several types."""
    assert combination.layout is not None
    return combination.layout


class LayoutBounds:
    """What bounds the plans of one question on devices of several types."""

    def __init__(self, question: PlanRequest, types: Mapping[str, TypeBounds]) -> None:
        self.question = question
        self.types = types
        self.first = next(iter(types.values()))
        self._bounds: dict[tuple[str, int], Floats] = {}
        self._copies: dict[tuple[tuple[tuple[str, int], ...], int], tuple[Floats, Floats]] = {}

    def seconds(self, combination: Combination) -> float:
        """Seconds that no plan of it is below; infinite where the parameters alone do not fit."""
        question, state = self.question, self.state(combination)
        for kinds, _ in layout_of(combination).classes:
            if state > sum(question.caps[kind] for kind in kinds):
                return np.inf
        costs = [self.costs(kinds, combination) for kinds, _ in layout_of(combination).classes]
        copies = [number for _, number in layout_of(combination).classes]
        need = -(-question.batch // combination.degrees.microbatches)
        return whole_filling(costs, copies, need)[1]

    def costs(self, kinds: tuple[str, ...], combination: Combination) -> Floats:
        """Least seconds of a copy's step with micro-batches of 1, 2, ... samples."""
        m = combination.degrees.microbatches
        need = -(-self.question.batch // m)
        slowest, through = self._copy(
            tuple(sorted(Counter(kinds).items())), combination.degrees.tensor
        )
        return (m - 1) * slowest[:need] + through[:need]

    def _copy(self, stages: tuple[tuple[str, int], ...], tensor: int) -> tuple[Floats, Floats]:
        """Least seconds of a copy's slowest stage, and of all its stages one after the other, with
        micro-batches of 1, 2, ... samples.
        """
        key = (stages, tensor)
        if key not in self._copies:
            counts = np.array(list(self._kinds.values()))
            each = np.stack([self._spread(kind, tensor) for kind, _ in stages])
            numbers = np.array([number for _, number in stages])
            slowest, through = slowest_stage(each, counts, numbers)
            self._copies[key] = np.maximum.accumulate(slowest), np.maximum.accumulate(through)
        return self._copies[key]

    @cached_property
    def _kinds(self) -> Mapping[int, int]:
        """How many units there are of each kind."""
        return Counter(unit.kind for unit in self.first.row)

    def _spread(self, kind: str, tensor: int) -> Floats:
        """(kinds of units, batch): seconds of a micro-batch of 1, 2, ... samples on t devices of a
        type: every operator's work evenly spread, or its launch."""
        key = (kind, tensor)
        if key not in self._bounds:
            passes, launches = self.types[kind].work
            device = self.types[kind].question.machine.device
            batch = self.question.batch
            sparse = np.floor(np.geomspace(min(batch, DENSE), batch, 512))
            grid = np.unique([*range(1, min(batch, DENSE) + 1), *sparse, batch])
            stops = np.cumsum([0, *(unit.stop - unit.start for unit in self.first.row)]).tolist()
            spans = {unit.kind: stops[n : n + 2] for n, unit in enumerate(self.first.row)}
            found = []
            for number in self._kinds:
                some, calls = (
                    part[slice(*spans[number])][..., None] for part in (passes, launches)
                )
                work = some * grid / tensor + device.seconds_of_kernels(calls)
                slower = np.maximum(work, device.seconds_of_host(calls))
                found.append(np.where(some > 0, slower, 0.0).sum(axis=(0, 1)))
            at = np.searchsorted(grid, np.arange(1, batch + 1), side="right") - 1
            self._bounds[key] = np.maximum.accumulate(np.stack(found)[:, at], axis=1)
        return self._bounds[key]

    def held(self, combination: Combination) -> float:
        """Bytes that the fullest device needs at least: some copy takes no less than the mean."""
        microbatch = -(
            -self.question.batch // combination.degrees.microbatches // combination.degrees.data
        )
        kept = min(self.first.kept, self.first.crossing) / combination.degrees.tensor
        return (self.state(combination) + kept * microbatch) / combination.degrees.pipeline

    def may_fit(
        self, combination: Combination, tuples: np.ndarray, caps: Mapping[str, float]
    ) -> np.ndarray:
        """Which sizes leave room for the state and the least that forward keeps."""
        state, t = self.state(combination), combination.degrees.tensor
        kept = min(self.first.kept, self.first.crossing) / t
        fits = np.ones(len(tuples), dtype=bool)
        for c, (kinds, _) in enumerate(layout_of(combination).classes):
            fits &= state + kept * tuples[:, c] <= sum(caps[kind] for kind in kinds)
        return fits

    def state(self, combination: Combination) -> float:
        """Bytes of weights, gradients and optimiser of a copy at any moment of a step, on the
        devices of one tensor rank."""
        question = self.first.question
        degrees, copies = combination.degrees, question.work.optimiser.state
        per_byte = least_state_per_byte(question.itemsize, degrees, copies)
        return self.first.held * per_byte / combination.degrees.tensor


# The sizes of micro-batches with which copies on unequal devices are tried.


def microbatch_shares(
    bounds: LayoutBounds, combination: Combination, caps: Mapping[str, float]
) -> np.ndarray:
    """(n, classes): micro-batches of the classes that together have the batch, none larger
    than it must be beside the others."""
    need = -(-bounds.question.batch // combination.degrees.microbatches)
    copies = [number for _, number in layout_of(combination).classes]
    if bounds.question.balance == "whale":
        found = _by_algorithm_1(bounds, combination, caps, need)
        return np.array([found]) if found else np.zeros((0, len(copies)), dtype=int)
    front: list[tuple[int, ...]] = [()]
    for number in copies[:-1]:
        front = [
            (*some, size)
            for some in front
            for size in range(1, max(1, _left(some, copies, need)) // number + 1)
        ]
    whole = [(*some, max(1, -(-_left(some, copies, need) // copies[-1]))) for some in front]
    return np.array([some for some in whole if _left(some[:-1], copies, need) > 0])


def _by_algorithm_1(
    bounds: LayoutBounds, combination: Combination, caps: Mapping[str, float], need: int
) -> tuple[int, ...] | None:
    """Whale's shares: by the rates of the devices of a copy, within its memory."""
    kept = bounds.first.kept * min(combination.degrees.microbatches, combination.degrees.pipeline)
    shares = [
        DeviceShare(
            rate=sum(_flops(bounds.types[kind].question.machine) for kind in kinds),
            memory=sum(caps[kind] for kind in kinds),
            scaled=need * kept / combination.degrees.tensor,
            fixed=bounds.state(combination),
        )
        for kinds in layout_of(combination).copies
    ]
    try:
        loads = dict(zip(layout_of(combination).copies, algorithm_1(shares).loads, strict=True))
    except PlanError:
        return None
    return tuple(
        max(1, int(np.ceil(loads[kinds] * need - 1e-9)))
        for kinds, _ in layout_of(combination).classes
    )


def _left(some: Sequence[int], copies: Sequence[int], need: int) -> int:
    return need - sum(n * size for n, size in zip(copies, some, strict=False))


def _flops(machine: Machine) -> float:
    return machine.device.rate(machine.dtype)


# One way to share a batch among the copies.


Cell = tuple[int, str]
"""Number of a class of copies, and a type of devices."""
Picks = MutableMapping[PlanCandidate, dict[tuple[str, float], tuple[Floats, np.ndarray]]]
"""By border and bytes allowed: (stages, classes) times, and recomputation with strategy."""


@dataclass(frozen=True)
class ShareCandidate:
    """A combination with the micro-batch of each class of copies, ready to be cut.

    Attributes:
        sizes: Samples of a micro-batch, class by class.
        candidate: Gives the tables of a type with these degrees.
        starts: First units that must begin a stage.
        picks: What stages of one type have picked, also for other layouts.
    """

    combination: Combination
    sizes: tuple[int, ...]
    candidate: Callable[[str, Degrees], PlanCandidate]
    starts: tuple[int, ...] = ()
    picks: Picks = field(default_factory=WeakKeyDictionary)
    _candidates: dict[Cell, PlanCandidate] = field(default_factory=dict)
    _known_lines: dict[tuple[Cell, str, int], _CellIntervals] = field(default_factory=dict)
    _mixed: dict[
        tuple[tuple[Cell, ...], str, tuple[float, ...]], dict[int, tuple[Floats, np.ndarray]]
    ] = field(default_factory=dict)

    @property
    def layout(self) -> DeviceLayout:
        return layout_of(self.combination)

    def of(self, cell: Cell) -> PlanCandidate:
        if cell not in self._candidates:
            number, kind = cell
            degrees = self.combination.sized(self.sizes[number])
            self._candidates[cell] = self.candidate(kind, degrees)
        return self._candidates[cell]

    def least(self, caps: Mapping[str, float] | None = None) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `caps` is below: of copies on one type their
        own bound, of those on several by their units."""
        combination = self.combination
        p, m = combination.degrees.pipeline, combination.degrees.microbatches
        seconds, held = 0.0, np.inf
        for number, (kinds, _) in enumerate(self.layout.classes):
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
            caps: Bytes, by type.
            useful: Whether a plan may be of use that takes about so many seconds (Alpa's sum of its
                stages) and so many bytes of a device; None: every one.
            known: Seconds from which on no plan is of use.
        """
        several = self.combination.degrees.pipeline > 1
        if several and not self._enough(caps, known):
            return None
        cells = sorted({cell for s in self._stages for cell in self.layout.types_of(s)})
        borders = {b for cell in cells for b in self.of(cell).tables.borders} if several else {"R"}
        best: Point | None = None
        for border in sorted(borders):
            point = self._within(border, caps, useful, known)
            if point is not None and point.seconds < known:
                best, known = point, point.seconds
        return best

    def planned(self, borders: Sequence[int], recompute: Collection[int] = ()) -> Point:
        """The plan that is cut there, whether it fits or not; whole tensors cross its borders.

        Args:
            borders: The first unit of each stage, and the number of units.
            recompute: Numbers of the stages whose units keep only what enters them.
        """
        tables = self.of(next(iter(self.layout.types_of(0)))).tables
        chosen = []
        for stage, (start, stop) in enumerate(pairwise(borders)):
            number = int(tables.classes.of[start, stop]) if len(borders) > 2 else 0
            again = int(stage in recompute)
            cells = sorted(self.layout.types_of(stage))
            lines = [self._lines(cell, "R", again) for cell in cells]
            prices = [int(line.seconds[number].argmin()) for line in lines]
            chosen.append((start, stop, number, [again, *prices]))
        return self._point("R", chosen)

    def _enough(self, caps: Mapping[str, float], known: float) -> bool:
        """Whether the stages of every copy may have room for all units."""
        for number, (kinds, _) in enumerate(self.layout.classes):
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
        tables = self.of(next(iter(self.layout.types_of(0)))).tables
        of = tables.classes.of
        numbers = of if p > 1 else np.where(of == of[0, -1], 0, -1)
        picked = [self._picked(stage, border, caps) for stage in reversed(self._stages)]
        times = np.stack([best for best, _ in picked])
        numbers = bar_intervals(numbers, self.starts)
        times = np.where(times < known / m, times, np.inf)  # all ranks have m, and their sums
        cuts = cut_stages(numbers, times, m)
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
        """Bytes on the fullest device."""
        most = 0.0
        for stage, (_, _, number, (again, *prices)) in enumerate(chosen):
            cells = sorted(self.layout.types_of(stage))
            for cell, price in zip(cells, prices, strict=True):
                line = self._lines(cell, border, again)
                held = line.held(np.array([number]), self.of(cell)._in_flight[stage])
                most = max(most, float(held[0, price]))
        return most

    def _picked(
        self, stage: int, border: str, caps: Mapping[str, float]
    ) -> tuple[Floats, np.ndarray]:
        """(classes of stretches,): the least time of a stage, infinite where it does not fit; and
        (classes, 1 + cells): whether it recomputes, and the strategy in each cell."""
        cells = tuple(sorted(self.layout.types_of(stage)))
        if len(cells) == 1:
            return self._alone(cells[0], stage, border, caps[cells[0][1]])
        key = (cells, border, tuple(caps[kind] for _, kind in cells))
        if key not in self._mixed:
            self._mixed[key] = self._unlike(cells, border, caps)
        return self._mixed[key][stage]

    def _unlike(
        self, cells: tuple[Cell, ...], border: str, caps: Mapping[str, float]
    ) -> dict[int, tuple[Floats, np.ndarray]]:
        """`_picked` of all stages with these cells. What takes as long both with few and with many
        micro-batches under way takes as long between them; but stages that hold all of them before
        their gradients are made may have room where those with fewer have none, so these, which are
        alike and come first, are looked at by themselves."""
        stages = [s for s in self._stages if sorted(self.layout.types_of(s)) == [*cells]]
        every = np.arange(len(self.of(cells[0])._prepared(border)[0]))
        times = np.full((len(stages), len(every)), np.inf)
        picks = np.zeros((*times.shape, 1 + len(cells)), dtype=np.int64)

        passes = self.of(cells[0])._passes
        lines = {again: [self._lines(c, border, again) for c in cells] for again in passes}
        alike = {again: self._alike(own) for again, own in lines.items()}

        def pick(place: int, some: np.ndarray) -> None:
            for again, own in lines.items():
                values = tuple(
                    line.seconds_within(some, self.of(c)._in_flight[stages[place]], caps[c[1]])
                    for c, line in zip(cells, own, strict=True)
                )
                best, ways = _together(values, tuple(same[some] for same in alike[again]))
                better = best < times[place, some]
                times[place, some[better]] = best[better]
                picks[place, some[better], 0] = again
                picks[place, some[better], 1:] = ways[better]

        late = sum(self.of(cells[0]).is_late(stage) for stage in stages)
        if late:
            pick(0, every)
            times[1:late], picks[1:late] = times[0], picks[0]
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

    def _alone(self, cell: Cell, stage: int, border: str, cap: float) -> tuple[Floats, np.ndarray]:
        """As `_picked`, where all copies of a stage are alike."""
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
        """The strategies of all classes of stretches in a cell."""
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

    def _alike(self, lines: Sequence[_CellIntervals]) -> tuple[Floats, ...]:
        """Of each cell but the first, (classes, K, K): 0 where its strategy holds as many bytes as
        one of the first, else infinite; nothing where any strategies go together."""
        if self.combination.degrees.tensor == 1:
            return ()
        first = lines[0].state[:, :, None]
        others = [line.state[:, None, :] for line in lines[1:]]
        return tuple(np.where(np.abs(first - o) <= 1e-6 * o, 0.0, np.inf) for o in others)

    def _point(self, border: str, chosen: Sequence[tuple[int, int, int, list[int]]]) -> Point:
        """The price of stages: (start, stop, class, [recomputation, strategy of each cell])."""
        layout = self.layout
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
        """A step without a pipeline: the passes and sums of the slowest copy, behind which the
        slowest update follows, which may be another copy's."""
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
        """A step of a pipeline as if every copy were as slow as the slowest, and as full as the
        fullest."""
        largest = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        candidate = self.of((largest, classes[largest].kinds[0]))
        stages = zip(*(one.stages for one in classes), strict=True)
        return candidate._point(border, tuple(map(_slowest, stages)))


class _CellIntervals(NamedTuple):
    """(classes, K) strategies in a cell, as `IntervalRows` and `StrategiesByTime` say."""

    seconds: Floats
    state: Floats
    kept: Floats
    more: Floats
    updated: Floats
    all: int
    first: Floats | None

    def held(self, some: np.ndarray, under_way: int) -> Floats:
        """Bytes of some classes."""
        late = self.first is not None and under_way == self.all
        more = self.first if self.first is not None and late else self.more
        held = self.state[some] + under_way * self.kept[some] + more[some]
        found: Floats = np.maximum(held, self.updated[some])
        return found

    def seconds_within(self, some: np.ndarray, under_way: int, cap: float) -> Floats:
        """Of some classes, infinite where they do not fit."""
        fits = self.held(some, under_way) <= cap
        found: Floats = np.where(fits, self.seconds[some], np.inf)
        return found


def _together(values: tuple[Floats, ...], alike: tuple[Floats, ...]) -> tuple[Floats, np.ndarray]:
    """(classes,) the least longest time, and (classes, cells) the strategies."""
    if not alike:
        picks = np.stack([value.argmin(axis=1) for value in values], axis=1)
        each = [np.take_along_axis(v, picks[:, n, None], 1)[:, 0] for n, v in enumerate(values)]
        return reduce(np.maximum, each), picks
    longest, chosen = values[0], []
    for value, apart in zip(values[1:], alike, strict=True):
        matched = value[:, None, :] + apart
        best = matched.argmin(axis=2)
        chosen.append(best)
        longest = np.maximum(longest, np.take_along_axis(matched, best[..., None], 2)[..., 0])
    first = longest.argmin(axis=1)[:, None]
    ways = [first, *(np.take_along_axis(pick, first, 1) for pick in chosen)]
    return np.take_along_axis(longest, first, 1)[:, 0], np.concatenate(ways, axis=1)


def _slowest(some: Sequence[PointStage]) -> PointStage:
    """One copy of a stage that is as slow as the slowest in everything, and as full as the
    fullest."""
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


class LayoutCandidate:
    """A combination on devices of several types, as `PlanCandidate` is one on devices of one type.

    Args:
        sharing: The combination with sizes of micro-batches.
        caps: Bytes of a device, by type.
        known: Whether a known plan is as good as one with these seconds and bytes.

    Attributes:
        left_out: Seconds that the plans of all shares that were not priced take at least.
        exhausted: Whether `fastest` has found that no plan fits.
    """

    band = BAND

    def __init__(
        self,
        combination: Combination,
        bounds: LayoutBounds,
        sharing: Callable[[tuple[int, ...]], ShareCandidate],
        caps: Mapping[str, float],
        known: Callable[[float, float], bool],
    ) -> None:
        self.combination = combination
        self.degrees = combination.degrees
        self.bounds = bounds
        self.sharing = sharing
        self.caps = caps
        self.known = known
        self.left_out = np.inf
        self.exhausted = False

    def bound(self, cap: float = np.inf) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it is below; the same within any `cap`."""
        return self.bounds.seconds(self.combination), self.bounds.held(self.combination)

    def fastest(self, cap: float, limit: float = np.inf, *, parts: bool = True) -> Point | None:
        """The fastest plan within the memory that is of use.

        Sizes of micro-batches are tried in the order of what they are estimated to take: their
        bound times what the last ones took above theirs.

        Args:
            cap: Bytes, of a device of any type.
            limit: Seconds from which on no plan is of use.
            parts: All are always there.
        """
        combination, bounds = self.combination, self.bounds
        proof = bounds.question.proof
        caps = {kind: min(cap, own) for kind, own in self.caps.items()}
        tuples = microbatch_shares(bounds, combination, caps)
        tuples = tuples[bounds.may_fit(combination, tuples, caps)]
        if not len(tuples):
            self.exhausted = True
            return None
        fits = False

        def useful(seconds: float, held: float) -> bool:
            nonlocal fits
            fits = True
            return proof or not self.known(seconds, held)

        classes = layout_of(combination).classes
        costs = np.stack(
            [
                bounds.costs(kinds, combination)[tuples[:, c] - 1]
                for c, (kinds, _) in enumerate(classes)
            ]
        )
        factors, misses = np.ones(len(classes)), 0
        least = costs.max(axis=0)
        open_ = least < limit
        skipped = ~open_
        fits = bool(skipped.any())
        best: Point | None = None
        tries = 0
        while open_.any():
            if not proof and tries == TRIES:
                break
            estimates = np.where(open_, (costs * factors[:, None]).max(axis=0), np.inf)
            place = int(estimates.argmin())
            known = np.inf if best is None else best.seconds
            if not proof and estimates[place] >= known * WORTH:
                break
            open_[place] = False
            tries += 1
            sharing = self.sharing(tuple(tuples[place].tolist()))
            point, own = None, sharing.least(caps)
            least[place] = max(least[place], own[0])
            skipped[place] = least[place] >= limit
            if skipped[place]:
                fits = fits or bool(np.isfinite(own[0]))
            elif useful(*own):
                fits, most = False, min(known, limit)
                point = sharing.fastest(caps, useful, most)
                if point is None and not fits:  # there is none, or none as fast
                    least[place], fits = max(least[place], most), most < np.inf
                skipped[place] = point is None and fits
            if point is None:
                misses += 1
                if misses == MISSES and best is None and not proof:
                    break
                continue
            factors = _class_seconds(point) / costs[:, place]
            if best is None or point.seconds < best.seconds:
                best = point
            open_ &= least < best.seconds
        least = least[open_ | skipped]
        self.left_out = min(self.left_out, float(least.min(initial=np.inf)))
        self.exhausted = best is None and not fits
        return best


def _class_seconds(point: Point) -> Floats:
    """(classes,): seconds of a step of each class of copies alone."""
    m = point.degrees.microbatches
    each = [[stage.seconds for stage in one.stages] for one in point.classes]
    return np.array([(m - 1) * max(own) + sum(own) for own in each])
