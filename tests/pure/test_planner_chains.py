"""pure: rows of units, however long: against joining one after the other, and against all ways."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from headway.planner.estimate.segments import UnitChains, min_plus_product, path, rows_of

PARTS = 5
PRICES = 3


def units(seed: int, shapes: dict[int, tuple[int, int]], *, whole: bool = True):
    """By kind (2, J, A, B, 5); whole numbers, whose sums are exact."""
    make = np.random.default_rng(seed)
    sizes = {kind: (2, PRICES, *shape, PARTS) for kind, shape in shapes.items()}
    if whole:
        return {kind: make.integers(0, 50, size).astype(float) for kind, size in sizes.items()}
    return {kind: make.random(size) for kind, size in sizes.items()}


def weights(seed: int, *, whole: bool = True):
    make = np.random.default_rng(seed + 1)
    size = (2, PRICES, PARTS)
    return make.integers(1, 9, size).astype(float) if whole else make.random(size)


def one_by_one(own, priced, kinds):
    found = own[kinds[0]]
    for kind in kinds[1:]:
        found, _ = min_plus_product(found, own[kind], priced)
    return found


def price(rows, priced):
    return np.einsum("rjabp,rjp->rjab", rows, priced)


RUNS = [[0] * 40, [1, *[0] * 30, 2], [1, *[0] * 25, 3, *[4] * 25, 2], [0, 3, 4] * 9]
SHAPES = {0: (3, 3), 1: (1, 3), 2: (3, 1), 3: (3, 3), 4: (3, 3)}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kinds", RUNS, ids=["run", "ends", "two runs", "no run"])
def test_costs_are_those_of_joining_one_by_one(seed, kinds):
    own, priced = units(seed, SHAPES), weights(seed)
    chains = UnitChains(priced, own.__getitem__)
    for length in range(1, len(kinds) + 1):
        found = rows_of(*chains.of(kinds[:length]))
        expected = one_by_one(own, priced, kinds[:length])
        assert np.array_equal(price(found, priced), price(expected, priced))


@pytest.mark.parametrize("seed", range(30))
def test_costs_of_any_numbers_are_those_of_joining_one_by_one(seed):
    own, priced = units(seed, SHAPES, whole=False), weights(seed, whole=False)
    kinds = RUNS[2]
    found = rows_of(*UnitChains(priced, own.__getitem__).of(kinds))
    np.testing.assert_allclose(found, one_by_one(own, priced, kinds), rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_costs_are_the_least_of_all_ways(seed):
    own, priced = units(seed, SHAPES), weights(seed)
    kinds = [1, 0, 0, 0, 0, 3, 4, 4, 2]
    found = price(rows_of(*UnitChains(priced, own.__getitem__).of(kinds)), priced)
    each = [price(own[kind], priced) for kind in kinds]
    ways = []
    for way in product(range(3), repeat=len(kinds) - 1):
        ends = (0, *way, 0)
        ways.append(sum(e[:, :, i, j] for e, i, j in zip(each, ends, ends[1:], strict=False)))
    assert np.array_equal(found[:, :, 0, 0], np.min(ways, axis=0))


@pytest.mark.parametrize("dear", [0.0, 20.0], ids=["", "changes are dear"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kinds", RUNS, ids=["run", "ends", "two runs", "no run"])
def test_placements_add_up_to_the_costs(kinds, seed, dear):
    own, priced = units(seed, SHAPES), weights(seed)
    own[0] = own[0] + dear * (1.0 - np.eye(3))[:, :, None]
    place = UnitChains(priced, own.__getitem__).of(kinds)
    rows = rows_of(*place)
    for again, number, entry, exit_ in np.ndindex(rows.shape[:-1]):
        way = path(*place, again, number, (entry, exit_))
        assert len(way) == len(kinds)
        assert (way[0][0], way[-1][1]) == (entry, exit_)
        assert all(one[1] == two[0] for one, two in pairwise(way))
        each = [own[kind][again, number, *ends] for kind, ends in zip(kinds, way, strict=True)]
        assert np.array_equal(sum(each), rows[again, number, entry, exit_])


def joins(chains: UnitChains) -> int:
    waiting, found = list(chains._first.values()), 0
    while waiting:
        waiting += waiting.pop().behind.values()
        found += 1
    return found


def test_a_long_run_needs_few_joins():
    """Of units that change what passes only where it pays for many."""
    own, priced = units(3, SHAPES, whole=False), weights(3, whole=False)
    own[0] = own[0] + (1.0 - np.eye(3))[:, :, None]
    chains = UnitChains(priced, own.__getitem__)
    place = chains.of([1, *[0] * 100_000, 2])
    assert joins(chains) < 100
    way = path(*place, 1, 2, (0, 0))
    assert len(way) == 100_002
    total = sum(own[0][1, 2, *ends] for ends in way[1:-1])
    total = total + own[1][1, 2, *way[0]] + own[2][1, 2, *way[-1]]
    np.testing.assert_allclose(rows_of(*place)[1, 2, 0, 0], total, rtol=1e-10)


def test_a_late_change_is_not_missed():
    """Another placement is better by little and dear to reach: it pays from 100 units on."""
    rows = np.full((2, PRICES, 2, 2, PARTS), 0.0)
    rows[..., 0, 0, 0], rows[..., 1, 1, 0] = 100.0, 99.0
    rows[..., 0, 1, 0], rows[..., 1, 0, 0] = 150.0, 150.0
    priced = np.zeros((2, PRICES, PARTS))
    priced[..., 0] = 1.0
    chains = UnitChains(priced, lambda kind: rows)
    few = rows_of(*chains.of([0] * 50))[0, 0, 0, 0, 0]
    many = rows_of(*chains.of([0] * 500))[0, 0, 0, 0, 0]
    assert few == 50 * 100.0
    assert many == 2 * 150.0 + 498 * 99.0


def test_units_that_alternate_never_repeat_themselves():
    """The cheapest way changes its placement with every unit: no step is the same."""
    rows = np.full((2, PRICES, 2, 2, PARTS), 0.0)
    rows[..., 0, 0, 0] = rows[..., 1, 1, 0] = 1000.0
    rows[..., 0, 1, 0], rows[..., 1, 0, 0] = 1.0, 3.0
    priced = np.zeros((2, PRICES, PARTS))
    priced[..., 0] = 1.0
    chains = UnitChains(priced, lambda kind: rows)
    found = rows_of(*chains.of([0] * 21))
    assert found[0, 0, 0, 1, 0] == 11 * 1.0 + 10 * 3.0
    assert joins(chains) == 21
