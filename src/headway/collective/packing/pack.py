"""From a link graph to a tree packing: the highest rate first, then few trees that reach it.

Broadcasts and reductions use directed trees. An all-reduce runs up and down the same tree,
loads both directions of each of its links, and is packed without directions (specification of
Blink's TreeGen: Wang et al. 2020, section 3; all-reduce: own derivation from Nash-Williams
1961).

Few trees: from capacities that allow a rate r a tree T of weight w may be taken if what is left
still allows r - w, that is for every constraint S with slack(S) = capacity(S) - r demand(S):

    w <= slack(S) / (T(S) - demand(S))      where T has more than `demand` edges in S
    w <= capacity(e)                        for its edges e

No choice of trees within these limits loses rate, so the search is free to look for few: it
branches over heavy trees, at random and with a limit. Blink solves an integer program over the
trees of multiplicative weights instead (Garg and Könemann 1998). Weights of given trees come from a
dense simplex (Dantzig 1951) with Bland's rule (1977). When links drift, the trees in use get new
weights first; new trees are added only where those cannot reach the new bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from headway.collective.packing.constraints import (
    LISTED,
    Arborescences,
    EdgeIndices,
    PackingProblem,
    SpanningTrees,
    Vector,
)
from headway.collective.packing.tree import Packing, WeightedTree
from headway.collective.topology import Direction, LinkGraph
from headway.errors import PlanError

# Relative: less than this is rounding.
RATE_ROUNDING = 1e-9
# Length of an edge that is thinner than the weight aimed at; chance makes up to 1.
_THIN = 8.0
# Weight of a constraint without slack, against those with less than is aimed at.
_TIGHT = 1e6
# Trees looked at for each one taken; of them proven; how often anew where none may be taken.
_CANDIDATES, _TRIED, _ROUNDS = 12, 3, 8
# Trees * edges * ranks after which no further attempt begins: this takes some seconds.
_EFFORT = 200_000
# How far a flatter tree is preferred to a heavier one, for each level.
_FLAT = 0.05
# How far chance prefers a lighter tree, after the first attempt.
_SPREAD = 0.3


class TakenTree(NamedTuple):
    """A tree, by the places of its edges, and its weight."""

    chosen: EdgeIndices
    weight: float


@dataclass(frozen=True)
class PackingState:
    """Capacities that are left, the rate that they allow, and the trees taken so far."""

    capacity: Vector
    rate: float
    taken: tuple[TakenTree, ...] = ()

    def after(self, chosen: EdgeIndices, weight: float) -> PackingState:
        capacity = self.capacity.copy()
        capacity[chosen] -= weight
        left = self.rate - weight
        return PackingState(
            np.maximum(capacity, 0.0), left, (*self.taken, TakenTree(chosen, weight))
        )


def few_trees(
    problem: PackingProblem, rate: float, *, tolerance: float, attempts: int
) -> tuple[TakenTree, ...]:
    """Few trees whose weights add up to a rate that the problem allows.

    Args:
        tolerance: Share of the rate that may be given up for fewer trees.
        attempts: Searches, every second one with the tolerance; of many ranks fewer.
    """
    # No tree can be heavier than the widest one, so that fewer trees cannot carry the rate.
    fewest = math.ceil((1 - tolerance) * rate / _widest(problem) - RATE_ROUNDING)
    best: tuple[TakenTree, ...] = ()
    effort = 0
    for attempt in range(attempts):
        # Seeded by the attempt: equal arguments give equal trees on every rank.
        random = np.random.default_rng(attempt)
        aim = rate * (1 - tolerance) if attempt % 2 else rate
        most = len(best) if best else math.inf
        start = PackingState(problem.capacity, aim)
        found = _attempt(problem, start, random, _SPREAD * attempt, most)
        best = min((found, best), key=lambda taken: _worth(problem, taken, rate, tolerance))
        effort += len(best) * len(problem.edges) * problem.ranks
        # Even with the fewest trees there can be, a few more attempts may find flatter ones.
        if effort > _EFFORT or (len(best) <= fewest and attempt >= attempts // 4):
            break
    return best


def _worth(
    problem: PackingProblem, taken: tuple[TakenTree, ...], rate: float, tolerance: float
) -> tuple[float, ...]:
    """Less is better: a rate that lacks more than the tolerance, trees, depth, lost rate."""
    lost = 1 - sum(tree.weight for tree in taken) / rate
    depth = sum(problem.depth(tree.chosen) * tree.weight for tree in taken)
    # Rounded, so that the last bits of the rate do not decide before the depth does.
    return (max(0.0, lost - tolerance - RATE_ROUNDING), len(taken), round(lost, 6), depth)


def _attempt(
    problem: PackingProblem,
    state: PackingState,
    random: np.random.Generator,
    spread: float,
    most: float,
) -> tuple[TakenTree, ...]:
    """Trees one after the other; ends early where there would be more than `most`."""
    total, widest = state.rate, _widest(problem)
    spread = min(spread, _SPREAD)
    while state.rate > RATE_ROUNDING * total:
        # Not even trees as heavy as can be would beat the best attempt so far.
        if len(state.taken) + math.ceil(state.rate / widest - RATE_ROUNDING) > most:
            return ()
        following = _with_one_more_tree(problem, state, random, spread)
        if following is None:
            break
        state = following
    return state.taken


def _with_one_more_tree(
    problem: PackingProblem, state: PackingState, random: np.random.Generator, spread: float
) -> PackingState | None:
    """The state with one more tree; None: none was found, as rounding has used up the slack."""
    for _ in range(_ROUNDS):  # each may learn constraints
        found = [
            (
                _heaviest(problem, state, chosen)
                * (1 - spread * random.random())
                / (1 + _FLAT * problem.depth(chosen)),
                chosen,
            )
            for chosen in _candidates(problem, state, random)
        ]
        found.sort(key=lambda item: -item[0])
        for _, chosen in found[:_TRIED]:
            weight = _proven(problem, state, chosen)
            if weight > 0:
                return state.after(chosen, weight)
    return None


def _heaviest(problem: PackingProblem, state: PackingState, chosen: EdgeIndices) -> float:
    """The highest weight of a tree by the known constraints."""
    weight = min(float(state.capacity[chosen].min()), state.rate)
    excess = problem.rows[:, chosen].sum(axis=1) - problem.demand
    # Counts, as floats: above 0.5 means one or more.
    over = excess > 0.5
    if over.any():
        slack = problem.slack(state.capacity, state.rate)
        weight = min(weight, float((slack[over] / excess[over]).min()))
    return weight


def _proven(problem: PackingProblem, state: PackingState, chosen: EdgeIndices) -> float:
    """The highest weight of a tree; 0: it may not be taken."""
    # A constraint that is learnt may lower the weight, which is then proven again.
    while True:
        weight = _heaviest(problem, state, chosen)
        if weight <= RATE_ROUNDING * state.rate:
            return 0.0
        after = state.after(chosen, weight)
        if after.rate <= RATE_ROUNDING * weight or not problem.learn(after.capacity, after.rate):
            return weight


def _candidates(
    problem: PackingProblem, state: PackingState, random: np.random.Generator
) -> Iterator[EdgeIndices]:
    """Trees that may be heavy.

    For each weight aimed at: few edges thinner than that, and few edges too many in constraints
    with less slack than that; none in those without slack.
    """
    slack = problem.slack(state.capacity, state.rate)
    aims, seen = _aims(state), set()
    # Longer than all other lengths together: edges that are used up come last.
    none = _TIGHT**2 * len(problem.rows) * (state.capacity <= RATE_ROUNDING * state.rate)
    for number in range(_CANDIDATES):
        aim = aims[number % len(aims)] * (1 - RATE_ROUNDING)
        weights = (slack < aim) + _TIGHT * (slack <= RATE_ROUNDING * state.rate)
        length = weights @ problem.rows + _THIN * (state.capacity < aim) + none
        chosen = problem.cheapest(length + problem.chance(random, hubs=number % 2 > 0))
        if chosen.tobytes() not in seen:
            seen.add(chosen.tobytes())
            yield chosen


def _aims(state: PackingState) -> list[float]:
    """Weights worth aiming at: all that is left, what edges can carry, half of what is left."""
    values = sorted(
        {float(x) for x in np.round(state.capacity, 12) if x > RATE_ROUNDING * state.rate}
    )
    places = sorted({*np.linspace(0, len(values) - 1, 4).astype(int).tolist()}, reverse=True)
    return [state.rate, *(values[place] for place in places), state.rate / 2]


def _widest(problem: PackingProblem) -> float:
    """The highest weight of any tree alone: every tree has an edge that is no wider."""
    values: list[float] = sorted({*problem.capacity.tolist()})
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        thin = (problem.capacity < values[middle]).astype(np.float64)
        if thin[problem.cheapest(thin)].any():
            high = middle - 1
        else:
            low = middle
    return values[low]


# The best weights of given trees: maximise sum w subject to A w <= c, w >= 0, with c >= 0.


_PIVOT_ROUNDING = 1e-11


def best_weights(uses: Vector, capacity: Vector) -> Vector:
    """Weights with the highest sum.

    Args:
        uses: Row: edge, column: tree; 1: the tree has the edge.
    """
    edges, trees = uses.shape
    # Scaled to 1, because `_PIVOT_ROUNDING` is absolute.
    scale = float(capacity.max()) or 1.0
    table = np.zeros((edges + 1, trees + 1))
    table[:-1, :-1], table[:-1, -1], table[-1, :-1] = uses, capacity / scale, -1.0
    # The slacks are a first basis, since no capacity is negative.
    outside, inside = list(range(trees)), list(range(trees, trees + edges))
    while True:
        falling = [s for s in range(trees) if table[-1, s] < -_PIVOT_ROUNDING]
        if not falling:
            break
        # Bland's rule: the smallest index, so that the simplex cannot cycle.
        column = min(falling, key=outside.__getitem__)
        row = _leaving(table, column, inside)
        _pivot(table, row, column)
        outside[column], inside[row] = inside[row], outside[column]
    weights = np.zeros(trees)
    for row, name in enumerate(inside):
        if name < trees:
            weights[name] = max(0.0, table[row, -1] * scale)
    return weights


def _leaving(table: Vector, column: int, inside: list[int]) -> int:
    """The row that reaches its limit first; every tree has an edge, so that there is one."""
    rows = [r for r in range(len(inside)) if table[r, column] > _PIVOT_ROUNDING]
    least = min(table[r, -1] / table[r, column] for r in rows)
    ties = [r for r in rows if table[r, -1] / table[r, column] <= least + _PIVOT_ROUNDING]
    return min(ties, key=inside.__getitem__)


def _pivot(table: Vector, row: int, column: int) -> None:
    pivot = table[row, column]
    across, down = table[row] / pivot, table[:, column].copy()
    table -= np.outer(down, across)
    table[row], table[:, column] = across, -down / pivot
    table[row, column] = 1 / pivot


# A full mesh of equal links has its packing in closed form.


def mesh_rate(graph: LinkGraph) -> float | None:
    """The rate of all links of a full mesh; None: it is not one, or the rates differ."""
    rates = {rate for i, row in enumerate(graph.rates) for j, rate in enumerate(row) if i != j}
    rate = next(iter(rates)) if len(rates) == 1 else 0.0
    return rate if rate > 0 else None


def mesh_packing(graph: LinkGraph, direction: Direction, root: int, rate: float) -> Packing:
    """Flat trees on a full mesh of n ranks with links of rate c.

    An all-reduce takes the n stars of weight c / 2, a broadcast the n - 1 trees root -> hub -> all
    others of weight c. Both reach the bound, n c / 2 and (n - 1) c.
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


# From a link graph to a packing: the highest rate first, then few trees.


# Searches for fewer trees: less than a second on eight ranks.
PACK_ATTEMPTS = 16
TOLERANCE = 0.01
"""Share of the bound given up for fewer trees."""


def highest_rate(graph: LinkGraph, direction: Direction, root: int = 0) -> float:
    """What no packing exceeds, in the unit of the links' rates.

    Raises:
        PlanError: The graph is not joined, or has one rank.
    """
    rate = mesh_rate(graph)
    if rate and graph.ranks > LISTED:
        return mesh_packing(graph, direction, root, rate).bound
    problem = packing_problem(graph, direction, root)
    return problem.bound(problem.capacity)


def pack(
    graph: LinkGraph,
    direction: Direction,
    root: int = 0,
    *,
    tolerance: float = TOLERANCE,
    attempts: int = PACK_ATTEMPTS,
) -> Packing:
    """Trees whose rate is the highest there is, less a tolerance, and few of them.

    Args:
        direction: For an all-reduce every tree gets a root of its own, its centre.
        root: Of a broadcast or a reduction.
        tolerance: Share of the rate that may be given up for fewer trees; 0: none.
        attempts: Searches for fewer trees; the result is the same on every rank.

    Raises:
        PlanError: The graph is not joined, or has one rank.
    """
    rate = mesh_rate(graph)
    if rate and graph.ranks > LISTED:
        return mesh_packing(graph, direction, root, rate)
    problem = packing_problem(graph, direction, root)
    bound = problem.bound(problem.capacity)
    taken = few_trees(problem, bound, tolerance=tolerance, attempts=attempts)
    packing = Packing(graph, direction, (), bound)
    return with_best_weights(packing, problem, [tree.chosen for tree in taken])


def packing_problem(graph: LinkGraph, direction: Direction, root: int) -> PackingProblem:
    """What trees are to be packed, and what limits them; raises as `pack` does."""
    if graph.ranks < 2:
        raise PlanError(
            "no trees to pack",
            problems=[f"the link graph has {graph.ranks} rank"],
            fix="One rank alone exchanges nothing: leave the exchange out.",
        )
    turned = graph.turned() if direction == "reduce" else graph
    if direction == "all_reduce":
        # Each tree loads both directions of its links alike, so that the slower one limits it.
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


def with_best_weights(
    packing: Packing, problem: PackingProblem, trees: Sequence[EdgeIndices]
) -> Packing:
    """A packing of some of these trees, given by the places of their edges, of the highest rate.

    The graph, direction and bound of `packing` are kept.
    """
    uses = np.zeros((len(problem.edges), len(trees)))
    for column, chosen in enumerate(trees):
        uses[chosen, column] = 1.0
    weights = best_weights(uses, problem.capacity)
    loads = uses @ weights
    used = loads > 0
    over = float((loads[used] / problem.capacity[used]).max()) if used.any() else 1.0
    weights /= max(1.0, over)  # by rounding the simplex may load an edge a little too much
    found = [
        WeightedTree(problem.parents(chosen), float(weight))
        for chosen, weight in zip(trees, weights, strict=True)
        if weight > RATE_ROUNDING * packing.bound
    ]
    # The heaviest first: chunk sizes are derived from it. The rest makes the order unique.
    found.sort(key=lambda tree: (-tree.weight, tree.root, tree.depth))
    return replace(packing, trees=tuple(found))


# Links that have become slower or faster: which ones, and a packing for the measured rates.


# Share of its rate that a link may drift before the trees are weighed anew; links measured again
# on a quiet machine differ by some percent.
DRIFT_THRESHOLD = 0.2
_REPACK_ATTEMPTS = 4


def drifted_links(
    old: LinkGraph, new: LinkGraph, threshold: float = DRIFT_THRESHOLD
) -> tuple[tuple[int, int], ...]:
    """The directions (i, j) whose rate differs by more than a share of the old one, ascending.

    A link that appears or disappears always counts.
    """
    arcs = sorted({*old.arcs, *new.arcs})
    return tuple(
        (i, j)
        for i, j in arcs
        if abs(new.rates[i][j] - old.rates[i][j]) > threshold * old.rates[i][j]
    )


def repack_trees(packing: Packing, graph: LinkGraph, tolerance: float = TOLERANCE) -> Packing:
    """The same ranks and direction on other links: old trees first, then as few new ones as do.

    Raises:
        PlanError: The links no longer join all ranks.
    """
    problem = packing_problem(graph, packing.direction, packing.trees[0].root)
    bound = problem.bound(problem.capacity)
    empty = replace(packing, graph=graph, bound=bound, trees=())
    trees = [*_surviving_trees(packing, problem)]
    found = with_best_weights(empty, problem, trees)
    if found.rate >= (1 - tolerance) * bound:
        return found
    fresh = few_trees(problem, bound, tolerance=tolerance / 2, attempts=_REPACK_ATTEMPTS)
    for tree in sorted(fresh, key=lambda tree: -tree.weight):
        trees.append(tree.chosen)
        found = with_best_weights(empty, problem, trees)
        if found.rate >= (1 - tolerance) * bound:
            break
    return found


def _surviving_trees(packing: Packing, problem: PackingProblem) -> Iterator[EdgeIndices]:
    """The trees whose links are all still there, by the places of their edges."""
    for tree in packing.trees:
        edges = tree.links if packing.direction == "all_reduce" else tree.edges
        if all(edge in problem.place for edge in edges):
            yield np.array(sorted(problem.place[edge] for edge in edges))
