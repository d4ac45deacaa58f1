"""The packing of a full mesh of equal links, in closed form.

Of n ranks with links of rate c, an all-reduce takes the n stars of weight c / 2, a broadcast the
n - 1 trees root -> hub -> all others of weight c. Both reach the bound, n c / 2 and (n - 1) c.
"""

from __future__ import annotations

from headway.collective.packing.tree import Packing, WeightedTree
from headway.collective.topology import Direction, LinkGraph


def mesh_rate(graph: LinkGraph) -> float | None:
    """The rate of all links of a full mesh; None: it is not one, or they differ."""
    rates = {rate for i, row in enumerate(graph.rates) for j, rate in enumerate(row) if i != j}
    rate = next(iter(rates)) if len(rates) == 1 else 0.0
    return rate if rate > 0 else None


def mesh_packing(graph: LinkGraph, direction: Direction, root: int, rate: float) -> Packing:
    """Flat trees on a full mesh.

    Args:
        graph: Full, of two ranks or more.
        direction: For an all-reduce every rank is the root of one tree.
        root: Of a broadcast or a reduction.
    """
    n = graph.ranks
    if direction == "all_reduce":
        stars = (
            WeightedTree(tuple(None if r == hub else hub for r in range(n)), rate / 2)
            for hub in range(n)
        )
        return Packing(graph, direction, tuple(stars), n * rate / 2)
    trees = []
    for hub in range(n):
        if hub != root:
            parent: list[int | None] = [hub] * n
            parent[root], parent[hub] = None, root
            trees.append(WeightedTree(tuple(parent), rate))
    return Packing(graph, direction, tuple(trees), (n - 1) * rate)
