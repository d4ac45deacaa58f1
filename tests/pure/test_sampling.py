"""pure: samples of enumerations rotate and can be repeated; time limits stretch with load."""

from __future__ import annotations

import math

from support import patience, sampling
from support.patience import patient
from support.sampling import sampled, sampled_by_cost

CASES = list(range(100))


def test_a_sample_is_the_same_for_the_same_seed_and_keeps_the_order(monkeypatch):
    monkeypatch.setenv(sampling.VARIABLE, "7")
    first = sampled(CASES, 10)
    assert first == sampled(CASES, 10) == sorted(first)
    assert len(set(first)) == 10


def test_samples_of_successive_days_tile_the_list(monkeypatch):
    seen = []
    for day in range(739_000, 739_010):
        monkeypatch.setenv(sampling.VARIABLE, str(day))
        seen += sampled(CASES, 10)
    assert sorted(seen) == CASES


def test_all_cases(monkeypatch):
    monkeypatch.setenv(sampling.VARIABLE, sampling.ALL)
    assert sampled(CASES, 10) == CASES


def test_a_short_list_is_taken_whole(monkeypatch):
    monkeypatch.setenv(sampling.VARIABLE, "7")
    assert sampled(CASES[:3], 10) == CASES[:3]


def test_a_limit_is_never_below_what_it_says_and_has_an_end(monkeypatch):
    assert patient(10) >= 10
    monkeypatch.setattr(patience, "REFERENCE_SECONDS", 1e-9)
    assert patience.measure_slowness() == patience.MAX_SLOWNESS
    monkeypatch.setattr(patience, "REFERENCE_SECONDS", 1e9)
    assert patience.measure_slowness() == 1


def test_samples_by_cost_tile_the_list_and_keep_to_their_budget(monkeypatch):
    costs = [1.0 + number % 7 for number in CASES]
    seen = []
    for day in range(739_000, 739_000 + math.ceil(sum(costs) / 20)):
        monkeypatch.setenv(sampling.VARIABLE, str(day))
        today = sampled_by_cost(CASES, 20, costs.__getitem__)
        assert sum(costs[case] for case in today) < 20 + max(costs)
        seen += today
    assert sorted(seen) == CASES
    monkeypatch.setenv(sampling.VARIABLE, sampling.ALL)
    assert sampled_by_cost(CASES, 20, costs.__getitem__) == CASES
