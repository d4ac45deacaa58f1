"""Proof that trees are a packing: they span the graph, and no link carries more than its rate."""

from __future__ import annotations

from headway.collective.nodes import children
from headway.errors import PlanError

# Relative: rounding of sums.
NEAR = 1e-9


def packing_loads(packing):
    """What each direction (i, j) carries, in the unit of the rates."""
    found = {}
    for tree in packing.trees:
        for up, down in tree.edges:
            used = [(up, down)] * (packing.direction != "reduce")
            for arc in used + [(down, up)] * (packing.direction != "broadcast"):
                found[arc] = found.get(arc, 0.0) + tree.weight
    return found


def check_packing(packing):
    """Raise a PlanError, with one line per problem, unless these trees are a packing."""
    problems = [*_tree_problems(packing)] or [*_load_problems(packing)]
    if problems:
        raise PlanError("these trees are not a packing", problems=problems)


def _tree_problems(packing):
    for number, tree in enumerate(packing.trees):
        if not tree.weight > 0:
            yield f"tree {number}: weight {tree.weight} is not above 0"
        if len(tree.parent) != packing.graph.ranks:
            yield f"tree {number}: {len(tree.parent)} ranks of {packing.graph.ranks}"
        elif not spans(tree.parent):
            yield f"tree {number}: its parents {tree.parent} are not a spanning tree"


def _load_problems(packing):
    for (i, j), load in sorted(packing_loads(packing).items()):
        rate = packing.graph.rates[i][j]
        if load > rate * (1 + NEAR):
            yield f"from rank {i} to rank {j}: {load:g} of {rate:g}"


def spans(parent):
    """Whether parents are one tree over all ranks."""
    if parent.count(None) != 1:
        return False
    below, reached = children(parent), [parent.index(None)]
    for rank in reached:
        reached += below[rank]
    return len(reached) == len(parent)
