"""The Adasum of all ranks in one process: what the reduction over ranks must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.comm.algorithms.adasum import adasum_coefficients, largest_power_of_two
from headway.comm.algorithms.method import GradientSlice


def adasum_tree(vectors: Sequence[Tensor], pieces: Sequence[GradientSlice]) -> Tensor:
    """The reference: the Adasum of one 1-D vector per rank, in one process and in float64.

    With p the largest power of two, vector p + i is first combined with vector i; then neighbours
    are combined, then neighbours of these. Each of the pieces, the layers, has its own factors.
    """
    power = largest_power_of_two(len(vectors))
    level = [vector.double() for vector in vectors]
    folded = [_pair(level[i], level[power + i], pieces) for i in range(len(level) - power)]
    level = [*folded, *level[len(folded) : power]]
    while len(level) > 1:
        level = [
            _pair(left, right, pieces) for left, right in zip(level[::2], level[1::2], strict=True)
        ]
    return level[0]


def _pair(left: Tensor, right: Tensor, pieces: Sequence[GradientSlice]) -> Tensor:
    result = torch.zeros_like(left)
    for piece in pieces:
        layer = slice(piece.start, piece.stop)
        a, b = left[layer], right[layer]
        factors = adasum_coefficients((a @ b).item(), (a @ a).item(), (b @ b).item())
        result[layer] = factors[0] * a + factors[1] * b
    return result
