"""The cheapest strategies of one structure of unit: the graph of choices, solved at all prices.

For each placement of what enters and leaves a unit, and each price, the frontier engine finds the
strategy of least weighted cost. Invariant: what a strategy costs is the sum of its operators'
choices and of the re-layouts between them. Source: Cai et al. 2022 (TensorOpt), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headway.graph import Operator, Rule
from headway.planner.frontier.bounds import find_bounds
from headway.planner.frontier.network import all_choices, make_network
from headway.planner.frontier.problem import ChoiceGraph
from headway.planner.frontier.rules import Order, order_eliminations
from headway.planner.frontier.solve import BUDGET
from headway.planner.operators import PARTS, Floats, Setting, cost, legal
from headway.planner.relayout import wanted
from headway.planner.row import Unit

ENDS = ("<entry", "exit>")
"""Nodes of what enters and leaves a unit."""


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


def solve_unit(setting: Setting, unit: Unit, weights: Floats) -> Solved:
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
        for operator in self.operators:
            names = (saved.name for saved in operator.saved)
            own = [name for name in names if name not in graph.held and name not in counted]
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
        costs = np.zeros((len(sources), len(targets), len(PARTS)))
        both = 1 + self.setting.work.graph.tensors[tensor].floating
        size = self.setting.bytes_of(tensor)
        found = self.setting.relayout.table(tuple(sources), tuple(targets), size)
        costs[..., :both] = found[..., :both]
        before = self.edges.get((source, target))
        self.edges[source, target] = costs if before is None else before + costs
