"""Clicks by DLRM: tables of ids, dense layers over numbers, and the dot products of all vectors.

    headway train dlrm -n 2
    headway train dlrm -n 2 --set arguments.data=movielens
    headway train dlrm -n 2 --set arguments.data=criteo --set arguments.path=days/ \\
        --set arguments.steps=10000

Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
Systems". The defaults train on Adult in a few seconds; the paper's sizes for Criteo's set of Kaggle
are `width=16`, `bottom=[512, 256, 64]`, `top=[512, 256]`, `optimizer=sgd`, `learning_rate=0.1`.

Names of shapes: N samples, P places of ids, D width of a vector, F vectors of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from headway.errors import RecipeError
from headway.nn.compressed import ProjectedBag, QuotientRemainderBag, mixed_width
from headway.nn.dots import PairwiseDots
from headway.nn.dynamic_bag import DynamicEmbeddingBag
from headway.run.recipe.recipe import Recipe
from headway.workloads.recommender.click_data import ClickData, Field
from headway.workloads.recommender.layers import FieldTables, dense_layers, plain_table
from headway.workloads.recommender.recipes import click_recipe

# ruff: noqa: N803, N806 (shape suffixes)

Interaction = Literal["dot", "cat"]
Compression = Literal["none", "quotient", "mixed"]
COMPRESSED_ROWS = 200
"""Tables of more rows than this can be compressed."""


class DLRM(nn.Module):
    """Dense layers over the numbers; their result and the tables' meet; dense layers over that.

    Args:
        numbers: Columns of `dense`.
        width: D.
        bottom: Sizes of the hidden layers over the numbers, whose last layer has D.
        top: Sizes of the hidden layers behind the interaction.
        interaction: "dot": the vector of the numbers and the dot products of all pairs of vectors.
            "cat": all vectors, one behind the other.
        itself: Also the dot products of each vector with itself.
        clamp: Probabilities keep this distance from 0 and 1.
        compress: Tables of more than 200 rows: "quotient": each is two, of rows / `remainders` and
            `remainders` rows, whose rows are multiplied; "mixed": its rows have width x (fewest
            rows of a table / rows)^`power`, and a layer widens them.
        growing: Rows are made when their ids are first trained, as of a stream.

    Raises:
        RecipeError: There is no such interaction or compression, tables that grow are to be
            compressed, or `clamp` is no distance below 1/2.
    """

    def __init__(
        self,
        numbers: int,
        fields: Sequence[Field],
        *,
        width: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        interaction: Interaction = "dot",
        itself: bool = False,
        clamp: float = 0.0,
        compress: Compression = "none",
        remainders: int = 4,
        power: float = 0.3,
        growing: bool = False,
    ) -> None:
        super().__init__()
        if growing and compress != "none":
            raise RecipeError(
                f"tables that grow, with compression {compress!r}",
                why="It is made for a number of rows that is known.",
                fix="leave one of the two away",
            )
        if compress not in get_args(Compression):
            legal = ", ".join(get_args(Compression))
            raise RecipeError(f"no compression {compress!r}", fix=f"choose one of {legal}")
        if interaction not in get_args(Interaction):
            legal = ", ".join(get_args(Interaction))
            raise RecipeError(f"no interaction {interaction!r}", fix=f"choose one of {legal}")
        if not 0 <= clamp < 0.5:
            raise RecipeError(f"clamp is {clamp}", why="It is a distance from 0 and 1, below 0.5.")
        vectors = len(fields) + 1
        self.bottom = dense_layers((numbers, *bottom, width), last_relu=True)
        fewest = min((field.rows for field in fields), default=1)

        seeds = count()  # else rows of equal ids begin alike

        def table(rows: int) -> nn.Module:
            if growing:
                return DynamicEmbeddingBag(width, scale=1 / math.sqrt(rows), seed=next(seeds))
            if compress == "none" or rows <= COMPRESSED_ROWS:
                return plain_table(rows, width)
            if compress == "quotient":
                return QuotientRemainderBag(rows, width, remainders=remainders)
            return ProjectedBag(rows, mixed_width(rows, fewest, width, power), width)

        self.tables = FieldTables(fields, width, table)
        self.dots = PairwiseDots(vectors, itself=itself) if interaction == "dot" else None
        met = vectors * width if self.dots is None else width + self.dots.features
        self.top = dense_layers((met, *top, 1), last_relu=False)
        self.most = math.log((1 - clamp) / clamp) if clamp else None

    def forward(self, dense_ND: Tensor, ids_NP: Tensor) -> Tensor:
        """Logits [N]."""
        first_ND = self.bottom(dense_ND)
        vectors = [first_ND, *self.tables(ids_NP)]
        if self.dots is None:
            met = torch.cat(vectors, dim=1)
        else:
            met = torch.cat((first_ND, self.dots(torch.stack(vectors, dim=1))), dim=1)
        logits_N: Tensor = self.top(met).squeeze(1)
        return logits_N if self.most is None else logits_N.clamp(-self.most, self.most)


def recipe(
    *,
    width: int = 16,
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
    interaction: Interaction = "dot",
    itself: bool = False,
    clamp: float = 0.0,
    compress: Compression = "none",
    remainders: int = 4,
    power: float = 0.3,
    growing: bool = False,
    learning_rate: float = 0.02,
    **training: Any,
) -> Recipe:
    """A training of DLRM; see `DLRM` and, for further arguments, `click_recipe`."""

    def model(data: ClickData) -> DLRM:
        return DLRM(
            len(data.numbers),
            data.fields,
            width=width,
            bottom=bottom,
            top=top,
            interaction=interaction,
            itself=itself,
            clamp=clamp,
            compress=compress,
            remainders=remainders,
            power=power,
            growing=growing,
        )

    return click_recipe("dlrm", model, learning_rate=learning_rate, **training)
