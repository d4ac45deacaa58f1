"""The graph of choices, its costs as tables, and the order in which its nodes are eliminated.

A strategy gives one choice to every node of a `ChoiceGraph`; its cost is the sum of the costs of
its nodes and edges, objective by objective. Costs are not negative; infinity forbids a choice or a
pair.

As tables, a cost is an array (d or J, C_1, ..., C_k, K): objectives first, then one axis for each
node of its scope, then the rows of each cell. Nodes with one choice are in no scope; their edges
become costs of the other end.

An elimination step takes all tables that mention a node and leaves one over the node's neighbours;
every rule is exact (Jia et al. 2018, OptCNN, theorems 1 and 2). The rules are edge, merge,
contract, node and triangle of Cai et al. 2022 (TensorOpt); where none applies, bucket elimination
by least fill (Dechter 1999). Leaves go first, so that a chain is solved from its beginning by the
linear dynamic programme (FT-LDP).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.cost.device import Array
from headway.errors import PlanError

Ints: TypeAlias = NDArray[np.int64]

BUDGET = 2_000_000
"""Cells of an elimination step above which choices of the most entangled node are tried instead."""


@dataclass(frozen=True)
class ChoiceGraph:
    """Choices of nodes, and what they cost.

    Attributes:
        objectives: Names of the d objectives, such as ("bytes", "seconds").
        nodes: Costs of the choices of a node, (C_v, d).
        edges: Costs of the pairs of choices of two nodes, (C_u, C_v, d).
        options: Names of the choices of a node, where they have names.
        forced: Choice that a node must take, where the user has said so.

    Raises:
        PlanError: Shapes or values that make no sense, all of them together.
    """

    objectives: tuple[str, ...]
    nodes: Mapping[str, Array]
    edges: Mapping[tuple[str, str], Array] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forced: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = tuple(_problems(self))
        if problems:
            raise PlanError(
                "the graph of choices cannot be searched",
                problems=problems,
                fix="correct the costs of these nodes and edges",
            )

    def evaluate(self, choices: Mapping[str, int] | Mapping[str, Ints]) -> Array:
        """Cost (d,) of a strategy that names the choice of every node; of strategies (n,) or any
        shapes that broadcast, (..., d)."""
        total: Array = sum(
            (costs[choices[name]] for name, costs in self.nodes.items()), np.zeros(1)
        )
        for (source, target), costs in self.edges.items():
            total = total + costs[choices[source], choices[target]]
        return total

    def named(self, choices: Mapping[str, int]) -> dict[str, str]:
        """A strategy by the names of its choices; the number where a choice has no name."""
        return {
            node: self.options[node][choice] if node in self.options else str(choice)
            for node, choice in choices.items()
        }


def _problems(graph: ChoiceGraph) -> Iterator[str]:
    width = len(graph.objectives)
    if not width:
        yield "there is no objective"
    if len(set(graph.objectives)) < width:
        yield f"objectives must have different names: {', '.join(graph.objectives)}"
    if not graph.nodes:
        yield "there is no node"
    for name, costs in graph.nodes.items():
        if costs.ndim != 2 or costs.shape[1] != width or len(costs) == 0:
            yield f"node {name}: costs are {costs.shape}, must be (choices, {width})"
        else:
            yield from _values(f"node {name}", costs)
    for (source, target), costs in graph.edges.items():
        yield from _problems_of_edge(graph, source, target, costs)
    yield from _problems_of_choices(graph)


def _problems_of_edge(graph: ChoiceGraph, source: str, target: str, costs: Array) -> Iterator[str]:
    label = f"edge {source} -> {target}"
    unknown = [name for name in (source, target) if name not in graph.nodes]
    if unknown:
        yield f"{label}: no node {', '.join(unknown)}"
        return
    if source == target:
        yield f"{label}: joins a node to itself; add its costs to those of the node"
        return
    expected = (len(graph.nodes[source]), len(graph.nodes[target]), len(graph.objectives))
    if costs.shape != expected:
        yield f"{label}: costs are {costs.shape}, must be {expected}"
    else:
        yield from _values(label, costs)


def _values(label: str, costs: Array) -> Iterator[str]:
    if np.isnan(costs).any():
        yield f"{label}: a cost is not a number"
    elif (costs < 0).any():
        yield f"{label}: a cost is negative ({costs.min():g})"


def _problems_of_choices(graph: ChoiceGraph) -> Iterator[str]:
    for name, options in graph.options.items():
        number = len(graph.nodes.get(name, ()))
        if number != len(options):
            yield f"node {name}: {len(options)} names for {number} choices"
    for name, choice in graph.forced.items():
        number = len(graph.nodes.get(name, ()))
        if not 0 <= choice < number:
            yield f"node {name}: choice {choice} is forced, there are {number}"


@dataclass(frozen=True, slots=True)
class CostTables:
    """Tables of one row per cell.

    Attributes:
        kept: The choices of each node that are still considered, by their number in the graph.
        sizes: Number of choices, of nodes with more than one.
        tables: Costs (d, C_1, ..., C_k, 1) of each table.
    """

    kept: Mapping[str, Ints]
    sizes: Mapping[str, int]
    scopes: tuple[tuple[str, ...], ...]
    tables: tuple[Array, ...]

    def chosen(self, choices: Mapping[str, Ints], number: int) -> dict[str, Ints]:
        """Of this number of strategies the choices as the graph numbers them."""
        # A node with one choice is in no scope, so no step records it: all strategies take its
        # place 0.
        only = np.zeros(number, dtype=np.int64)
        return {name: kept[choices.get(name, only)] for name, kept in self.kept.items()}


def make_cost_tables(graph: ChoiceGraph, kept: Mapping[str, Ints]) -> CostTables:
    """The tables of a graph in which only some choices of each node are considered."""
    sizes = {name: len(kept[name]) for name in graph.nodes if len(kept[name]) > 1}
    scopes: list[tuple[str, ...]] = []
    tables: list[Array] = []
    for name, costs in graph.nodes.items():
        _add(scopes, tables, (name,), costs[kept[name]], sizes)
    for (source, target), costs in graph.edges.items():
        part = costs[kept[source]][:, kept[target]]
        _add(scopes, tables, (source, target), part, sizes)
    return CostTables(kept, sizes, tuple(scopes), tuple(tables))


def all_choices(graph: ChoiceGraph) -> dict[str, Ints]:
    """What is considered at first: the forced choice of a node, or all."""
    return {
        name: np.array([graph.forced[name]]) if name in graph.forced else np.arange(len(costs))
        for name, costs in graph.nodes.items()
    }


def _add(
    scopes: list[tuple[str, ...]],
    tables: list[Array],
    nodes: tuple[str, ...],
    costs: Array,
    sizes: Mapping[str, int],
) -> None:
    scope = tuple(name for name in nodes if name in sizes)
    moved = np.moveaxis(np.asarray(costs, dtype=np.float64), -1, 0)
    # A pair that is forbidden in one objective is forbidden in all, so that later tests may look at
    # the first objective alone.
    infinite = np.isinf(moved)
    table = np.where(infinite.any(axis=0), np.inf, moved) if infinite.any() else moved
    scopes.append(scope)
    tables.append(table.reshape(len(moved), *(sizes[name] for name in scope), 1))


def align(table: Array, scope: Sequence[str], axes: Sequence[str]) -> Array:
    """A table with its axes in another order, and of length 1 where it lacks a node."""
    order, places = _aligned(tuple(scope), tuple(axes))
    shape = (*table.shape, 1)
    return table.transpose(order).reshape([shape[place] for place in places])


@lru_cache(maxsize=4096)
def _aligned(
    scope: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the order of the axes, which axis has the length of each of the result; behind all: 1)."""
    last = len(scope) + 1
    order = sorted(range(len(scope)), key=lambda place: axes.index(scope[place]))
    found = {name: 1 + place for place, name in enumerate(scope)}
    lengths = (found.get(name, last + 1) for name in axes)
    return (0, *(1 + place for place in order), last), (0, *lengths, last)


@dataclass(frozen=True, slots=True)
class Elimination:
    """What was eliminated: a node, or with the rule "edge" one of two parallel edges.

    Attributes:
        rule: As in the module's docstring; "last" is the only node left of its component;
            "condition" is a node of which every choice was tried, "fix" one of which only some
            were.
        node: Its name; for an edge "source -> target".
        neighbours: Nodes that it was joined to; their number is the width of the step.
    """

    rule: str
    node: str
    neighbours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """Tables that become one table.

    Attributes:
        node: What is chosen in this step; None for a mere sum of tables.
        inputs: Numbers of the tables; the given ones come first, then the results in order.
        scope: Nodes over which the new table stands.
    """

    node: str | None
    inputs: tuple[int, ...]
    result: int
    scope: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """All steps.

    Attributes:
        steps: In order; after them only tables without nodes are left.
        blocked: Nodes that were taken out because a step would have exceeded the budget.
    """

    steps: tuple[EliminationStep, ...]
    log: tuple[Elimination, ...]
    blocked: tuple[str, ...]


def order_eliminations(
    scopes: Sequence[tuple[str, ...]], sizes: Mapping[str, int], budget: int
) -> EliminationOrder:
    """The order for tables over these nodes.

    Args:
        scopes: Nodes of each given table: one, or source and target of an edge.
        budget: Most pairs of (choices of the neighbours, choice of the node) in one step.
    """
    search = _OrderSearch(scopes, sizes, budget)
    search.run()
    return EliminationOrder(tuple(search.steps), tuple(search.log), tuple(search.blocked))


class _OrderSearch:
    def __init__(
        self, scopes: Sequence[tuple[str, ...]], sizes: Mapping[str, int], budget: int
    ) -> None:
        self.sizes = sizes
        self.budget = budget
        self.place = {name: number for number, name in enumerate(sizes)}
        self.scopes = dict(enumerate(scopes))
        self.next = len(scopes)
        self.tables: dict[str, set[int]] = {name: set() for name in sizes}
        self.steps: list[EliminationStep] = []
        self.log: list[Elimination] = []
        self.blocked: list[str] = []
        self.heap: list[tuple[tuple[int, int, int], str]] = []

    def run(self) -> None:
        for number in list(self.scopes):
            self._enter(number)
        for name in self.tables:
            self._offer(name)
        while self.tables:
            found = self._pop() or self._least_fill()
            if found is None:
                self._block()
            else:
                self._eliminate(found)

    def neighbours(self, name: str) -> tuple[str, ...]:
        found = {other for number in self.tables[name] for other in self.scopes[number]}
        return tuple(sorted(found - {name}, key=self.place.__getitem__))

    def _enter(self, number: int) -> None:
        """Adds a table; if there is one over the same nodes, both become one."""
        scope = self.scopes[number]
        if scope and (other := self._same(number)) is not None:
            self._leave(other)
            joined = self._step(None, (other, number), self.scopes[other])
            if len(scope) > 1:
                self.log.append(Elimination("edge", " -> ".join(scope), scope))
            del self.scopes[number]
            self._enter(joined)
            return
        for name in scope:
            self.tables[name].add(number)

    def _same(self, number: int) -> int | None:
        scope = set(self.scopes[number])
        # A table over the same nodes is listed at each of them; the shortest list is searched.
        fewest = min(scope, key=lambda name: len(self.tables[name]))
        found = (n for n in self.tables[fewest] if n != number and set(self.scopes[n]) == scope)
        return next(found, None)

    def _leave(self, number: int) -> None:
        for name in self.scopes[number]:
            self.tables[name].discard(number)

    def _step(self, node: str | None, inputs: tuple[int, ...], scope: tuple[str, ...]) -> int:
        self.steps.append(EliminationStep(node, inputs, self.next, scope))
        self.scopes[self.next] = scope
        self.next += 1
        return self.next - 1

    def _offer(self, name: str) -> None:
        """Puts a node that an exact rule of TensorOpt fits into the heap."""
        near = self.neighbours(name)
        rule = self._rule(name, near)
        if rule == "bucket" or self._cells(name, near) > self.budget:
            return
        # Leaves go in the graph's order whatever they cost: a chain is then solved from its
        # beginning (FT-LDP). Of the others the smallest product goes first.
        rank = {"node": 1, "triangle": 2}.get(rule, 0)
        key = (rank, self._cells(name, near) if rank else 0, self.place[name])
        heapq.heappush(self.heap, (key, name))

    def _pop(self) -> str | None:
        """The first node of the heap whose entry is still true."""
        while self.heap:
            key, name = heapq.heappop(self.heap)
            # Entries are not removed when an elimination changes a node's neighbours; it is offered
            # again.
            if name in self.tables:
                near = self.neighbours(name)
                rule = self._rule(name, near)
                if rule != "bucket" and {"node": 1, "triangle": 2}.get(rule, 0) == key[0]:
                    return name
        return None

    def _rule(self, name: str, near: tuple[str, ...]) -> str:
        if len(near) == 0:
            return "last"
        # `_enter` has joined parallel edges: there is one edge for each neighbour.
        edges = [self.scopes[n] for n in self.tables[name] if len(self.scopes[n]) > 1]
        # A bucket leaves a table over three or more nodes, of which TensorOpt's rules know nothing.
        if len(near) > 2 or any(len(edge) > 2 for edge in edges):
            return "bucket"
        outward = [edge[0] == name for edge in edges]
        if len(near) == 1:
            return "merge" if outward[0] else "contract"
        if outward[0] != outward[1]:
            return "node"
        return "triangle" if self._adjacent(*near) else "bucket"

    def _adjacent(self, first: str, second: str) -> bool:
        return any(second in self.scopes[number] for number in self.tables[first])

    def _cells(self, name: str, near: tuple[str, ...]) -> int:
        return self.sizes[name] * prod(self.sizes[other] for other in near)

    def _least_fill(self) -> str | None:
        """The node whose elimination joins the fewest pairs anew, of those within the budget."""
        near = {name: self.neighbours(name) for name in self.tables}
        sets = {name: set(others) for name, others in near.items()}
        best: tuple[tuple[int, int, int], str] | None = None
        for name, others in near.items():
            cells = self._cells(name, others)
            if cells <= self.budget:
                # Every missing pair counts twice, once from each end, which does not change the
                # order.
                fill = sum(len(others) - 1 - len(sets[other] & sets[name]) for other in others)
                key = (fill, cells, self.place[name])
                best = min(best, (key, name)) if best else (key, name)
        return best[1] if best else None

    def _block(self) -> None:
        """Takes the node with the most neighbours out of all tables: its choice will be given."""
        name = max(self.tables, key=lambda n: (len(self.neighbours(n)), -self.place[n]))
        self.blocked.append(name)
        near = self.neighbours(name)
        for number in sorted(self.tables[name]):
            self._leave(number)
            scope = tuple(other for other in self.scopes[number] if other != name)
            self.scopes[number] = scope
            self._enter(number)
        del self.tables[name]
        for other in near:
            self._offer(other)

    def _eliminate(self, name: str) -> None:
        near = self.neighbours(name)
        self.log.append(Elimination(self._rule(name, near), name, near))
        scope = self._orientation(name, near)
        inputs = tuple(sorted(self.tables[name]))
        for number in inputs:
            self._leave(number)
        result = self._step(name, inputs, scope)
        del self.tables[name]
        self._enter(result)
        for other in near:
            self._offer(other)

    def _orientation(self, name: str, near: tuple[str, ...]) -> tuple[str, ...]:
        """Of a new edge: from the source of the way through the node, else in the given order."""
        if len(near) != 2:
            return near
        # `_rule` tells "node" from "triangle" by the direction of the edges, so a new one must have
        # one.
        sources = {self.scopes[n][0] for n in self.tables[name] if len(self.scopes[n]) == 2}
        return near if near[0] in sources or near[1] not in sources else near[::-1]
