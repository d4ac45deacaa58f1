"""An optimal packing of few trees: take one tree after the other, each as heavy as it may be.

From capacities that allow a rate r a tree T of weight w may be taken if what is left still allows
r - w, that is for every constraint S with slack(S) = capacity(S) - r demand(S):

    w <= slack(S) / (T(S) - demand(S))      where T has more than `demand` edges in S
    w <= capacity(e)                        for its edges e

Hence no choice of trees ever loses rate, and the search is free to look for few: it branches over
trees that may be heavy, at random and with a limit, and is bounded by the thinnest edge that every
tree has. The tree that has no edge too many in a tight constraint is the shortest one under lengths
that count the tight constraints of an edge (the dual of the packing). Blink (Wang et al. 2020,
section 3.2) instead solves an integer program over the trees of its multiplicative weights, which
can lack those that the best rate needs.

Invariant: the capacities of a `State` allow its rate. The result depends on the arguments alone:
ranks on like machines find the same trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headway.collective.packing.constraints import Chosen, Problem, Vector

NEAR = 1e-9
"""Relative: less than this is rounding."""
_THIN = 8.0
"""Length of an edge that is thinner than the weight aimed at; chance makes up to 1."""
_TIGHT = 1e6
"""Weight of a constraint without slack, against those with less than is aimed at."""
_CANDIDATES, _TRIED, _ROUNDS = 12, 3, 8
"""Trees looked at for each one taken; of them proven; how often anew where none may be taken."""
_EFFORT = 200_000
"""Trees * edges * ranks after which no further attempt begins: some seconds."""
_FLAT = 0.05
"""How far a flatter tree is preferred to a heavier one, for each level."""
_SPREAD = 0.3
"""How far chance prefers a lighter tree, after the first attempt."""


@dataclass(frozen=True)
class Taken:
    """A tree, by the places of its edges, and its weight."""

    chosen: Chosen
    weight: float


@dataclass(frozen=True)
class State:
    """Capacities that are left, the rate that they allow, and the trees taken so far."""

    capacity: Vector
    rate: float
    taken: tuple[Taken, ...] = ()

    def after(self, chosen: Chosen, weight: float) -> State:
        capacity = self.capacity.copy()
        capacity[chosen] -= weight
        left = self.rate - weight
        return State(np.maximum(capacity, 0.0), left, (*self.taken, Taken(chosen, weight)))


def few_trees(
    problem: Problem, rate: float, *, tolerance: float, attempts: int
) -> tuple[Taken, ...]:
    """Few trees whose weights add up to a rate that the problem allows.

    Args:
        problem: The graph, and what limits trees on it.
        rate: Its bound.
        tolerance: Share of the rate that may be given up for fewer trees.
        attempts: Searches, every second one with the tolerance; of many ranks fewer.
    """
    fewest = math.ceil((1 - tolerance) * rate / _widest(problem) - NEAR)
    best: tuple[Taken, ...] = ()
    effort = 0
    for attempt in range(attempts):
        random = np.random.default_rng(attempt)
        aim = rate * (1 - tolerance) if attempt % 2 else rate
        most = len(best) if best else math.inf
        found = _attempt(problem, State(problem.capacity, aim), random, _SPREAD * attempt, most)
        best = min((found, best), key=lambda taken: _worth(problem, taken, rate, tolerance))
        effort += len(best) * len(problem.edges) * problem.ranks
        if effort > _EFFORT or (len(best) <= fewest and attempt >= attempts // 4):
            break
    return best


def _worth(
    problem: Problem, taken: tuple[Taken, ...], rate: float, tolerance: float
) -> tuple[float, ...]:
    """Less is better: a rate that lacks more than the tolerance, trees, depth, lost rate."""
    lost = 1 - sum(tree.weight for tree in taken) / rate
    depth = sum(problem.depth(tree.chosen) * tree.weight for tree in taken)
    return (max(0.0, lost - tolerance - NEAR), len(taken), round(lost, 6), depth)


def _attempt(
    problem: Problem, state: State, random: np.random.Generator, spread: float, most: float
) -> tuple[Taken, ...]:
    """Trees one after the other; ends early where there would be more than `most`."""
    total, widest = state.rate, _widest(problem)
    spread = min(spread, _SPREAD)
    while state.rate > NEAR * total:
        if len(state.taken) + math.ceil(state.rate / widest - NEAR) > most:
            return ()
        following = _following(problem, state, random, spread)
        if following is None:
            break
        state = following
    return state.taken


def _following(
    problem: Problem, state: State, random: np.random.Generator, spread: float
) -> State | None:
    """With one more tree; None: none was found (rounding has used up the slack)."""
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


def _heaviest(problem: Problem, state: State, chosen: Chosen) -> float:
    """The highest weight of a tree by the known constraints."""
    weight = min(float(state.capacity[chosen].min()), state.rate)
    excess = problem.rows[:, chosen].sum(axis=1) - problem.demand
    over = excess > 0.5
    if over.any():
        slack = problem.slack(state.capacity, state.rate)
        weight = min(weight, float((slack[over] / excess[over]).min()))
    return weight


def _proven(problem: Problem, state: State, chosen: Chosen) -> float:
    """The highest weight of a tree; 0: it may not be taken."""
    while True:
        weight = _heaviest(problem, state, chosen)
        if weight <= NEAR * state.rate:
            return 0.0
        after = state.after(chosen, weight)
        if after.rate <= NEAR * weight or not problem.learn(after.capacity, after.rate):
            return weight


def _candidates(problem: Problem, state: State, random: np.random.Generator) -> Iterator[Chosen]:
    """Trees that may be heavy.

    For each weight aimed at: few edges thinner than that, and few edges too many in constraints
    with less slack than that; none in those without slack.
    """
    slack = problem.slack(state.capacity, state.rate)
    aims, seen = _aims(state), set()
    none = _TIGHT**2 * len(problem.rows) * (state.capacity <= NEAR * state.rate)
    for number in range(_CANDIDATES):
        aim = aims[number % len(aims)] * (1 - NEAR)
        weights = (slack < aim) + _TIGHT * (slack <= NEAR * state.rate)
        length = weights @ problem.rows + _THIN * (state.capacity < aim) + none
        chosen = problem.cheapest(length + problem.chance(random, hubs=number % 2 > 0))
        if chosen.tobytes() not in seen:
            seen.add(chosen.tobytes())
            yield chosen


def _aims(state: State) -> list[float]:
    """Weights worth aiming at: all that is left, what edges can carry, half of what is left."""
    values = sorted({float(x) for x in np.round(state.capacity, 12) if x > NEAR * state.rate})
    places = sorted({*np.linspace(0, len(values) - 1, 4).astype(int).tolist()}, reverse=True)
    return [state.rate, *(values[place] for place in places), state.rate / 2]


def _widest(problem: Problem) -> float:
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
