"""ranks: `--plan auto` cuts no model into stages that the executor could not cut."""

from __future__ import annotations

import pytest
import torch

from headway.errors import PlanError
from headway.plans import Plan
from headway.run.measure.recipe_model import check_stage_boundaries
from headway.run.recipe.factory import load_recipe
from support.commands import headway_here
from support.uncuttable import SQUARE

MODULE = """
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import TensorDataset

from headway import Recipe, criterion

"""
MODULE += SQUARE
MODULE += """

class Odd(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(20, 400), nn.Linear(400, 3), odd

    def forward(self, x):
        x = self.first(x)
        return self.second(Square.apply(x) if self.odd else x * x)


def points(count=64):
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


def recipe(odd):
    return Recipe(
        name="odd",
        model=lambda: Odd(odd),
        data=points,
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch="16 samples",
        stop="2 steps",
    )


def odd():
    return recipe(True)


def even():
    return recipe(False)
"""
SLOW_LINK = """
nodes = 1
processes = 2
[[levels]]
name = "node"
nodes = 1
rate = "1 MB/s"
latency = "10 us"
[devices.cpu]
peak = { fp32 = "50 GFLOP/s" }
memory = "4 GiB"
memory_rate = "10 GB/s"
dispatch = "5 us"
sharpness = 1.0
update = "1 ns"
"""
"""Sums of gradients take far longer than what goes from stage to stage."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "odd_models.py").write_text(MODULE)
    (tmp_path / "slow.toml").write_text(SLOW_LINK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "even"])
def test_the_fastest_plan_that_can_be_cut_is_taken(folder, name):
    done = headway_here(
        "train", f"odd_models:{name}", "-n", "2", "--plan", "auto", "--cluster", "slow.toml",
        "--directory", "run", cwd=folder,
    )  # fmt: skip
    assert done.code == 0, done.err
    said = "would be chosen, but cannot run: the forward of Odd cannot be cut into stages"
    assert (said in done.err) == (name == "odd")
    plan = Plan.load(folder / "run" / "plan.json")
    assert (plan.pipe_degree, plan.data_degree) == ((1, 2) if name == "odd" else (2, 1))


def test_whether_stages_can_be_made_is_told_without_numbers(folder):
    even = load_recipe("odd_models:even", ())
    check_stage_boundaries(even, ("second",), 4)
    with pytest.raises(PlanError, match=r"no module third"):
        check_stage_boundaries(even, ("third",), 4)
    with pytest.raises(PlanError, match="cannot be cut into stages"):
        check_stage_boundaries(load_recipe("odd_models:odd", ()), ("second",), 4)


def test_nothing_is_allocated_for_it(folder):
    def large():
        return torch.nn.Sequential(*(torch.nn.Linear(10**6, 10**6) for _ in range(3)))

    recipe = load_recipe("odd_models:even", ())
    object.__setattr__(recipe, "model", large)
    object.__setattr__(recipe, "loss", lambda model, data: model(data[0].new_zeros(4, 10**6)).sum())
    check_stage_boundaries(recipe, ("1", "2"), 4)
