"""single: the largest k of d values, exactly and by MSTopK."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.comm.compress import topk_selection
from headway.comm.compress.compressor import seeded_generator
from headway.comm.compress.sparsification import random_indices
from headway.comm.compress.topk_selection import SMALL, ms_top_k, ms_top_k_by_passes, top_k
from headway.errors import RunError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = st.one_of(st.integers(1, 300), st.integers(SMALL, 4 * SMALL))
SHAPES = ("normal", "heavy", "few values", "mostly zero", "equal", "zero", "sorted", "periodic")


def make(shape: str, size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values with a property that a selection might stumble over."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=draw, dtype=torch.float64)
    if shape == "heavy":
        normal = normal / torch.rand(size, generator=draw, dtype=torch.float64).clamp(min=1e-3)
    elif shape == "few values":
        normal = normal.round()
    elif shape == "mostly zero":
        normal = normal * (torch.rand(size, generator=draw, dtype=torch.float64) < 0.01)
    elif shape == "equal":
        normal = torch.full((size,), -3.0, dtype=torch.float64)
    elif shape == "zero":
        normal = normal * 0.0  # both zeros, with and without a sign
    elif shape == "sorted":
        normal = normal.sort().values
    elif shape == "periodic":  # every 64th is large, as in a matrix with one hot column
        normal = normal * torch.where(torch.arange(size) % 64 == 0, 100.0, 1e-3)
    return normal.to(dtype)


def by_sorting(values: torch.Tensor, k: int) -> torch.Tensor:
    """The definition: magnitudes descending, equal ones in order of their index."""
    order = torch.sort(values.double().abs(), descending=True, stable=True).indices
    return order[:k].sort().values


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES,
    share=st.floats(0, 1),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_top_k_is_the_set_that_sorting_gives(size, share, shape, dtype, seed):
    values = make(shape, size, seed, dtype)
    k = max(1, round(share**3 * size))
    assert torch.equal(top_k(values, k), by_sorting(values, k))


@pytest.mark.parametrize("density", [0.01, 0.001, 0.0001])
def test_top_k_is_the_set_of_torch(density):
    values = make("heavy", 300_000, 1)
    k = math.ceil(density * len(values))
    assert torch.equal(top_k(values, k), values.abs().topk(k).indices.sort().values)


@pytest.mark.parametrize("k", [1, 2, SMALL // 8, SMALL - 1, SMALL])
@pytest.mark.parametrize("shape", SHAPES)
def test_top_k_at_its_limits(shape, k):
    values = make(shape, SMALL, 3)
    assert torch.equal(top_k(values, k), by_sorting(values, k))


@settings(max_examples=30, deadline=None)
@given(size=SIZES, shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES))
def test_adding_on_the_way_is_adding_before(size, shape, dtype):
    values, more = make("normal", size, 4, dtype), make(shape, size, 5, dtype)
    total, k = values + more, max(1, size // 50)
    assert torch.equal(top_k(values, k, add=more), by_sorting(total, k))
    assert torch.equal(values, total)
    values = total - more
    total = values + more
    ms_top_k(values, k, seeded_generator(0, ""), add=more)
    assert torch.equal(values, total)


def test_a_sample_that_misleads_costs_time_but_not_exactness(monkeypatch):
    """The first threshold passes far too few values; it is lowered until k pass."""
    values = make("normal", 4 * SMALL, 6)
    asked = []
    true = topk_selection._sampled_threshold

    def misled(values, add, k):
        asked.append(k)
        return true(values, add, 1) if len(asked) < 3 else true(values, add, k)

    monkeypatch.setattr(topk_selection, "_sampled_threshold", misled)
    assert torch.equal(top_k(values, 2000), by_sorting(values, 2000))
    assert asked == [2000, 8000]
    monkeypatch.setattr(topk_selection, "_sampled_threshold", lambda *_: 2**31 - 2)
    assert torch.equal(top_k(values, 2000), by_sorting(values, 2000))


@pytest.mark.parametrize("size", [100, 2 * SMALL])
@pytest.mark.parametrize("select", [top_k, lambda v, k: ms_top_k(v, k, seeded_generator(0, ""))])
def test_nan_is_an_error(size, select):
    values = make("normal", size, 7)
    values[size // 2] = math.nan
    with pytest.raises(RunError, match="is NaN"):
        select(values, 3)
    values = make("zero", size, 7)
    values[0] = -math.nan
    with pytest.raises(RunError, match="is NaN"):
        select(values, 3)


def test_infinity_is_the_largest_and_no_threshold_of_mstopk():
    values = make("normal", 2 * SMALL, 8)
    values[[5, 77]] = torch.tensor([math.inf, -math.inf])
    assert top_k(values, 2).tolist() == [5, 77]
    with pytest.raises(RunError, match="infinite"):
        ms_top_k(values, 2, seeded_generator(0, ""))


@pytest.mark.parametrize("k", [0, 11])
def test_no_such_k(k):
    with pytest.raises(ValueError, match="1 to 10"):
        top_k(torch.ones(10), k)
    with pytest.raises(ValueError, match="1-D float"):
        top_k(torch.ones(10, dtype=torch.int32), 3)


# -- MSTopK -----------------------------------------------------------------------------------


def check_invariants(values, k, found):
    """Spec 1.4: what MSTopK promises."""
    magnitudes = values.double().abs()
    assert len(found.indices) == k
    assert torch.equal(found.indices, found.indices.unique())
    assert found.count_above <= k <= found.count_below
    assert found.count_above == int((magnitudes >= found.above).sum())
    assert found.count_below == int((magnitudes >= found.below).sum())
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[found.indices] = True
    assert chosen[magnitudes >= found.above].all()
    assert not chosen[magnitudes < found.below].any()
    energy = magnitudes[chosen].square().sum()
    exact = magnitudes.square().sort(descending=True).values[:k].sum()
    above = min(found.above, float(magnitudes.max()))
    least = exact - (k - found.count_above) * (above**2 - found.below**2)
    assert energy >= least * (1 - 1e-12) - 1e-300


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES,
    share=st.floats(0, 1),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    samplings=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_mstopk_keeps_its_invariants(size, share, shape, dtype, samplings, seed):
    values = make(shape, size, seed, dtype)
    k = max(1, round(share**3 * size))
    check_invariants(
        values, k, ms_top_k(values, k, seeded_generator(seed, "a"), samplings=samplings)
    )


@pytest.mark.parametrize("k", [1, 100, SMALL])
@pytest.mark.parametrize("size", [200, SMALL])
@pytest.mark.parametrize("shape", SHAPES)
def test_mstopk_at_its_limits(shape, size, k):
    values = make(shape, size, 9)
    k = min(k, size)
    check_invariants(values, k, ms_top_k(values, k, seeded_generator(0, "")))
    check_invariants(values, k, ms_top_k_by_passes(values, k, seeded_generator(0, "")))


@pytest.mark.parametrize("size", [3000, 20 * SMALL])
def test_counts_among_candidates_are_those_of_the_passes(size):
    values = make("normal", size, 10)
    quick = ms_top_k(values, size // 100, seeded_generator(0, "x"))
    paper = ms_top_k_by_passes(values, size // 100, seeded_generator(0, "x"))
    assert quick.count_above == paper.count_above
    assert quick.count_below == paper.count_below
    assert quick.above == pytest.approx(paper.above, rel=1e-6)
    shared = np.intersect1d(quick.indices, paper.indices).size
    assert shared >= size // 100 - 2


def test_thirty_samplings_find_all_of_the_energy():
    values = make("normal", 40 * SMALL, 11)
    k = len(values) // 100
    kept = values[ms_top_k(values, k, seeded_generator(0, "")).indices].double().square().sum()
    best = values[top_k(values, k)].double().square().sum()
    assert kept / best > 0.999999


def test_the_choice_between_the_thresholds_is_drawn():
    """Equal values: which ones are sent changes from step to step, and not between equal runs."""
    values = make("equal", 2 * SMALL, 12)
    first, second, again = (
        ms_top_k(values, 10, seeded_generator(1, "a", step)).indices.tolist() for step in (0, 1, 0)
    )
    assert first == again != second
    assert first == list(range(first[0], first[0] + 10))


# -- random places ----------------------------------------------------------------------------


@given(size=st.integers(1, 5000), share=st.floats(0, 1), step=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_random_places_are_distinct_and_in_order(size, share, step):
    k = max(1, round(share * size))
    places = random_indices(3, "layer", step, size, k)
    assert len(places) == k
    assert torch.equal(places, places.unique())
    assert int(places[0]) >= 0
    assert int(places[-1]) < size


def test_every_place_has_the_same_chance():
    """Chi squared over 2000 steps, 5 of 23 places: 22 degrees of freedom, below the 99.9 % line."""
    counts = np.zeros(23)
    for step in range(2000):
        counts[random_indices(0, "w", step, 23, 5).numpy()] += 1
    # Stretches of 4 and 5 places: the chances are 1/4 and 1/5.
    borders = np.arange(6) * 23 // 5
    expected = np.repeat(2000 / np.diff(borders), np.diff(borders))
    assert ((counts - expected) ** 2 / expected).sum() < 48
    assert not torch.equal(random_indices(0, "w", 0, 230, 5), random_indices(0, "v", 0, 230, 5))
    assert not torch.equal(random_indices(0, "w", 0, 230, 5), random_indices(1, "w", 0, 230, 5))
