"""Level 2 of the search: what every stretch of a model costs, each distinct block solved once.

A model is a row of units, cut where one tensor crosses. For each structure of unit, each placement
of what enters and leaves, and each of J prices (of bytes in seconds) the frontier engine finds the
cheapest strategy; a stretch is the cheapest way through its units (the power of a block for a run
of equal ones). The J strategies of a stretch are points of its lower hull. Invariant: what
a stretch costs is the sum of the strategies of its units, which can be named. Sources: Cai et al.
2022 (TensorOpt), FT-LDP; Zheng et al. 2022 (Alpa), stages as intervals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from headway.planner.chains import Chain, Chains, Longer, joined, path, rows_of
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

    def first(self, classes: int) -> Cells:
        """Of the first classes."""
        if classes == self.params.shape[1]:
            return self
        return Cells._make([*(part[:, :classes] for part in self[:-1]), self.prices])


class _Group(NamedTuple):
    """Classes of stretches that are one chain: `rows` of it, (2, J, len(PARTS)) what a further
    unit of each of its runs adds, the classes, and (members, runs) how many units those have."""

    rows: Floats
    steps: list[Floats]
    members: np.ndarray
    counts: Floats


@dataclass(frozen=True)
class Tables:
    """What all stretches of a model cost under one `Setting`."""

    setting: Setting
    row: tuple[Unit, ...]
    classes: Stretches
    transients: Transients
    scale: float
    _places: dict[int, tuple[Chain, Longer]] = field(default_factory=dict)
    _grouped: dict[int, list[_Group]] = field(default_factory=dict)
    _solved: dict[int, Solved] = field(default_factory=dict)
    _cells: dict[str, Cells] = field(default_factory=dict)
    _least: list[Cells] = field(default_factory=list)
    _least_of: dict[int, float] = field(default_factory=dict)
    _crossing: dict[str, Floats] = field(default_factory=dict)
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

    @cached_property
    def chains(self) -> Chains:
        """Of the units, at all prices."""
        return Chains(self.weights, lambda kind: self.solved(kind).rows)

    def stretch(self, number: int) -> Floats:
        """(2, J, A, B, len(PARTS)) of a class of stretches."""
        return rows_of(*self._place_of(number))

    def _place_of(self, number: int) -> tuple[Chain, Longer]:
        """The chain of a class, and how much longer its runs are."""
        if number not in self._places:
            before, last = self.classes.before[number], self.classes.last[number]
            if before < 0:
                self._places[number] = self.chains.first(last), ()
            elif before in self._places:
                self._places[number] = self.chains.longer(*self._places[before], last)
            else:
                start, stop = self.classes.examples[number]
                self._places[number] = self.chains.of([u.kind for u in self.row[start:stop]])
        return self._places[number]

    def _groups(self, classes: int) -> list[_Group]:
        """The first classes, those of one chain together."""
        if classes not in self._grouped:
            groups: dict[tuple[int, ...], list[int]] = {}
            self._join_all(classes)
            for number in range(classes):
                chain, runs = self._place_of(number)
                groups.setdefault((id(chain), *(id(run) for run, _ in runs)), []).append(number)
            found = []
            for members in groups.values():
                places = [self._places[number] for number in members]
                chain, runs = places[0]
                counts = np.array([[n for _, n in runs] for _, runs in places], dtype=float)
                steps = [run.step for run, _ in runs]
                found.append(_Group(chain.rows, steps, np.array(members), counts))
            self._grouped[classes] = found
        return self._grouped[classes]

    def _join_all(self, classes: int) -> None:
        """Joins the units of the first classes, those of one length at once."""
        before, last = self.classes.before, self.classes.last
        for low, high in self.classes.lengths:
            if low >= classes:
                break
            pairs = {}
            for number in range(low, high):
                if number not in self._places and before[number] >= 0:
                    chain, _ = self._place_of(before[number])
                    if self.chains.missing(chain, last[number]):
                        pairs[id(chain), last[number]] = chain, last[number]
            self.chains.join(pairs.values())

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
        known = self._cells.get(border)
        if known is None or len(doubled) > known.params.shape[1]:
            known = self._cells[border] = self._cells_of(border, doubled)
        return known.first(len(doubled))

    def _cells_of(self, border: str, doubled: Floats) -> Cells:
        if not border:
            rows = self.stretch(int(self.classes.of[0, -1]))[:, :, 0, 0]
            groups = [_Group(rows[:, :, None, None], [], np.zeros(1, dtype=int), np.zeros((1, 0)))]
        else:
            groups = self._groups(len(doubled))
        lines = []
        for group in groups:
            start, stop = self.classes.examples[group.members[0]] if border else (0, len(self.row))
            first, last = self.row[start].entry, self.row[stop - 1].exit
            entry, exit_ = self.place(first, border), self.place(last, border)
            lines.append(group.rows[:, :, entry, exit_])
        every = np.stack([*lines, *(step for group in groups for step in group.steps)])
        by_price = {every[:, :, j].tobytes(): j for j in reversed(range(every.shape[2]))}
        prices = np.sort(list(by_price.values()))
        parts = np.empty((every.shape[-1], 2, len(doubled), len(prices)))
        for group, line in zip(groups, lines, strict=True):
            own = line[:, prices].transpose(2, 0, 1)[:, :, None]
            for step, numbers in zip(group.steps, group.counts.T, strict=True):
                own = own + step[:, prices].transpose(2, 0, 1)[:, :, None] * numbers[:, None]
            parts[:, :, group.members] = own
        return self._laid_out(parts, doubled, prices)

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
            _, picks = joined(left, right, self.weights)
            states = self.states(self.row[middle].entry)
            found.update(states[place] for place in np.unique(picks))
        return tuple(sorted(found))

    def least_of(self, units: int) -> float:
        """Seconds below which no stretch of so many units, or more, takes for a micro-batch."""
        if units not in self._least_of:
            sums = np.concatenate([[0.0], np.cumsum([self.room.least[u.kind] for u in self.row])])
            self._least_of[units] = float((sums[units:] - sums[:-units]).min()) * (1.0 - ROUNDING)
        return self._least_of[units]

    def crossing(self, border: str) -> Floats:
        """(L,): bytes of a device of what enters each unit, where it has this placement."""
        if border not in self._crossing:
            tensors = [unit.entry for unit in self.row]
            split = [border.startswith("S") and border in self.states(tensor) for tensor in tensors]
            whole = [self.setting.bytes_of(tensor) for tensor in tensors]
            self._crossing[border] = np.array(whole) / np.where(split, self.setting.tensor, 1)
        return self._crossing[border]

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
        place = self._place_of(int(self.classes.of[start, stop]))
        return path(*place, again, price, ends)


def tables(
    setting: Setting, row: tuple[Unit, ...], classes: Stretches, transients: Transients
) -> Tables:
    """Tables for a setting; `row`, `classes` and `transients` are those of its model."""
    flops = setting.work.graph.flops.total * setting.scale / setting.tensor
    rate = next(iter(setting.machine.device.peak.values()))
    return Tables(setting, row, classes, transients, flops / rate)
