"""pure: the placement of tables as an integer program: equal to trying everything."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from headway.planner.tables import solve as solving
from headway.planner.tables.choices import Held, PlacementProblem
from headway.planner.tables.incumbent import _State, quick_assignments
from headway.planner.tables.solve import Shortage, Solution, solve
from support.placements import best_of_all, random_problem
from support.sampling import sampled

CASES, BLOCK = 200, 25


@pytest.mark.parametrize("block", sampled(range(CASES // BLOCK), 1))
def test_the_optimum_is_that_of_trying_everything(block):
    fitted = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        problem = random_problem(np.random.default_rng(seed))
        best, found = best_of_all(problem), solve(problem)
        if best is None:
            assert isinstance(found, Shortage), seed
            assert found.missing.sum() > 0
            continue
        fitted += 1
        assert isinstance(found, Solution), seed
        assert found.seconds == pytest.approx(best, rel=1e-9), seed
        assert found.seconds == problem.seconds(found.assignment)
        assert found.proven, (seed, found.bound)
        assert problem.fits(found.assignment)
    assert fitted > BLOCK / 3


@pytest.mark.parametrize("seed", range(4))
def test_what_is_missing_is_enough_and_no_more(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, tables=5, ranks=2, tiers=1)
    problem = replace(problem, capacity=np.full((1, 2), 2.0))
    found = solve(problem)
    assert isinstance(found, Shortage)
    assert found.proven
    enough = replace(problem, capacity=problem.capacity + found.missing)
    assert isinstance(solve(enough), Solution)
    for rank in (0, 1):
        if found.missing[0, rank] >= 1:
            less = enough.capacity.copy()
            less[0, rank] -= 0.5
            short = solve(replace(enough, capacity=less))
            assert isinstance(short, Shortage)


def test_beyond_the_program_the_answer_fits_and_says_its_gap():
    rng = np.random.default_rng(5)
    problem = random_problem(rng, tables=80, ranks=20, tiers=2)
    problem = replace(problem, capacity=problem.capacity * 3)
    found = solve(problem, seconds=2.0)
    assert isinstance(found, Solution)
    assert problem.fits(found.assignment)
    assert 0 < found.bound <= found.seconds
    assert found.gap == pytest.approx(1 - found.bound / found.seconds)


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_without_the_program_is_never_above_the_optimum(seed, monkeypatch):
    problem = random_problem(np.random.default_rng(seed))
    best = best_of_all(problem)
    monkeypatch.setattr(solving, "EXACT_TABLES", 0)
    found = solve(problem)
    if best is None:
        assert isinstance(found, Shortage)
    else:
        assert isinstance(found, Solution)
        assert found.bound <= best * (1 + 1e-9)
        assert best <= found.seconds * (1 + 1e-9)


def test_an_answer_is_no_worse_than_a_hint(monkeypatch):
    problem = random_problem(np.random.default_rng(3), tables=5, ranks=3, tiers=1)
    problem = replace(problem, capacity=np.full((1, 3), 1e3))
    best = solve(problem)
    assert isinstance(best, Solution)
    monkeypatch.setattr(solving, "EXACT_TABLES", 0)
    monkeypatch.setattr(solving, "_QUICK_SHARE", 0.0)
    hinted = solve(problem, hints=(best.assignment,))
    assert isinstance(hinted, Solution)
    assert hinted.seconds == best.seconds


def test_a_hint_that_does_not_fit_is_left_out():
    problem = random_problem(np.random.default_rng(1), tables=2, ranks=2, tiers=1)
    form = problem.options[0][0].forms[0]
    full = replace(form, bytes=np.full((1, 2), 1e6))
    option = replace(problem.options[0][0], forms=(full,))
    problem = PlacementProblem(
        names=("a",),
        options=((option, replace(option, forms=(form,))),),
        tiers=problem.tiers,
        capacity=np.full((1, 2), 100.0),
        latencies=(0.0,),
    )
    ranks = option.ranks[: option.pieces]
    found = solve(problem, hints=((Held(option=0, forms=dict.fromkeys(ranks, 0)),),))
    assert isinstance(found, Solution)
    assert found.assignment[0].option == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_local_search_keeps_its_books_and_finds_short_steps(seed):
    problem = random_problem(np.random.default_rng(seed), tables=5, ranks=3, tiers=1)
    problem = replace(problem, capacity=np.full((1, 3), 40.0))
    found = quick_assignments(problem, until=perf_counter() + 5)
    best = best_of_all(problem)
    assert found is not None
    assert best is not None
    assert problem.fits(found)
    assert problem.seconds(found) <= 1.1 * best
    state = _State.of(problem, found)
    move = state.take(2)
    state.put(2, state.best(2) or move)
    assert state.load == pytest.approx(problem.loads(state.assignment))
    assert state.free == pytest.approx(problem.capacity - problem.used(state.assignment))
    assert state.score[0] == pytest.approx(problem.seconds(state.assignment))
