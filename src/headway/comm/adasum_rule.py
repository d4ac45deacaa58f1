"""Adasum without communication: the formula, the tree over the ranks, the reference.

Two gradients of one layer that point the same way are averaged, orthogonal ones are added, and in
between it is gradual (Maleki et al. 2021, equation 3):

    A(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

More than two are combined pairwise in a tree; A is not associative, so the tree is part of the
method. Invariant: dot products and squared norms are sums of exact products in float64, whatever
the type of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.comm.method import Piece

TINY = math.sqrt(torch.finfo(torch.float64).tiny)
"""A squared norm below the square root of the smallest normal double counts as zero."""

BLOCK = 2**15
"""Elements that are widened to float64 at a time: they stay in the cache (CPU)."""


class Widened:
    """Room for one block of both operands in float64."""

    def __init__(self, device: torch.device) -> None:
        # A GPU wants few large calls.
        self.size = BLOCK if device.type == "cpu" else 512 * BLOCK
        self._rooms = torch.empty((2, self.size), dtype=torch.float64, device=device)

    def __call__(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Both in float64; valid until the next call."""
        if left.dtype == torch.float64:
            return left, right
        size = left.numel()
        return self._rooms[0, :size].copy_(left), self._rooms[1, :size].copy_(right)


def statistics(left: Tensor, right: Tensor, widened: Widened) -> tuple[float, float, float]:
    """left.right, |left|^2 and |right|^2 of two 1-D tensors, in float64."""
    dot = first = second = 0.0
    for start in range(0, left.numel(), widened.size):
        block = slice(start, start + widened.size)
        one, other = widened(left[block], right[block])
        dot += torch.dot(one, other).item()
        first += torch.dot(one, one).item()
        second += torch.dot(other, other).item()
    return dot, first, second


def coefficients(dot: float, first: float, second: float) -> tuple[float, float]:
    """The factors of both operands; 1 for one that is zero."""
    return (
        1.0 if first < TINY else 1.0 - dot / (2.0 * first),
        1.0 if second < TINY else 1.0 - dot / (2.0 * second),
    )


def combine(own: Tensor, other: Tensor, factor: float, other_factor: float) -> None:
    """own = factor * own + other_factor * other."""
    if own.element_size() >= 4:
        own.mul_(factor).add_(other, alpha=other_factor)
    else:  # in 16 bits each of the two operations would round
        own.copy_(own.float().mul_(factor).add_(other.float(), alpha=other_factor))


def power_of_two(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def adasum_tree(vectors: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    """The reference: what Adasum over as many ranks has to give, in one process and in float64.

    With p the largest power of two, vector p + i is first combined with vector i; then neighbours
    are combined, then neighbours of these.

    Args:
        vectors: One for each rank; 1-D, gradients only.
        pieces: The layers; each has its own factors.
    """
    power = power_of_two(len(vectors))
    level = [vector.double() for vector in vectors]
    folded = [_pair(level[i], level[power + i], pieces) for i in range(len(level) - power)]
    level = [*folded, *level[len(folded) : power]]
    while len(level) > 1:
        level = [
            _pair(left, right, pieces) for left, right in zip(level[::2], level[1::2], strict=True)
        ]
    return level[0]


def _pair(left: Tensor, right: Tensor, pieces: Sequence[Piece]) -> Tensor:
    result = torch.zeros_like(left)
    for piece in pieces:
        layer = slice(piece.start, piece.stop)
        a, b = left[layer], right[layer]
        factors = coefficients((a @ b).item(), (a @ a).item(), (b @ b).item())
        result[layer] = factors[0] * a + factors[1] * b
    return result


def describe_tree(ranks: Sequence[int]) -> str:
    """The order of combination, for people: "A(A(0, 1), A(2, 3))"."""
    power = power_of_two(len(ranks))
    level = [str(rank) for rank in ranks]
    folded = [f"A({level[i]}, {level[power + i]})" for i in range(len(level) - power)]
    level = [*folded, *level[len(folded) : power]]
    while len(level) > 1:
        level = [f"A({a}, {b})" for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]
