"""single: what an optimiser's step does to the rows of a table is found out by trying it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from headway.errors import RecipeError
from headway.optim import LAMB, LARS
from headway.optim.row_law import RowLaw, law_options, row_law

OWN = RowLaw(rows=True, columns=True, keeps=True, sparse=True)
MOVES = RowLaw(rows=True, columns=True, keeps=False, sparse=False)
WHOLE = RowLaw(rows=False, columns=False, keeps=False, sparse=False)


class RowWise(torch.optim.Optimizer):
    """Row-wise Adagrad: one accumulator for each row."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("sum", torch.zeros(len(parameter)).to(parameter))
                state["sum"] += parameter.grad.square().mean(1)
                parameter -= group["lr"] * parameter.grad / (state["sum"].sqrt()[:, None] + 1e-10)


class Strange(RowWise):
    """Has what `copy` does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = object()

    def step(self, closure: Any = None) -> Any:
        assert self.inner
        return super().step(closure)


def law(make: Any, **options: Any) -> RowLaw:
    made = make(nn.Embedding(5, 3).parameters(), **options)
    return row_law(made, made.param_groups[0], torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "options", "wanted"),
    [
        (torch.optim.SGD, {"lr": 1.0}, OWN),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, MOVES),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, MOVES),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, OWN),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}, MOVES),
        (torch.optim.Adam, {}, MOVES),
        (torch.optim.AdamW, {"amsgrad": True}, MOVES),
        (torch.optim.RMSprop, {}, MOVES),
        (torch.optim.SparseAdam, {}, RowLaw(True, True, True, True, only_sparse=True)),
        (torch.optim.Adafactor, {}, WHOLE),
        (LARS, {"lr": 0.1}, WHOLE),
        (LAMB, {"lr": 0.1}, WHOLE),
        (LARS, {"lr": 0.1, "momentum": 0.9, "adapt": False}, MOVES),
        (RowWise, {}, RowLaw(True, False, True, False)),
    ],
)
def test_laws(make, options, wanted):
    assert replace(law(make, **options), by_element=0, by_row=0) == wanted


def test_a_rate_of_zero_hides_nothing_and_the_optimiser_is_left_as_it_is():
    table = nn.Embedding(5, 3)
    made = torch.optim.Adam(table.parameters(), lr=0.1)
    LambdaLR(made, lambda step: 0.0)
    assert made.param_groups[0]["lr"] == 0.0
    before = table.weight.detach().clone()
    found = row_law(made, made.param_groups[0], torch.device("cpu"))
    assert replace(found, by_element=0, by_row=0) == MOVES
    assert torch.equal(table.weight, before)
    assert not made.state
    assert made.param_groups[0]["params"] == [table.weight]


def test_what_cannot_be_tried_is_refused():
    with pytest.raises(RecipeError, match="by Strange could not be tried on a small table"):
        law(Strange)


def test_the_law_is_asked_again_where_an_option_but_the_rate_has_changed():
    group = {"params": [1], "lr": 0.1, "weight_decay": 0.0}
    assert law_options(group) == law_options({**group, "params": [2], "lr": 3.0})
    assert law_options(group) != law_options({**group, "weight_decay": 0.1})
