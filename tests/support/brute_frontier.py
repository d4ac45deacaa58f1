"""Frontiers by trying every strategy, and random graphs of choices to try it on."""

from __future__ import annotations

import itertools

import numpy as np

from headway.planner.pareto.choice_graph import ChoiceGraph


def all_strategies(graph):
    """Every strategy, as one column of choices per node."""
    ranges = [
        [graph.forced[name]] if name in graph.forced else range(len(costs))
        for name, costs in graph.nodes.items()
    ]
    columns = np.array(list(itertools.product(*ranges)), dtype=np.int64).T
    return dict(zip(graph.nodes, columns, strict=True))


def costs_of(graph, strategies):
    total = 0.0
    for name, costs in graph.nodes.items():
        total = total + costs[strategies[name]]
    for (source, target), costs in graph.edges.items():
        total = total + costs[strategies[source], strategies[target]]
    return total


def front_of(costs):
    """Straight from the definition: distinct rows that no other row is at most as large as."""
    rows = sorted({tuple(row) for row in costs.tolist() if np.isfinite(row).all()})
    kept = []
    for row in rows:  # a dominating row comes before what it dominates
        if not any(all(a <= b for a, b in zip(other, row, strict=True)) for other in kept):
            kept.append(row)
    return np.array(kept).reshape(-1, costs.shape[1])


def brute_force(graph):
    return front_of(costs_of(graph, all_strategies(graph)))


def coverage(kept, wanted):
    """The least f such that each wanted row costs a kept row divided by f."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(wanted[:, None] > 0, kept[None] / wanted[:, None], np.inf)
    ratios = np.where(kept[None] <= wanted[:, None], 1.0, ratios)
    return ratios.max(axis=2).min(axis=1).max(initial=1.0)


def random_graph(seed, pairs, sizes, objectives=2, *, most=30, forbidden=0.0, whole=True):
    """Costs at random for these nodes and edges; whole numbers, so that sums are exact."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        costs = random.uniform(0, most, (*shape, objectives))
        costs = np.floor(costs) if whole else costs
        costs[random.random(shape) < forbidden] = np.inf
        return costs

    nodes = {name: np.floor(draw(size)) for name, size in sizes.items()}
    nodes = {name: np.where(np.isinf(c).all(), 0.0, c) for name, c in nodes.items()}
    edges = {(u, v): draw(sizes[u], sizes[v]) for u, v in pairs}
    return ChoiceGraph(tuple("abcd"[:objectives]), nodes, edges)


def random_dag(seed, objectives, *, most_nodes=7, most_choices=4):
    random = np.random.default_rng(1000 + seed)
    names = [f"n{number}" for number in range(random.integers(1, most_nodes + 1))]
    density = random.random()
    pairs = [pair for pair in itertools.combinations(names, 2) if random.random() < density]
    sizes = {name: int(random.integers(1, most_choices + 1)) for name in names}
    return random_graph(seed, pairs, sizes, objectives, forbidden=0.05 * (seed % 3))
