"""pure: Zou's lemmas and the choice of algorithms against worked values and every choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headway.errors import PlanError
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.planner.guidelines import zou
from headway.planner.guidelines.layer_algorithms import (
    choose_algorithms,
    choose_minibatch,
    frontier_of,
)
from support.sampling import sampled


@pytest.mark.parametrize(
    ("overhead", "alphas"),
    [
        (0.10, {2: 0.9167, 4: 0.7857, 8: 0.6111, 16: 0.4231}),
        (0.05, {2: 0.9545, 4: 0.875, 8: 0.75, 16: 0.5833}),
        (0.2, {4: 0.6667}),
    ],
)
def test_the_worked_values_of_lemma_1(overhead, alphas):
    for devices, alpha in alphas.items():
        assert zou.efficiency(overhead, devices) == pytest.approx(alpha, abs=5e-5)
    speed_ups = [zou.speed_up(0.1, devices) for devices in (2, 4, 8, 16)]
    assert speed_ups == pytest.approx([1.833, 3.143, 4.889, 6.769], abs=5e-4)
    assert zou.speed_up(0.2, 4) == pytest.approx(2.667, abs=5e-4)
    assert (zou.most_devices(0.05, 0.8), zou.most_devices(0.1, 0.8)) == (6, 3)


def test_the_inverses_of_lemma_1_give_back_what_they_were_made_from():
    for overhead, devices in itertools.product([0.01, 0.1, 0.37, 2.0], range(2, 40)):
        alpha = zou.efficiency(overhead, devices)
        assert zou.most_devices(overhead, alpha) == devices
        assert zou.allowed_overhead(devices, alpha) == pytest.approx(overhead, rel=1e-9)
        assert zou.speed_up(overhead, devices) < zou.ceiling(overhead)
    assert zou.speed_up(0.1, 10**9) == pytest.approx(zou.ceiling(0.1), rel=1e-6)


def test_lemma_1_at_its_ends():
    assert zou.efficiency(0.0, 64) == 1
    assert zou.ceiling(0.0) == zou.most_devices(0.0, 0.9) == math.inf
    assert zou.allowed_overhead(4, 0.25) == math.inf
    for wrong in (lambda: zou.efficiency(-0.1, 2), lambda: zou.most_devices(0.1, 1.2)):
        with pytest.raises(ValueError):
            wrong()


def test_the_worked_values_of_lemma_2():
    alexnet = {"num_bytes": 244e6, "rate": 1.25e9, "seconds": 0.5}
    assert zou.parameter_servers(workers=4, **alexnet) == (4, pytest.approx(3.12, abs=5e-3))
    assert zou.parameter_servers(workers=8, **alexnet) == (7, pytest.approx(6.25, abs=5e-3))
    servers, exact = zou.parameter_servers(552e6, 16, 1.25e9, 2.0)
    assert (servers, exact) == (8, pytest.approx(7.07, abs=5e-3))


def test_lemma_2_asks_for_more_with_workers_and_for_fewer_with_rate_and_time():
    for workers, rate, seconds in itertools.product((1, 3, 9), (1e8, 1e9), (0.1, 1.0)):
        servers, _ = zou.parameter_servers(1e8, workers, rate, seconds)
        assert zou.parameter_servers(1e8, workers + 1, rate, seconds)[0] >= servers
        assert zou.parameter_servers(1e8, workers, 2 * rate, seconds)[0] <= servers
        assert zou.parameter_servers(1e8, workers, rate, 2 * seconds)[0] <= servers


def random_layers(seed):
    random = np.random.default_rng(seed)
    return {
        f"conv{k}": [
            LayerAlgorithm(
                f"a{n}", float(random.integers(1, 60)) / 8, float(random.integers(0, 40))
            )
            for n in range(random.integers(1, 5))
        ]
        for k in range(random.integers(1, 9))
    }


def every_choice(layers, mode):
    """Bytes and seconds of all of them; the numbers are eighths, so that sums are exact."""
    size, seconds = np.zeros(1), np.zeros(1)
    for some in layers.values():
        together = np.add if mode == "sum" else np.maximum
        size = together.outer(size, [a.bytes for a in some]).ravel()
        seconds = np.add.outer(seconds, [a.seconds for a in some]).ravel()
    return size, seconds


@pytest.mark.parametrize("part", sampled(range(4), 1))
def test_the_algorithms_equal_brute_force_on_200_instances(part):
    for seed in range(part * 50, part * 50 + 50):
        layers = random_layers(seed)
        for mode in ("sum", "max"):
            size, seconds = every_choice(layers, mode)
            order = np.lexsort((seconds, size))
            least = np.minimum.accumulate(seconds[order])
            front = order[np.r_[True, least[1:] < least[:-1]]]
            _, solution = frontier_of(layers, mode)
            np.testing.assert_array_equal(solution.costs.T, [size[front], seconds[front]])
            bound = float(size.mean())
            found = choose_algorithms(*frontier_of(layers, mode), bound)
            assert found.seconds == seconds[size <= bound].min()
            check_the_names(layers, found, mode)


def test_the_algorithms_equal_a_solver_of_integer_programmes():
    """The programme as printed, given to HiGHS where scipy is installed."""
    optimize = pytest.importorskip("scipy.optimize")
    for seed in sampled(range(60), 15):
        layers = random_layers(seed)
        ways = [(k, a) for k, some in enumerate(layers.values()) for a in some]
        bound = float(every_choice(layers, "sum")[0].mean())
        one_of_each = np.array([[float(k == n) for k, _ in ways] for n in range(len(layers))])
        solved = optimize.milp(
            [a.seconds for _, a in ways],
            integrality=np.ones(len(ways)),
            bounds=optimize.Bounds(0, 1),
            constraints=[
                optimize.LinearConstraint([[a.bytes for _, a in ways]], ub=bound),
                optimize.LinearConstraint(one_of_each, 1, 1),
            ],
        )
        assert solved.success
        assert choose_algorithms(*frontier_of(layers), bound).seconds == pytest.approx(
            solved.fun, rel=1e-6
        )


def check_the_names(layers, found, mode):
    assert list(found.algorithms) == list(layers)
    picks = [
        next(a for a in some if a.name == found.algorithms[name]) for name, some in layers.items()
    ]
    assert sum(a.seconds for a in picks) == found.seconds
    assert (sum if mode == "sum" else max)(a.bytes for a in picks) <= found.bytes


def test_a_shared_pool_is_never_slower():
    for seed in range(30):
        layers = random_layers(seed)
        for bound in (40.0, 80.0, 200.0):
            try:
                alone = choose_algorithms(*frontier_of(layers), bound).seconds
            except PlanError:
                continue
            assert choose_algorithms(*frontier_of(layers, "max"), bound).seconds <= alone


def test_a_bound_that_nothing_meets_says_how_far_it_is():
    with pytest.raises(PlanError, match="at least 7, the cap is 6"):
        choose_algorithms(*frontier_of({"conv": [LayerAlgorithm("fft", 1.0, 7.0)]}), 6.0)


def profile(batch):
    """Time per sample falls with the batch; the fast algorithm needs work space per sample."""
    layers = {
        f"conv{k}": [
            LayerAlgorithm("gemm", 1.0 + 0.2 * batch, 0.0),
            LayerAlgorithm("fft", 1.0 + 0.1 * batch, 3.0 * batch),
        ]
        for k in range(2)
    }
    return AlgorithmProfile(
        layers=layers, rest=0.5, features=2.0 * batch, parameters=8.0, classifier=2.0
    )


def test_the_minibatch_is_the_one_with_the_shortest_epoch():
    found = choose_minibatch(profile, [1, 2, 4, 8, 16, 32, 64, 128], memory=100, samples=1000)
    assert [trial.batch for trial in found.trials] == [1, 2, 4, 8, 16, 32, 64]  # 64: too much
    assert [trial.bound for trial in found.trials] == [88, 86, 82, 74, 58, 26, -38]
    expected = {  # fft twice up to 8, once at 16 (48 of 58), not at 32 (96 of 26)
        8: (2 * 1.8 + 0.5) * 125,
        16: (2.6 + 4.2 + 0.5) * 63,
        32: (2 * 7.4 + 0.5) * 32,
    }
    epochs = {trial.batch: trial.epoch for trial in found.trials}
    assert {b: epochs[b] for b in expected} == pytest.approx(expected)
    assert found.best.batch == min(epochs, key=epochs.get) == 16
    assert sorted(found.best.chosen.algorithms.values()) == ["fft", "gemm"]


def test_a_cap_on_the_minibatch_is_kept_and_a_pool_lets_more_in():
    sizes = [1, 2, 4, 8, 16]
    assert choose_minibatch(profile, sizes, memory=100, samples=1000, most=8).best.batch == 8
    pool = choose_minibatch(profile, sizes, memory=100, samples=1000, mode="max").best
    assert (pool.batch, pool.chosen.bytes, set(pool.chosen.algorithms.values())) == (
        16,
        48,
        {"fft"},
    )


def test_no_minibatch_that_fits_is_an_error_with_the_reason():
    with pytest.raises(PlanError, match="1 samples: 7 B too much"):
        choose_minibatch(profile, [1, 2], memory=5, samples=10)
