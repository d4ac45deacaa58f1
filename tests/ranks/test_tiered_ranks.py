"""ranks: tables that are split over ranks, and over tiers on each of them, train as whole ones."""

from __future__ import annotations

import pytest
from torch.optim import Adagrad

from support.ranks import World, ranks
from support.tiered_models import differences


def found_on(world: World) -> dict[str, float]:
    found: dict[str, float] = {}
    for way in ("table", "column", "row", "hash"):
        each, _ = differences(
            lambda p: Adagrad(p, lr=0.1), way, "110 rows", steps=6, rank=world.rank, size=world.size
        )
        found |= {f"{way} {name}": value for name, value in each.items()}
    return found


def nothing_differs(results: list[dict[str, float]]) -> None:
    for found in results:
        assert len(found) == 4 * 6
        assert max(found.values()) < 1e-12, found


@ranks(2, timeout=60, check=nothing_differs)
def test_each_way_over_tiers_on_two_ranks(world: World) -> dict[str, float]:
    return found_on(world)


@pytest.mark.slow
@ranks(4, timeout=90, check=nothing_differs)
def test_each_way_over_tiers_on_four_ranks(world: World) -> dict[str, float]:
    return found_on(world)
