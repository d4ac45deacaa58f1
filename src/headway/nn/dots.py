"""The interaction of DLRM: dot products of all pairs of vectors (Naumov et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# ruff: noqa: N803 (shape suffixes)


class PairwiseDots(nn.Module):
    """Dot products of vectors i and j < i, row by row: (1, 0), (2, 0), (2, 1), (3, 0), ...

    Args:
        vectors: Their number F.
        itself: Also those of each vector with itself, at the end of its row.
    """

    pairs: Tensor

    def __init__(self, vectors: int, *, itself: bool = False) -> None:
        super().__init__()
        row, column = torch.tril_indices(vectors, vectors, 0 if itself else -1)
        self.features = len(row)
        self.register_buffer("pairs", row * vectors + column, persistent=False)

    def forward(self, vectors_NFD: Tensor) -> Tensor:
        """[N, F (F - 1) / 2], or with `itself` [N, F (F + 1) / 2]."""
        products = vectors_NFD @ vectors_NFD.transpose(1, 2)
        return products.flatten(1).index_select(1, self.pairs)
