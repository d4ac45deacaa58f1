"""From a link graph to a packing: the highest rate first, then few trees.

Broadcasts and reductions are trees with directions; an all-reduce runs up and down the same tree at
once, loads both directions of each of its links, and is packed without directions (specification of
Blink's TreeGen: Wang et al. 2020, section 3; all-reduces: own derivation from Nash-Williams 1961).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headway.collective.packing.constraints import (
    LISTED,
    Arborescences,
    Chosen,
    Problem,
    SpanningTrees,
)
from headway.collective.packing.even import even_packing, even_rate
from headway.collective.packing.few import NEAR, few_trees
from headway.collective.packing.graph import Direction, LinkGraph
from headway.collective.packing.simplex import best_weights
from headway.collective.packing.tree import Packing, Tree
from headway.errors import PlanError

ATTEMPTS = 16
"""Searches for fewer trees: less than a second on eight ranks."""
TOLERANCE = 0.01
"""Share of the bound given up for fewer trees."""


def highest_rate(graph: LinkGraph, direction: Direction, root: int = 0) -> float:
    """What no packing exceeds, in the unit of the links' rates.

    Args:
        graph: The links.
        direction: For an all-reduce the root does not matter.
        root: Of a broadcast or a reduction.

    Raises:
        PlanError: The graph is not joined, or has one rank.
    """
    rate = even_rate(graph)
    if rate and graph.ranks > LISTED:
        return even_packing(graph, direction, root, rate).bound
    problem = problem_of(graph, direction, root)
    return problem.bound(problem.capacity)


def pack(
    graph: LinkGraph,
    direction: Direction,
    root: int = 0,
    *,
    tolerance: float = TOLERANCE,
    attempts: int = ATTEMPTS,
) -> Packing:
    """Trees whose rate is the highest there is, less a tolerance, and few of them.

    Args:
        graph: The links.
        direction: For an all-reduce every tree gets a root of its own, its centre.
        root: Of a broadcast or a reduction.
        tolerance: Share of the rate that may be given up for fewer trees; 0: none.
        attempts: Searches for fewer trees; the result is the same on every rank.

    Raises:
        PlanError: The graph is not joined, or has one rank.
    """
    rate = even_rate(graph)
    if rate and graph.ranks > LISTED:
        return even_packing(graph, direction, root, rate)
    problem = problem_of(graph, direction, root)
    bound = problem.bound(problem.capacity)
    taken = few_trees(problem, bound, tolerance=tolerance, attempts=attempts)
    packing = Packing(graph, direction, (), bound)
    return weighed(packing, problem, [tree.chosen for tree in taken])


def problem_of(graph: LinkGraph, direction: Direction, root: int) -> Problem:
    """What trees are to be packed, and what limits them.

    Raises:
        PlanError: The graph is not joined, or has one rank.
    """
    if graph.ranks < 2:
        raise PlanError(
            "no trees to pack",
            problems=[f"the link graph has {graph.ranks} rank"],
            fix="One rank alone exchanges nothing: leave the exchange out.",
        )
    turned = graph.turned() if direction == "reduce" else graph
    if direction == "all_reduce":
        turned = LinkGraph.of(graph.ranks, {link: graph.link_rate(*link) for link in graph.links})
        root = 0
    missing = turned.unreached(root)
    if missing:
        names = ", ".join(map(str, missing))
        raise PlanError(
            f"the links do not join all ranks for this {direction}",
            problems=[f"no path of links joins rank {root} and rank {rank}" for rank in missing],
            fix=f"Add links to rank {names}, or leave these ranks out: LinkGraph.part.",
        )
    if direction == "all_reduce":
        return SpanningTrees(turned)
    return Arborescences(turned, root)


def weighed(packing: Packing, problem: Problem, trees: Sequence[Chosen]) -> Packing:
    """A packing of some of these trees, with the weights of the highest rate.

    Args:
        packing: Its graph, direction and bound are kept.
        problem: Its trees' problem.
        trees: By the places of their edges.
    """
    uses = np.zeros((len(problem.edges), len(trees)))
    for column, chosen in enumerate(trees):
        uses[chosen, column] = 1.0
    weights = best_weights(uses, problem.capacity)
    loads = uses @ weights
    used = loads > 0
    over = float((loads[used] / problem.capacity[used]).max()) if used.any() else 1.0
    weights /= max(1.0, over)  # rounding of the simplex
    found = [
        Tree(problem.parents(chosen), float(weight))
        for chosen, weight in zip(trees, weights, strict=True)
        if weight > NEAR * packing.bound
    ]
    found.sort(key=lambda tree: (-tree.weight, tree.root, tree.depth))
    return replace(packing, trees=tuple(found))
