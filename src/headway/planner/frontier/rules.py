"""In which order the nodes of a graph are eliminated, and by which rule.

Invariant: every rule is exact. A step takes the tables that mention a node and leaves one over the
node's neighbours, in which the best choice of the node has been made for each of their choices;
costs are sums, and the neighbours are all that the node can see (Jia et al. 2018, OptCNN, theorems
1 and 2). Rules as in Cai et al. 2022 (TensorOpt): edge, merge, contract, node, triangle; where all
are stuck, bucket elimination by least fill (Dechter 1999). Leaves go first, so that a chain is
solved from its beginning by the linear dynamic programme (FT-LDP).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

RULES = ("edge", "merge", "contract", "node", "triangle", "bucket", "last", "condition", "fix")


@dataclass(frozen=True, slots=True)
class Elimination:
    """What was eliminated: a node, or with the rule "edge" one of two parallel edges.

    Attributes:
        rule: One of `RULES`; "last" is the only node left of its component; "condition" is a node
            of which every choice was tried, "fix" one of which only some were.
        node: Its name; for an edge "source -> target".
        neighbours: Nodes that it was joined to; their number is the width of the step.
    """

    rule: str
    node: str
    neighbours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Tables that become one table.

    Attributes:
        node: What is chosen in this step; None for a mere sum of tables.
        inputs: Numbers of the tables; the given ones come first, then the results in order.
        result: Number of the new table.
        scope: Nodes over which the new table stands.
    """

    node: str | None
    inputs: tuple[int, ...]
    result: int
    scope: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """All steps.

    Attributes:
        steps: In order; after them only tables without nodes are left.
        log: The eliminations, by rule.
        blocked: Nodes that were taken out because a step would have exceeded the budget.
    """

    steps: tuple[Step, ...]
    log: tuple[Elimination, ...]
    blocked: tuple[str, ...]

    @property
    def width(self) -> int:
        """The most neighbours of a node at its elimination."""
        return max((len(entry.neighbours) for entry in self.log if entry.rule != "edge"), default=0)


def order_eliminations(
    scopes: Sequence[tuple[str, ...]], sizes: Mapping[str, int], budget: int
) -> Order:
    """The order for tables over these nodes.

    Args:
        scopes: Nodes of each given table: one, or source and target of an edge.
        sizes: Number of choices of each node.
        budget: Most pairs of (choices of the neighbours, choice of the node) in one step.
    """
    search = _Search(scopes, sizes, budget)
    search.run()
    return Order(tuple(search.steps), tuple(search.log), tuple(search.blocked))


class _Search:
    """The graph as it shrinks."""

    def __init__(
        self, scopes: Sequence[tuple[str, ...]], sizes: Mapping[str, int], budget: int
    ) -> None:
        self.sizes = sizes
        self.budget = budget
        self.place = {name: number for number, name in enumerate(sizes)}
        self.scopes = dict(enumerate(scopes))
        self.next = len(scopes)
        self.tables: dict[str, set[int]] = {name: set() for name in sizes}
        self.steps: list[Step] = []
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
        fewest = min(scope, key=lambda name: len(self.tables[name]))
        found = (n for n in self.tables[fewest] if n != number and set(self.scopes[n]) == scope)
        return next(found, None)

    def _leave(self, number: int) -> None:
        for name in self.scopes[number]:
            self.tables[name].discard(number)

    def _step(self, node: str | None, inputs: tuple[int, ...], scope: tuple[str, ...]) -> int:
        self.steps.append(Step(node, inputs, self.next, scope))
        self.scopes[self.next] = scope
        self.next += 1
        return self.next - 1

    def _offer(self, name: str) -> None:
        """Puts a node that an exact rule of TensorOpt fits into the heap."""
        near = self.neighbours(name)
        rule = self._rule(name, near)
        if rule == "bucket" or self._cells(name, near) > self.budget:
            return
        rank = {"node": 1, "triangle": 2}.get(rule, 0)
        key = (rank, self._cells(name, near) if rank else 0, self.place[name])
        heapq.heappush(self.heap, (key, name))

    def _pop(self) -> str | None:
        """The first node of the heap whose entry is still true."""
        while self.heap:
            key, name = heapq.heappop(self.heap)
            if name in self.tables:
                near = self.neighbours(name)
                rule = self._rule(name, near)
                if rule != "bucket" and {"node": 1, "triangle": 2}.get(rule, 0) == key[0]:
                    return name
        return None

    def _rule(self, name: str, near: tuple[str, ...]) -> str:
        if len(near) == 0:
            return "last"
        edges = [self.scopes[n] for n in self.tables[name] if len(self.scopes[n]) > 1]
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
        sources = {self.scopes[n][0] for n in self.tables[name] if len(self.scopes[n]) == 2}
        return near if near[0] in sources or near[1] not in sources else near[::-1]
