"""Layers whose result crosses the first input with the last one: Deep and Cross Networks.

Wang et al. 2017, "Deep & Cross Network for Ad Click Predictions"; Wang et al. 2021, "DCN V2".

Names of shapes: N samples, E features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# ruff: noqa: N803 (shape suffixes)


class CrossLayer(nn.Module):
    """x0 (x . w) + b + x: one number of each sample weighs its first input.

    Args:
        features: E.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Linear(features, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, first_NE: Tensor, x_NE: Tensor) -> Tensor:
        """[N, E] from the network's input and the layer's."""
        result: Tensor = first_NE * self.weight(x_NE) + self.bias + x_NE
        return result


class CrossLayerV2(nn.Module):
    """x0 * (W x + b) + x, elementwise; W is of low rank, U V, or whole.

    Args:
        features: E.
        rank: Of W; None: W is a whole matrix.
    """

    def __init__(self, features: int, rank: int | None = None) -> None:
        super().__init__()
        into = features if rank is None else rank
        self.down = None if rank is None else nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(into, features)

    def forward(self, first_NE: Tensor, x_NE: Tensor) -> Tensor:
        """[N, E] from the network's input and the layer's."""
        within = x_NE if self.down is None else self.down(x_NE)
        result: Tensor = first_NE * self.up(within) + x_NE
        return result
