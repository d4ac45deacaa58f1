"""What the models of recommenders are made of: tables of fields, and stacks of dense layers.

Names of shapes: N samples, P places, F fields, D width of a vector, E features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from headway.workloads.recommender.click_data import Field

# ruff: noqa: N803, N806 (shape suffixes)


class FieldTables(nn.Module):
    """A table for each field; the vectors of a field's ids are added.

    Args:
        width: D.
        table: Makes a module that is called as an `nn.EmbeddingBag` of so many rows is; None: such
            a bag, whose first numbers are DLRM's, uniform within 1 / sqrt(rows).
    """

    def __init__(
        self,
        fields: Sequence[Field],
        width: int,
        table: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.places = tuple(field.places for field in fields)
        make = table or partial(plain_table, width=width)
        self.tables = nn.ModuleList(make(field.rows) for field in fields)

    def forward(self, ids_NP: Tensor) -> list[Tensor]:
        """A vector [N, D] for each field."""
        parts = ids_NP.split(self.places, 1)
        return [self._pooled(t, ids) for t, ids in zip(self.tables, parts, strict=True)]

    def _pooled(self, table: nn.Module, ids_NK: Tensor) -> Tensor:
        if ids_NK.shape[1] == 1:
            vectors_ND: Tensor = table(ids_NK)
        else:
            ids_NK, values_NK = filled(ids_NK, next(table.parameters()).dtype)
            vectors_ND = table(ids_NK, per_sample_weights=values_NK)
        return vectors_ND


def plain_table(rows: int, width: int) -> nn.EmbeddingBag:
    """A table with the first numbers of DLRM's."""
    table = nn.EmbeddingBag(rows, width, mode="sum")
    bound = 1 / math.sqrt(rows)
    nn.init.uniform_(table.weight, -bound, bound)
    return table


def filled(ids_NP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids of which none is negative, and 0 for each place that was empty, 1 for the others."""
    return ids_NP.clamp(min=0), (ids_NP >= 0).to(dtype)


class OneIdSpace(nn.Module):
    """The ids of all fields as ids of one table: field k begins behind the rows of field k - 1."""

    first: Tensor

    def __init__(self, fields: Sequence[Field]) -> None:
        super().__init__()
        starts = accumulate((field.rows for field in fields), initial=0)
        first = [start for start, f in zip(starts, fields, strict=False) for _ in range(f.places)]
        self.rows = sum(field.rows for field in fields)
        self.bags = any(field.places > 1 for field in fields)
        self.register_buffer("first", torch.tensor(first), persistent=False)

    def forward(self, ids_NP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Ids [N, P] of the one table, and their values; None: all are 1."""
        if not self.bags:
            return ids_NP + self.first, None
        ids_NP, values_NP = filled(ids_NP, dtype)
        return ids_NP + self.first, values_NP


def dense_layers(sizes: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Linear layers from size to size, with ReLU between them; the first numbers are DLRM's."""
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(sizes):
        layer = nn.Linear(entering, leaving)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (entering + leaving)))
        nn.init.normal_(layer.bias, std=math.sqrt(1 / leaving))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))
