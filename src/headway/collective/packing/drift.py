"""Links that have become slower or faster: which, and a packing for what is measured now.

A program that runs on many ranks should change little: the trees in use get new weights, and new
trees come only where those cannot reach the new bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headway.collective.packing.constraints import Chosen, Problem
from headway.collective.packing.few import few_trees
from headway.collective.packing.graph import LinkGraph
from headway.collective.packing.pack import TOLERANCE, problem_of, weighed
from headway.collective.packing.tree import Packing

THRESHOLD = 0.2
"""Share of its rate that a link may drift before the trees are weighed anew; links measured again
on a quiet machine differ by some percent."""
_ATTEMPTS = 4


def drifted(
    old: LinkGraph, new: LinkGraph, threshold: float = THRESHOLD
) -> tuple[tuple[int, int], ...]:
    """The directions (i, j) whose rate differs by more than a share of the old one, ascending.

    Args:
        old: What was packed.
        new: What is measured now, of the same ranks.
        threshold: Share of the old rate. A link that appears or disappears counts always.
    """
    arcs = sorted({*old.arcs, *new.arcs})
    return tuple(
        (i, j)
        for i, j in arcs
        if abs(new.rates[i][j] - old.rates[i][j]) > threshold * old.rates[i][j]
    )


def repacked(packing: Packing, graph: LinkGraph, tolerance: float = TOLERANCE) -> Packing:
    """The same ranks and direction on other links: old trees first, then as few new ones as do.

    Args:
        packing: In use.
        graph: The links as they are now.
        tolerance: Share of the new bound that may be given up.

    Raises:
        PlanError: The links no longer join all ranks.
    """
    problem = problem_of(graph, packing.direction, packing.trees[0].root)
    bound = problem.bound(problem.capacity)
    empty = replace(packing, graph=graph, bound=bound, trees=())
    trees = [*_standing(packing, problem)]
    found = weighed(empty, problem, trees)
    if found.rate >= (1 - tolerance) * bound:
        return found
    fresh = few_trees(problem, bound, tolerance=tolerance / 2, attempts=_ATTEMPTS)
    for tree in sorted(fresh, key=lambda tree: -tree.weight):
        trees.append(tree.chosen)
        found = weighed(empty, problem, trees)
        if found.rate >= (1 - tolerance) * bound:
            break
    return found


def _standing(packing: Packing, problem: Problem) -> Iterator[Chosen]:
    """The trees whose links are all still there, by the places of their edges."""
    for tree in packing.trees:
        edges = tree.links if packing.direction == "all_reduce" else tree.edges
        if all(edge in problem.place for edge in edges):
            yield np.array(sorted(problem.place[edge] for edge in edges))
