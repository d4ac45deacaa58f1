"""The cut and partition constraints that bound a tree packing, and how violated ones are found.

A packing of rate r exists exactly if every set of ranks without the root is entered by r
(broadcast; Edmonds 1973), or every partition into p parts is crossed by r (p - 1) (all-reduce;
Tutte 1961, Nash-Williams 1961). Both read: the edges of each constraint carry r * demand or
more. For few ranks all constraints are listed; for more they are separated by minimum cuts: for
each rank one cut, and for partitions the greedy algorithm for the least sum over the parts P of
x(border of P) / 2 - r (Cunningham 1985, Barahona 1992: one cut for each rank).

The algorithms on graphs that this needs stand here too, on dense matrices for some dozen ranks:
minimum cuts by Dinic's maximum flow (1970), the shortest arborescence (Chu and Liu 1965,
Edmonds 1967) and the shortest spanning tree (Prim 1957).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headway.collective.nodes import Parents, set_partitions
from headway.collective.packing.tree import WeightedTree, root_tree
from headway.collective.topology import LinkGraph

# Of the largest capacity: less than this is no capacity.
_CRUMB = 1e-12


def min_cut(capacity: Sequence[Sequence[float]], source: int, sink: int) -> tuple[float, set[int]]:
    """The least capacity whose removal parts a sink from a source, and the source's smallest side.

    Args:
        capacity: Row i, column j: from i to j; 0: no arc.
    """
    n = len(capacity)
    rest = [list(row) for row in capacity]
    near = [[j for j in range(n) if rest[i][j] > 0 or rest[j][i] > 0] for i in range(n)]
    crumb = _CRUMB * max(map(max, rest))
    while True:
        level = _levels(rest, near, source, crumb)
        if level[sink] < 0:
            break
        _block(rest, near, level, source, sink, crumb)
    # What the last search reached is the source's side of a minimum cut.
    side = {i for i in range(n) if level[i] >= 0}
    return sum(capacity[i][j] for i in side for j in near[i] if j not in side), side


def _levels(rest: list[list[float]], near: list[list[int]], source: int, crumb: float) -> list[int]:
    """By rank, the residual arcs from the source; -1: not reached."""
    level = [-1] * len(rest)
    level[source] = 0
    # The list grows while it is walked: breadth first.
    for i in (todo := [source]):
        row = rest[i]
        for j in near[i]:
            if level[j] < 0 and row[j] > crumb:
                level[j] = level[i] + 1
                todo.append(j)
    return level


def _block(
    rest: list[list[float]],
    near: list[list[int]],
    level: list[int],
    source: int,
    sink: int,
    crumb: float,
) -> None:
    """Fill shortest paths until each has a full arc."""
    # Dinic's current arcs: one that has led nowhere is not tried again in this phase.
    tried = [0] * len(rest)
    path = [source]
    while path:
        i = path[-1]
        if i == sink:
            _fill(rest, path)
            path = [source]
            continue
        while tried[i] < len(near[i]):
            j = near[i][tried[i]]
            if level[j] == level[i] + 1 and rest[i][j] > crumb:
                path.append(j)
                break
            tried[i] += 1
        else:
            path.pop()
            if path:
                tried[path[-1]] += 1


def _fill(rest: list[list[float]], path: list[int]) -> None:
    arcs = list(pairwise(path))
    least = min(rest[i][j] for i, j in arcs)
    for i, j in arcs:
        rest[i][j] -= least
        rest[j][i] += least


# The shortest spanning tree for given lengths: with directions from a root, and without.


Matrix = Sequence[Sequence[float]]


def arborescence(length: Matrix, root: int) -> list[int]:
    """The parent of each rank in the shortest tree away from a root, which is its own parent.

    Args:
        length: Row i, column j: of the arc from i to j; infinite: there is none. Not negative.

    Raises:
        ValueError: No tree reaches all ranks.
    """
    n = len(length)
    columns = [[length[i][j] if i != j else math.inf for i in range(n)] for j in range(n)]
    return _shortest(columns, root)


def _shortest(into: list[list[float]], root: int) -> list[int]:
    """`into[j][i]`: length of the arc from i to j."""
    n = len(into)
    parent = [min(range(n), key=column.__getitem__) for column in into]
    parent[root] = root
    for j in range(n):
        if j != root and math.isinf(into[j][parent[j]]):
            raise ValueError(f"no arc into {j}")
    cycle = _cycle(parent, root)
    return parent if not cycle else _solve_contracted(into, root, parent, cycle)


def _cycle(parent: Sequence[int], root: int) -> list[int]:
    """The ranks of one cycle; empty: there is none."""
    state = [0] * len(parent)
    state[root] = -1
    for start in range(1, len(parent) + 1):
        rank = start - 1
        while state[rank] == 0:
            state[rank] = start
            rank = parent[rank]
        if state[rank] == start:
            found = [rank]
            while (rank := parent[rank]) != found[0]:
                found.append(rank)
            return found
    return []


def _solve_contracted(
    into: list[list[float]], root: int, parent: list[int], cycle: list[int]
) -> list[int]:
    """Contract a cycle to one rank, solve, and open it where the solution enters it."""
    n, inside = len(into), set(cycle)
    kept = [rank for rank in range(n) if rank not in inside]
    entry, leave = [0] * n, [0] * n
    entering = []  # into the cycle, from each kept rank, less the arc that it replaces
    for i in kept:
        # Compared by what an arc adds to the one that it replaces in the cycle.
        entry[i] = min(cycle, key=lambda j: into[j][i] - into[j][parent[j]])
        entering.append(into[entry[i]][i] - into[entry[i]][parent[entry[i]]])
    smaller = []
    for j in kept:
        leave[j] = min(cycle, key=into[j].__getitem__)
        smaller.append([into[j][i] for i in kept] + [into[j][leave[j]]])
    smaller.append([*entering, math.inf])
    below = _shortest(smaller, kept.index(root))
    whole = list(parent)
    for place, j in enumerate(kept):
        whole[j] = leave[j] if below[place] == len(kept) else kept[below[place]]
    whole[root] = root
    source = kept[below[-1]]
    whole[entry[source]] = source
    return whole


def spanning_tree(length: Matrix) -> list[int]:
    """The parent of each rank in the shortest tree without directions, hung up at rank 0.

    Args:
        length: Symmetric; infinite: there is no link.

    Raises:
        ValueError: No tree reaches all ranks.
    """
    n = len(length)
    best, parent = list(length[0]), [0] * n
    left = list(range(1, n))
    while left:
        rank = min(left, key=best.__getitem__)
        if math.isinf(best[rank]):
            raise ValueError(f"no link to {rank}")
        left.remove(rank)
        row = length[rank]
        for other in left:
            if row[other] < best[other]:
                best[other], parent[other] = row[other], rank
    return parent


# What limits a packing: cuts from a root, partitions of the ranks; all of them, or those found.


Vector = npt.NDArray[np.float64]
EdgeIndices = npt.NDArray[np.intp]
"""Places of edges; also of each rank the number of its part, one row per constraint."""

# Up to so many ranks all constraints are listed: 127 cuts, 4139 partitions.
LISTED = 8
# Relative to the rate: a constraint missed by less is kept.
_NEAR = 1e-9
# The length of an edge that is not there; finite, because differences of lengths are formed.
_LONG = 1e30


class PackingProblem(ABC):
    """One kind of packing on one graph.

    Attributes:
        edges: Arcs or links, in the order of all vectors.
        rows: Of each known constraint the edges that count for it, as 0 and 1.
        demand: Of each of them: what it needs, in units of the rate.
    """

    def __init__(
        self, ranks: int, edges: Sequence[tuple[int, int]], capacity: Iterable[float]
    ) -> None:
        self.ranks = ranks
        self.edges = tuple(edges)
        self.capacity = np.array([*capacity], dtype=np.float64)
        self.place = {edge: place for place, edge in enumerate(self.edges)}
        self.complete = ranks <= LISTED
        self.rows = np.zeros((0, len(self.edges)))
        self.demand = np.zeros(0)
        self._ends = np.array(self.edges, dtype=np.intp).reshape(-1, 2).T

    @abstractmethod
    def cheapest(self, length: Vector) -> EdgeIndices:
        """The edges of the shortest tree, ascending; lengths are not negative."""

    @abstractmethod
    def parents(self, chosen: EdgeIndices) -> Parents:
        """The tree of these edges, hung up."""

    @abstractmethod
    def violated(self, capacity: Vector, rate: float) -> Sequence[EdgeIndices]:
        """Constraints that capacities miss at a rate, as the part of each rank; empty: none."""

    @abstractmethod
    def _row(self, labels: EdgeIndices) -> Vector:
        """The edges that count for constraints, which are given as the part of each rank."""

    def add(self, labels: EdgeIndices) -> None:
        """Know more constraints: one row for each, the part of each rank, from 0 upwards."""
        self.rows = np.vstack([self.rows, self._row(labels)])
        # Parts are numbered from 0: the largest number is 1 for a cut, p - 1 for a partition.
        self.demand = np.concatenate([self.demand, labels.max(axis=1).astype(np.float64)])

    def bound(self, capacity: Vector) -> float:
        """The highest rate that capacities allow."""
        # Ends: each round learns constraints that the last rate violates; they are finitely many.
        while True:
            rate = float((self.rows @ capacity / self.demand).min())
            if rate <= 0 or not self.learn(capacity, rate):
                return max(rate, 0.0)

    def chance(self, random: np.random.Generator, *, hubs: bool) -> Vector:
        """Lengths by chance, below 1: of each edge, or of the rank that sends, for flat trees."""
        if not hubs:
            return random.random(len(self.edges))
        ranks = random.random(self.ranks)
        return 0.9 * self._hub(ranks[self._ends]) + 0.1 * random.random(len(self.edges))

    @abstractmethod
    def _hub(self, ends: Vector) -> Vector:
        """The length of each edge from those of its two ends."""

    def slack(self, capacity: Vector, rate: float) -> Vector:
        """What each known constraint has more than a rate needs."""
        return self.rows @ capacity - rate * self.demand

    def depth(self, chosen: EdgeIndices) -> int:
        """Of a tree, from its root."""
        return WeightedTree(self.parents(chosen), 1.0).depth

    def learn(self, capacity: Vector, rate: float) -> bool:
        """Add the constraints that are missed at a rate; whether there was any."""
        if self.complete:
            return False
        found = self.violated(capacity, rate)
        if len(found):
            self.add(np.array(found))
        return len(found) > 0

    def matrix(self, values: Vector, absent: float, *, both: bool = False) -> list[list[float]]:
        """Values of the edges by rank and rank; `both`: also the other way round."""
        full = np.full((self.ranks, self.ranks), absent)
        full[self._ends[0], self._ends[1]] = values
        if both:
            full[self._ends[1], self._ends[0]] = values
        rows: list[list[float]] = full.tolist()
        return rows


class Arborescences(PackingProblem):
    """Trees away from a root: a broadcast."""

    def __init__(self, graph: LinkGraph, root: int) -> None:
        # No tree away from the root enters it.
        arcs = [arc for arc in graph.arcs if arc[1] != root]
        super().__init__(graph.ranks, arcs, (graph.rates[i][j] for i, j in arcs))
        self.root = root
        self.add(_cut_labels(graph.ranks, root) if self.complete else self._first())

    def _first(self) -> EdgeIndices:
        """What enters each rank, and what leaves the root."""
        labels = np.eye(self.ranks, dtype=np.intp)
        labels[self.root] = 1 - labels[self.root]
        return labels

    def _row(self, labels: EdgeIndices) -> Vector:
        entered: Vector = (labels[:, self._ends[0]] < labels[:, self._ends[1]]).astype(np.float64)
        return entered

    def _hub(self, ends: Vector) -> Vector:
        senders: Vector = ends[0]
        return senders

    def cheapest(self, length: Vector) -> EdgeIndices:
        parent = arborescence(self.matrix(length, _LONG), self.root)
        return np.array(
            [self.place[up, rank] for rank, up in enumerate(parent) if rank != self.root]
        )

    def parents(self, chosen: EdgeIndices) -> Parents:
        parent: list[int | None] = [None] * self.ranks
        for up, rank in (self.edges[place] for place in chosen):
            parent[rank] = up
        return tuple(parent)

    def violated(self, capacity: Vector, rate: float) -> Sequence[EdgeIndices]:
        arcs, found = self.matrix(np.maximum(capacity, 0.0), 0.0), []
        for sink in range(self.ranks):
            if sink != self.root:
                value, side = min_cut(arcs, self.root, sink)
                if value < rate * (1 - _NEAR):
                    found.append(np.array([int(i not in side) for i in range(self.ranks)]))
        # Several sinks may lie behind the same cut.
        return [*np.unique(found, axis=0)] if found else []


class SpanningTrees(PackingProblem):
    """Trees without directions: an all-reduce, which uses both directions of each link."""

    def __init__(self, graph: LinkGraph) -> None:
        links = graph.links
        super().__init__(graph.ranks, links, (graph.link_rate(i, j) for i, j in links))
        self.add(_partition_labels(graph.ranks) if self.complete else self._first())

    def _first(self) -> EdgeIndices:
        """Every rank for itself, and each against all others."""
        single = np.arange(self.ranks, dtype=np.intp)
        return np.vstack([single, np.eye(self.ranks, dtype=np.intp)])

    def _row(self, labels: EdgeIndices) -> Vector:
        crossed: Vector = (labels[:, self._ends[0]] != labels[:, self._ends[1]]).astype(np.float64)
        return crossed

    def _hub(self, ends: Vector) -> Vector:
        nearer: Vector = ends.min(axis=0)
        return nearer

    def cheapest(self, length: Vector) -> EdgeIndices:
        parent = spanning_tree(self.matrix(length, _LONG, both=True))
        pairs = ((min(up, rank), max(up, rank)) for rank, up in enumerate(parent) if rank)
        return np.array([self.place[pair] for pair in pairs])

    def parents(self, chosen: EdgeIndices) -> Parents:
        return root_tree([self.edges[place] for place in chosen], self.ranks)

    def violated(self, capacity: Vector, rate: float) -> Sequence[EdgeIndices]:
        """The partition that misses most, if any does."""
        between = self.matrix(np.maximum(capacity, 0.0), 0.0, both=True)
        blocks = _least_parts(between, rate)
        labels = np.zeros(self.ranks, dtype=np.intp)
        for label, block in enumerate(blocks):
            labels[[*block]] = label
        crossing = float((self._row(labels[None]) @ capacity)[0])
        missed = crossing < rate * (len(blocks) - 1) * (1 - _NEAR)
        return [labels] if missed else []


def _least_parts(between: list[list[float]], rate: float) -> list[set[int]]:
    """The partition with the least sum over its parts P of (border of P) / 2 - rate.

    Greedy, one rank after the other: y_j is the least of g(S) - y(S without j) over the sets S of
    j and earlier ranks; parts that share ranks with the set found become one.
    """
    n = len(between)
    price: list[float] = []
    blocks: list[set[int]] = []
    for j in range(n):
        least, found = _least_set(between, price, j)
        price.append(least - rate)
        apart = [block for block in blocks if not block & found]
        blocks = [*apart, found.union(*(block for block in blocks if block & found))]
    return blocks


def _least_set(
    between: list[list[float]], price: Sequence[float], j: int
) -> tuple[float, set[int]]:
    """Of the sets S of j and ranks before it, the least (border of S) / 2 - y(S without j).

    The cut of a network: 0 to j - 1 are ranks, j is the source, j + 1 stands for all later ranks.
    """
    rows = [[x / 2 for x in between[i][: j + 1]] + [0.0] for i in range(j + 1)]
    rows.append([0.0] * (j + 2))
    for i in range(j + 1):
        rows[i][j + 1] = sum(between[i][j + 1 :]) / 2
    # A rank in S saves y: an arc from the source, cut if it stays outside; or -y to the sink.
    for i, y in enumerate(price):
        if y > 0:
            rows[j][i] += y
        else:
            rows[i][j + 1] -= y
    value, side = min_cut(rows, j, j + 1)
    return value - sum(y for y in price if y > 0), side


@lru_cache(maxsize=64)
def _cut_labels(ranks: int, root: int) -> EdgeIndices:
    """All sets without the root: 1 for their ranks."""
    others = [rank for rank in range(ranks) if rank != root]
    labels = np.zeros((2 ** len(others) - 1, ranks), dtype=np.intp)
    numbers = np.arange(1, 2 ** len(others))
    for bit, rank in enumerate(others):
        labels[:, rank] = numbers >> bit & 1
    return labels


@lru_cache(maxsize=16)
def _partition_labels(ranks: int) -> EdgeIndices:
    """All partitions into two or more parts."""
    # The first partition has all ranks in one part.
    return np.array([*set_partitions(ranks)][1:], dtype=np.intp).reshape(-1, ranks)
