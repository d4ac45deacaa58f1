"""single: ways to compute convolutions and attention: found, equal, measured, chosen (Zou)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import support
from headway.capture.benchmark.layer_algorithms import (
    ATTENTION,
    CONVOLUTION,
    DEFAULT_ALGORITHM,
    ROOT,
    layers_of,
    measure_algorithms,
    peak_bytes,
    use_algorithms,
)
from headway.capture.benchmark.timer import DeviceTimer
from headway.errors import PlanError
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.planner.guidelines.layer_algorithms import choose_minibatch

CLOCK = DeviceTimer(torch.device("cpu"), seconds=0.001)
TABLE = json.loads((Path(support.__file__).parent / "algorithm_table.json").read_text("utf-8"))


class Net(nn.Module):
    """Convolutions with strides, dilation, groups, no bias; one called twice; attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.twice = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, bias=False)
        self.heads = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = self.twice(F.relu(self.twice(x)))
        b, _, h, w = x.shape
        q, k, v = self.heads(x.flatten(2).mT).view(b, h * w, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.head(x.transpose(1, 2).flatten(2).mean(1))


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Net().double()


IMAGES = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def numbers(model, algorithms):
    model.zero_grad()
    images = IMAGES.clone().requires_grad_()
    with use_algorithms(model, algorithms):
        made = model(images)
        F.cross_entropy(made, torch.tensor([1, 4])).backward()
    return [made.detach(), images.grad, *(p.grad.clone() for p in model.parameters())]


def test_layers_are_found_by_their_modules(model):
    found = layers_of(model, lambda: model(IMAGES))
    assert [called.name for called in found] == ["stem", "twice", "twice#2", ROOT]
    assert [called.ways for called in found] == [CONVOLUTION] * 3 + [ATTENTION]
    assert found[1].key == found[2].key != found[0].key


@pytest.mark.parametrize("convolution", [name for name in CONVOLUTION if name != DEFAULT_ALGORITHM])
@pytest.mark.parametrize("attention", ["math", "flash"])
def test_every_way_computes_the_same(model, convolution, attention):
    plain = numbers(model, {})
    names = dict.fromkeys(["stem", "twice", "twice#2"], convolution) | {ROOT: attention}
    for one, other in zip(numbers(model, names), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_way_is_really_taken(model, monkeypatch):
    """One layer alone, in its second call; nothing stays on the model."""
    seen = []
    unfold = F.unfold
    monkeypatch.setattr(F, "unfold", lambda *given: seen.append(given[0].shape) or unfold(*given))
    numbers(model, {"twice#2": "unfold"})
    numbers(model, {})
    assert seen == [torch.Size([2, 8, 6, 6])]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_wrong_choices_are_refused(model):
    with pytest.raises(PlanError, match=r"no such algorithm") as error:
        numbers(model, {"stem": "winograd"})
    assert "There are: plain, channels-last, unfold, native, math" in str(error.value)
    with pytest.raises(PlanError, match="stem cannot be computed by math"):
        numbers(model, {"stem": "math"})
    with pytest.raises(PlanError, match="not called") as error:
        numbers(model, {"stam": "unfold"})
    assert "stam" in str(error.value)


def test_measured(model):
    """Layers that are called alike once; a column matrix is work space; what is missing is left
    out; a file gives the same back."""
    known = {}

    def step():
        return F.cross_entropy(model(IMAGES), torch.tensor([1, 4]))

    found = measure_algorithms(model, step, clock=CLOCK, parameters=7.0, known=known)
    layers = found.profile.layers
    assert [*layers] == ["stem", "twice", "twice#2", ROOT]
    assert len(known) == 3
    assert {way.name for way in layers["stem"]} == set(CONVOLUTION)
    assert DEFAULT_ALGORITHM in {way.name for way in layers[ROOT]} <= set(ATTENTION)
    ways = {way.name: way for way in layers["stem"]}
    columns = 2 * 75 * 36 * 8  # samples, window, positions, bytes; kept for backward
    assert ways["unfold"].bytes - ways[DEFAULT_ALGORITHM].bytes > 0.5 * columns
    assert all(min(way.bytes for way in some) == 0 for some in layers.values())
    assert all(some[0].seconds > 0 for some in layers.values())
    assert found.seconds >= found.profile.rest >= 0
    assert found.peak > found.profile.features > 0
    assert all(p.grad is None for p in model.parameters())


def test_peak_bytes():
    """Three tensors of 8,000 bytes at a time, of four that are made."""

    def call():
        one = torch.zeros(1000, dtype=torch.float64)
        two = torch.zeros(1000, dtype=torch.float64)
        three = one + two
        del one, two
        return three, torch.zeros(1000, dtype=torch.float64)

    assert peak_bytes(call, CLOCK) == 24_000


# -- Z4: the recorded table of benchmarks/algorithm_choice.py -------------------------------------


def profile_of(table):
    layers = {
        layer: tuple(LayerAlgorithm(*way) for way in ways)
        for layer, ways in table["layers"].items()
    }
    return AlgorithmProfile(**(table | {"layers": layers}))


PROFILES = {int(batch): profile_of(table) for batch, table in TABLE["profiles"].items()}
MEASURED = {(b, tuple(ways)): (s, size) for b, ways, s, size in TABLE["sweep"]}
SIZES = sorted(size for _, size in MEASURED.values())


def epoch(batch, ways):
    return MEASURED[batch, ways][0] * -(-TABLE["samples"] // batch)


@pytest.mark.parametrize("quantile", [n / 20 for n in range(1, 21)])
def test_the_choice_is_near_the_best_of_all_and_fits(quantile):
    """Z4: at bounds that from one in twenty to all combinations need."""
    memory = SIZES[round(quantile * (len(SIZES) - 1))]
    best = choose_minibatch(
        PROFILES.__getitem__, PROFILES, memory=memory, samples=TABLE["samples"]
    ).best
    taken = best.batch, tuple(best.chosen.algorithms.values())
    assert MEASURED[taken][1] <= memory
    least = min(epoch(*key) for key, (_, size) in MEASURED.items() if size <= memory)
    assert epoch(*taken) <= 1.05 * least


def test_bounds_change_the_choice():
    """The table is no trivial one: more memory changes batch or algorithms."""
    found = set()
    for quantile in (0.05, 0.2, 0.5, 1.0):
        memory = SIZES[round(quantile * (len(SIZES) - 1))]
        best = choose_minibatch(
            PROFILES.__getitem__, PROFILES, memory=memory, samples=TABLE["samples"]
        ).best
        found.add((best.batch, *best.chosen.algorithms.values()))
    assert len(found) > 1
