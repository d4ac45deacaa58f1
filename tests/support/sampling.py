"""Enumerations in tests: a sample that rotates from day to day, or all of them.

    @pytest.mark.parametrize("layout", sampled(LAYOUTS, 20))

An exhaustive list proves most, but nobody waits for it before each commit. `make test` takes a
sample of it; `make test-all` (`pytest --all-cases`) takes the whole. The sample depends on a
seed, which pytest prints at its start and `--case-seed` sets; by default it is the day, so that a
fortnight of ordinary runs sees most of the list, and a failure can be repeated.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

VARIABLE = "HEADWAY_CASE_SEED"
"""Set once by conftest.py, before anything is collected: workers and ranks must choose alike."""
ALL = "all"

T = TypeVar("T")


def seed_of_today() -> str:
    """The seed of the day, a number as text."""
    return str(datetime.now(tz=UTC).toordinal())


def sampled(cases: Sequence[T], count: int) -> list[T]:
    """`count` of the cases, in their order; all of them under `--all-cases`.

    Args:
        cases: The whole enumeration, in an order that is the same in every process.
        count: How many of them an ordinary run tests.
    """
    seed = os.environ.get(VARIABLE) or seed_of_today()
    if seed == ALL or count >= len(cases):
        return list(cases)
    # The number of cases is part of the seed: two lists are not sampled in step.
    chosen = random.Random(f"{seed}/{len(cases)}").sample(range(len(cases)), count)
    return [cases[number] for number in sorted(chosen)]
