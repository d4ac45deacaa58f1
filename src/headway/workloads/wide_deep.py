"""Clicks by Wide & Deep: a weight for each id, and dense layers over vectors of the ids.

    headway train wide-deep -n 2

Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems". The products of ids that the
paper's wide part has, chosen by hand for its shop, are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn.factorization import FactorizationMachine
from headway.run.recipe.recipe import Recipe
from headway.workloads.recommender.click_data import ClickData
from headway.workloads.recommender.layers import FieldTables, OneIdSpace, dense_layers
from headway.workloads.recommender.recipes import click_recipe


class WideDeep(nn.Module):
    """The score of logistic regression plus that of dense layers over pooled vectors.

    Args:
        width: Of the vectors.
        deep: Sizes of the hidden layers.
    """

    def __init__(self, data: ClickData, *, width: int = 8, deep: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.ids = OneIdSpace(data.fields)
        self.wide = FactorizationMachine(self.ids.rows, 0)
        self.tables = FieldTables(data.fields, width)
        sizes = (len(data.numbers) + len(data.fields) * width, *deep, 1)
        self.deep = dense_layers(sizes, last_relu=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits [N] of dense [N, D] and ids [N, P]."""
        wide = self.wide(*self.ids(ids, dense.dtype))
        deep = self.deep(torch.cat((dense, *self.tables(ids)), dim=1)).squeeze(1)
        logits: Tensor = wide + deep
        return logits


def recipe(
    *,
    width: int = 8,
    deep: Sequence[int] = (64, 32),
    learning_rate: float = 0.02,
    **training: Any,
) -> Recipe:
    """A training of Wide & Deep; see `WideDeep` and, for further arguments, `click_recipe`."""
    return click_recipe(
        "wide-deep",
        lambda data: WideDeep(data, width=width, deep=deep),
        learning_rate=learning_rate,
        **training,
    )
