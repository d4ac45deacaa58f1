"""ranks: random plans of small models: what `plan` says of them is what training does."""

from __future__ import annotations

import pytest

from support.planned_models import RECIPES
from support.ranks import warm_up
from support.run_sweep import problems, request

UNCAPTURED = "branching"  # its forward looks at numbers: there is no plan at all


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(RECIPES)))
def test_what_is_said_of_a_plan_is_so(seed: int) -> None:
    if request(seed).name != UNCAPTURED:
        warm_up()
        assert [found for found in problems(seed, 1) if found[1]] == []
