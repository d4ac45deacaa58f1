"""Weighted trees, and packings of them: how fast each part of a buffer flows, and along which tree.

Invariant: no direction of a link carries more than its rate when every tree carries its weight.
The rate of a packing is the sum of the weights (Edmonds 1973 for broadcasts; Tutte 1961 and
Nash-Williams 1961 for all-reduces; Wang et al. 2020, "Blink").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from headway.collective.nodes import Parents, depths
from headway.collective.topology import Direction, LinkGraph


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
    def depth(self) -> int:
        """Of the deepest tree: what a short message waits for."""
        return max((tree.depth for tree in self.trees), default=0)

    @property
    def fractions(self) -> tuple[float, ...]:
        """Of the buffer, that each tree carries; sums to 1."""
        return tuple(tree.weight / self.rate for tree in self.trees)


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
