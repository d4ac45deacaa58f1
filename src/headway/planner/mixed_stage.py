"""One way to share a model among devices of several types, priced on the tables of each type.

Every stage is as slow as its slowest copy: copies take micro-batches of the sizes that are asked
for, on the devices of their cells. Of all copies of a stage the one strategy counts that is best
for the slowest of them; with a tensor axis only strategies go together that hold as many bytes of
parameters. Invariant: what a point says is what `Candidate`'s rows of its types say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np

from headway.planner.borders import without_crossing
from headway.planner.candidate import Candidate, Stage
from headway.planner.degrees import Degrees
from headway.planner.mixed_point import Combination, MixedPoint, MixedStage, Part
from headway.planner.operators import Floats
from headway.planner.pipeline_cuts import cut
from headway.planner.pricing import Rows
from headway.planner.whale.filling import slowest_stage

Cell = tuple[int, str]
"""Number of a class of copies, and a type of devices."""
Picks = MutableMapping[Candidate, dict[tuple[str, float], tuple[Floats, np.ndarray]]]
"""By border and bytes allowed: (stages, classes) times, and recomputation with strategy."""


@dataclass(frozen=True)
class Sharing:
    """A combination with the micro-batch of each class of copies, ready to be cut.

    Attributes:
        combination: Degrees and cells.
        sizes: Samples of a micro-batch, class by class.
        candidate: Gives the tables of a type with these degrees.
        starts: First units that must begin a stage.
        picks: What stages of one type have picked, also for other layouts.
    """

    combination: Combination
    sizes: tuple[int, ...]
    candidate: Callable[[str, Degrees], Candidate]
    starts: tuple[int, ...] = ()
    picks: Picks = field(default_factory=WeakKeyDictionary)
    _candidates: dict[Cell, Candidate] = field(default_factory=dict)
    _mixed: dict[
        tuple[tuple[Cell, ...], str, tuple[float, ...]], dict[int, tuple[Floats, np.ndarray]]
    ] = field(default_factory=dict)

    def of(self, cell: Cell) -> Candidate:
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
            rows = [self._whole(self.of((number, kind))) for kind in stages]
            held = min(
                held, *(float((r[..., Rows.STATE] + r[..., Rows.KEPT]).min()) / p for r in rows)
            )
            if len(stages) == 1:
                cap = np.inf if caps is None else caps[kinds[0]]
                seconds = max(seconds, self.of((number, kinds[0])).bound(cap)[0])
            else:
                units = [self._units(self.of((number, kind))) for kind in stages]
                tails = [[[row[..., Rows.TAIL].min() / m]] for row in rows]
                counts, each = units[0][0], np.stack([one for _, one in units])
                on = np.array(list(stages.values()))
                found = slowest_stage(each, counts, on)
                alike, through = float(found[0][0]), float(found[1][0])
                with_sums = np.concatenate([each, tails], axis=1)
                busy = m * float(slowest_stage(with_sums, np.append(counts, 1), on)[0][0])
                seconds = max(seconds, busy, (m - 1) * alike + through)
        return seconds, held

    def _whole(self, candidate: Candidate) -> Floats:
        found: Floats = candidate.least_rows[list(candidate._passes)]
        return found

    def _units(self, candidate: Candidate) -> tuple[np.ndarray, Floats]:
        """Numbers of units of each kind, and (kinds, 1) their least seconds."""
        tables = candidate.tables
        counts = Counter(unit.kind for unit in tables.row)
        least = [float(tables.solved(k).rows[0, ..., :2].sum(axis=-1).min()) for k in counts]
        return np.array(list(counts.values())), np.array(least)[:, None]

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
        cells = sorted({cell for s in self._stages for cell in self.combination.cells.types_of(s)})
        borders = {b for cell in cells for b in self.of(cell).tables.borders} if several else {"R"}
        best: MixedPoint | None = None
        for border in sorted(borders):
            point = self._within(border, caps, useful, known)
            if point is not None and point.seconds < known:
                best, known = point, point.seconds
        return best

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
        numbers, times = without_crossing(numbers, times, self.starts)
        times = np.where(times < known / m, times, np.inf)  # all ranks have m, and their sums
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
        micro-batches under way takes as long between them."""
        stages = [s for s in self._stages if sorted(self.combination.cells.types_of(s)) == [*cells]]
        every = np.arange(len(self.of(cells[0])._prepared(border)[0]))
        times = np.full((len(stages), len(every)), np.inf)
        picks = np.zeros((*times.shape, 1 + len(cells)), dtype=np.int64)

        def pick(place: int, some: np.ndarray) -> None:
            for again in self.of(cells[0])._passes:
                values, held = zip(
                    *(
                        self._values(c, border, stages[place], again, caps[c[1]], some)
                        for c in cells
                    ),
                    strict=True,
                )
                best, ways = self._together(values, held)
                better = best < times[place, some]
                times[place, some[better]] = best[better]
                picks[place, some[better], 0] = again
                picks[place, some[better], 1:] = ways[better]

        last = len(stages) - 1
        for place in {0, last}:
            pick(place, every)
        waiting = [(0, last, every)]
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
            times, picks = candidate._picked(candidate.pricing.updatable(rows, cap), cap)
            known[key] = times, np.stack(np.divmod(picks, rows.shape[2]), axis=-1)
        times, picks = known[key]
        behind = self.combination.pipeline - 1 - stage
        return times[behind], picks[behind]

    def _values(
        self, cell: Cell, border: str, stage: int, again: int, cap: float, some: np.ndarray
    ) -> tuple[Floats, Floats]:
        """(some classes, K): seconds of a stage in a cell by strategy, and bytes of its state."""
        candidate = self.of(cell)
        rows, _ = candidate._prepared(border)
        rows = rows[some, again]
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
    return np.maximum(found + rows[..., Rows.MORE], candidate.pricing.updated(rows))


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
