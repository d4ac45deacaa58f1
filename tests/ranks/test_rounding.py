"""ranks: a model that magnifies rounding is equal all the same, and a bug in it is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import headway
from headway.errors import NotEqual
from support.recipes import wide


class Saturated(nn.Module):
    """What a unit in the last place changes in its weights changes 3,000 times as much behind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.sin(3e3 * self.inner(x))


class Off(torch.optim.SGD):
    """Wrong by a millionth wherever several ranks train."""

    def step(self, closure=None):
        if torch.distributed.is_initialized():
            for group in self.param_groups:
                group["lr"] = 0.01 * (1 + 1e-6)
        return super().step(closure)


def sensitive(optimizer=torch.optim.SGD):
    """`wide`, magnified."""
    recipe = wide()
    return replace(
        recipe,
        model=lambda: Saturated(recipe.model()),
        optimizer=lambda model: optimizer(model.parameters(), lr=0.01),
    )


def off():
    return sensitive(Off)


def test_what_rounding_becomes_in_the_model_is_no_difference():
    (run,) = headway.verify(f"{__name__}:sensitive", processes=2, steps=2).runs
    assert run.holds, run.comparison.first
    # Or there is nothing to see.
    assert run.rounding is not None
    assert max(error for error in run.errors.values() if error is not None) > 1e-12


def test_a_bug_in_such_a_model_is_found():
    with pytest.raises(NotEqual, match="step 1, parameter"):
        headway.verify(f"{__name__}:off", processes=2, steps=2).check()
