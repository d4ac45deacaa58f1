"""Clicks by factorisation machines, the models of distributed equivalent substitution.

    headway train des-fm -n 2
    headway train des-fm -n 2 --set arguments.width=0            # logistic regression
    headway train des-fm -n 2 --set arguments.field_aware=true

Rong et al. 2020, "Distributed Equivalent Substitution Training for Large-Scale Recommender
Systems": with a table in parts the ranks exchange sums of each sample, D + 2 numbers, and neither
rows nor gradients. The model says nothing of that; the plan does (`split.tables`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headway.nn.factorization import FactorizationMachine, FieldAwareFactorizationMachine
from headway.run.recipe.recipe import Recipe
from headway.workloads.recommender.click_data import ClickData, places_of
from headway.workloads.recommender.layers import OneIdSpace
from headway.workloads.recommender.recipes import click_recipe


class FM(nn.Module):
    """A factorisation machine over the ids of all fields, and a weight for each number.

    Args:
        width: Of the vectors; 0: logistic regression.
        field_aware: Each id has a vector for each field.
    """

    def __init__(self, data: ClickData, *, width: int = 8, field_aware: bool = False) -> None:
        super().__init__()
        self.ids = OneIdSpace(data.fields)
        rows = self.ids.rows
        self.machine: nn.Module = (
            FieldAwareFactorizationMachine(rows, width, places_of(data.fields))
            if field_aware
            else FactorizationMachine(rows, width)
        )
        self.numbers = nn.Linear(len(data.numbers), 1, bias=False)
        nn.init.zeros_(self.numbers.weight)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits [N] of dense [N, D] and ids [N, P]."""
        ids, values = self.ids(ids, dense.dtype)
        logits: Tensor = self.machine(ids, values) + self.numbers(dense).squeeze(1)
        return logits


def recipe(
    *,
    width: int = 8,
    field_aware: bool = False,
    learning_rate: float = 0.05,
    optimizer: str = "adagrad",
    **training: Any,
) -> Recipe:
    """A training of a factorisation machine; see `FM`; further arguments: `click_recipe`."""
    return click_recipe(
        "field-aware fm" if field_aware else "fm" if width else "logistic regression",
        lambda data: FM(data, width=width, field_aware=field_aware),
        learning_rate=learning_rate,
        optimizer=optimizer,
        **training,
    )
