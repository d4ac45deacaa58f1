"""Clicks by Deep & Cross Networks: cross layers beside dense layers.

    headway train dcn -n 2
    headway train dcn -n 2 --set arguments.version=1

Wang et al. 2017, "Deep & Cross Network for Ad Click Predictions" (version 1); Wang et al. 2021,
"DCN V2", parallel structure (version 2, of low rank where `rank` is given).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import RecipeError
from headway.nn.cross import CrossLayer, CrossLayerV2
from headway.run.recipe.recipe import Recipe
from headway.workloads.recommender.click_data import ClickData
from headway.workloads.recommender.layers import FieldTables, dense_layers
from headway.workloads.recommender.recipes import click_recipe


class DCN(nn.Module):
    """Cross layers and dense layers over numbers and pooled vectors; a last layer over both.

    Args:
        version: Of the cross layers, 1 or 2.
        layers: Cross layers.
        rank: Of version 2; None: whole matrices.
        width: Of the vectors.
        deep: Sizes of the dense layers.

    Raises:
        RecipeError: There is no such version.
    """

    def __init__(
        self,
        data: ClickData,
        *,
        version: int = 2,
        layers: int = 2,
        rank: int | None = 16,
        width: int = 8,
        deep: Sequence[int] = (64, 32),
    ) -> None:
        super().__init__()
        if version not in (1, 2):
            raise RecipeError(f"no version {version} of cross layers", fix="There are 1 and 2.")
        features = len(data.numbers) + len(data.fields) * width
        self.tables = FieldTables(data.fields, width)
        self.cross = nn.ModuleList(
            CrossLayer(features) if version == 1 else CrossLayerV2(features, rank)
            for _ in range(layers)
        )
        self.deep = dense_layers((features, *deep), last_relu=True)
        self.last = nn.Linear(features + (deep[-1] if deep else features), 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits [N] of dense [N, D] and ids [N, P]."""
        first = torch.cat((dense, *self.tables(ids)), dim=1)
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        logits: Tensor = self.last(torch.cat((crossed, self.deep(first)), dim=1)).squeeze(1)
        return logits


def recipe(
    *,
    version: int = 2,
    layers: int = 2,
    rank: int | None = 16,
    width: int = 8,
    deep: Sequence[int] = (64, 32),
    learning_rate: float = 0.02,
    **training: Any,
) -> Recipe:
    """A training of a DCN; see `DCN` and, for further arguments, `click_recipe`."""
    return click_recipe(
        f"dcn {version}",
        lambda data: DCN(data, version=version, layers=layers, rank=rank, width=width, deep=deep),
        learning_rate=learning_rate,
        **training,
    )
