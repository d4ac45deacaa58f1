"""ranks: lookups in split tables, and their gradients, equal those in whole ones."""

from __future__ import annotations

import pytest

from support.ranks import ranks
from support.split_table_models import WAYS, EveryLookup, compare, lookup_data, shares


def batches_of(size):
    return [lookup_data(n, 10 * size + rank) for rank, n in enumerate(shares(size))]


def nothing_differs(results):
    for rank, found in enumerate(results):
        wrong = {key: value for key, value in found.items() if not value <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"


def every_way(world, **options):
    return {
        (way, key): value
        for way in WAYS
        for key, value in compare(world, EveryLookup, batches_of, way, **options)[0].items()
    }


@ranks(2, timeout=60, check=nothing_differs)
def test_every_lookup_in_every_way_on_two_ranks(world):
    return every_way(world)


@pytest.mark.slow
@ranks(3, timeout=60, check=nothing_differs)
def test_every_lookup_in_every_way_on_three_ranks(world):
    return every_way(world) | every_way(world, touched=False)
