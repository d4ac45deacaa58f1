"""Clicks by DeepFM: a factorisation machine, and dense layers over the same vectors.

    headway train deepfm -n 2

Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn.factorization import VECTOR_DEVIATION, pairs
from headway.run.recipe.recipe import Recipe
from headway.workloads.recommender.click_data import ClickData, places_of
from headway.workloads.recommender.layers import OneIdSpace, dense_layers
from headway.workloads.recommender.recipes import click_recipe


class DeepFM(nn.Module):
    """The score of a factorisation machine plus that of dense layers over its vectors.

    Args:
        width: Of the vectors.
        deep: Sizes of the hidden layers.
    """

    def __init__(self, data: ClickData, *, width: int = 8, deep: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.places = places_of(data.fields)
        self.ids = OneIdSpace(data.fields)
        self.weights = nn.Embedding(self.ids.rows, 1)
        self.vectors = nn.Embedding(self.ids.rows, width)
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.vectors.weight, std=VECTOR_DEVIATION)
        numbers = len(data.numbers)
        self.numbers = nn.Linear(numbers, 1)
        self.deep = dense_layers((numbers + len(self.places) * width, *deep, 1), last_relu=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits [N] of dense [N, D] and ids [N, P]."""
        ids, values = self.ids(ids, dense.dtype)
        weights, vectors = self.weights(ids), self.vectors(ids)
        if values is not None:
            weights, vectors = weights * values[..., None], vectors * values[..., None]
        of_fields = [part.sum(1) for part in vectors.split(self.places, 1)]
        wide = self.numbers(dense).squeeze(1) + weights.sum((1, 2)) + pairs(vectors)
        logits: Tensor = wide + self.deep(torch.cat((dense, *of_fields), dim=1)).squeeze(1)
        return logits


def recipe(
    *,
    width: int = 8,
    deep: Sequence[int] = (64, 32),
    learning_rate: float = 0.02,
    optimizer: str = "adagrad",
    **training: Any,
) -> Recipe:
    """A training of DeepFM; see `DeepFM` and, for further arguments, `click_recipe`."""
    return click_recipe(
        "deepfm",
        lambda data: DeepFM(data, width=width, deep=deep),
        learning_rate=learning_rate,
        optimizer=optimizer,
        **training,
    )
