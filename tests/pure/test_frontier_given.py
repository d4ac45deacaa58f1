"""pure: sweeps of a graph of choices in which some nodes are given."""

from __future__ import annotations

import numpy as np
import pytest

from headway.planner.pareto.choice_graph import (
    ChoiceGraph,
    all_choices,
    make_cost_tables,
    order_eliminations,
)
from headway.planner.pareto.elimination import find_weighted_bounds


def test_given_nodes_are_swept_at_once():
    """One sweep with two nodes given equals one sweep for each pair of their choices."""
    random = np.random.default_rng(5)
    sizes = {"in": 3, "a": 4, "b": 2, "c": 3, "out": 2}
    pairs = [("in", "a"), ("in", "c"), ("a", "b"), ("b", "c"), ("c", "out"), ("a", "out")]
    graph = ChoiceGraph(
        ("x", "y"),
        {name: random.random((size, 2)) for name, size in sizes.items()},
        {(u, v): random.random((sizes[u], sizes[v], 2)) for u, v in pairs},
    )
    weights = random.random((7, 2))
    given = ("in", "out")
    network = make_cost_tables(graph, all_choices(graph))
    scopes = [tuple(name for name in scope if name not in given) for scope in network.scopes]
    order = order_eliminations(scopes, {name: sizes[name] for name in "abc"}, 1000)
    found = find_weighted_bounds(network, order, weights, whole=False, given=given)
    assert found.least.shape == (3, 2, 7)
    for one, two in np.ndindex(3, 2):
        kept = all_choices(graph) | {"in": np.array([one]), "out": np.array([two])}
        alone = make_cost_tables(graph, kept)
        again = order_eliminations(alone.scopes, alone.sizes, 1000)
        forced = find_weighted_bounds(alone, again, weights, whole=False)
        assert found.least[one, two] == pytest.approx(forced.least, rel=1e-12)
        for name in "abc":
            picks = np.broadcast_to(found.choices[name], (3, 2, 7))
            assert (picks[one, two] == forced.choices[name]).all()
