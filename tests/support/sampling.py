"""Enumerations in tests: a sample that rotates from day to day, or all of them.

    @pytest.mark.parametrize("layout", sampled(LAYOUTS, 20))

An exhaustive list proves most, but nobody waits for it before each commit. `make test` takes a
sample of it; `make test-all` (`pytest --all-cases`) takes the whole. The sample depends on a
number, which pytest prints at its start and `--case-seed` sets, so that a failure can be repeated.
By default it is the day, and samples of successive days tile the list.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
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
    # A window that moves on by its own width over a shuffled list: after len / count days, every
    # case has had its turn, which independent samples would not promise.
    order = random.Random(len(cases)).sample(range(len(cases)), len(cases))
    start = int(seed) * count
    chosen = (order[(start + n) % len(order)] for n in range(count))
    return [cases[number] for number in sorted(chosen)]


def sampled_by_cost(cases: Sequence[T], budget: float, cost: Callable[[T], float]) -> list[T]:
    """As many of the cases as cost about `budget` together, in their order.

    Samples of successive days tile the list as those of `sampled` do: a case is in the sample of
    the day into which it begins when all are lined up by their costs.
    """
    seed = os.environ.get(VARIABLE) or seed_of_today()
    total = sum(map(cost, cases))
    if seed == ALL or budget >= total:
        return list(cases)
    days = math.ceil(total / budget)
    today, begin, chosen = int(seed) % days, 0.0, []
    for number in random.Random(len(cases)).sample(range(len(cases)), len(cases)):
        if int(begin / total * days) == today:
            chosen.append(number)
        begin += cost(cases[number])
    return [cases[number] for number in sorted(chosen)]
