"""Level 2 of the search: what every stretch of a model costs, each distinct block solved once.

A model is a row of units, cut where one tensor crosses. For each structure of unit, each placement
of what enters and leaves, and each of J prices (of bytes in seconds) the frontier engine finds the
cheapest strategy; a stretch is the cheapest way through its units (the power of a block for a run
of equal ones). The J strategies of a stretch are points of its lower hull. Invariant: what
a stretch costs is the sum of the strategies of its units, which can be named. Sources: Cai et al.
2022 (TensorOpt), FT-LDP; Zheng et al. 2022 (Alpa), stages as intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from headway.planner.operators import Floats, Setting
from headway.planner.room import ROUNDING, Room, room_of
from headway.planner.row import Stretches, Unit
from headway.planner.transients import Transients
from headway.planner.unit_choices import Solved, solve_unit

BYTE_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0, 1e7)
"""Of a whole device's memory, in seconds of a micro-batch of the whole model."""
SAVED_WEIGHTS = (1.0, 8.0)
"""Kept activations against parameters: micro-batches under way per 16 bytes of state."""
STEPS = (1.0, 32.0)
"""Micro-batches over which a step's own seconds are spread."""


class Cells(NamedTuple):
    """Strategies of stretches, each (2, classes, K): without and with recomputation.

    Attributes:
        forward: Seconds of a micro-batch.
        backward: The same, with what is computed again.
        step: Seconds of a step on the tensor axis.
        params: Bytes of parameters of a device, each counted once.
        kept: Bytes that a micro-batch keeps, each counted once.
        more: Bytes for a moment, as `Transients.beside` has them.
        prices: (K,) numbers of the prices, those that give strategies of their own.
    """

    forward: Floats
    backward: Floats
    step: Floats
    params: Floats
    kept: Floats
    more: Floats
    prices: np.ndarray


@dataclass(frozen=True)
class Tables:
    """What all stretches of a model cost under one `Setting`."""

    setting: Setting
    row: tuple[Unit, ...]
    classes: Stretches
    transients: Transients
    scale: float
    _known: dict[int, Floats] = field(default_factory=dict)
    _solved: dict[int, Solved] = field(default_factory=dict)
    _cells: dict[tuple[str, int], Cells] = field(default_factory=dict)
    _priced: dict[int, Floats] = field(default_factory=dict)
    _picks: dict[int, np.ndarray] = field(default_factory=dict)
    _least: list[Cells] = field(default_factory=list)
    _least_of: dict[int, float] = field(default_factory=dict)
    _states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _paths: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @cached_property
    def weights(self) -> Floats:
        """(2, J, 5): prices of `PARTS`; with recomputation forward counts twice and what is kept
        inside of a unit not."""
        memory = self.setting.machine.device.memory
        lines = []
        for price in BYTE_PRICES:
            for saved in SAVED_WEIGHTS if price else (0.0,):
                for steps in STEPS:
                    each = price * self.scale / memory
                    lines.append((1.0, 1.0, 1.0 / steps, 8.0 * each, saved * each))
        plain = np.array(lines)
        again = plain * np.array([2.0, 1.0, 1.0, 1.0, 0.0])
        return np.stack([plain, again])

    def solved(self, kind: int) -> Solved:
        """The strategies of a structure of unit."""
        if kind not in self._solved:
            unit = next(unit for unit in self.row if unit.kind == kind)
            self._solved[kind] = solve_unit(self.setting, unit, self.weights)
        return self._solved[kind]

    @cached_property
    def kinds(self) -> tuple[np.ndarray, Floats]:
        """(kinds,): how many units there are of each, and its least seconds of a micro-batch."""
        counts = Counter(unit.kind for unit in self.row)
        least = [float(self.solved(k).rows[0, ..., :2].sum(axis=-1).min()) for k in counts]
        return np.array(list(counts.values())), np.array(least)

    @cached_property
    def room(self) -> Room:
        """What units take at least."""
        return room_of(self)

    def states(self, tensor: str) -> tuple[str, ...]:
        """Placements of what crosses a border of units."""
        if tensor not in self._states:
            self._states[tensor] = self.setting.placements(tensor) if tensor else ("",)
        return self._states[tensor]

    def stretch(self, number: int) -> Floats:
        """(2, J, A, B, len(PARTS)) of a class of stretches."""
        way = []
        while number not in self._known and self.classes.before[number] >= 0:
            way.append(number)
            number = self.classes.before[number]
        found = self._known.get(number)
        if found is None:
            found = self.solved(self.classes.last[number]).rows
            self._known[number] = found
        for number in reversed(way):
            found, picks = self._with(found, self.classes.last[number])
            self._known[number], self._picks[number] = found, picks.astype(np.int8)
        return found

    def _with(self, left: Floats, last: int) -> tuple[Floats, np.ndarray]:
        """`_joined` with one more unit of this kind."""
        right = self.solved(last).rows
        if last not in self._priced:
            self._priced[last] = _price(right, self.weights)
        return _joined(left, right, self.weights, self._priced[last])

    def _stretches(self, classes: int) -> None:
        """The first classes, those of a length and with one last unit at once."""
        sizes = [stop - start for start, stop in self.classes.examples[:classes]]
        missing = [number for number in range(len(sizes)) if number not in self._known]
        for _, alike in groupby(missing, key=sizes.__getitem__):  # shorter ones come first
            groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
            for number in alike:
                before, last = self.classes.before[number], self.classes.last[number]
                if before < 0:
                    self._known[number] = self.solved(last).rows
                else:
                    groups.setdefault((last, self._known[before].shape), []).append(number)
            for (last, _), numbers in groups.items():
                left = np.stack([self._known[self.classes.before[n]] for n in numbers])
                rows, picks = self._with(left, last)
                self._known.update(zip(numbers, rows, strict=True))
                self._picks.update(zip(numbers, picks.astype(np.int8), strict=True))

    @cached_property
    def transient(self) -> float:
        """Bytes that the largest unit keeps while it is computed again."""
        kinds = sorted({unit.kind for unit in self.row})
        return max(float(self.solved(kind).rows[0, 0, ..., 4].min()) for kind in kinds)

    def cells(self, border: str, doubled: Floats) -> Cells:
        """Of the first classes of stretches, with one placement at both ends.

        Args:
            border: The placement; whole where a tensor cannot have it. "": of the whole row only,
                as class 0.
            doubled: (classes,) bytes of parameters that are counted more than once; the same
                whoever asks.
        """
        key = border, len(doubled)
        if key not in self._cells:
            several = bool(border)
            if several:
                self._stretches(len(doubled))
            found = []
            some = self.classes.examples[: len(doubled)] if several else ((0, len(self.row)),)
            for start, stop in some:
                rows = self.stretch(int(self.classes.of[start, stop]))
                first, last = self.row[start].entry, self.row[stop - 1].exit
                found.append(rows[:, :, self.place(first, border), self.place(last, border)])
            cells = np.stack(found, axis=2)  # (2, J, classes, 5)
            by_price = {cells[:, j].tobytes(): j for j in reversed(range(cells.shape[1]))}
            prices = np.sort(list(by_price.values()))
            parts = cells[:, prices].transpose(3, 0, 2, 1)
            self._cells[key] = self._laid_out(np.ascontiguousarray(parts), doubled, prices)
        return self._cells[key]

    def least(self, doubled: Floats) -> Cells:
        """Of the whole row at all prices, with whole tensors at its ends; arguments as `cells`."""
        if not self._least:
            rows = self.stretch(int(self.classes.of[0, -1]))[:, :, 0, 0]
            parts = np.ascontiguousarray(rows.transpose(2, 0, 1)[:, :, None])
            self._least.append(self._laid_out(parts, doubled, np.arange(parts.shape[-1])))
        return self._least[0]

    def _laid_out(self, parts: Floats, doubled: Floats, prices: np.ndarray) -> Cells:
        """From (5, 2, classes, K)."""
        forward, backward, step, params, kept = parts
        backward = backward + np.arange(2.0)[:, None, None] * forward
        params = np.maximum(params - (doubled / self.setting.tensor)[:, None], 0.0)
        several = len(doubled) > 1
        kept, more = self.transients.beside(self.setting, kept, several=several)
        return Cells(forward, backward, step, params, kept, more, prices)

    @cached_property
    def borders(self) -> tuple[str, ...]:
        """Placements that some cheapest way through the whole model takes at a quarter of it, at
        half or at three quarters: those that the borders of stages are tried with."""
        length = len(self.row)
        found: set[str] = set()
        for middle in sorted({length // 4, length // 2, 3 * length // 4} - {0}):
            left = self.stretch(int(self.classes.of[0, middle]))
            right = self.stretch(int(self.classes.of[middle, length]))
            _, picks = _joined(left, right, self.weights)
            states = self.states(self.row[middle].entry)
            found.update(states[place] for place in np.unique(picks))
        return tuple(sorted(found))

    def least_of(self, units: int) -> float:
        """Seconds below which no stretch of so many units, or more, takes for a micro-batch."""
        if units not in self._least_of:
            sums = np.concatenate([[0.0], np.cumsum([self.room.least[u.kind] for u in self.row])])
            self._least_of[units] = float((sums[units:] - sums[:-units]).min()) * (1.0 - ROUNDING)
        return self._least_of[units]

    def place(self, tensor: str, state: str) -> int:
        """The number of a placement of a border's tensor; 0, whole, where it has not got it."""
        states = self.states(tensor)
        return states.index(state) if state in states else 0

    def path(
        self, start: int, stop: int, again: int, price: int, ends: tuple[int, int]
    ) -> tuple[tuple[int, int], ...]:
        """Of every unit of a stretch the placements at its entry and exit, as numbers."""
        key = (int(self.classes.of[start, stop]), again, price, *ends)
        if key not in self._paths:
            self._paths[key] = self._path(start, stop, again, price, ends)
        return self._paths[key]

    def _path(
        self, start: int, stop: int, again: int, price: int, ends: tuple[int, int]
    ) -> tuple[tuple[int, int], ...]:
        number, (entry, exit_) = int(self.classes.of[start, stop]), ends
        self.stretch(number)
        states = []
        while self.classes.before[number] >= 0:
            between = int(self._picks[number][again, price, entry, exit_])
            states.append((between, exit_))
            number, exit_ = self.classes.before[number], between
        return ((entry, exit_), *reversed(states))


def _price(rows: Floats, weights: Floats) -> Floats:
    """(..., 2, J, A, B): what strategies (..., 2, J, A, B, 5) cost."""
    found: Floats = np.einsum("...rjabp,rjp->...rjab", rows, weights)
    return found


def _joined(
    left: Floats, right: Floats, weights: Floats, other: Floats | None = None
) -> tuple[Floats, np.ndarray]:
    """One after the other, by the cheapest placement between them, (..., 2, J, A, C, 5) and picks.

    There may be several in front, (..., 2, J, A, B, 5). `other` is `_price` of those behind.
    """
    if left.shape[-2] == 1 and right.shape[-3] == 1:
        sums = left[..., :, 0, None, :] + right[..., None, 0, :, :]
        return sums, np.zeros(sums.shape[:-1], dtype=np.int64)
    priced = _price(left, weights)
    other = _price(right, weights) if other is None else other
    best = priced[..., :, 0, None] + other[..., None, 0, :]
    picks = np.zeros(best.shape, dtype=np.int64)
    for between in range(1, left.shape[-2]):
        sums = priced[..., :, between, None] + other[..., None, between, :]
        picks[sums < best] = between
        np.minimum(best, sums, out=best)
    one, two = _lines(picks.shape[:-1], left.shape[-2], right.shape[:-1])
    return _rows_of(left, one + picks) + _rows_of(right, two + picks * right.shape[3]), picks


@lru_cache(maxsize=256)
def _lines(
    shape: tuple[int, ...], between: int, right: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The lines of both tables where the placement between them is the first one."""
    one = np.arange(math.prod(shape)).reshape(*shape, 1) * between
    two = np.arange(math.prod(right[:2])).reshape(*right[:2], 1, 1) * right[2] * right[3]
    return one, two + np.arange(right[3])


def _rows_of(table: Floats, lines: np.ndarray) -> Floats:
    return table.reshape(-1, table.shape[-1]).take(lines, axis=0)


def tables(
    setting: Setting, row: tuple[Unit, ...], classes: Stretches, transients: Transients
) -> Tables:
    """Tables for a setting; `row`, `classes` and `transients` are those of its model."""
    flops = setting.work.graph.flops.total * setting.scale / setting.tensor
    rate = next(iter(setting.machine.device.peak.values()))
    return Tables(setting, row, classes, transients, flops / rate)
