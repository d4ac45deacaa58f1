"""Trees by name, as the parent of every rank: what `trees` makes programs of.

Invariant: exactly one rank has no parent, the root, and every other one reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headway.collective.nodes import Nodes

Parents = tuple[int | None, ...]
"""Of each rank the next one on the way to the root; None: the root."""


def chain(order: Sequence[int]) -> Parents:
    """A line that begins at the root."""
    parents: list[int | None] = [None] * len(order)
    for parent, rank in pairwise(order):
        parents[rank] = parent
    return tuple(parents)


def star(ranks: int, root: int) -> Parents:
    """All others are children of the root."""
    return tuple(None if rank == root else root for rank in range(ranks))


def binomial(ranks: int, root: int) -> Parents:
    """The tree of recursive doubling: depth log2(n); what is sent first has the furthest to go."""
    parents: list[int | None] = [None] * ranks
    for place in range(1, ranks):
        parents[(root + place) % ranks] = (root + (place & (place - 1))) % ranks
    return tuple(parents)


def two_level(nodes: Nodes, root: int) -> Parents:
    """One rank of each node is joined to the root, the others of the node to that one.

    The rank of a node is the one with the root's place in it, so that roots of different places
    use different ranks.
    """
    home = nodes.inside(root)
    place = home.index(root)
    parents: list[int | None] = [None] * nodes.ranks
    for members in nodes.members:
        head = root if members == home else members[place % len(members)]
        for rank in members:
            parents[rank] = root if rank == head else head
    parents[root] = None
    return tuple(parents)


def children(parents: Parents) -> list[list[int]]:
    """Of each rank."""
    found: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            found[parent].append(rank)
    return found


def depths(parents: Parents) -> list[int]:
    """Of each rank how far from the root it is.

    Raises:
        ValueError: Not a tree.
    """
    found = [-1] * len(parents)
    roots = [rank for rank, parent in enumerate(parents) if parent is None]
    if len(roots) != 1:
        raise ValueError(f"the parents {parents} make no tree: {len(roots)} roots")
    below = children(parents)
    level, depth = roots, 0
    while level:
        for rank in level:
            found[rank] = depth
        level, depth = [child for rank in level for child in below[rank]], depth + 1
    if -1 in found:
        raise ValueError(f"the parents {parents} make no tree: rank {found.index(-1)} is not in it")
    return found


def heights(parents: Parents) -> list[int]:
    """Of each rank how far its furthest leaf is."""
    deep = depths(parents)
    found = [0] * len(parents)
    for rank in sorted(range(len(parents)), key=lambda one: -deep[one]):
        parent = parents[rank]
        if parent is not None:
            found[parent] = max(found[parent], found[rank] + 1)
    return found
