"""pure: each elimination rule and the whole search against trying every strategy."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from headway.errors import PlanError
from headway.planner.pareto.choice_graph import (
    ChoiceGraph,
    all_choices,
    make_cost_tables,
    order_eliminations,
)
from headway.planner.pareto.elimination import eliminate
from headway.planner.pareto.solve import solve
from support.brute_frontier import brute_force, costs_of, coverage, random_dag, random_graph
from support.sampling import sampled

RULES = {  # nodes in their order, edges, and which rules the elimination takes
    "last": ("a b", "", ["last", "last"]),
    "merge": ("a b", "ab", ["merge", "last"]),
    "contract": ("b a", "ab", ["contract", "last"]),
    "node and edge": ("a v w b", "av vb aw wb", ["node", "node", "edge", "merge", "last"]),
    "parallel edges": ("a b", "ab ba", ["edge", "merge", "last"]),
    "triangle": (
        "u v w x",
        "uv uw vw vx wx",
        ["triangle", "edge", "node", "edge", "merge", "last"],
    ),
    "fork": ("a b v w", "av aw bv bw", ["bucket", "node", "edge", "merge", "last"]),
    "bucket": ("a b c d e", "ab ac ad ae bc bd be cd ce de", ["bucket"]),
}


def small(name, seed, objectives=2):
    nodes, pairs, rules = RULES[name]
    sizes = {node: 2 + (seed + place) % 3 for place, node in enumerate(nodes.split())}
    graph = random_graph(seed, [tuple(pair) for pair in pairs.split()], sizes, objectives)
    return graph, rules


def eliminated(graph, budget=10**6):
    """Without bounds and without what is known: only the rules."""
    network = make_cost_tables(graph, all_choices(graph))
    order = order_eliminations(network.scopes, network.sizes, budget)
    found = eliminate(network, order)
    return found, network.chosen(found.choices(), len(found.costs)), order


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_each_rule_keeps_the_frontier_and_can_be_undone(name, objectives):
    for seed in range(12):
        graph, rules = small(name, seed, objectives)
        found, strategies, order = eliminated(graph)
        assert [entry.rule for entry in order.log][: len(rules)] == rules
        np.testing.assert_array_equal(found.costs, brute_force(graph))
        np.testing.assert_array_equal(costs_of(graph, strategies), found.costs)


@pytest.mark.parametrize("part", sampled(range(10), 2))
def test_the_search_equals_brute_force_on_500_graphs(part):
    for seed in range(part * 50, part * 50 + 50):
        graph = random_dag(seed, objectives=(2, 3, 1, 2)[seed % 4])
        wanted = brute_force(graph)
        if not len(wanted):
            with pytest.raises(PlanError, match="forbidden"):
                solve(graph)
            continue
        found = solve(graph)
        assert found.exact
        assert found.factor == 1
        np.testing.assert_array_equal(found.costs, wanted)
        np.testing.assert_array_equal(costs_of(graph, found.strategies), wanted)
        np.testing.assert_array_equal(graph.evaluate(found.choices(0)), wanted[0])


def long_chain(seed, nodes=20, choices=4, objectives=2):
    """Long enough for the quick passes and the parts."""
    names = [f"n{number:02d}" for number in range(nodes)]
    sizes = dict.fromkeys(names, choices)
    pairs = [*pairwise(names), *((names[i], names[i + 3]) for i in range(0, nodes - 3, 4))]
    return random_graph(seed, pairs, sizes, objectives, most=12)


@pytest.mark.parametrize("objectives", [2, 3])
def test_bounds_drop_nothing_of_the_frontier(objectives):
    for seed in sampled(range(3), 1):
        graph = long_chain(seed, 18 if objectives == 2 else 16, 3, objectives)
        np.testing.assert_array_equal(solve(graph).costs, eliminated(graph)[0].costs)


def test_costs_that_are_no_whole_numbers():
    for seed in range(20):
        pairs = list(combinations("abcd", 2))
        graph = random_graph(seed, pairs, dict.fromkeys("abcd", 4), whole=False)
        np.testing.assert_allclose(solve(graph).costs, brute_force(graph), rtol=1e-12)


def test_forced_choices_and_their_names():
    graph, _ = small("bucket", 3)
    names = {"b": tuple(f"way {number}" for number in range(len(graph.nodes["b"])))}
    forced = ChoiceGraph(graph.objectives, graph.nodes, graph.edges, names, {"a": 1, "c": 0})
    found = solve(forced)
    np.testing.assert_array_equal(found.costs, brute_force(forced))
    assert set(found.strategies["a"]) == {1}
    assert set(found.strategies["c"]) == {0}
    named = forced.named(found.choices(0))
    assert named["a"] == "1"
    assert named["b"] == f"way {found.choices(0)['b']}"


def test_caps_leave_exactly_what_is_within_them():
    for seed in range(10):
        graph, _ = small("node and edge", seed)
        whole = brute_force(graph)
        cap = float(whole[len(whole) // 2, 0])
        found = solve(graph, cap={"a": cap})
        np.testing.assert_array_equal(found.costs, whole[whole[:, 0] <= cap])
        with pytest.raises(PlanError, match=rf"a: at least {whole[0, 0]:g}, the cap is"):
            solve(graph, cap={"a": float(whole[0, 0]) - 1})
    with pytest.raises(ValueError, match="no objective 'q'"):
        solve(graph, cap={"q": 1.0})


def test_a_hub_with_few_choices_is_tried_with_all_and_stays_exact():
    names = "abcdef"
    for seed in range(5):
        graph = random_graph(seed, list(combinations(names, 2)), dict.fromkeys(names, 3))
        found = solve(graph, budget=3**4)
        assert [entry.rule for entry in found.log][:2] == ["condition", "condition"]
        assert found.exact
        np.testing.assert_array_equal(found.costs, brute_force(graph))


def test_beyond_that_choices_are_fixed_and_the_factor_says_how_far_off_it_may_be():
    names = "abcdef"
    for seed in range(5):
        graph = random_graph(seed, list(combinations(names, 2)), dict.fromkeys(names, 5))
        found = solve(graph, budget=5**2)
        assert found.log[0].rule == "fix"
        assert not found.exact
        assert coverage(found.costs, brute_force(graph)) <= found.factor < 4
        np.testing.assert_array_equal(costs_of(graph, found.strategies), found.costs)


@pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.5])
def test_within_epsilon_of_the_frontier_and_smaller(epsilon):
    sizes = []
    for seed in range(3):
        graph = long_chain(seed)
        whole = solve(graph)
        found = solve(graph, epsilon=epsilon)
        off = coverage(found.costs, whole.costs)
        assert off <= found.factor <= 1 + epsilon
        assert not found.exact
        sizes += [len(found), len(whole)]
    assert sum(sizes[::2]) < sum(sizes[1::2])


def test_few_rows_come_with_a_factor_that_holds():
    factors, offs = [], []
    for seed in range(4):
        graph = long_chain(seed)
        found = solve(graph, rows=6)
        assert not found.exact
        factors.append(found.factor)
        offs.append(coverage(found.costs, solve(graph).costs))
    assert all(off <= factor for off, factor in zip(offs, factors, strict=True))
    assert max(offs) > 1.001
    assert max(factors) < 1.5


def test_the_same_graph_gives_the_same_bytes():
    first, second = (solve(long_chain(1), epsilon=0.05) for _ in range(2))
    assert first.costs.tobytes() == second.costs.tobytes()
    assert all((first.strategies[n] == second.strategies[n]).all() for n in first.strategies)


def test_transformer_and_residual_shapes_reduce_to_one_node_and_a_mask_needs_buckets():
    layer = [("x", "q"), ("x", "k"), ("x", "v"), ("q", "s"), ("k", "s"), ("s", "c"), ("v", "c")]
    layer += [("c", "o"), ("o", "r"), ("x", "r")]
    pairs, names = [], []
    for number in range(12):
        here = {n: f"{n}{number}" for n in "xqkvscor"} | {"x": f"r{number - 1}"}
        pairs += [(here[u], here[v]) for u, v in layer]
        names += [here[n] for n in "qkvscor"]
    sizes = dict.fromkeys(["r-1", *names], 2)
    rules = {e.rule for e in order_eliminations(pairs, sizes, 10**6).log}
    assert rules == {"node", "edge", "merge", "last"}
    masked = [*pairs, *(("mask", f"s{number}") for number in range(12))]
    order = order_eliminations(masked, {"mask": 2, **sizes}, 10**6)
    assert "bucket" in {entry.rule for entry in order.log}
    assert max(len(entry.neighbours) for entry in order.log if entry.rule != "edge") <= 3
    assert not order.blocked


def test_all_problems_of_a_graph_come_together():
    with pytest.raises(PlanError) as caught:
        ChoiceGraph(
            ("bytes", "seconds"),
            {"a": np.array([[1.0, -1.0]]), "b": np.ones((2, 3))},
            {("a", "c"): np.ones((1, 1, 2)), ("a", "a"): np.ones((1, 1, 2))},
            {"a": ("one", "two")},
            {"a": 4},
        )
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 6
    for part in ("negative", "(2, 3)", "no node c", "to itself", "2 names for 1", "choice 4"):
        assert part in text
