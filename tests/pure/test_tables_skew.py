"""pure: how lookups fall on rows, counted exactly and in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.planner.tables.skew import AccessSkew, SkewCounter, measure_skew


def shares_of(ids, rows, tops):
    counts = np.sort(np.bincount(ids, minlength=rows))[::-1]
    return [counts[:n].sum() / len(ids) for n in tops]


def zipf(seed, rows, count, power=1.3):
    return np.minimum(np.random.default_rng(seed).zipf(power, count) - 1, rows - 1)


def test_a_small_table_is_counted_exactly():
    ids = zipf(0, 5000, 100_000)
    skew = measure_skew(np.array_split(ids, 7), 5000)
    assert (skew.error, skew.lookups) == (0.0, 100_000)
    assert list(skew.shares) == pytest.approx(shares_of(ids, 5000, skew.top))
    assert skew.share(5000) == 1.0
    assert skew.share(0) == 0.0


@pytest.mark.parametrize("counters", [50, 400, 3000])
def test_a_large_table_is_summarised_within_the_stated_error(counters):
    rows = 100_000
    ids = zipf(1, rows, 200_000)
    skew = measure_skew(np.array_split(ids, 40), rows, exact_rows=0, counters=counters)
    true = shares_of(ids, rows, skew.top)
    for said, exact in zip(skew.shares, true, strict=True):
        assert said <= exact + 1e-12
        assert exact <= said + skew.error + 1e-12
    if counters == 3000:
        assert skew.error < 0.5


def test_the_summary_does_not_grow():
    counter = SkewCounter(10**9, exact_rows=0, counters=64)
    for seed in range(20):
        counter.add(np.random.default_rng(seed).integers(0, 10**9, 10_000))
    assert len(counter._ids) <= 64
    assert counter.skew.lookups == 200_000


def test_different_rows_among_lookups_are_as_many_as_expected():
    rng = np.random.default_rng(2)
    ids = zipf(3, 2000, 400_000)
    skew = measure_skew([ids], 2000)
    for lookups in (10, 300, 5000):
        drawn = np.mean([len(np.unique(rng.choice(ids, lookups))) for _ in range(50)])
        assert skew.unique(lookups) == pytest.approx(drawn, rel=0.05)
    even = AccessSkew(rows=1000)
    assert even.unique(1000) == pytest.approx(1000 * (1 - (1 - 1e-3) ** 1000))
    assert even.unique(1000, 500) == pytest.approx(even.unique(1000) / 2)


def test_ranges_of_rows_have_their_share_of_lookups():
    skew = measure_skew([np.arange(0, 50), np.arange(0, 50), np.arange(50, 100)], 100)
    assert skew.range_share(0, 50) == pytest.approx(2 / 3, abs=0.02)
    assert AccessSkew(rows=100).range_share(0, 25) == 0.25


@pytest.mark.parametrize(("ids", "said"), [([0, 7], "id 7 is outside"), ([-1, 0], "id -1")])
def test_an_id_outside_the_table_is_refused(ids, said):
    with pytest.raises(DataError, match=said):
        measure_skew([ids], 7)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 199), min_size=1, max_size=400),
    st.integers(1, 40),
    st.booleans(),
)
def test_the_curve_rises_and_never_promises_too_much(ids, counters, exact):
    skew = measure_skew([ids], 200, exact_rows=200 if exact else 0, counters=counters)
    assert list(skew.shares) == sorted(skew.shares)
    assert all(0 < share <= 1 + 1e-12 for share in skew.shares)
    for share in (0.1, 0.5, 0.9):
        rows = skew.rows_for(share)
        assert skew.share(rows) >= share - 1e-9 or rows == skew.rows
        assert rows == 0 or skew.share(rows - 1) < share + 1e-9
    assert 0 < skew.unique(50) <= 50
