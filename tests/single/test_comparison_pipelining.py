"""single: what the adapter of torch.distributed.pipelining finds out about a recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.blocks import repeated_blocks
from headway.comparison.frameworks.torch_pipelining import (
    ModelOutput,
    balanced_cuts,
    model_arguments,
    num_microbatches,
    traced,
)
from headway.errors import RecipeError
from headway.run.recipe.recipe import Recipe


class Tower(nn.Module):
    """Blocks of given widths, between a layer before and a layer behind: x_BF -> y_B1."""

    def __init__(self, widths: list[int], head: int = 1) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.short = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)) for width in widths
        )
        self.behind = nn.Linear(4, head)

    def forward(self, x_BF: Tensor) -> Tensor:
        x_BF = self.short(self.before(x_BF))
        for layer in self.layers:
            x_BF = x_BF + layer(x_BF)
        return self.behind(x_BF)


class Choosy(Tower):
    """Looks at its numbers before it decides."""

    def forward(self, x_BF: Tensor) -> Tensor:
        return super().forward(x_BF if x_BF.sum() > 0 else -x_BF)


RECIPE = Recipe(
    name="tower",
    model=lambda: Tower([8] * 4),
    data=lambda: torch.utils.data.TensorDataset(torch.zeros(24, 4), torch.zeros(24, 1)),
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    batch=12,
    stop="1 steps",
)
BATCH = (torch.zeros(12, 4), torch.zeros(12, 1))


def job_of(ranks: int = 2, **changes) -> FrameworkJob:
    return FrameworkJob(recipe=replace(RECIPE, **changes), rank=0, ranks=ranks)


def test_the_blocks_are_entries_of_lists():
    assert list(repeated_blocks(Tower([8] * 4))) == [f"layers.{n}" for n in range(4)]
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(repeated_blocks(layers)) == ["0", "2"]
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList"):
        repeated_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("widths", "head", "cuts"),
    [
        ([8, 8, 8, 8], 1, ["layers.2"]),
        ([8, 8, 8, 100], 1, ["layers.3"]),
        ([100, 8, 8, 8], 1, ["layers.1"]),
        # The layer behind goes with the last block, the list before has none.
        ([8, 8, 8, 8], 100, ["layers.3"]),
    ],
)
def test_stages_have_much_the_same_work(widths, head, cuts):
    model = Tower(widths, head)
    assert balanced_cuts(model, 2, (torch.zeros(2, 4),), {}) == cuts
    assert model.training


def test_micro_batches_are_equal_and_enough():
    assert num_microbatches(job_of(batch=12)) == 6
    assert num_microbatches(job_of(batch=16)) == 8
    assert num_microbatches(job_of(ranks=3, batch=6)) == 6
    with pytest.raises(RecipeError, match="a batch of 11 samples has no 2 to 8 equal"):
        num_microbatches(job_of(batch=11))


def test_the_loss_tells_what_the_model_is_called_with():
    args, kwargs = model_arguments(job_of(), BATCH)
    assert (args, kwargs) == ((BATCH[0],), {})
    named = job_of(loss=lambda model, batch: model(x_BF=batch[0]).mean())
    assert model_arguments(named, BATCH) == ((), {"x_BF": BATCH[0]})


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda model, batch: batch[0].mean(), "the loss does not call the model"),
        (lambda model, batch: model.head(batch[0]), "the loss asks the model for head"),
        (
            lambda model, batch: model(batch[0], torch.ones(3, 3)),
            r"called with a tensor of shape \[3, 3\] for 12 samples",
        ),
    ],
)
def test_losses_that_a_pipeline_cannot_have(loss, problem):
    with pytest.raises(RecipeError, match=problem):
        model_arguments(job_of(loss=loss), BATCH)


def test_the_output_is_given_once():
    output = ModelOutput(3)
    assert output("whatever") == 3
    with pytest.raises(RecipeError, match="calls the model more than once"):
        output("whatever")


def test_models_that_cannot_be_cut_say_why():
    with pytest.raises(RecipeError, match="4 entries do not make 5 parts"):
        traced(Tower([8] * 4), 5, (torch.zeros(2, 4),), {})
    with pytest.raises(RecipeError, match=r"cannot cut the model\n(.|\n)*data-dependent"):
        traced(Choosy([8] * 4), 2, (torch.zeros(2, 4),), {})
