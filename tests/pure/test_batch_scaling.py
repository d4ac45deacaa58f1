"""pure: the fits of a study of batch sizes and rates, on runs whose laws are known."""

from __future__ import annotations

import math
import random

import pytest

from headway.cost.batch_scaling import (
    BatchScaling,
    StudyRun,
    analyze,
    fit_critical_batch,
    fit_exponent,
)

BATCHES = (4, 8, 16, 32, 64)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def run(batch, rate, steps, *, end="reached", seed=0, every=1):
    return StudyRun(
        batch=batch, rate=rate, seed=seed, end=end, every=every, value=0.4, directory=f"b{batch}",
        steps=round(steps), samples=round(steps) * batch,
    )  # fmt: skip


def study(*, p=1.0, critical=24.0, least=4000.0, centre=1.1, factors=FACTORS, every=1):
    """Runs of the law: a parabola in log rate around c B^p, with S_min (1 + B_crit / B)."""
    found = []
    for batch in BATCHES:
        best = 0.01 * batch**p
        for factor in factors:
            away = math.log(factor / centre)
            steps = least * (1 + critical / batch) * math.exp(0.2 * away**2)
            found.append(run(batch, best * factor, steps, every=every))
    return found


@pytest.mark.parametrize("p", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("critical", [6.0, 24.0, 100.0])
def test_the_law_is_found_again(p, critical):
    found = analyze(study(p=p, critical=critical))
    assert found.exponent.value == pytest.approx(p, abs=0.002)
    assert found.exponent.low < p < found.exponent.high
    assert found.critical.value == pytest.approx(critical, rel=0.01)
    assert found.critical.low < critical < found.critical.high
    assert found.min_samples == pytest.approx(found.min_steps * critical, rel=0.01)
    assert found.left_out == ()
    assert [round(e, 2) for _, _, e in found.exponents] == [p] * 4


def test_the_parabola_finds_a_rate_between_those_of_the_grid():
    found = analyze(study(centre=1.3))
    for one in found.batches:
        assert one.best.rate == pytest.approx(0.01 * one.batch)
        assert one.optimum == pytest.approx(0.013 * one.batch, rel=0.01)


def test_the_order_of_the_runs_changes_nothing():
    runs = study()
    shuffled = random.Random(3).sample(runs, len(runs))
    assert analyze(shuffled) == analyze(runs)


def test_of_rates_alike_the_smallest_is_chosen():
    found = analyze([run(8, rate, 100) for rate in (0.1, 0.2, 0.4)])
    assert found.batches[0].best.rate == 0.1
    assert found.batches[0].edge == "smallest"


def test_a_best_rate_at_the_edge_is_left_out_of_the_exponent():
    runs = [r for r in study() if not (r.batch == 64 and r.rate > 0.64)]
    found = analyze(runs)
    assert found.left_out == (64,)
    assert found.batches[-1].edge == "largest"
    assert found.exponent.value == pytest.approx(1, abs=0.002)
    # A larger rate that diverged is no edge.
    bounded = analyze([*runs, run(64, 1.28, 3, end="diverged")])
    assert bounded.left_out == ()
    assert bounded.batches[-1].optimum == pytest.approx(0.64)


def test_a_batch_that_never_reaches_the_target_has_its_row():
    runs = [run(r.batch, r.rate, 500, end="budget") if r.batch == 4 else r for r in study()]
    found = analyze(runs)
    assert [one.batch for one in found.batches] == list(BATCHES)
    assert found.batches[0].best is None
    assert found.batches[0].rates[0].ends == ("budget",)
    assert found.left_out == (4,)
    assert found.critical.value == pytest.approx(24, rel=0.02)


def test_seeds_are_averaged_and_one_that_fails_counts():
    rates = (0.1, 0.2, 0.4)
    steps = ((90, 90), (50, 98), (80, 80))
    runs = [run(8, rate, made, seed=seed) for rate, both in zip(rates, steps, strict=True)
            for seed, made in enumerate(both)]  # fmt: skip
    best = analyze(runs).batches[0].best
    assert best.rate == 0.2
    assert best.steps == pytest.approx(70)
    runs = [run(8, r.rate, r.steps, end="diverged", seed=1) if r.rate == 0.2 and r.seed else r
            for r in runs]  # fmt: skip
    assert analyze(runs).batches[0].best.rate == 0.4


def test_two_batches_have_no_interval_and_so_no_estimate():
    found = analyze([r for r in study() if r.batch < 16])
    assert found.exponent is None
    assert found.critical is None
    assert len(found.exponents) == 1


def test_the_spacing_is_a_floor_of_the_interval():
    # Exactly on a line: without the floor the interval would be empty.
    narrow, _ = fit_exponent(BATCHES, [0.1 * b for b in BATCHES], [math.log(1.1)] * 5)
    wide, _ = fit_exponent(BATCHES, [0.1 * b for b in BATCHES], [math.log(2)] * 5)
    assert wide.high - wide.low == pytest.approx(
        (narrow.high - narrow.low) * math.log(2) / math.log(1.1)
    )
    fine, _ = fit_critical_batch(BATCHES, [100 * (1 + 20 / b) for b in BATCHES], [1] * 5)
    coarse, _ = fit_critical_batch(BATCHES, [100 * (1 + 20 / b) for b in BATCHES], [20] * 5)
    assert coarse.high - coarse.low > 5 * (fine.high - fine.low)


def test_the_interval_of_the_exponent_covers_the_truth():
    # 95 % of 400 noisy lines: 380; 5 standard deviations of a binomial law are 22.
    draw, covered = random.Random(5), 0
    for _ in range(400):
        rates = [0.1 * b**0.5 * math.exp(draw.gauss(0, 0.3)) for b in BATCHES]
        found, _ = fit_exponent(BATCHES, rates, [1e-9] * 5)
        covered += found.low <= 0.5 <= found.high
    assert 358 <= covered <= 400


def test_the_interval_of_the_critical_batch_covers_the_truth():
    draw, covered = random.Random(7), 0
    for _ in range(300):
        steps = [300 * (1 + 24 / b) * math.exp(draw.gauss(0, 0.05)) for b in BATCHES]
        found, _ = fit_critical_batch(BATCHES, steps, [1e-9] * 5)
        covered += found.low <= 24 <= found.high
    assert 266 <= covered <= 300


def test_what_the_data_do_not_bound_is_open():
    all_halve, _ = fit_critical_batch(BATCHES, [6400 / b for b in BATCHES], [1] * 5)
    assert all_halve.high == math.inf
    assert all_halve.low > 64
    none_halve, _ = fit_critical_batch(BATCHES, [100] * 5, [1] * 5)
    assert none_halve.low == 0
    assert none_halve.high < 4


def halves(steps) -> BatchScaling:
    return analyze([run(b, 0.1, s) for b, s in zip(BATCHES, steps, strict=True)])


def test_where_steps_stop_halving():
    assert halves((800, 400, 220, 180, 170)).stops_halving == (16, 32)
    assert halves((800, 400, 200, 100, 50)).stops_halving is None
    # sqrt(2) is the limit: the slope of the law at B_crit.
    assert halves((1000, 706, 498, 351, 248)).stops_halving is None
    assert halves((1000, 709, 503, 357, 253)).stops_halving == (4, 8)
