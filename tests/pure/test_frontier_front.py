"""pure: fronts of one to four objectives, ties, forbidden rows, thinning by ratio."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planner.pareto.front import reduce_front, reduce_rows, spread
from support.brute_frontier import front_of


def vectors(width, most=12):
    number = st.integers(0, 9).map(float)
    row = st.one_of(st.lists(number, min_size=width, max_size=width))
    return st.lists(row, min_size=1, max_size=most).map(
        lambda rows: np.array(rows, dtype=np.float64).reshape(-1, width)
    )


widths = st.integers(1, 4)
triples = widths.flatmap(lambda d: st.tuples(vectors(d), vectors(d), vectors(d)))


@given(triples)
def test_reduce_is_the_definition_and_keeps_the_first_of_equal_rows(sets):
    costs = np.concatenate(sets)
    rows = reduce_front(costs)
    front = costs[rows]
    np.testing.assert_array_equal(front, front_of(costs))
    for number, row in zip(rows, front, strict=True):
        assert number == np.flatnonzero((costs == row).all(axis=1))[0]
    np.testing.assert_array_equal(front[reduce_front(front)], front)


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
