"""single: the schedules of other frameworks, step by step, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headway.errors import RecipeError
from headway.optim import deepspeed_rates, torchtitan_rates


def rates(make, steps, lr=0.5):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def deepspeed_by_hand(kind, low, high, warmup, total, shape, steps):
    """As WarmupLR and its kin: `step()` sets the rate of iteration 0 after the first update."""
    found = [low]
    for k in range(steps - 1):
        if k < warmup:
            gamma = math.log(k + 1) / math.log(warmup) if shape == "log" else k / warmup
        elif kind == "linear":
            gamma = max(0.0, (total - k) / max(1.0, total - warmup))
        else:
            gamma = 1.0
        found.append(low + (high - low) * gamma)
    return found


@pytest.mark.parametrize("shape", ["log", "linear"])
@pytest.mark.parametrize("kind", ["constant", "linear"])
@pytest.mark.parametrize(("low", "warmup", "total"), [(0.0, 5, 12), (0.1, 3, 20), (0.05, 8, 8)])
def test_deepspeeds_warm_up_and_decay(kind, shape, low, warmup, total):
    found = rates(
        lambda optimizer: deepspeed_rates(
            optimizer, warmup=warmup, shape=shape, start=low / 0.5, decay=kind, steps=total
        ),
        25,
    )
    by_hand = deepspeed_by_hand(kind, low, 0.5, warmup, total, shape, 25)
    assert found == pytest.approx(by_hand, rel=1e-12, abs=1e-15)


def test_deepspeeds_cosine():
    warmup, total, start, end = 4, 16, 0.2, 0.01
    by_hand = [0.0]
    for k in range(24):
        if k < warmup:
            ratio = start + (1 - start) * k / warmup
        else:
            done = min(1.0, (k - warmup + 1) / (total - warmup))
            ratio = end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
        by_hand.append(0.5 * ratio)
    found = rates(
        lambda optimizer: deepspeed_rates(
            optimizer,
            warmup=warmup,
            shape="linear",
            start=start,
            decay="cosine",
            steps=total,
            end=end,
        ),
        25,
    )
    assert found == pytest.approx(by_hand, rel=1e-12, abs=1e-15)
    assert found[-1] == pytest.approx(0.5 * end)


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_torchtitans_three_phases(shape):
    steps, warmup, end = 20, 4, 0.1
    found = rates(
        lambda optimizer: torchtitan_rates(
            optimizer, steps=steps, warmup=warmup, decay_ratio=0.5, shape=shape, end=end
        ),
        steps,
    )
    # 4 steps up, 7 = 20 + 1 - 4 - 10 steps of the full rate, and 9 of the 10 steps down.
    assert found[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert found[4:11] == [0.5] * 7
    falls = {
        "linear": lambda p: 1 - p,
        "sqrt": lambda p: 1 - math.sqrt(p),
        "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    }
    by_hand = [0.5 * (end + (1 - end) * falls[shape](n / 10)) for n in range(1, 10)]
    assert found[11:] == pytest.approx(by_hand, rel=1e-12)
    assert min(found[11:]) > 0.5 * end


def test_torchtitan_without_a_stable_phase_and_behind_its_end():
    found = rates(lambda optimizer: torchtitan_rates(optimizer, steps=10, warmup=10), 10)
    assert found == pytest.approx([0.5 * (n + 1) / 10 for n in range(10)])
    # Its last step is one before the rate would be 0; behind that it stays there.
    assert rates(lambda o: torchtitan_rates(o, steps=4, warmup=0), 9)[-1] == 0.0


@pytest.mark.parametrize("options", [{"warmup": 0}, {"decay": "linear"}, {"decay": "cosine"}])
def test_deepspeed_rates_that_cannot_be(options):
    with pytest.raises(RecipeError, match="cannot be"):
        rates(lambda optimizer: deepspeed_rates(optimizer, **options), 1)


@pytest.mark.parametrize("options", [{"warmup": 11}, {"decay_ratio": 2.0}, {"steps": 0}])
def test_torchtitan_rates_that_cannot_be(options):
    with pytest.raises(RecipeError, match="cannot be"):
        rates(lambda optimizer: torchtitan_rates(optimizer, **{"steps": 10, **options}), 1)
