"""pure: the algebra of fronts: laws, two to four objectives, ties, thinning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planner.pareto import reduce_front
from headway.planner.pareto.front import reduce_rows, spread
from support.brute_frontier import coverage, front_of


def vectors(width, most=12):
    number = st.integers(0, 9).map(float)
    row = st.one_of(st.lists(number, min_size=width, max_size=width))
    return st.lists(row, min_size=1, max_size=most).map(
        lambda rows: np.array(rows, dtype=np.float64).reshape(-1, width)
    )


widths = st.integers(1, 4)
triples = widths.flatmap(lambda d: st.tuples(vectors(d), vectors(d), vectors(d)))


def same(first, second):
    np.testing.assert_array_equal(first.costs, second.costs)


@given(triples)
def test_reduce_is_the_definition_and_keeps_the_first_of_equal_rows(sets):
    costs = np.concatenate(sets)
    front = reduce_front(costs)
    np.testing.assert_array_equal(front.costs, front_of(costs))
    for row, origin in zip(front.costs, front.origins[:, 0], strict=True):
        assert origin == np.flatnonzero((costs == row).all(axis=1))[0]
    same(reduce_front(front.costs), front)


@given(triples)
def test_union_and_product_commute_associate_and_distribute(sets):
    a, b, c = (reduce_front(costs) for costs in sets)
    same(a.union(b), b.union(a))
    same(a.product(b), b.product(a))
    same(a.union(b).union(c), a.union(b.union(c)))
    same(a.product(b).product(c), a.product(b.product(c)))
    same(a.product(b.union(c)), a.product(b).union(a.product(c)))
    same(a.union(a), a)
    same(a.product(reduce_front(np.zeros((1, a.costs.shape[1])))), a)


@given(triples)
def test_origins_lead_back_to_the_rows(sets):
    a, b, _ = (reduce_front(costs) for costs in sets)
    for row, (which, place) in zip(a.union(b).costs, a.union(b).origins, strict=True):
        assert (row == (b if which else a).costs[place]).all()
    for row, (one, two) in zip(a.product(b).costs, a.product(b).origins, strict=True):
        assert (row == a.costs[one] + b.costs[two]).all()


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_many_sets_at_once_with_forbidden_rows(width, whole):
    random = np.random.default_rng(width)
    costs = random.uniform(1, 40, (width, 30, 300))
    costs = np.floor(costs) if whole else costs
    costs[0][random.random((30, 300)) < 0.3] = np.inf
    costs[:, 7] = np.inf
    fronts, picks = reduce_rows(costs)
    for cell in range(30):
        kept = picks[cell][picks[cell] >= 0]
        np.testing.assert_array_equal(fronts[:, cell, : len(kept)].T, front_of(costs[:, cell].T))
        np.testing.assert_array_equal(fronts[:, cell, : len(kept)], costs[:, cell][:, kept])
        assert np.isinf(fronts[:, cell, len(kept) :]).all()


@settings(max_examples=60)
@given(widths.flatmap(lambda d: vectors(d, 40)), st.sampled_from([0.05, 0.3, 1.0]))
def test_a_thinned_front_covers_the_whole_one(costs, epsilon):
    front = reduce_front(costs)
    thin = front.thin(epsilon)
    assert {tuple(row) for row in thin.costs} <= {tuple(row) for row in front.costs}
    assert coverage(thin.costs, front.costs) <= (1 + epsilon) * (1 + 1e-12)
    same(front.thin(0.0), front)


def test_thinning_two_objectives_keeps_as_few_rows_as_possible():
    front = reduce_front(np.array([[x, 200.0 - x] for x in range(100, 111)]))
    assert len(front.thin(0.1)) == 1
    assert len(front.thin(0.04)) == 2
    with pytest.raises(ValueError, match="epsilon"):
        front.thin(-0.1)


def test_spreading_keeps_both_ends_and_never_more_than_wanted():
    long = np.stack([np.arange(1.0, 60.0), 100.0 - np.arange(1.0, 60.0)])
    costs = np.full((2, 2, 59), np.inf)
    costs[:, 0], costs[:, 1, :3] = long, long[:, :3]
    picks = np.where(np.isfinite(costs[0]), np.arange(59), -1)
    some, kept = spread(costs, picks, 5)
    assert kept.shape == (2, 5)
    assert kept[0, 0] == 0
    assert kept[0].max() == 58
    np.testing.assert_array_equal(kept[1], [0, 1, 2, -1, -1])
    np.testing.assert_array_equal(some[:, 1, :3], long[:, :3])
