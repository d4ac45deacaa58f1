"""Weighted trees, and packings of them: how fast each part of a buffer flows, and along which tree.

Invariant: in a packing that passes `check` no direction of a link carries more than its rate when
every tree carries its weight. The rate of a packing is the sum of the weights (Edmonds 1973 for
broadcasts; Tutte 1961 and Nash-Williams 1961 for all-reduces; Wang et al. 2020, "Blink").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from headway.collective.nodes import Parents, children, depths
from headway.collective.topology import Direction, LinkGraph
from headway.errors import PlanError

# Relative: rounding of sums.
_NEAR = 1e-9


@dataclass(frozen=True)
class WeightedTree:
    """A spanning tree.

    Attributes:
        weight: What flows along it per second, in the unit of the links' rates.
    """

    parent: Parents
    weight: float

    @property
    def root(self) -> int:
        return self.parent.index(None)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """(parent, child) of all ranks but the root."""
        return frozenset((up, rank) for rank, up in enumerate(self.parent) if up is not None)

    @property
    def links(self) -> frozenset[tuple[int, int]]:
        """The same without a direction, i < j."""
        return frozenset((min(edge), max(edge)) for edge in self.edges)

    @cached_property
    def depth(self) -> int:
        """Links on the longest path from the root."""
        return max(depths(self.parent))


@dataclass(frozen=True)
class Packing:
    """Trees that share a link graph.

    Attributes:
        bound: The highest rate of any packing: for a broadcast the least of the minimum cuts from
            the root, for an all-reduce the least of (rate across a partition) / (parts - 1).
    """

    graph: LinkGraph
    direction: Direction
    trees: tuple[WeightedTree, ...]
    bound: float

    @property
    def rate(self) -> float:
        """Sum of the weights: algorithm bandwidth of a long message."""
        return sum(tree.weight for tree in self.trees)

    @property
    def share(self) -> float:
        """The rate as a share of the bound."""
        return self.rate / self.bound if self.bound else 1.0

    @property
    def depth(self) -> int:
        """Of the deepest tree: what a short message waits for."""
        return max((tree.depth for tree in self.trees), default=0)

    @property
    def fractions(self) -> tuple[float, ...]:
        """Of the buffer, that each tree carries; sums to 1."""
        return tuple(tree.weight / self.rate for tree in self.trees)

    def loads(self) -> dict[tuple[int, int], float]:
        """What each direction (i, j) carries, in the unit of the rates."""
        found: dict[tuple[int, int], float] = {}
        for tree in self.trees:
            for arc in self._arcs(tree):
                found[arc] = found.get(arc, 0.0) + tree.weight
        return found

    def _arcs(self, tree: WeightedTree) -> Iterator[tuple[int, int]]:
        for up, down in tree.edges:
            if self.direction != "reduce":
                yield up, down
            if self.direction != "broadcast":
                yield down, up

    def check(self) -> None:
        """Raise unless the trees span the graph and no link carries more than its rate.

        Raises:
            PlanError: With one line per problem.
        """
        problems = [*self._tree_problems()]
        if not problems:
            problems = [*self._load_problems()]
        if problems:
            fix = "Pack this graph again: headway.collective.packing.pack."
            raise PlanError("these trees are not a packing", problems=problems, fix=fix)

    def _tree_problems(self) -> Iterator[str]:
        for number, tree in enumerate(self.trees):
            if not tree.weight > 0:
                yield f"tree {number}: weight {tree.weight} is not above 0"
            if len(tree.parent) != self.graph.ranks:
                yield f"tree {number}: {len(tree.parent)} ranks of {self.graph.ranks}"
            elif not spans(tree.parent):
                yield f"tree {number}: its parents {tree.parent} are not a spanning tree"

    def _load_problems(self) -> Iterator[str]:
        for (i, j), load in sorted(self.loads().items()):
            rate = self.graph.rates[i][j]
            if load > rate * (1 + _NEAR):
                yield f"from rank {i} to rank {j}: {load:g} of {rate:g}"

    def explain(self) -> str:
        """The rate, what limits it, and a line for each tree."""
        head = (
            f"{self.direction}: rate {self.rate:.4g}, {self.share:.1%} of the bound "
            f"{self.bound:.4g}; {len(self.trees)} trees, depth {self.depth}"
        )
        lines = [
            f"  {tree.weight:<8.4g} root {tree.root}  depth {tree.depth}  "
            + " ".join(f"{up}-{down}" for up, down in top_down(tree.parent))
            for tree in self.trees
        ]
        return "\n".join([head, *lines])


def spans(parent: Parents) -> bool:
    """Whether parents are one tree over all ranks."""
    if parent.count(None) != 1:
        return False
    return len(top_down(parent)) == len(parent) - 1


def top_down(parent: Parents) -> tuple[tuple[int, int], ...]:
    """(parent, child) of what can be reached from the root, level by level."""
    below, level, found = children(parent), [parent.index(None)], []
    while level:
        edges = [(up, rank) for up in level for rank in below[up]]
        found += edges
        level = [rank for _, rank in edges]
    return tuple(found)


def root_tree(links: Sequence[tuple[int, int]], ranks: int, root: int | None = None) -> Parents:
    """The parents of a tree that is given by its links.

    Args:
        root: None: its centre, from which the farthest rank is nearest (the lower of two).
    """
    near: list[list[int]] = [[] for _ in range(ranks)]
    for i, j in links:
        near[i].append(j)
        near[j].append(i)
    root = _centre(near) if root is None else root
    parent: dict[int, int | None] = {root: None}
    # The list grows while it is walked: level by level, from the root.
    for rank in (todo := [root]):
        for other in near[rank]:
            if other not in parent:
                parent[other] = rank
                todo.append(other)
    return tuple(parent[rank] for rank in range(len(near)))


def _centre(near: Sequence[Sequence[int]]) -> int:
    """The middle of a longest path: take leaves off until one or two ranks are left."""
    degree = [len(others) for others in near]
    left = set(range(len(near)))
    while len(left) > 2:
        leaves = [rank for rank in left if degree[rank] <= 1]
        left.difference_update(leaves)
        for leaf in leaves:
            for other in near[leaf]:
                degree[other] -= 1
    return min(left)
