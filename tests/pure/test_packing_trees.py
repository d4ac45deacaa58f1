"""pure: packings: near the bound, no link too full, few trees; the published machines."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from headway.collective.packing.pack import highest_rate, pack, packing_problem
from headway.collective.packing.tree import Packing, WeightedTree, root_tree
from headway.collective.topology import LinkGraph, dgx1p, dgx1v
from headway.errors import PlanError
from support.link_graphs import islands, random_graph
from support.packings import check_packing, packing_loads, spans
from support.sampling import sampled

V, P = dgx1v(), dgx1p()
DIRECTIONS = ("broadcast", "reduce", "all_reduce")


def most_load(packing):
    """Share of the fullest direction, counted here."""
    loads = {}
    for tree in packing.trees:
        for rank, up in enumerate(tree.parent):
            if up is not None:
                both = [(up, rank), (rank, up)]
                used = {"broadcast": both[:1], "reduce": both[1:], "all_reduce": both}
                for arc in used[packing.direction]:
                    loads[arc] = loads.get(arc, 0.0) + tree.weight
    assert loads == pytest.approx(packing_loads(packing))
    return max(load / packing.graph.rates[i][j] for (i, j), load in loads.items())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_random_graphs_are_packed_to_the_bound(direction):
    """Of 200 graphs of 3 to 8 ranks, integer and real rates."""
    for seed in sampled(range(200), 40):
        graph = random_graph(seed)
        root = seed % graph.ranks
        packing = pack(graph, direction, root, tolerance=0.0, attempts=1)
        assert packing.bound == highest_rate(graph, direction, root)
        assert packing.rate == pytest.approx(packing.bound, rel=1e-7), seed
        assert most_load(packing) <= 1 + 1e-9
        assert all(spans(tree.parent) for tree in packing.trees)
        if direction != "all_reduce":
            assert {tree.root for tree in packing.trees} == {root}
        check_packing(packing)


@pytest.mark.parametrize(
    ("graph", "direction", "rate", "trees"),
    [
        (V, "broadcast", 6, 4),
        (V, "reduce", 6, 4),
        (V, "all_reduce", 24 / 7, 7),
        (P, "broadcast", 4, 4),
        (P, "reduce", 4, 4),
        (P, "all_reduce", 16 / 7, 7),
        (V.part([0, 1, 2, 3]), "broadcast", 4, 3),
        (V.part([0, 1, 2, 3]), "all_reduce", 3, 2),
        (V.part([0, 1, 4, 5]), "broadcast", 2, 2),
        (V.part([0, 1, 4, 5]), "all_reduce", 2, 2),
        (V.part(range(6)), "broadcast", 3, 3),
        (V.part(range(6)), "all_reduce", 2.5, 3),
        (V.part(range(7)), "broadcast", 4, 4),
        (V.part(range(7)), "all_reduce", 3, 2),
        (islands(2, 4, inside=10, across=1), "broadcast", 4, 4),
        (islands(2, 4, inside=10, across=1), "all_reduce", 4, 4),
        (LinkGraph.mesh(4), "broadcast", 3, 3),
        (LinkGraph.mesh(4), "all_reduce", 2, 2),
        (LinkGraph.mesh(4).scaled(0.1, [(1, 2)]), "broadcast", 2.1, 4),
        (LinkGraph.mesh(4).scaled(0.1, [(1, 2)]), "all_reduce", 1.7, 5),
        (LinkGraph.mesh(4).scaled(0.0, [(1, 2)]), "all_reduce", 5 / 3, 4),
    ],
)
def test_published_machines(graph, direction, rate, trees):
    """Blink has 6 trees on the DGX-1V; the rates are those of the specification."""
    packing = pack(graph, direction)
    assert packing.rate == pytest.approx(rate)
    assert packing.rate == pytest.approx(packing.bound)
    assert len(packing.trees) <= trees
    assert most_load(packing) <= 1 + 1e-9


@pytest.mark.parametrize("root", range(8))
def test_every_root_of_the_machines(root):
    for graph, rate in ((V, 6), (P, 4)):
        packing = pack(graph, "broadcast", root, attempts=4)
        assert packing.rate == pytest.approx(rate)
        assert len(packing.trees) <= 6


def test_links_have_the_numbers_of_the_machines():
    assert [sum(row) for row in V.rates] == [6] * 8
    assert [sum(row) for row in P.rates] == [4] * 8
    assert dgx1v(25e9).rates[0][3] == 50e9


def fewest(graph):
    """The least number of trees of the best all-reduce, by an integer program over all trees."""
    links, n = graph.links, graph.ranks
    trees = [t for t in itertools.combinations(range(len(links)), n - 1) if is_tree(links, t, n)]
    count, capacity = len(trees), np.array([graph.link_rate(*link) for link in links])
    uses = np.array([[float(place in tree) for tree in trees] for place in range(len(links))])
    none, most = np.zeros((len(links), count)), capacity.max()
    rate = highest_rate(graph, "all_reduce")
    found = milp(
        np.r_[np.zeros(count), np.ones(count)],
        constraints=[
            LinearConstraint(np.hstack([uses, none]), ub=capacity),
            LinearConstraint(np.r_[np.ones(count), np.zeros(count)], lb=rate * (1 - 1e-7)),
            LinearConstraint(np.hstack([np.eye(count), -most * np.eye(count)]), ub=0.0),
        ],
        integrality=np.r_[np.zeros(count), np.ones(count)],
        bounds=Bounds(0, np.r_[np.full(count, np.inf), np.ones(count)]),
    )
    return round(found.fun)


def is_tree(links, places, n):
    reached = {0}
    for _ in places:
        reached |= {r for p in places for r in links[p] if reached & {*links[p]}}
    return len(reached) == n


def test_the_trees_are_hardly_more_than_an_integer_program_needs():
    counts = []
    for seed in range(24):
        graph = random_graph(seed, 4)
        counts.append((len(pack(graph, "all_reduce", tolerance=0.0).trees), fewest(graph)))
    assert all(own <= least + 1 for own, least in counts)
    assert sum(own for own, _ in counts) <= 1.05 * sum(least for _, least in counts)


def test_a_tolerance_buys_fewer_trees():
    graph = LinkGraph.mesh(4).scaled(0.1, [(1, 2)])
    packing = pack(graph, "all_reduce", tolerance=0.02)
    assert len(packing.trees) == 4
    assert packing.rate == pytest.approx(5 / 3)
    assert len(pack(graph, "broadcast", tolerance=0.05).trees) == 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_ranks_than_constraints_can_be_listed_for(direction):
    torus = {}
    for i, j in itertools.product(range(4), range(4)):
        torus[4 * i + j, 4 * i + (j + 1) % 4] = torus[4 * i + j, 4 * ((i + 1) % 4) + j] = 1.0
    for graph in (LinkGraph.of(16, torus), islands(2, 8, inside=10, across=1), LinkGraph.mesh(9)):
        packing = pack(graph, direction, attempts=2)
        assert packing.rate >= 0.99 * packing.bound
        assert most_load(packing) <= 1 + 1e-9
        check_packing(packing)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_meshes_have_flat_trees_in_closed_form(direction):
    for ranks in (9, 17):
        mesh = LinkGraph.mesh(ranks, 3.0)
        packing = pack(mesh, direction, 2)
        check_packing(packing)
        problem = packing_problem(mesh, direction, 2)
        assert packing.bound == pytest.approx(problem.bound(problem.capacity))
        assert packing.rate == pytest.approx(packing.bound)
        assert packing.depth == (1 if direction == "all_reduce" else 2)
    slow = pack(mesh.scaled(0.5, [(3, 4)]), direction, attempts=1)
    assert slow.rate >= 0.99 * slow.bound


def test_trees_of_a_mesh_are_flat():
    for ranks in (4, 6, 8):
        assert pack(LinkGraph.mesh(ranks), "broadcast").depth == 2
        assert pack(LinkGraph.mesh(ranks), "all_reduce").depth <= 3


def test_every_rank_finds_the_same_trees():
    for direction in DIRECTIONS:
        assert pack(V, direction) == pack(dgx1v(), direction)


def test_rates_of_any_unit_give_the_same_trees():
    fast = pack(V.scaled(25e9), "broadcast")
    slow = pack(V, "broadcast")
    assert [tree.parent for tree in fast.trees] == [tree.parent for tree in slow.trees]
    assert fast.rate == pytest.approx(25e9 * slow.rate)


def test_an_all_reduce_hangs_each_tree_up_at_its_centre():
    packing = pack(V, "all_reduce")
    for tree in packing.trees:
        links = [*tree.links]
        others = [WeightedTree(root_tree(links, 8, root), 1.0).depth for root in range(8)]
        assert tree.depth == min(others)
        assert tree.depth == math.ceil(max(others) / 2)
    assert len({tree.root for tree in packing.trees}) > 1


def test_chains_and_stars_have_their_centres():
    chain = root_tree([(0, 1), (1, 2), (2, 3), (3, 4)], 5)
    assert chain == (1, 2, None, 2, 3)
    assert WeightedTree(chain, 1.0).depth == 2
    assert WeightedTree(root_tree([(3, 0), (3, 1), (3, 2)], 4), 1.0).root == 3
    assert root_tree([(0, 1)], 2) == (None, 0)


def test_what_is_no_packing_is_refused_with_all_problems():
    star = WeightedTree((None, 0, 0, 0), 0.7)
    packing = Packing(LinkGraph.mesh(4), "all_reduce", (star, star), 2.0)
    with pytest.raises(PlanError) as caught:
        check_packing(packing)
    assert len(caught.value.problems) == 6
    assert "from rank 0 to rank 1: 1.4 of 1" in str(caught.value)
    broken = (
        WeightedTree((None, 2, 1, 0), 1.0),
        WeightedTree((None, 0), 1.0),
        WeightedTree((None, 0, 0, 0), 0.0),
    )
    with pytest.raises(PlanError) as caught:
        check_packing(Packing(LinkGraph.mesh(4), "broadcast", broken, 2.0))
    assert len(caught.value.problems) == 3
