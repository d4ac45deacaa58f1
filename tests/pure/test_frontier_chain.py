"""pure: chains, powers of repeated blocks, and the fastest strategy within caps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headway.errors import PlanError
from headway.planner.pareto.choice_graph import ChoiceGraph
from headway.planner.pareto.solve import mini_time, solve
from support.brute_frontier import coverage, front_of, random_graph
from support.front_algebra import block_of, chain, covering_factor, product, repeat


def random_block(seed, entries=3, exits=3, objectives=2):
    random = np.random.default_rng(seed)
    return block_of(np.floor(random.uniform(1, 30, (entries, exits, 2, objectives))))


def chain_graph(seed, nodes=6, choices=3, objectives=2):
    names = [f"n{number}" for number in range(nodes)]
    return random_graph(seed, list(pairwise(names)), dict.fromkeys(names, choices), objectives)


def as_blocks(graph):
    """A source block of the first node, then each edge with the node behind it."""
    names = list(graph.nodes)
    yield block_of(graph.nodes[names[0]][None, :, None, :])
    for source, target in pairwise(names):
        costs = graph.edges[source, target] + graph.nodes[target][None]
        yield block_of(costs[:, :, None, :])


def whole_front(block):
    return front_of(block.costs.reshape(len(block.costs), -1).T)


@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_the_linear_programme_equals_the_elimination_of_a_chain(objectives):
    for seed in range(8):
        graph = chain_graph(seed, objectives=objectives)
        block = chain(list(as_blocks(graph)))
        np.testing.assert_array_equal(whole_front(block), solve(graph).costs)
        for exit_ in range(3):
            for row, costs in enumerate(block.front(0, exit_)):
                way = block.choices(0, exit_, row)
                choices = dict(zip(graph.nodes, way[1:], strict=True))
                np.testing.assert_array_equal(graph.evaluate(choices), costs)


@pytest.mark.parametrize("times", [1, 2, 3, 6, 7, 8, 13])
@pytest.mark.parametrize("objectives", [2, 3])
def test_a_power_equals_the_unrolled_repetition(times, objectives):
    block = random_block(times, 2, 2, objectives)
    power, unrolled = repeat(block, times), chain([block] * times)
    np.testing.assert_array_equal(power.costs, unrolled.costs)
    for row, costs in enumerate(power.front(1, 0)):
        steps = power.steps(1, 0, row)
        ends = [*(entry for entry, _ in steps[1:]), 0]
        total = sum(
            block.costs[:, entry, exit_, at] for (entry, at), exit_ in zip(steps, ends, strict=True)
        )
        np.testing.assert_array_equal(total, costs)


def test_a_thinned_power_says_how_far_off_it_may_be():
    block = random_block(5)
    exact, thin = repeat(block, 24), repeat(block, 24, rows=24)
    assert thin.costs.shape[3] <= 24
    worst = max(coverage(thin.front(i, j), exact.front(i, j)) for i in range(3) for j in range(3))
    assert 1.0 < worst <= thin.factor < 1.5
    assert exact.factor == 1.0


def test_the_covering_factor_by_hand():
    whole = np.array([[[1.0, 2.0, 4.0]], [[8.0, 4.0, 1.0]]])
    assert covering_factor(whole, whole) == 1.0
    assert covering_factor(whole, whole[:, :, [0, 2]]) == 2.0


def test_blocks_that_do_not_fit():
    with pytest.raises(ValueError, match="2 choices at an exit, 3"):
        product(random_block(0, 3, 2), random_block(1, 3, 3))
    with pytest.raises(ValueError, match="at least once"):
        repeat(random_block(0), 0)
    with pytest.raises(ValueError, match="4 axes"):
        block_of(np.ones((2, 2, 2)))


# ---- what a user asks -------------------------------------------------------------------------

OBJECTIVES = ("bytes", "seconds")


def test_the_fastest_within_the_memory_is_the_row_of_the_frontier():
    frontier = solve(ChoiceGraph(OBJECTIVES, (graph := chain_graph(7)).nodes, graph.edges))
    for row, costs in enumerate(frontier.costs):
        assert mini_time(OBJECTIVES, frontier, cap={"bytes": float(costs[0])}) == row
    low = float(frontier.costs[:, 0].min())
    with pytest.raises(PlanError, match=f"bytes: at least {low:g}"):
        mini_time(OBJECTIVES, frontier, cap={"bytes": low / 2})
