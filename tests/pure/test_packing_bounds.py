"""pure: what limits a packing, against every tree, every cut and every partition."""

from __future__ import annotations

import itertools

import networkx
import numpy as np
import pytest
from scipy.optimize import linprog

from headway.collective.packing.constraints import (
    Arborescences,
    SpanningTrees,
    arborescence,
    min_cut,
    spanning_tree,
)
from headway.collective.packing.pack import (
    best_weights,
    highest_rate,
    packing_problem,
)
from headway.collective.topology import LinkGraph
from headway.errors import PlanError
from support.link_graphs import islands, random_graph
from support.multiplicative_weights import pack_by_multiplicative_weights


def every_tree(n, *, root=None):
    """All spanning trees as sets of links, or of arcs away from a root."""
    if root is None:
        pairs = itertools.combinations(range(n), 2)
        for links in itertools.combinations([*pairs], n - 1):
            if networkx.is_tree(networkx.Graph(links)) and len({*sum(links, ())}) == n:
                yield frozenset(links)
        return
    others = [rank for rank in range(n) if rank != root]
    for parents in itertools.product(range(n), repeat=n - 1):
        arcs = [(up, rank) for up, rank in zip(parents, others, strict=True) if up != rank]
        graph = networkx.DiGraph(arcs)
        if len(arcs) == n - 1 and len(graph) == n and networkx.is_arborescence(graph):
            yield frozenset(arcs)


def exact_rate(problem, root=None):
    """The linear program over all trees."""
    present = {edge for edge, x in zip(problem.edges, problem.capacity, strict=True) if x > 0}
    trees = [tree for tree in every_tree(problem.ranks, root=root) if tree <= present]
    uses = np.array([[float(edge in tree) for tree in trees] for edge in problem.edges])
    found = linprog(-np.ones(len(trees)), A_ub=uses, b_ub=problem.capacity)
    return -found.fun, uses


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_linear_program_over_all_trees(seed):
    graph = random_graph(seed, 3 + seed % 3)
    for direction, root in (("all_reduce", None), ("broadcast", seed % 3)):
        problem = packing_problem(graph, direction, root or 0)
        rate, uses = exact_rate(problem, root)
        assert highest_rate(graph, direction, root or 0) == pytest.approx(rate, rel=1e-9)
        weights = best_weights(uses, problem.capacity)
        assert weights.sum() == pytest.approx(rate, rel=1e-9)
        assert (uses @ weights <= problem.capacity * (1 + 1e-12)).all()


def brute_cut(graph, root):
    others = [rank for rank in range(graph.ranks) if rank != root]
    sides = (
        set(side) | {root} for k in range(len(others)) for side in itertools.combinations(others, k)
    )
    return min(
        sum(graph.rates[i][j] for i, j in graph.arcs if i in s and j not in s) for s in sides
    )


def test_a_broadcast_is_limited_by_its_least_cut():
    for seed in range(40):
        graph = random_graph(seed)
        root = seed % graph.ranks
        assert highest_rate(graph, "broadcast", root) == pytest.approx(brute_cut(graph, root))
        turned = highest_rate(graph, "reduce", root)
        assert turned == pytest.approx(brute_cut(graph.turned(), root))


def searching(problem):
    """The same problem, which has to find its constraints as if it had many ranks."""
    problem.complete = False
    problem.rows, problem.demand = problem.rows[:0], problem.demand[:0]
    problem.add(problem._first())
    return problem


def test_constraints_that_are_searched_give_the_same_bound_as_all_of_them():
    for seed in range(60):
        graph = random_graph(seed)
        for make in (SpanningTrees, lambda g: Arborescences(g, 0)):
            listed, found = make(graph), searching(make(graph))
            expected = listed.bound(listed.capacity)
            assert found.bound(found.capacity) == pytest.approx(expected, rel=1e-9)
            assert len(found.rows) <= len(listed.rows) + 2 * graph.ranks


def test_there_are_as_many_cuts_and_partitions_as_there_must_be():
    mesh = LinkGraph.mesh(8)
    assert len(Arborescences(mesh, 3).rows) == 2**7 - 1
    assert len(SpanningTrees(mesh).rows) == 4140 - 1  # Bell's number, less the whole
    assert len(SpanningTrees(LinkGraph.mesh(9)).rows) == 10


@pytest.mark.parametrize(
    ("graph", "broadcast", "all_reduce"),
    [
        (LinkGraph.mesh(12), 11, 6),
        (LinkGraph.of(12, {(i, (i + 1) % 12): 1.0 for i in range(12)}), 2, 12 / 11),
        (LinkGraph.of(10, {(0, i): 2.0 for i in range(1, 10)}), 2, 2),
        (islands(2, 8, inside=10, across=1), 8, 8),
        (islands(3, 4, inside=10, across=1), 8, 6),
    ],
    ids=["mesh", "ring", "star", "two islands", "three islands"],
)
def test_bounds_of_many_ranks_in_closed_form(graph, broadcast, all_reduce):
    assert highest_rate(graph, "broadcast") == pytest.approx(broadcast)
    assert highest_rate(graph, "reduce", 3) == pytest.approx(broadcast)
    assert highest_rate(graph, "all_reduce") == pytest.approx(all_reduce)


def test_the_least_cut_is_that_of_another_program():
    for seed in range(40):
        graph = random_graph(seed, 4 + seed % 12)
        value, side = min_cut(graph.rates, 0, graph.ranks - 1)
        other = networkx.DiGraph()
        other.add_weighted_edges_from(
            ((i, j, graph.rates[i][j]) for i, j in graph.arcs), "capacity"
        )
        assert value == pytest.approx(networkx.minimum_cut_value(other, 0, graph.ranks - 1))
        assert 0 in side
        assert graph.ranks - 1 not in side


def test_flow_is_taken_back_from_a_shortest_path():
    """0-1-2-7 is the shortest way and has to give up its middle: 0-3-4-2-7 and 0-1-5-6-7."""
    arcs = [(0, 1), (1, 2), (2, 7), (0, 3), (3, 4), (4, 2), (1, 5), (5, 6), (6, 7)]
    graph = LinkGraph.of(8, dict.fromkeys(arcs, 1.0) | {(1, 5): 0.5}, both=False)
    assert min_cut(graph.rates, 0, 7) == (1.5, {0, 1, 2, 3, 4})


def test_the_shortest_trees_are_the_shortest_of_all():
    for seed in range(30):
        random = np.random.default_rng(seed)
        n = 3 + seed % 3
        length = random.integers(0, 6, (n, n)) + (random.random((n, n)) if seed % 2 else 0.0)
        root = seed % n
        parent = arborescence(length.tolist(), root)
        found = sum(length[parent[j]][j] for j in range(n) if j != root)
        best = min(sum(length[a] for a in tree) for tree in every_tree(n, root=root))
        assert found == pytest.approx(best)
        both = np.minimum(length, length.T)
        parent = spanning_tree(both.tolist())
        found = sum(both[parent[j]][j] for j in range(1, n))
        assert found == pytest.approx(min(sum(both[a] for a in t) for t in every_tree(n)))


def test_tiny_lengths_are_told_apart():
    """Offsets would lose lengths of 1e-33, as multiplicative weights begin with them."""
    length = np.array([[0, 5, 1], [0, 0, 9], [0, 2, 0]]) * 1e-33
    assert arborescence(length.tolist(), 0) == [0, 2, 0]


def test_an_arborescence_of_64_ranks_is_that_of_another_program():
    length = np.random.default_rng(0).random((64, 64))
    parent = arborescence(length.tolist(), 5)
    arcs = [(i, j, length[i, j]) for i in range(64) for j in range(64) if i != j and j != 5]
    graph = networkx.DiGraph()
    graph.add_weighted_edges_from(arcs)
    best = networkx.minimum_spanning_arborescence(graph).size("weight")
    assert sum(length[parent[j], j] for j in range(64) if j != 5) == pytest.approx(best)


@pytest.mark.parametrize("direction", ["broadcast", "all_reduce"])
def test_the_published_method_comes_as_near_as_it_promises(direction):
    epsilon = 0.1
    for seed in range(4):
        problem = packing_problem(random_graph(seed, 5), direction, 0)
        trees = pack_by_multiplicative_weights(problem, epsilon)
        loads = np.zeros(len(problem.edges))
        for tree in trees:
            loads[tree.chosen] += tree.weight
        assert (loads <= problem.capacity * (1 + 1e-9)).all()
        rate, bound = sum(tree.weight for tree in trees), problem.bound(problem.capacity)
        assert bound * (1 - 2 * epsilon) <= rate <= bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("graph", "direction", "problem"),
    [
        (LinkGraph.of(4, {(0, 1): 1.0, (2, 3): 1.0}), "broadcast", "rank 0 and rank 2"),
        (LinkGraph.of(3, {(0, 1): 1.0, (1, 2): 1.0}, both=False), "reduce", "rank 0 and rank 1"),
        (LinkGraph.of(2, {(0, 1): 1.0}, both=False), "all_reduce", "rank 0 and rank 1"),
        (LinkGraph.of(1, {}), "all_reduce", "has 1 rank"),
    ],
)
def test_ranks_that_cannot_be_reached_are_named(graph, direction, problem):
    with pytest.raises(PlanError, match=problem):
        highest_rate(graph, direction)


def test_all_problems_of_a_link_graph_come_at_once():
    with pytest.raises(PlanError) as caught:
        LinkGraph.of(2, {(0, 2): 1.0, (1, 1): 1.0, (0, 1): -1.0, (1, 0): float("inf")})
    assert len(caught.value.problems) == 4


def test_one_way_links_are_no_links_of_an_all_reduce():
    graph = LinkGraph.of(3, {(0, 1): 5, (1, 0): 2, (1, 2): 3, (2, 1): 4, (0, 2): 9}, both=False)
    assert graph.links == ((0, 1), (1, 2))
    assert highest_rate(graph, "all_reduce") == pytest.approx(2)
    assert highest_rate(graph, "broadcast") == pytest.approx(min(5 + 4, 9 + 3, 14, 9))
