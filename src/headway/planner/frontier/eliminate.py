"""Carries out an order of eliminations on fronts, and finds the strategy behind a row.

Invariant: every row of a table knows the choice and the rows that it was made from (one number
that encodes them), so that undoing the steps in reverse recovers a strategy whose cost is the row.
Source: Cai et al. 2022 (TensorOpt), eliminations and unrolling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from headway.planner.frontier.bounds import Bounds
from headway.planner.frontier.gaps import Gaps
from headway.planner.frontier.network import Network, align
from headway.planner.frontier.rows import (
    Bools,
    Floats,
    Ints,
    joined,
    padded,
    places,
    reduce_rows,
    spread,
    take,
)
from headway.planner.frontier.rules import Order, Step

_CANDIDATES = 2_000_000


@dataclass(frozen=True, slots=True)
class Pruning:
    """What may be dropped on the way.

    Attributes:
        rows: Most rows of a cell; None: all. What is dropped for this is lost.
        bounds: Least costs of completions; None: no test.
        gaps: Where a completion must be able to lie.
    """

    rows: int | None = None
    bounds: Bounds | None = None
    gaps: Gaps | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """How a table was made.

    Attributes:
        step: Its node, inputs, number and scope.
        shape: Number of choices of the node (1 if there is none), then rows of each input.
        picks: (C_1, ..., C_k, K), places in this shape; -1 where a cell has fewer rows.
    """

    step: Step
    shape: tuple[int, ...]
    picks: Ints


@dataclass(frozen=True, slots=True)
class Eliminated:
    """The frontier of a network.

    Attributes:
        costs: (K, d).
        records: Of all steps, the last of which made the frontier.
        dropped: Rows that the limit `Pruning.rows` has cost.
        peak: The most rows of a table.
    """

    costs: Floats
    records: tuple[Record, ...]
    dropped: int
    peak: int

    def choices(self) -> dict[str, Ints]:
        """The strategies of all rows: the choices (K,) of each node that is in a scope."""
        rows = {self.records[-1].step.result: np.arange(len(self.costs))}
        chosen: dict[str, Ints] = {}
        for record in reversed(self.records):
            step = record.step
            cell = tuple(chosen[name] for name in step.scope)
            picks = record.picks[(*cell, rows[step.result])]
            choice, *parts = np.unravel_index(picks, record.shape)
            if step.node is not None:
                chosen[step.node] = choice
            rows.update(zip(step.inputs, parts, strict=True))
        return chosen


def eliminate(network: Network, order: Order, pruning: Pruning | None = None) -> Eliminated:
    """The frontier of all strategies that pruning leaves."""
    work = _Work(network, order, pruning or Pruning())
    for step in order.steps:
        work.carry_out(step)
    return work.finish()


class _Work:
    """Tables as they are made and used up."""

    def __init__(self, network: Network, order: Order, pruning: Pruning) -> None:
        self.sizes = network.sizes
        self.pruning = pruning
        self.tables = dict(enumerate(network.tables))
        self.scopes = dict(enumerate(network.scopes))
        self.extra = len(network.tables) + len(order.steps)
        self.records: list[Record] = []
        self.dropped = 0
        self.peak = 1

    def carry_out(self, step: Step) -> None:
        """One step; more than two inputs of several rows are first summed in pairs."""
        inputs = sorted(step.inputs, key=lambda n: (self.tables[n].shape[-1], self.tables[n].size))
        while len(inputs) > 2 and self.tables[inputs[-3]].shape[-1] > 1:
            first, second = inputs.pop(-3), inputs.pop(-2)
            union = dict.fromkeys((*self.scopes[first], *self.scopes[second]))
            self._make(Step(None, (first, second), self.extra, tuple(union)), bounded=False)
            inputs.append(self.extra)
            self.extra += 1
        self._make(Step(step.node, tuple(inputs), step.result, step.scope), bounded=True)

    def finish(self) -> Eliminated:
        """The sum of the tables that are left: independent parts of the graph."""
        left = sorted(self.tables, key=lambda n: (self.tables[n].shape[-1], n))
        while len(left) > 1:
            self._make(Step(None, (left[0], left[1]), self.extra, ()), bounded=False)
            left = [*left[2:], self.extra]
            self.extra += 1
        if not self.records or self.records[-1].step.result != left[0]:
            self._make(Step(None, (left[0],), self.extra, ()), bounded=False)
            left = [self.extra]
        costs = self.tables[left[0]].T
        found = np.isfinite(costs).all(axis=1)
        return Eliminated(costs[found], tuple(self.records), self.dropped, self.peak)

    def _make(self, step: Step, *, bounded: bool) -> None:
        given = [(self.tables[number], self.scopes[number]) for number in step.inputs]
        size = 1 if step.node is None else self.sizes[step.node]
        shape = (size, *(table.shape[-1] for table, _ in given))
        bounds = self.pruning.bounds if bounded else None
        rest = None if bounds is None else bounds.outside[step.result]
        cells = tuple(self.sizes[name] for name in step.scope)
        made: list[tuple[Floats, Ints]] = []
        for part in self._parts(cells, shape):
            costs = _candidates(given, step, part)
            made.append(self._front(costs, rest[part] if cells and rest is not None else rest))
        costs, picks = joined([c for c, _ in made], [p for _, p in made])
        self.tables[step.result] = costs.reshape(len(costs), *cells, -1)
        self.scopes[step.result] = step.scope
        self.records.append(Record(step, shape, picks.reshape(*cells, -1)))
        self.peak = max(self.peak, picks.shape[-1])
        for number in step.inputs:
            del self.tables[number], self.scopes[number]

    def _parts(self, cells: tuple[int, ...], shape: tuple[int, ...]) -> list[slice]:
        """Ranges of the first axis, such that the candidates of one fit into memory."""
        if not cells:
            return [slice(None)]
        size = max(1, _CANDIDATES // (prod(cells[1:]) * prod(shape)))
        return [slice(start, start + size) for start in range(0, cells[0], size)]

    def _front(self, costs: Floats, rest: Floats | None) -> tuple[Floats, Ints]:
        """Reduced, tested against the bounds and cut to the most rows; costs (d, R, n)."""
        costs, picks = reduce_rows(costs)
        if rest is not None and self.pruning.gaps is not None:
            alive = self._open(costs, rest.reshape(-1, rest.shape[-1]))
            kept = places(alive & (picks >= 0))
            costs, picks = take(costs, kept), np.take_along_axis(padded(picks), kept, axis=1)
        if self.pruning.rows is not None:
            before = int((picks >= 0).sum())
            costs, picks = spread(costs, picks, self.pruning.rows)
            self.dropped += before - int((picks >= 0).sum())
        return costs, picks

    def _open(self, costs: Floats, rest: Floats) -> Bools:
        """Which rows (R, K) may be completed in a gap; rest is (R, J)."""
        bounds, gaps = self.pruning.bounds, self.pruning.gaps
        assert bounds is not None
        assert gaps is not None
        alive: Bools = np.isfinite(costs[0])
        cell, row = np.nonzero(alive)
        alive[cell, row] = gaps.let_pass(costs[:, cell, row].T @ bounds.weights.T + rest[cell])
        return alive


def _candidates(given: Sequence[tuple[Floats, tuple[str, ...]]], step: Step, part: slice) -> Floats:
    """Sums of a row of each table for each choice of the node, (d, R, n)."""
    axes = step.scope if step.node is None else (*step.scope, step.node)
    total: Floats | None = None
    for table, scope in given:
        aligned = align(table, scope, axes)
        if step.scope and aligned.shape[1] > 1:
            aligned = aligned[:, part]
        if total is None:
            total = aligned
        else:
            summed = total[..., :, None] + aligned[..., None, :]
            total = summed.reshape(*summed.shape[:-2], -1)
    assert total is not None
    cells = prod(total.shape[1 : 1 + len(step.scope)])
    return total.reshape(len(total), cells, -1)
