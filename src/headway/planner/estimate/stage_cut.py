"""The model as a row of units, and the dynamic programme that cuts it into stages.

A unit is a run of operators that no stage border divides; units end where one tensor crosses.
Intervals of units with the same sequence of kinds form one class and have the same costs. Where
stages begin may be forced by the user, and is barred where no plan could name the border.

The cut minimises T = sum of t_i + (m - 1) max t_i, by enumeration of the largest stage time: for
each bound the dynamic programme F(s, i) gives the least sum for the units from i on with s stages
left. Bounds rise from the least possible one and end where they alone cost more than the best known
cut.

Source: Zheng et al. 2022 (Alpa), equations 2 to 4 and section 5.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headway.cost.device import Array
from headway.documents import nearest
from headway.errors import PlanError
from headway.graph.model_graph import ModelGraph, Operator
from headway.graph.repeated_blocks import StructureHashes, find_repeated_blocks
from headway.graph.stage_boundaries import cut_points

# A sum of many floats may be off by this share.
_ROUNDING = 1e-9
# Of the price of a unit, when a sum is bounded: 2 ** -12 of the bound is close enough.
_HALVINGS = 12


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """A cut.

    Attributes:
        borders: 0, the first unit of every further stage, and the number of units.
    """

    borders: tuple[int, ...]
    total: float
    slowest: float

    def seconds(self, microbatches: int) -> float:
        return self.total + (microbatches - 1) * self.slowest


class IntervalsByLength(NamedTuple):
    """Intervals by their number of units.

    Attributes:
        of: (W, L): the class of the k + 1 units from i on; -1 where there are not so many left.
        units: (classes,) how many units those of a class have.
        begin: (classes,) the last unit with which some of them begin.
        end: (classes,) the first unit before which some of them end.
    """

    of: np.ndarray
    units: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def cut_stages(
    of: np.ndarray,
    times: Array,
    microbatches: int,
    floor: float | None = None,
    known: float = np.inf,
    lines: IntervalsByLength | None = None,
) -> StageCut | None:
    """The best cut into `len(times)` stages; None where no cut fits, or none is faster than
    `known`.

    Args:
        of: (L, L + 1): the class of the units from i to before j; -1 where j <= i, and where they
            may be no stage. Intervals of a class have as many units.
        times: (p, classes): row s is of a stage that has s more behind it; infinite where it does
            not fit.
        microbatches: m.
        floor: What the stage times of any cut add up to at least, where that is known.
        known: Cuts that take as long, or longer, are not of interest.
        lines: `intervals_by_length` of `of`, where the caller has it; of short stages alone: others
            are not tried.
    """
    stages, length = len(times), len(of)
    if stages > length:
        return None
    if stages == 1:
        only = float(times[0, of[0, length]]) if of[0, length] >= 0 else np.inf
        return (
            StageCut(borders=(0, length), total=only, slowest=only) if np.isfinite(only) else None
        )
    programme = _StageProgramme(intervals_by_length(of) if lines is None else lines, times)
    if floor is None:
        free = programme.solve(np.inf)
        floor = free.total if free else 0.0
    # A slower longest stage alone costs more than `known` leaves beside the least sum.
    most = (known - floor) / (microbatches - 1) if microbatches > 1 else np.inf
    least = floor / stages * (1 - _ROUNDING)  # what the slowest stage takes at least
    # Mostly all stages have the same times: only rows that differ from the one above add bounds.
    some = times[np.append(True, (times[1:] != times[:-1]).any(axis=1))]
    some = some[(some >= max(least, programme.least)) & (some < most) & np.isfinite(some)]
    if not len(some):
        return None
    # If the least bound has a cut, no other cut has a shorter longest stage.
    best = programme.solve(float(some.min()))
    if best is None:
        best = _shortest(programme, np.unique(some)[1:])
    if best is None:
        return None
    within = (some >= best.slowest) & (
        floor + (microbatches - 1) * some < best.seconds(microbatches)
    )
    return _best(programme, np.unique(some[within]), microbatches, floor, best)


def _best(
    programme: _StageProgramme, bounds: Array, microbatches: int, floor: float, best: StageCut
) -> StageCut:
    """The best cut within any of these bounds; of equals, that within the least bound."""
    m, place, last = microbatches - 1, 0, len(bounds) - 1
    # A higher bound gives no greater sum: all bounds between two cost at least the sum within the
    # upper one, and m - 1 times the lower one.
    waiting = [(0, last + 1, floor)]
    while waiting:
        low, high, total = waiting.pop()  # open at both ends
        if high - low < 2:
            continue
        least, known = total + m * bounds[low + 1], best.seconds(microbatches)
        if least > known or (least == known and place <= low):
            continue
        if programme.sum_of(float(bounds[high - 1])) + m * bounds[low + 1] > known:
            continue
        middle = last if high > last else (low + high) // 2
        found = programme.solve(float(bounds[middle]))
        if found is None:  # the least bound has a cut: so have all
            continue
        same = int(np.searchsorted(bounds, found.slowest))  # the same cut from here on
        if (found.seconds(microbatches), same) < (known, place):
            best, place = found, same
        waiting.append((middle, high, total))
        waiting.append((low, same, found.total))
    return best


def _shortest(programme: _StageProgramme, bounds: Array) -> StageCut | None:
    """The cut within the least bound that has one."""
    # That of the least longest stage, sought within the lowest bound first, then within one 5 %
    # higher, 10 %, 20 % and so on.
    high, step, longest = 0, 1.05, np.inf
    while high < len(bounds) and not np.isfinite(longest := programme.longest(bounds[high])):
        further = int(np.searchsorted(bounds, bounds[high] * step))
        last = len(bounds) - 1
        high = len(bounds) if high == last else min(max(further, high + 1), last)
        step *= step
    return programme.solve(longest) if np.isfinite(longest) else None


class _Band(NamedTuple):
    """F of a stage by the unit with which it begins, from `low` on, between `pad` infinite values
    at both ends; it has so many units at least and at most, and takes `times` by class."""

    low: int
    shortest: int
    widest: int
    times: Array
    padded: Array
    pad: int

    @property
    def least(self) -> float:
        return float(self.padded[self.pad])

    def behind(self, first: int, last: int) -> Array:
        """F where it begins with these units, both included; infinite where it cannot."""
        place = self.pad - self.low
        return self.padded[place + first : place + last + 1]


class _StageProgramme:
    """F(s, i) for one row of units, with any bound.

    Attributes:
        least: The longest stage of any cut takes so long, or longer.
    """

    def __init__(self, lines: IntervalsByLength, times: Array) -> None:
        self.width, self.length = lines.of.shape
        self.lines, self.times = lines, times
        self._number = np.arange(1.0, self.width + 1)
        self._each = _least_of_each(lines, times)
        above = np.minimum.accumulate(self._each[:, ::-1], axis=1)[:, ::-1]
        self._above = above  # of so many units, or more
        # a stage has room for as many units as there are numbers within the bound
        last = self.length - 1
        self.least = float(np.partition(above, last, None)[last]) if above.size > last else np.inf

    def sum_of(self, bound: float) -> float:
        """What the stages of any cut within a bound add up to at least."""
        times = np.where(self._each <= bound, self._each, np.inf)
        low, high, most = 0.0, 2.0 * bound, 0.0
        for _ in range(_HALVINGS):
            # Lagrangian duality: any price gives a valid bound, and bisection seeks the best one.
            # For any price of a unit: p cheapest stages at this price, and the price of all units.
            price = (low + high) / 2
            paid = times - price * self._number
            picks = paid.argmin(axis=1)
            least = np.take_along_axis(paid, picks[:, None], 1).sum()
            most = max(most, float(least + price * self.length))
            # The cheapest stages hold too few units: a higher price makes longer ones cheaper.
            if picks.sum() + len(picks) < self.length:
                low = price
            else:
                high = price
        return most * (1 - _ROUNDING)

    def longest(self, bound: float) -> float:
        """The least longest stage of all cuts; infinite if it is above the bound."""
        found = self._values(bound, np.maximum, -np.inf)
        return found[-1].least if found else np.inf

    def solve(self, bound: float) -> StageCut | None:
        """The least sum of stage times of which none is above the bound."""
        found = self._values(bound, np.add, 0.0)
        return self._unrolled(found) if found and np.isfinite(found[-1].least) else None

    def _bands(self, bound: float) -> list[tuple[int, int, int, int]]:
        """From the last stage: between which units one can begin that has so many behind it, and
        how many it can have; nothing where there is no cut."""
        fits = self._each <= bound
        most, fewest = (self._above <= bound).sum(axis=1), fits.argmax(axis=1) + 1
        if (most == 0).any() or most.sum() < self.length or fewest.sum() > self.length:
            return []
        behind, least = most.cumsum(), fewest.cumsum()
        # Where a stage can begin follows from the most and the fewest units of the stages in front
        # of it and behind it.
        low = np.maximum(self.length - behind, least[-1] - least)
        high = np.minimum(self.length - least, behind[-1] - behind)
        if (low > high).any():
            return []
        first, last = (np.append(self.length, ends[:-1]) for ends in (low, high))
        shortest, widest = np.maximum(fewest, first - high), np.minimum(most, last - low)
        return list(zip(*(part.tolist() for part in (low, high, shortest, widest)), strict=True))

    def _values(self, bound: float, join: np.ufunc, nothing: float) -> list[_Band]:
        """F of every stage from the last one on; nothing where there is no cut."""
        bands = self._bands(bound)
        if not bands:
            return []
        classes = self._classes(bound, max(band[3] for band in bands))
        pads = [high - low for low, high, *_ in bands]  # a window of F goes so far beyond its ends
        # One allocation for all bands: each has high - low + 1 values between two pads as long as
        # the next stage's band, so that a window beyond its ends reads infinity.
        room = np.full(3 * sum(pads) + len(pads) + 1, np.inf)
        place = pads[0]
        room[place] = nothing
        before = _Band(self.length, 0, 0, classes[0], room[: 2 * place + 1], place)
        step, left, found = room.itemsize, 2 * place + 1, []
        for times, (low, high, shortest, widest), pad in zip(
            classes, bands, [*pads[1:], 0], strict=True
        ):
            sums = times.take(self.lines.of[shortest - 1 : widest, low : high + 1])
            rest = before.behind(low + shortest, high + widest)
            own = room[left + pad : left + pad + sums.shape[1]]
            if len(sums) > 1:
                # Row k of this view is `rest` shifted by k units; nothing is copied.
                windows = np.ndarray(sums.shape, rest.dtype, rest, 0, (step, step))
                join(sums, windows, out=sums).min(axis=0, out=own)
            else:
                join(sums[0], rest, out=own)
            size = len(own) + 2 * pad
            before = _Band(low, shortest, widest, times, room[left : left + size], pad)
            left += size
            found.append(before)
        return found

    def _classes(self, bound: float, widest: int) -> Array:
        """(p, some classes + 1): times within the bound, of all that have at most so many units;
        infinite in the last column, for -1."""
        last = int(np.flatnonzero(self.lines.units <= widest)[-1]) + 1
        times = np.full((len(self.times), last + 1), np.inf)
        np.copyto(times[:, :-1], self.times[:, :last], where=self.times[:, :last] <= bound)
        return times

    def _unrolled(self, bands: list[_Band]) -> StageCut:
        borders, each = [0], []
        for stage in range(len(bands) - 1, 0, -1):
            start, band = borders[-1], bands[stage]
            # Found again for the starts of one cut; back-pointers would be written for all starts
            # of all bounds.
            times = band.times.take(self.lines.of[band.shortest - 1 : band.widest, start])
            first = start + band.shortest
            number = int((times + bands[stage - 1].behind(first, start + band.widest)).argmin())
            each.append(float(times[number]))
            borders.append(first + number)
        last = self.lines.of[self.length - borders[-1] - 1, borders[-1]]
        each.append(float(bands[0].times[last]))
        borders.append(self.length)
        return StageCut(borders=tuple(borders), total=float(sum(each)), slowest=max(each))


def _least_of_each(lines: IntervalsByLength, times: Array) -> Array:
    """(p, W): the least time of each stage with so many units."""
    width, length = lines.of.shape
    some = np.argsort(lines.units, kind="stable")
    some = some[lines.units[some] > 0]
    behind = np.arange(len(times))[:, None]
    # The first stage begins the row, the last one ends it, and each of those between has a unit,
    # too.
    far = (lines.begin[some] < len(times) - 1 - behind) | (lines.end[some] > length - behind)
    own = np.where(far, np.inf, times[:, some])
    numbers, first = np.unique(lines.units[some], return_index=True)
    found = np.full((len(times), width), np.inf)
    # `some` is sorted by length: reduceat needs intervals of the same length side by side.
    found[:, numbers - 1] = np.minimum.reduceat(own, first, axis=1)
    # Row s has s stages behind it: the last row begins the model and row 0 ends it, so each number
    # of units is one interval there.
    ends = length - 1 - np.arange(width)
    found[-1] = _times_of(times[-1], lines.of[:, 0])
    found[0] = _times_of(times[0], lines.of[np.arange(width), ends])
    return found


def _times_of(times: Array, classes: np.ndarray) -> Array:
    return np.asarray(np.where(classes < 0, np.inf, times[classes]))


def intervals_by_length(of: np.ndarray) -> IntervalsByLength:
    """`of` as `cut_stages` takes it, by number of units."""
    length, step = len(of), of.itemsize
    lines = np.concatenate([of.ravel(), np.full(length, -1, of.dtype)])
    # behind the end of a line are the first columns of the next one, up to its diagonal: -1
    found = np.ndarray((length, length), of.dtype, lines, step, (step, (length + 2) * step)).copy()
    units = np.zeros(found.max() + 2, dtype=np.int64)  # with one for -1
    units[found] = np.arange(1, length + 1)[:, None]
    begin, end = np.zeros_like(units), np.full_like(units, length)
    for number, line in enumerate(found):  # of equal classes the last one counts
        own = line[: length - number]
        begin[own] = np.arange(len(own))
        end[own[::-1]] = np.arange(length, number, -1)
    return IntervalsByLength(found, units[:-1], begin[:-1], end[:-1])


@dataclass(frozen=True, kw_only=True)
class LayerUnit:
    """Operators that no stage border divides.

    Attributes:
        kind: Equal for units of equal structure: a number from 0.
        entry: The tensor that enters; "" for the first unit.
        exit: The tensor that leaves; "" for the last.
        module: With which it begins: of the first part of its first operator, where nothing else
            lies in it; else `layer`.
        layer: Module of its first operator that has one. A border in front of it, behind what was
            folded into it, is taken for this one.
    """

    start: int
    stop: int
    kind: int
    entry: str
    exit: str
    module: str
    layer: str = ""


def make_units(graph: ModelGraph) -> tuple[LayerUnit, ...]:
    """The finest row of units: repeated blocks whole, what lies between them cut where possible."""
    structures = StructureHashes(graph)
    segments = find_repeated_blocks(graph, structures=structures).segments
    counts: dict[str, int] = {}
    for segment in segments:
        counts[segment.structure] = counts.get(segment.structure, 0) + 1
    inside = {
        place
        for segment in segments
        if counts[segment.structure] > 1
        for place in range(segment.start + 1, segment.stop)
    }
    borders: list[tuple[int, str]] = [(0, "")]
    for cut in cut_points(graph):
        if cut.place not in inside and cut.tensors[0] != borders[-1][1]:
            borders.append((cut.place, cut.tensors[0]))
    borders.append((len(graph.operators), ""))
    kinds: dict[object, int] = {}
    found = []
    everywhere = _around(graph.operators)
    for (start, entry), (stop, exit_) in pairwise(borders):
        operators = graph.operators[start:stop]
        shapes = tuple(graph.tensors[t].shape if t else () for t in (entry, exit_))
        key = (structures.of(start, stop), shapes)
        layer = next((o.module for o in operators if o.module), "")
        module, own = next(iter(operators[0].modules), ""), _around(operators)
        if not module or own[module] < everywhere[module]:
            module = layer
        kind = kinds.setdefault(key, len(kinds))
        found.append(
            LayerUnit(
                start=start,
                stop=stop,
                kind=kind,
                entry=entry,
                exit=exit_,
                module=module,
                layer=layer,
            )
        )
    return tuple(found)


def _around(operators: Sequence[Operator]) -> Counter[str]:
    found = Counter[str]()
    for operator in operators:
        paths = (name.split(".") for name in operator.modules or (operator.module,))
        found.update({".".join(path[:n]) for path in paths for n in range(1, len(path) + 1)})
    return found


@dataclass(frozen=True)
class IntervalClasses:
    """Which intervals of the row are alike.

    Attributes:
        of: (L, L + 1): the class of the units from i to before j.
        before: Of each class the one without its last unit; -1 for one unit.
        last: Of each class the kind of its last unit.
        examples: Of each class one (i, j).
        lengths: The (first class, class behind the last) of each number of units.
    """

    of: np.ndarray
    before: tuple[int, ...]
    last: tuple[int, ...]
    examples: tuple[tuple[int, int], ...]
    lengths: tuple[tuple[int, int], ...]

    @cached_property
    def lines(self) -> IntervalsByLength:
        return intervals_by_length(self.of)

    def within(self, width: int) -> IntervalsByLength:
        """Of intervals of at most so many units; 0: of all."""
        whole, last = self.lines, self.lengths[width - 1][1]
        return IntervalsByLength(whole.of[: width or None], *(part[:last] for part in whole[1:]))


def interval_classes(row: tuple[LayerUnit, ...]) -> IntervalClasses:
    """Numbers the distinct sequences of kinds, shorter ones first."""
    length = len(row)
    kinds = np.array([unit.kind for unit in row])
    of = np.full((length, length + 1), -1, dtype=np.int64)
    # Codes of intervals of one length, built from those one unit shorter: no tuple is hashed.
    codes = np.zeros(length, dtype=np.int64)
    numbers = codes - 1
    before: list[int] = []
    last: list[int] = []
    examples: list[tuple[int, int]] = []
    lengths: list[tuple[int, int]] = []
    for size in range(1, length + 1):
        starts = length - size + 1
        # There are at most `length` kinds, so each pair of code and kind has its own number.
        pairs = codes[:starts] * (length + 1) + kinds[size - 1 :]
        _, first, codes = np.unique(pairs, return_index=True, return_inverse=True)
        before += numbers[first].tolist()
        last += kinds[first + size - 1].tolist()
        numbers = codes + len(examples)
        examples += [(start, start + size) for start in first.tolist()]
        of[np.arange(starts), np.arange(size, length + 1)] = numbers
        lengths.append((len(examples) - len(first), len(examples)))
    return IntervalClasses(of, tuple(before), tuple(last), tuple(examples), tuple(lengths))


def unit_of_module(name: str, row: Sequence[LayerUnit]) -> int | None:
    """The unit that begins with a module; no pipeline begins a second stage with the first."""
    numbers = range(1, len(row))
    same = [n for n in numbers if name in (row[n].module, row[n].layer)]
    inside = [n for n in numbers if _lies_in(name, row[n].module) or _lies_in(name, row[n].layer)]
    return next(iter([*same, *inside]), None)


def forced_stage_starts(
    force: Sequence[tuple[str, str]], row: Sequence[LayerUnit]
) -> tuple[int, ...]:
    """The first units of the stages that are forced; that of the first unit is always one.

    Args:
        force: (module, what); those with "stage" count.

    Raises:
        PlanError: No stage can begin there.
    """
    names = [module for module, how in force if how == "stage"]
    first = next((unit.module for unit in row if unit.module), "")
    found = {name: 0 if _lies_in(name, first) else unit_of_module(name, row) for name in names}
    legal = list(dict.fromkeys(unit.module for unit in row if unit.module))
    problems = [
        f"{name}=stage: no stage can begin there{nearest(name, legal)}"
        for name, start in found.items()
        if start is None
    ]
    if problems:
        raise PlanError(
            "what is forced is not legal",
            problems=problems,
            fix=f"Stages begin where one tensor crosses: {', '.join(legal)}.",
        )
    return tuple(sorted({start for start in found.values() if start}))


def border_name(unit: LayerUnit, force: Sequence[tuple[str, str]]) -> str:
    """What a plan calls the border in front of a unit: its module, or its layer where that is
    forced."""

    names = [name for name, how in force if how == "stage"]
    module, layer = (any(_lies_in(n, known) for n in names) for known in (unit.module, unit.layer))
    return unit.layer if layer and not module else unit.module


def unnameable_units(row: Sequence[LayerUnit]) -> frozenset[int]:
    """Units that no plan can name as the first of a stage."""
    first = next((n for n, unit in enumerate(row) if unit.module), len(row))
    seen = {""}
    found = set()
    for number, unit in enumerate(row):
        # What calls no module (a loss, a mean), a later call of a module, and the first module,
        # before which the executor has no stage.
        if number and (number <= first or unit.module in seen):
            found.add(number)
        seen.add(unit.module)
    return frozenset(found)


def bar_intervals(
    of: np.ndarray, starts: Sequence[int], barred: Collection[int] = ()
) -> np.ndarray:
    """`of` for `cut_stages`, with stages that begin at `starts` and at no `barred` unit."""
    if not starts and not barred:
        return of
    first, stop = np.arange(of.shape[0])[:, None], np.arange(of.shape[1])[None, :]
    never = np.isin(first, list(barred)) & (stop > first)
    # A stage that begins in front of a forced start must end there.
    for start in starts:
        never |= (first < start) & (stop > start)
    return np.where(never, -1, of)


def _lies_in(name: str, module: str) -> bool:
    """Whether a module is the one of this name, or inside of it."""
    return module == name or module.startswith(f"{name}.")
