"""pure: the fit of latency and rate to measured times, and when it is not to be trusted."""

from __future__ import annotations

import math
import random

import pytest

from headway.collective.model.link_fit import LinkFit, fit_link, link_drifted, ring_factor

SIZES = (2**12, 2**15, 2**18, 2**21, 2**24)


def measured(latency, slope, noise, repetitions=5):
    draw = random.Random(7)
    return [
        (size, (latency + slope * size) * (1 + noise * draw.random()))
        for size in SIZES
        for _ in range(repetitions)
    ]


def test_exact_times_give_the_exact_fit():
    fit = fit_link(measured(2e-4, 8e-8, 0.0), ranks=2)
    assert fit.latency == pytest.approx(2e-4, rel=1e-9)
    assert fit.seconds_per_byte == pytest.approx(8e-8, rel=1e-9)
    assert fit.error < 1e-9
    assert fit.reliable


def test_of_repetitions_the_best_counts():
    samples = measured(2e-4, 8e-8, 0.0, repetitions=1)
    disturbed = samples + [(size, seconds * 40) for size, seconds in samples]
    assert fit_link(disturbed, ranks=2) == fit_link(samples, ranks=2)


def test_noise_of_a_tenth_moves_both_parameters_by_no_more():
    fit = fit_link(measured(2e-4, 8e-8, 0.1), ranks=2)
    assert fit.latency == pytest.approx(2e-4, rel=0.1)
    assert fit.seconds_per_byte == pytest.approx(8e-8, rel=0.1)


def test_small_messages_count_as_much_as_large_ones():
    """A plain least-squares fit of these times has a latency of nearly 0."""
    samples = [(size, 1e-3 + 1e-8 * size) for size in SIZES[:-1]] + [(2**24, 0.15)]
    assert fit_link(samples, ranks=2).latency > 0.8e-3


@pytest.mark.parametrize(
    ("samples", "latency", "slope"),
    [
        ([(100, 1.0), (200, 3.0)], 0.0, None),  # steeper than proportional
        ([(100, 2.0), (200, 1.0)], None, 0.0),  # falls with the size
    ],
)
def test_no_parameter_is_negative(samples, latency, slope):
    fit = fit_link(samples, ranks=2)
    assert latency in (None, fit.latency)
    assert slope in (None, fit.seconds_per_byte)
    assert min(fit.latency, fit.seconds_per_byte) >= 0


def test_a_clamped_fit_is_the_best_one_with_that_parameter_at_zero():
    samples = [(100, 1.0), (200, 3.0)]
    fit = fit_link(samples, ranks=2)

    def loss(b):
        return sum((b * size / seconds - 1) ** 2 for size, seconds in samples)

    assert loss(fit.seconds_per_byte) < min(loss(fit.seconds_per_byte * x) for x in (0.99, 1.01))


def test_times_that_are_no_line_are_flagged_with_the_number():
    samples = [(size, 1e-4 + 1e-8 * size) for size in SIZES]
    samples[2] = (SIZES[2], samples[2][1] * 3)
    fit = fit_link(samples, ranks=4)
    assert not fit.reliable
    assert f"by up to {fit.error:.0%}" in fit.explain()
    assert "shared or not steady" in fit.explain()
    assert "not steady" not in fit_link(measured(1e-4, 1e-8, 0.0), ranks=4).explain()


@pytest.mark.parametrize(
    "samples", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 0.0), (9, 1.0)], [(8, math.nan)]]
)
def test_what_cannot_be_fitted_is_refused(samples):
    with pytest.raises(ValueError, match=r"two sizes|no measurement"):
        fit_link(samples, ranks=2)


@pytest.mark.parametrize("bad", [{"latency": -1.0}, {"latency": math.inf}, {"ranks": 0}])
def test_impossible_links_are_refused(bad):
    with pytest.raises(ValueError, match=r"must be finite|at least 1"):
        LinkFit(**({"latency": 0.0, "seconds_per_byte": 0.0} | bad))


def test_a_rate_gives_the_ring_s_time():
    fit = LinkFit.of_rate(12.5e6, 1e-3, ranks=4)
    assert fit.seconds(25 * 2**20) == pytest.approx(1e-3 + 1.5 * 25 * 2**20 / 12.5e6)
    assert fit.rate == pytest.approx(12.5e6)
    assert fit.wire_seconds(12.5e6) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="positive"):
        LinkFit.of_rate(0.0, 0.0, 2)


def test_one_rank_sends_nothing():
    fit = LinkFit.of_rate(12.5e6, 0.0, ranks=1)
    assert ring_factor(1) == 0
    assert fit.seconds(10**9) == fit.wire_seconds(10**9) == 0
    assert math.isinf(fit.rate)


@pytest.mark.parametrize(
    ("latency", "slope", "moved"),
    [(1.0, 1.0, False), (1.1, 1.1, False), (1.0, 1.3, True), (1.0, 0.7, True), (2.0, 1.0, True)],
)
def test_drift_is_seen_in_both_directions(latency, slope, moved):
    old = LinkFit(1e-3, 1e-8)
    new = LinkFit(latency * 1e-3, slope * 1e-8)
    assert link_drifted(old, new) is moved
    assert link_drifted(new, old) is moved
