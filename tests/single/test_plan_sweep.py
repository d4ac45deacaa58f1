"""single: random requests: nothing that can be priced beats the answer, refusals are exact."""

from __future__ import annotations

import pytest

from support.plan_sweep import problems, request

QUICK = (20, 32, 34, 75, 85)


@pytest.mark.parametrize("seed", QUICK)
def test_a_request_is_answered_well(seed: int) -> None:
    words, question = request(seed)
    assert list(problems(question)) == [], words


@pytest.mark.slow
@pytest.mark.parametrize("seed", [n for n in range(40) if n not in QUICK])
def test_more_requests_are_answered_well(seed: int) -> None:
    words, question = request(seed, mixed=seed % 10 == 9)
    assert list(problems(question)) == [], words
