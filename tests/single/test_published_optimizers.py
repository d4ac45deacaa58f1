"""single: LARS and LAMB step as their papers have them; a planted mistake is a difference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from headway.optim import LAMB, LARS, WarmUp, layerwise
from headway.verification.reference.optimizers import step_as_published

OPTIMIZERS = {
    "lars": partial(LARS, lr=0.1, weight_decay=0.01),
    "lars as printed": partial(LARS, lr=0.1, weight_decay=0.01, momentum_correction=False),
    "lars without momentum": partial(LARS, lr=0.1, momentum=0.0),
    "lars of all": partial(LARS, lr=0.1, weight_decay=0.1, exclude_1d=False),
    "lars plain": partial(LARS, lr=0.1, weight_decay=0.1, adapt=False),
    "lamb": partial(LAMB, lr=0.01),
    "lamb clamped": partial(LAMB, lr=0.01, clamp=(0.1, 1.0), exclude_1d=False),
    "lamb without bias correction": partial(LAMB, lr=0.01, bias_correction=False),
}


def steps(make, *, published):
    """The weights after five steps with rates that change; one layer starts at zero."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    nn.init.zeros_(model[2].weight)
    optimizer = make(model.parameters())
    if published:
        step_as_published(optimizer)
    scheduler = WarmUp(optimizer, 3)
    data = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(5):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
        scheduler.step()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [*(p.detach() for p in model.parameters()), *state]


def distance(make):
    found = zip(steps(make, published=False), steps(make, published=True), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_library_steps_as_published(name):
    assert distance(OPTIMIZERS[name]) < 1e-13


def test_a_wrong_trust_ratio_is_a_difference(monkeypatch):
    original = LARS._ratios
    monkeypatch.setattr(LARS, "_ratios", lambda self, *a: original(self, *a) * 1.0001)
    assert distance(OPTIMIZERS["lars"]) > 1e-6


def test_a_wrong_bias_correction_is_a_difference(monkeypatch):
    original = layerwise._advance
    monkeypatch.setattr(layerwise, "_advance", lambda layer: (original(layer)[0], 1.0))
    assert distance(OPTIMIZERS["lamb"]) > 1e-6
