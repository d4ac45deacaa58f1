"""One way to share a model among devices of several types, priced on the tables of each type.

Every stage is as slow as its slowest copy: copies take micro-batches of the sizes that are asked
for, on the devices of their cells. Of all copies of a stage the one strategy counts that is best
for the slowest of them; with a tensor axis only strategies go together that hold as many bytes of
parameters. Invariant: what a point says is what `Candidate`'s rows of its types say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise

import numpy as np

from headway.planner.borders import without_crossing
from headway.planner.candidate import Candidate, Stage
from headway.planner.degrees import Degrees
from headway.planner.mixed_mesh import Cells
from headway.planner.operators import Floats
from headway.planner.pipeline_cuts import cut
from headway.planner.pricing import Rows

Cell = tuple[int, str]
"""Number of a class of copies, and a type of devices."""


@dataclass(frozen=True, kw_only=True, order=True)
class Combination:
    """What the outer loop opens.

    Attributes:
        amounts: Devices of each type in use.
        tensor: t.
        data: d, copies of the model.
        pipeline: p, stages.
        microbatches: m, of a step and every copy.
        zero: Stage of ZeRO over the copies.
        cells: Where the devices stand.
    """

    amounts: tuple[tuple[str, int], ...]
    tensor: int
    data: int
    pipeline: int
    microbatches: int
    zero: int
    cells: Cells

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
class Part:
    """A stage on the devices of one type in one class of copies.

    Attributes:
        kind: The type.
        copies: So many.
        microbatch: Samples of the largest micro-batch.
        stage: As if all copies were like these.
    """

    kind: str
    copies: int
    microbatch: int
    stage: Stage

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
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Of a micro-batch where it is slowest."""
        return max(part.stage.seconds for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class MixedPoint:
    """One plan.

    Attributes:
        combination: Degrees and cells.
        sizes: The largest micro-batch of each class of copies.
        border: Placement of what crosses from stage to stage.
        stages: From the first.
        seconds: Of a step.
        messages: Of those, between stages.
    """

    combination: Combination
    sizes: tuple[int, ...]
    border: str
    stages: tuple[MixedStage, ...]
    seconds: float
    messages: float

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


@dataclass(frozen=True)
class Sharing:
    """A combination with the micro-batch of each class of copies, ready to be cut.

    Attributes:
        combination: Degrees and cells.
        sizes: Samples of a micro-batch, class by class.
        candidate: Gives the tables of a type with these degrees.
        starts: First units that must begin a stage.
    """

    combination: Combination
    sizes: tuple[int, ...]
    candidate: Callable[[str, Degrees], Candidate]
    starts: tuple[int, ...] = ()
    _candidates: dict[Cell, Candidate] = field(default_factory=dict)
    _single: dict[tuple[Cell, str, float], tuple[Floats, np.ndarray]] = field(default_factory=dict)

    def of(self, cell: Cell) -> Candidate:
        if cell not in self._candidates:
            number, kind = cell
            degrees = self.combination.degrees(self.sizes[number])
            self._candidates[cell] = self.candidate(kind, degrees)
        return self._candidates[cell]

    def least(self) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it is below.

        Stages that take equally long are those of the fastest copy: 1 / sum of 1 / whole model.
        """
        combination = self.combination
        p, m = combination.pipeline, combination.microbatches
        seconds, held = 0.0, np.inf
        for number, (kinds, _) in enumerate(combination.cells.classes):
            own, passes = {}, {}
            for kind in dict.fromkeys(kinds):
                candidate = self.of((number, kind))
                rows = candidate.least_rows[list(candidate._passes)]
                passes[kind] = float(rows[..., Rows.SECONDS].min())
                own[kind] = float((m * rows[..., Rows.SECONDS] + rows[..., Rows.TAIL]).min())
                held = min(held, float((rows[..., Rows.STATE] + rows[..., Rows.KEPT]).min()) / p)
            busy = 1.0 / sum(1.0 / own[kind] for kind in kinds)
            alike = 1.0 / sum(1.0 / passes[kind] for kind in kinds)
            seconds = max(seconds, busy, (m - 1) * alike + min(passes.values()))
        return seconds, held

    def fastest(
        self, caps: Mapping[str, float], useful: Callable[[float, float], bool] | None = None
    ) -> MixedPoint | None:
        """The fastest plan of which no device needs more than its type's `caps`.

        Args:
            caps: Bytes, by type.
            useful: Whether a plan may be of use that takes about so many seconds (Alpa's sum of its
                stages) and so many bytes of a device; None: every one.
        """
        several = self.combination.pipeline > 1
        cells = sorted({cell for s in self._stages for cell in self.combination.cells.types_of(s)})
        borders = {b for cell in cells for b in self.of(cell).tables.borders} if several else {"R"}
        best: MixedPoint | None = None
        for border in sorted(borders):
            point = self._within(border, caps, useful)
            if point is not None and (best is None or point.seconds < best.seconds):
                best = point
        return best

    @property
    def _stages(self) -> range:
        return range(self.combination.pipeline)

    def _within(
        self,
        border: str,
        caps: Mapping[str, float],
        useful: Callable[[float, float], bool] | None,
    ) -> MixedPoint | None:
        combination = self.combination
        p, m = combination.pipeline, combination.microbatches
        tables = self.of(next(iter(combination.cells.types_of(0)))).tables
        of = tables.classes.of
        numbers = of if p > 1 else np.where(of == of[0, -1], 0, -1)
        picked = [self._picked(stage, border, caps) for stage in reversed(self._stages)]
        times = np.stack([best for best, _ in picked])
        numbers, times = without_crossing(numbers, times, self.starts)
        cuts = cut(numbers, times, m)
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
                candidate = self.of(cell)
                row = candidate._prepared(border)[0][number, again, price]
                most = max(most, float(_held(candidate, row, stage)))
        return most

    def _picked(
        self, stage: int, border: str, caps: Mapping[str, float]
    ) -> tuple[Floats, np.ndarray]:
        """(classes of stretches,): the least time of a stage, infinite where it does not fit; and
        (classes, 1 + cells): whether it recomputes, and the strategy in each cell."""
        cells = sorted(self.combination.cells.types_of(stage))
        if len(cells) == 1:
            return self._alone(cells[0], stage, border, caps[cells[0][1]])
        found = []
        for again in self.of(cells[0])._passes:
            values, held = zip(
                *(self._values(cell, border, stage, again, caps[cell[1]]) for cell in cells),
                strict=True,
            )
            best, picks = self._together(values, held)
            found.append((best, np.column_stack([np.full(len(best), again), picks])))
        better = found[0][0] <= found[-1][0]
        best = np.where(better, found[0][0], found[-1][0])
        return best, np.where(better[:, None], found[0][1], found[-1][1])

    def _alone(self, cell: Cell, stage: int, border: str, cap: float) -> tuple[Floats, np.ndarray]:
        """As `_picked`, where all copies of a stage are alike."""
        key = (cell, border, cap)
        if key not in self._single:
            candidate = self.of(cell)
            rows, _ = candidate._prepared(border)
            times, picks = candidate._picked(rows, cap)
            self._single[key] = times, np.stack(np.divmod(picks, rows.shape[2]), axis=-1)
        times, picks = self._single[key]
        behind = self.combination.pipeline - 1 - stage
        return times[behind], picks[behind]

    def _values(
        self, cell: Cell, border: str, stage: int, again: int, cap: float
    ) -> tuple[Floats, Floats]:
        """(classes, K): seconds of a stage's strategies in a cell, and bytes of their state."""
        candidate = self.of(cell)
        rows, _ = candidate._prepared(border)
        rows = rows[:, again]
        value = rows[..., Rows.SECONDS] + rows[..., Rows.TAIL] / self.combination.microbatches
        held = _held(candidate, rows, stage)
        return np.where(held <= cap, value, np.inf), rows[..., Rows.STATE]

    def _together(
        self, values: tuple[Floats, ...], held: tuple[Floats, ...]
    ) -> tuple[Floats, np.ndarray]:
        """(classes,) the least longest time, and (classes, cells) the strategies."""
        if len(values) == 1 or self.combination.tensor == 1:
            picks = np.stack([value.argmin(axis=1) for value in values], axis=1)
            each = [np.take_along_axis(v, v.argmin(axis=1)[:, None], 1)[:, 0] for v in values]
            return reduce(np.maximum, each), picks
        longest, chosen = values[0], []
        for value, bytes_ in zip(values[1:], held[1:], strict=True):
            first_, other = held[0][:, :, None], bytes_[:, None, :]
            same = np.abs(first_ - other) <= 1e-6 * other
            matched = np.where(same, value[:, None, :], np.inf)
            chosen.append(matched.argmin(axis=2))
            longest = np.maximum(longest, matched.min(axis=2))
        first = longest.argmin(axis=1)[:, None]
        ways = [first, *(np.take_along_axis(pick, first, 1) for pick in chosen)]
        return np.take_along_axis(longest, first, 1)[:, 0], np.concatenate(ways, axis=1)

    def _point(self, border: str, chosen: Sequence[tuple[int, int, int, list[int]]]) -> MixedPoint:
        """The price of stages: (start, stop, class, [recomputation, strategy of each cell])."""
        cells = self.combination.cells
        parts: list[list[Part]] = [[] for _ in chosen]
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
                        Part(
                            kind=cell[1],
                            copies=cells.classes[cell[0]][1],
                            microbatch=self.sizes[cell[0]],
                            stage=stages[s],
                        )
                    )
            if len(chosen) == 1:
                steps.append(candidate._point(border, stages))
        made = tuple(
            MixedStage(start=start, stop=stop, recompute=bool(pick[0]), parts=tuple(own_parts))
            for (start, stop, _, pick), own_parts in zip(chosen, parts, strict=True)
        )
        seconds, messages = self._price(border, made, [point.seconds for point in steps])
        return MixedPoint(
            combination=self.combination,
            sizes=self.sizes,
            border=border,
            stages=made,
            seconds=seconds,
            messages=messages,
        )

    def _price(
        self, border: str, stages: Sequence[MixedStage], alone: Sequence[float]
    ) -> tuple[float, float]:
        """(seconds of a step, of those of messages): as if every copy were as slow as the slowest.

        Args:
            border: Placement of what crosses from stage to stage.
            stages: From the first.
            alone: Seconds of a step on each type, where there is one stage.
        """
        if alone:
            return max(alone), 0.0
        largest = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        candidate = self.of((largest, self.combination.cells.classes[largest][0][0]))
        price = candidate._point(border, tuple(_slowest(stage) for stage in stages))
        return price.seconds, price.messages


def _held(candidate: Candidate, rows: Floats, stage: int) -> Floats:
    """(...) bytes of a stage's strategies, (..., columns) as `Rows` says."""
    found: Floats = rows[..., Rows.STATE] + candidate._in_flight[stage] * rows[..., Rows.KEPT]
    return found + rows[..., Rows.MORE]


def _slowest(stage: MixedStage) -> Stage:
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
