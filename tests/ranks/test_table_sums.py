"""ranks: heads of models on split tables equal the serial ones: outputs, gradients, steps."""

from __future__ import annotations

import pytest

from support.ranks import ranks
from support.split_table_models import WAYS, compare, lookup_data, shares
from support.substitutions import MODELS


def batches_of(size):
    return [lookup_data(n, 10 * size + rank) for rank, n in enumerate(shares(size))]


def nothing_differs(results):
    for rank, found in enumerate(results):
        wrong = {key: value for key, value in found.items() if not value <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"


def compare_all(world, names, ways=WAYS, travels=("auto", "sums", "rows")):
    return {
        (name, way, how, key): value
        for name in names
        for way in ways
        for how in travels
        for key, value in compare(world, MODELS[name], batches_of, way, travels=how)[0].items()
    }


@pytest.mark.parametrize("name", MODELS)
@ranks(2, timeout=60, check=nothing_differs)
def test_heads_on_two_ranks(world, name):
    return compare_all(world, [name])


@pytest.mark.slow
@ranks(3, timeout=120, check=nothing_differs)
def test_heads_on_three_ranks(world):
    return compare_all(world, MODELS, travels=("auto", "sums"))
