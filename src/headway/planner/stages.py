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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np

from headway.graph import Operator, Rule
from headway.planner.frontier.bounds import find_bounds
from headway.planner.frontier.network import all_choices, make_network
from headway.planner.frontier.problem import ChoiceGraph
from headway.planner.frontier.rules import Order, order_eliminations
from headway.planner.frontier.solve import BUDGET
from headway.planner.operators import PARTS, Floats, Setting, cost, legal
from headway.planner.relayout import wanted
from headway.planner.row import Stretches, Unit
from headway.planner.transients import Transients

BYTE_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0, 1e7)
"""Of a whole device's memory, in seconds of a micro-batch of the whole model."""
SAVED_WEIGHTS = (1.0, 8.0)
"""Kept activations against parameters: micro-batches under way per 16 bytes of state."""
ENDS = ("<entry", "exit>")
"""Nodes of what enters and leaves a unit."""
STEPS = (1.0, 32.0)
"""Micro-batches over which a step's own seconds are spread."""


@dataclass(frozen=True)
class Solved:
    """The strategies of one structure.

    Attributes:
        rows: (2, J, A, B, len(PARTS)): without and with recomputation, by price, by placement at
            the entry and the exit.
        strategies: The choice of each operator, (A, B, 2 J).
        rules: The choices of each operator.
        graph: What was searched.
    """

    rows: Floats
    strategies: Mapping[str, np.ndarray]
    rules: Mapping[str, tuple[Rule, ...]]
    graph: ChoiceGraph


@dataclass(frozen=True)
class Tables:
    """What all stretches of a model cost under one `Setting`."""

    setting: Setting
    row: tuple[Unit, ...]
    classes: Stretches
    scale: float
    _known: dict[int, Floats] = field(default_factory=dict)
    _solved: dict[int, Solved] = field(default_factory=dict)
    _cells: dict[str, tuple[Floats, np.ndarray]] = field(default_factory=dict)
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
            self._solved[kind] = _solve(self.setting, unit, self.weights)
        return self._solved[kind]

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
            right = self.solved(self.classes.last[number]).rows
            found, _ = _joined(found, right, self.weights)
            self._known[number] = found
        return found

    def _stretches(self) -> None:
        """All classes, those of a length and with one last unit at once."""
        sizes = [stop - start for start, stop in self.classes.examples]
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
                rows, _ = _joined(left, self.solved(last).rows, self.weights)
                self._known.update(zip(numbers, rows, strict=True))

    @cached_property
    def transient(self) -> float:
        """Bytes that the largest unit keeps while it is computed again."""
        kinds = sorted({unit.kind for unit in self.row})
        return max(float(self.solved(kind).rows[0, 0, ..., 4].min()) for kind in kinds)

    @cached_property
    def transients(self) -> Transients:
        """What stretches hold for a moment."""
        return Transients(self.setting, self.row, self.classes)

    def cells(self, border: str, several: bool) -> tuple[Floats, np.ndarray]:
        """(classes, 2, K, 5) of all stretches with one placement at both ends, and the (K,) prices
        that give strategies of their own.

        Args:
            border: The placement; whole where a tensor cannot have it.
            several: False: only the whole row, as class 0.
        """
        key = border if several else ""
        if key not in self._cells:
            if several:
                self._stretches()
            found = []
            for start, stop in self.classes.examples if several else ((0, len(self.row)),):
                rows = self.stretch(int(self.classes.of[start, stop]))
                first, last = self.row[start].entry, self.row[stop - 1].exit
                found.append(rows[:, :, self.place(first, border), self.place(last, border)])
            cells = np.stack(found)
            by_price = {cells[:, :, j].tobytes(): j for j in reversed(range(cells.shape[2]))}
            prices = np.sort(list(by_price.values()))
            self._cells[key] = cells[:, :, prices], prices
        return self._cells[key]

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
        states = []
        way = (slice(again, again + 1), slice(price, price + 1))
        entry, exit_ = slice(ends[0], ends[0] + 1), ends[1]
        for place in range(stop - 1, start, -1):
            left = self.stretch(int(self.classes.of[start, place]))
            right = self.solved(self.row[place].kind).rows
            right = right[*way, :, exit_ : exit_ + 1]
            _, picks = _joined(left[*way, entry], right, self.weights[way])
            between = int(picks[0, 0, 0, 0])
            states.append((between, exit_))
            exit_ = between
        return ((ends[0], exit_), *reversed(states))


def _joined(left: Floats, right: Floats, weights: Floats) -> tuple[Floats, np.ndarray]:
    """One after the other, by the cheapest placement between them, (..., 2, J, A, C, 5) and picks.

    There may be several in front, (..., 2, J, A, B, 5).
    """
    if left.shape[-2] == 1 and right.shape[-3] == 1:
        sums = left[..., :, 0, None, :] + right[..., None, 0, :, :]
        return sums, np.zeros(sums.shape[:-1], dtype=np.int64)
    priced = np.einsum("...rjabp,rjp->...rjab", left, weights)
    other = np.einsum("rjabp,rjp->rjab", right, weights)
    best = priced[..., :, 0, None] + other[..., None, 0, :]
    picks = np.zeros(best.shape, dtype=np.int64)
    for between in range(1, left.shape[-2]):
        sums = priced[..., :, between, None] + other[..., None, between, :]
        picks[sums < best] = between
        np.minimum(best, sums, out=best)
    return _rows_of(left, _lines(picks.shape[:-1])[..., None] * left.shape[-2] + picks) + _rows_of(
        right,
        (_lines(right.shape[:2])[:, :, None, None] * right.shape[2] + picks) * right.shape[3]
        + np.arange(right.shape[3]),
    ), picks


def _lines(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _rows_of(table: Floats, lines: np.ndarray) -> Floats:
    return table.reshape(-1, table.shape[-1]).take(lines, axis=0)


def _solve(setting: Setting, unit: Unit, weights: Floats) -> Solved:
    """All pairs of placements at the ends, all prices at once."""
    made = _Graph(setting, unit)
    graph = made.graph
    prices = weights.reshape(-1, len(PARTS))
    found = _choices(graph, prices) if setting.tensor > 1 else {}  # else there is no choice
    entries, exits = (
        setting.placements(tensor) if tensor else ("",) for tensor in (unit.entry, unit.exit)
    )
    whole = (len(entries), len(exits), len(prices))
    chosen = found | {
        ENDS[0]: np.arange(len(entries))[:, None, None],
        ENDS[1]: np.arange(len(exits))[:, None],
    }
    none = np.zeros((1, 1, 1), dtype=np.int64)
    picks = {name: chosen.get(name, none) for name in graph.nodes}
    rows = np.broadcast_to(_evaluate(graph, picks), (*whole, len(PARTS)))
    rows = np.moveaxis(rows, 2, 0).reshape(*weights.shape[:2], *whole[:2], len(PARTS)).copy()
    if unit.entry:
        parts = np.array([setting.tensor if state.startswith("S") else 1 for state in entries])
        rows[1, ..., 4] = (setting.bytes_of(unit.entry) / parts)[:, None]
    else:
        rows[1, ..., 4] = 0.0
    strategies = {name: np.broadcast_to(pick, whole) for name, pick in picks.items()}
    return Solved(rows, strategies, made.rules, graph)


def _choices(graph: ChoiceGraph, prices: Floats) -> dict[str, np.ndarray]:
    """Of every node for each pair of placements at the ends and each price."""
    network = make_network(graph, all_choices(graph))
    scopes = [tuple(name for name in scope if name not in ENDS) for scope in network.scopes]
    sizes = {name: size for name, size in network.sizes.items() if name not in ENDS}
    order = _order(tuple(scopes), tuple(sizes.items()))
    return find_bounds(network, order, prices, whole=False, given=ENDS).choices


@lru_cache(maxsize=512)
def _order(scopes: tuple[tuple[str, ...], ...], sizes: tuple[tuple[str, int], ...]) -> Order:
    """Structures, and sizes of micro-batches, often have the same one."""
    return order_eliminations(scopes, dict(sizes), BUDGET)


def _evaluate(graph: ChoiceGraph, chosen: Mapping[str, np.ndarray]) -> Floats:
    """(..., d) of strategies."""
    total: Floats = sum(costs[chosen[name]] for name, costs in graph.nodes.items())
    for (source, target), costs in graph.edges.items():
        total = total + costs[chosen[source], chosen[target]]
    return total


class _Graph:
    """The graph of choices of a unit: operators, and tensors that several of them use."""

    def __init__(self, setting: Setting, unit: Unit) -> None:
        self.setting = setting
        self.unit = unit
        graph = setting.work.graph
        self.operators = graph.operators[unit.start : unit.stop]
        self.rules = {operator.name: legal(setting, operator) for operator in self.operators}
        self.made = {tensor: o for o in self.operators for tensor in o.outputs}
        self.states: dict[str, tuple[tuple[str, str], ...]] = {}
        self.names: dict[str, str] = {}
        self.nodes: dict[str, Floats] = {}
        self.edges: dict[tuple[str, str], Floats] = {}
        self._tensors()
        self._operators()
        self.graph = ChoiceGraph(PARTS, self.nodes, self.edges)

    def _tensors(self) -> None:
        uses: dict[str, int] = {}
        for operator in self.operators:
            for tensor in dict.fromkeys(operator.inputs):
                uses[tensor] = uses.get(tensor, 0) + 1
        shared = [t for t, n in uses.items() if n > 1 and t in self.made]
        ends = {self.unit.entry: ENDS[0], self.unit.exit: ENDS[1]}
        for tensor in dict.fromkeys([self.unit.entry, self.unit.exit, *shared]):
            if not tensor or tensor in self.setting.work.fixed:
                continue
            states = [(place, place) for place in self.setting.placements(tensor)]
            if tensor not in ends and self.setting.tensor > 1:
                states.append(("R", "P"))  # gradients are added up before they are summed
            self.names[tensor] = ends.get(tensor, f"={tensor}")
            self.states[tensor] = tuple(states)
            self.nodes[self.names[tensor]] = np.zeros((len(states), len(PARTS)))

    def _operators(self) -> None:
        counted: set[str] = set()
        graph = self.setting.work.graph
        held = {*graph.parameters, *graph.buffers, *graph.inputs}
        for operator in self.operators:
            own = [s.name for s in operator.saved if s.name not in held and s.name not in counted]
            counted.update(own)
            self.nodes[operator.name] = np.array(
                [cost(self.setting, operator, r, tuple(own)) for r in self.rules[operator.name]]
            )
            for number, tensor in enumerate(operator.inputs):
                self._enters(operator, number, tensor)
        for tensor, name in self.names.items():
            if self.setting.tensor > 1 and (maker := self.made.get(tensor)) is not None:
                place = maker.outputs.index(tensor)
                sources = [(r.outputs[place], wanted(r.outputs[place])) for r in self._of(maker)]
                self._edge(maker.name, name, tensor, sources, list(self.states[tensor]))

    def _of(self, operator: Operator) -> tuple[Rule, ...]:
        return self.rules[operator.name]

    def _enters(self, operator: Operator, number: int, tensor: str) -> None:
        if tensor in self.setting.work.fixed or self.setting.tensor == 1:
            return
        targets = [(r.inputs[number], r.gradients[number]) for r in self._of(operator)]
        if tensor in self.names:
            self._edge(
                self.names[tensor], operator.name, tensor, list(self.states[tensor]), targets
            )
        elif (maker := self.made.get(tensor)) is not None:
            place = maker.outputs.index(tensor)
            sources = [(r.outputs[place], wanted(r.outputs[place])) for r in self._of(maker)]
            self._edge(maker.name, operator.name, tensor, sources, targets)

    def _edge(
        self,
        source: str,
        target: str,
        tensor: str,
        sources: list[tuple[str, str]],
        targets: list[tuple[str, str]],
    ) -> None:
        size = self.setting.bytes_of(tensor)
        floating = self.setting.work.graph.tensors[tensor].floating
        price = self.setting.relayout.seconds
        costs = np.zeros((len(sources), len(targets), len(PARTS)))
        known: dict[tuple[str, str], float] = {}
        for one, (lies, wants) in enumerate(sources):
            for two, (needs, gives) in enumerate(targets):
                for part, pair in enumerate(((lies, needs), (gives, wants))[: 1 + floating]):
                    if pair not in known:
                        known[pair] = price(*pair, size)
                    costs[one, two, part] = known[pair]
        before = self.edges.get((source, target))
        self.edges[source, target] = costs if before is None else before + costs


def tables(setting: Setting, row: tuple[Unit, ...], classes: Stretches) -> Tables:
    """Tables for a setting; `row` and `classes` are those of `units` and `stretches`."""
    flops = setting.work.graph.flops.total * setting.scale / setting.tensor
    rate = next(iter(setting.machine.device.peak.values()))
    return Tables(setting, row, classes, flops / rate)
