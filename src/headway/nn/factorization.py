"""Factorisation machines: scores of samples from weights and vectors of the ids that they have.

Rendle 2010, "Factorization Machines"; Juan et al. 2016, "Field-aware Factorization Machines for CTR
Prediction". Everything before the last square is a sum over a sample's ids, so that a table in
parts sends a few sums per sample, and neither rows nor gradients.

Names of shapes: N samples, P places (ids of a sample), F fields, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# ruff: noqa: N803, N806 (shape suffixes)

VECTOR_DEVIATION = 0.01
"""Of the first vectors. Zeros would stay zeros: the gradient of a vector is a sum of others."""


class FactorizationMachine(nn.Module):
    """w0 + sum w_i x_i + sum over pairs i < j of (v_i . v_j) x_i x_j.

    The pairs cost P D: they are half of |sum v_i x_i|^2 - sum |v_i x_i|^2.

    Args:
        rows: Ids are below it.
        width: Of the vectors; 0: none, which is logistic regression.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Embedding(rows, 1)
        nn.init.zeros_(self.weights.weight)
        self.vectors = nn.Embedding(rows, width) if width else None
        if self.vectors is not None:
            nn.init.normal_(self.vectors.weight, std=VECTOR_DEVIATION)

    def forward(self, ids_NP: Tensor, values_NP: Tensor | None = None) -> Tensor:
        """Scores [N].

        Args:
            ids_NP: int64; a place that does not count has any id and the value 0.
            values_NP: The x_i; None: all are 1.
        """
        weights_NP = self.weights(ids_NP).squeeze(-1)
        if values_NP is not None:
            weights_NP = weights_NP * values_NP
        score: Tensor = self.bias + weights_NP.sum(1)
        if self.vectors is None:
            return score
        vectors_NPD = self.vectors(ids_NP)
        if values_NP is not None:
            vectors_NPD = vectors_NPD * values_NP[..., None]
        return score + pairs(vectors_NPD)


def pairs(vectors_NPD: Tensor) -> Tensor:
    """[N]: the sum over all pairs of places of the products of their vectors."""
    sum_ND = vectors_NPD.sum(1)
    return (sum_ND.square().sum(1) - vectors_NPD.square().sum((1, 2))) / 2


class FieldAwareFactorizationMachine(nn.Module):
    """As a factorisation machine, with a vector for each field that an id can meet:
    (v_i,field(j) . v_j,field(i)) x_i x_j.

    Args:
        rows: Ids are below it.
        width: Of the vectors.
        places: How many places each field has, in their order.
    """

    def __init__(self, rows: int, width: int, places: Sequence[int]) -> None:
        super().__init__()
        self.places, self.width = tuple(places), width
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Embedding(rows, 1)
        self.vectors = nn.Embedding(rows, width * len(self.places))
        nn.init.zeros_(self.weights.weight)
        nn.init.normal_(self.vectors.weight, std=VECTOR_DEVIATION)

    def forward(self, ids_NP: Tensor, values_NP: Tensor | None = None) -> Tensor:
        """Scores [N]; see `FactorizationMachine.forward`."""
        weights_NP, vectors_NPV = self.weights(ids_NP).squeeze(-1), self.vectors(ids_NP)
        if values_NP is not None:
            weights_NP = weights_NP * values_NP
            vectors_NPV = vectors_NPV * values_NP[..., None]
        fields = len(self.places)
        of_field = vectors_NPV.split(self.places, 1)
        # sums[n, f, g]: of the vectors that the ids of field f have for field g.
        sums_NFFD = torch.stack([part.sum(1) for part in of_field], 1)
        sums_NFFD = sums_NFFD.unflatten(2, (fields, self.width))
        twice = (sums_NFFD * sums_NFFD.transpose(1, 2)).sum((1, 2, 3))
        # Of an id with itself: it is in its field's own sum.
        own = [
            part.narrow(2, field * self.width, self.width).square().sum((1, 2))
            for field, part in enumerate(of_field)
        ]
        score: Tensor = self.bias + weights_NP.sum(1) + (twice - torch.stack(own).sum(0)) / 2
        return score
