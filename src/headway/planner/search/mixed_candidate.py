"""A plan on devices of several types: which devices stand where, and what its stages cost.
Devices stand in an order of their types, tensor groups inside of one type. They are laid out stage
by stage (pipelines across types) or copy by copy (data parallelism across types); where a type ends
in the middle of a stage or of a copy, both are mixed.

Every stage is as slow as its slowest copy: copies take micro-batches of the requested sizes, on the
    devices of
their cells, priced on the tables of each type. Of all strategies of a stage the one counts that is
best for its slowest copy; with a tensor axis only strategies go together that hold as many bytes of
parameters.

Sources: Jia et al. 2022 (Whale), order by memory and nested data parallelism; Zheng et al. 2022
    (Alpa), device
groups in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise, permutations, product
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import Floats
from headway.planner.estimate.partition import bar_intervals, cut_stages, unnameable_units
from headway.planner.estimate.pricing import IntervalRows
from headway.planner.search.candidate import PlanCandidate
from headway.planner.search.plan_point import Point, PointStage
from headway.planner.whale.load_balance import slowest_stage

ORDERS = 24
"""Orders of types that are tried; beyond four types only the one that is given."""


@dataclass(frozen=True, kw_only=True, order=True)
class DeviceCells:
    """The type of each cell of data x pipe.

    Attributes:
        copies: For each copy of the model the types of its stages.
        order: Of the axes, as in `Degrees`: "tdp" stage by stage, "tpd" copy by copy.
    """

    copies: tuple[tuple[str, ...], ...]
    order: str

    @cached_property
    def classes(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Distinct copies, and how many there are of each; in order."""
        return tuple(Counter(self.copies).items())

    def types_of(self, stage: int) -> frozenset[tuple[int, str]]:
        """(number of the class, type) of all cells of a stage."""
        return frozenset((c, kinds[stage]) for c, (kinds, _) in enumerate(self.classes))


def device_layouts(
    amounts: Mapping[str, int], *, tensor: int, data: int, pipeline: int, every: bool = True
) -> Iterator[DeviceCells]:
    """All different ways to lay devices out.

    Args:
        amounts: Devices of each type; those of 0 are left out.
        tensor: Devices of a cell, all of one type.
        every: All orders of the types; else the one in which they are given.
    """
    used = {kind: number for kind, number in amounts.items() if number}
    if any(number % tensor for number in used.values()):
        return
    if sum(used.values()) != tensor * data * pipeline:
        return
    seen: set[tuple[tuple[str, ...], ...]] = set()
    tried = permutations(used) if every and len(used) <= 4 else iter([tuple(used)])
    for kinds in tried:
        cells = [kind for kind in kinds for _ in range(used[kind] // tensor)]
        for order in ("tdp", "tpd"):
            copies = _copies(cells, data, pipeline, order)
            key = tuple(sorted(copies))  # which copy is the first does not matter
            if key not in seen:
                seen.add(key)
                yield DeviceCells(copies=copies, order=order)


def _copies(
    cells: Sequence[str], data: int, pipeline: int, order: str
) -> tuple[tuple[str, ...], ...]:
    if order == "tpd":
        return tuple(tuple(cells[c * pipeline : (c + 1) * pipeline]) for c in range(data))
    return tuple(tuple(cells[s * data + c] for s in range(pipeline)) for c in range(data))


def device_counts(
    counts: Mapping[str, int], devices: Sequence[int] | None
) -> tuple[dict[str, int], ...]:
    """How many devices of each type may be used together.

    Args:
        devices: Numbers of devices in all, of powers of two or all of each type; None: every type
            is used whole or not at all.
    """
    ways = []
    for number in counts.values():
        some = {2**n for n in range(number.bit_length())} if devices is not None else set()
        ways.append(sorted({0, number, *(n for n in some if n <= number)}))
    found = [dict(zip(counts, numbers, strict=True)) for numbers in product(*ways)]
    return tuple(
        amounts
        for amounts in found
        if (sum(amounts.values()) in devices if devices is not None else any(amounts.values()))
    )


# Plans on devices of several types: which devices stand where, and what their stages cost.


@dataclass(frozen=True, kw_only=True, order=True)
class MixedCombination:
    """What the outer loop opens.

    Attributes:
        amounts: Devices of each type in use.
        tensor: t.
        data: d, copies of the model.
        pipeline: p, stages.
        microbatches: m, of a step and every copy.
        zero: Stage of ZeRO over the copies.
    """

    amounts: tuple[tuple[str, int], ...]
    tensor: int
    data: int
    pipeline: int
    microbatches: int
    zero: int
    cells: DeviceCells

    @property
    def devices(self) -> int:
        return sum(number for _, number in self.amounts)

    def degrees(self, microbatch: int) -> Degrees:
        """As if all copies were of one class."""
        return Degrees(
            tensor=self.tensor,
            data=self.data,
            pipeline=self.pipeline,
            microbatch=microbatch,
            microbatches=self.microbatches,
            zero=self.zero,
            order=self.cells.order,
        )


@dataclass(frozen=True, kw_only=True)
class MixedStagePart:
    """A stage on the devices of one type in one class of copies.

    Attributes:
        microbatch: Samples of the largest micro-batch.
        stage: As if all copies were like these.
    """

    kind: str
    copies: int
    microbatch: int
    stage: PointStage

    @property
    def bytes(self) -> float:
        return self.stage.bytes


@dataclass(frozen=True, kw_only=True)
class MixedStage:
    """One stage.

    Attributes:
        start: Its first unit.
        stop: The unit behind its last.
        recompute: Whether its units keep only what enters them.
        parts: On every type of devices, class by class.
    """

    start: int
    stop: int
    recompute: bool
    parts: tuple[MixedStagePart, ...]

    @property
    def seconds(self) -> float:
        """Of a micro-batch where it is slowest."""
        return max(part.stage.seconds for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class MixedPoint:
    """One plan.

    Attributes:
        sizes: The largest micro-batch of each class of copies.
        border: Placement of what crosses from stage to stage.
        messages: Of those, between stages.
        slowest: As if every copy were as slow as the slowest in everything, which is how it is
            priced.
    """

    combination: MixedCombination
    sizes: tuple[int, ...]
    border: str
    stages: tuple[MixedStage, ...]
    seconds: float
    messages: float
    slowest: Point

    @property
    def bytes(self) -> float:
        """On the fullest device."""
        return max(part.bytes for stage in self.stages for part in stage.parts)

    @property
    def devices(self) -> int:
        return self.combination.devices

    def bytes_on(self, kind: str) -> float:
        """On the fullest device of a type."""
        parts = [part for stage in self.stages for part in stage.parts]
        return max((part.bytes for part in parts if part.kind == kind), default=0.0)

    def idle(self, kind: str) -> float:
        """Which share of the step devices of a type do not compute, on the average."""
        m = self.combination.microbatches
        parts = [part for stage in self.stages for part in stage.parts if part.kind == kind]
        copies = sum(part.copies for part in parts)
        busy = sum(m * part.stage.seconds * part.copies for part in parts) / copies
        return 1.0 - busy / self.seconds


# One way to share a model among devices of several types, priced on the tables of each type.


Cell = tuple[int, str]
"""Number of a class of copies, and a type of devices."""
Picks = MutableMapping[PlanCandidate, dict[tuple[str, float], tuple[Floats, np.ndarray]]]
"""By border and bytes allowed: (stages, classes) times, and recomputation with strategy."""


@dataclass(frozen=True)
class MixedCandidate:
    """A combination with the micro-batch of each class of copies, ready to be cut.

    Attributes:
        sizes: Samples of a micro-batch, class by class.
        candidate: Gives the tables of a type with these degrees.
        starts: First units that must begin a stage.
        picks: What stages of one type have picked, also for other layouts.
    """

    combination: MixedCombination
    sizes: tuple[int, ...]
    candidate: Callable[[str, Degrees], PlanCandidate]
    starts: tuple[int, ...] = ()
    picks: Picks = field(default_factory=WeakKeyDictionary)
    _candidates: dict[Cell, PlanCandidate] = field(default_factory=dict)
    _known_lines: dict[tuple[Cell, str, int], _MixedIntervals] = field(default_factory=dict)
    _mixed: dict[
        tuple[tuple[Cell, ...], str, tuple[float, ...]], dict[int, tuple[Floats, np.ndarray]]
    ] = field(default_factory=dict)

    def of(self, cell: Cell) -> PlanCandidate:
        if cell not in self._candidates:
            number, kind = cell
            degrees = self.combination.degrees(self.sizes[number])
            self._candidates[cell] = self.candidate(kind, degrees)
        return self._candidates[cell]

    def least(self, caps: Mapping[str, float] | None = None) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `caps` is below: of copies on one type their
        own bound, of those on several by their units."""
        combination = self.combination
        p, m = combination.pipeline, combination.microbatches
        seconds, held = 0.0, np.inf
        for number, (kinds, _) in enumerate(combination.cells.classes):
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
    ) -> MixedPoint | None:
        """The fastest plan of which no device needs more than its type's `caps`.

        Args:
            caps: Bytes, by type.
            useful: Whether a plan may be of use that takes about so many seconds (Alpa's sum of its
                stages) and so many bytes of a device; None: every one.
            known: Seconds from which on no plan is of use.
        """
        several = self.combination.pipeline > 1
        if several and not self._enough(caps, known):
            return None
        cells = sorted({cell for s in self._stages for cell in self.combination.cells.types_of(s)})
        borders = {b for cell in cells for b in self.of(cell).tables.borders} if several else {"R"}
        best: MixedPoint | None = None
        for border in sorted(borders):
            point = self._within(border, caps, useful, known)
            if point is not None and point.seconds < known:
                best, known = point, point.seconds
        return best

    def planned(self, borders: Sequence[int], recompute: Collection[int] = ()) -> MixedPoint:
        """The plan that is cut there, whether it fits or not; whole tensors cross its borders.

        Args:
            borders: The first unit of each stage, and the number of units.
            recompute: Numbers of the stages whose units keep only what enters them.
        """
        tables = self.of(next(iter(self.combination.cells.types_of(0)))).tables
        chosen = []
        for stage, (start, stop) in enumerate(pairwise(borders)):
            number = int(tables.classes.of[start, stop]) if len(borders) > 2 else 0
            again = int(stage in recompute)
            cells = sorted(self.combination.cells.types_of(stage))
            lines = [self._lines(cell, "R", again) for cell in cells]
            prices = [int(line.seconds[number].argmin()) for line in lines]
            chosen.append((start, stop, number, [again, *prices]))
        return self._point("R", chosen)

    def _enough(self, caps: Mapping[str, float], known: float) -> bool:
        """Whether the stages of every copy may have room for all units."""
        for number, (kinds, _) in enumerate(self.combination.cells.classes):
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
        return range(self.combination.pipeline)

    def _within(
        self,
        border: str,
        caps: Mapping[str, float],
        useful: Callable[[float, float], bool] | None,
        known: float,
    ) -> MixedPoint | None:
        combination = self.combination
        p, m = combination.pipeline, combination.microbatches
        tables = self.of(next(iter(combination.cells.types_of(0)))).tables
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
            cells = sorted(self.combination.cells.types_of(stage))
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
        cells = tuple(sorted(self.combination.cells.types_of(stage)))
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
        stages = [s for s in self._stages if sorted(self.combination.cells.types_of(s)) == [*cells]]
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
        behind = self.combination.pipeline - 1 - stage
        return times[behind], picks[behind]

    def _lines(self, cell: Cell, border: str, again: int) -> _MixedIntervals:
        """The strategies of all classes of stretches in a cell."""
        key = (cell, border, again)
        if key not in self._known_lines:
            candidate = self.of(cell)
            every = candidate._prepared(border)[0]
            rows, first = every[:, again], candidate.first(every)
            waiting = candidate.pricing.memory.waiting[: len(rows), None]
            m = self.combination.microbatches
            self._known_lines[key] = _MixedIntervals(
                seconds=rows[..., IntervalRows.SECONDS] + rows[..., IntervalRows.TAIL] / m,
                state=rows[..., IntervalRows.STATE],
                kept=rows[..., IntervalRows.KEPT],
                more=rows[..., IntervalRows.MORE],
                updated=candidate.pricing.updated(rows) + waiting,
                all=m,
                first=None if first is None else first[:, again],
            )
        return self._known_lines[key]

    def _alike(self, lines: Sequence[_MixedIntervals]) -> tuple[Floats, ...]:
        """Of each cell but the first, (classes, K, K): 0 where its strategy holds as many bytes as
        one of the first, else infinite; nothing where any strategies go together."""
        if self.combination.tensor == 1:
            return ()
        first = lines[0].state[:, :, None]
        others = [line.state[:, None, :] for line in lines[1:]]
        return tuple(np.where(np.abs(first - o) <= 1e-6 * o, 0.0, np.inf) for o in others)

    def _point(self, border: str, chosen: Sequence[tuple[int, int, int, list[int]]]) -> MixedPoint:
        """The price of stages: (start, stop, class, [recomputation, strategy of each cell])."""
        cells = self.combination.cells
        parts: list[list[MixedStagePart]] = [[] for _ in chosen]
        steps = []
        for cell in sorted({cell for s in self._stages for cell in cells.types_of(s)}):
            own = []  # the strategy in this cell of every stage that has one
            for s, (start, stop, number, (again, *prices)) in enumerate(chosen):
                places = sorted(cells.types_of(s))
                price = prices[places.index(cell)] if cell in places else 0
                own.append((start, stop, number, again, price))
            candidate = self.of(cell)
            stages = candidate._stages(border, own)
            for s in self._stages:
                if cell in cells.types_of(s):
                    parts[s].append(
                        MixedStagePart(
                            kind=cell[1],
                            copies=cells.classes[cell[0]][1],
                            microbatch=self.sizes[cell[0]],
                            stage=stages[s],
                        )
                    )
            if len(chosen) == 1:
                steps.append((candidate, stages[0]))
        made = tuple(
            MixedStage(start=start, stop=stop, recompute=bool(pick[0]), parts=tuple(own_parts))
            for (start, stop, _, pick), own_parts in zip(chosen, parts, strict=True)
        )
        slowest = self._slowest_alone(border, steps) if steps else self._slowest(border, made)
        return MixedPoint(
            combination=self.combination,
            sizes=self.sizes,
            border=border,
            stages=made,
            seconds=slowest.seconds,
            messages=slowest.messages,
            slowest=slowest,
        )

    def _slowest_alone(
        self, border: str, steps: Sequence[tuple[PlanCandidate, PointStage]]
    ) -> Point:
        """A step without a pipeline: the passes and sums of the slowest copy, behind which the
        slowest update follows, which may be another copy's."""
        after = max(stage.after for _, stage in steps)
        points = [
            candidate._point(
                border, (replace(one, after=after, tail=one.tail + after - one.after),)
            )
            for candidate, one in steps
        ]
        return max(points, key=lambda one: one.seconds)

    def _slowest(self, border: str, stages: Sequence[MixedStage]) -> Point:
        """A step of a pipeline as if every copy were as slow as the slowest.

        Args:
            border: Placement of what crosses from stage to stage.
        """
        largest = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        candidate = self.of((largest, self.combination.cells.classes[largest][0][0]))
        return candidate._point(border, tuple(_slowest(stage) for stage in stages))


class _MixedIntervals(NamedTuple):
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
        found = self.state[some] + under_way * self.kept[some] + more[some]
        held: Floats = np.maximum(found, self.updated[some])
        return held

    def seconds_within(self, some: np.ndarray, under_way: int, cap: float) -> Floats:
        """Of some classes, infinite where they do not fit."""
        return np.where(self.held(some, under_way) <= cap, self.seconds[some], np.inf)


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


def _slowest(stage: MixedStage) -> PointStage:
    """One copy that is as slow as the slowest in everything."""
    some = [part.stage for part in stage.parts]
    forward = max(one.forward for one in some)
    return replace(
        some[0],
        forward=forward,
        seconds=forward + max(one.seconds - one.forward for one in some),
        tail=max(one.tail for one in some),
        after=max(one.after for one in some),
        weight=min(one.weight for one in some),
        params=max(one.params for one in some),
    )
