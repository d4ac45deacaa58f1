"""Arithmetic on lists of tensors: the only file that uses the `torch._foreach_*` functions.

torch documents them nowhere, though its own optimisers are made of them; on GPUs a list costs one
kernel instead of one per tensor. `tests/single/test_lars_lamb.py` holds each function here against
the public one. Invariant: the result for a tensor depends on that tensor alone and not on the list
that it is in, so that any division of a list over ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ROW = 2**14
"""Elements whose squares are added in one go. torch's float32 norm adds all of them one after the
other in few lanes: its relative error at 10 million elements is 4e-4. With rows of 16 Ki elements,
whose norms are combined in float64, it stays below 3e-7, at the same speed."""

Tensors = Sequence[Tensor]


def add_(xs: Tensors, ys: Tensors, alpha: float = 1.0) -> None:
    """x += alpha * y."""
    torch._foreach_add_(list(xs), list(ys), alpha=alpha)


def shift_(xs: Tensors, numbers: Sequence[float]) -> None:
    """x += number, a number per tensor."""
    torch._foreach_add_(list(xs), list(numbers))


def scale_(xs: Tensors, factor: float | Tensors) -> None:
    """x *= factor: one number, or a tensor of one number for each."""
    torch._foreach_mul_(list(xs), factor if isinstance(factor, float) else list(factor))


def scaled(xs: Tensors, factor: float) -> list[Tensor]:
    """factor * x."""
    return list(torch._foreach_mul(list(xs), factor))


def products(xs: Tensors, numbers: Tensors) -> list[Tensor]:
    """x times a tensor of one number for each."""
    return list(torch._foreach_mul(list(xs), list(numbers)))


def sum_of(xs: Tensors, ys: Tensors, alpha: float) -> list[Tensor]:
    """x + alpha * y."""
    return list(torch._foreach_add(list(xs), list(ys), alpha=alpha))


def lerp_(xs: Tensors, ys: Tensors, weight: float) -> None:
    """x += weight * (y - x)."""
    torch._foreach_lerp_(list(xs), list(ys), weight)


def add_product_(xs: Tensors, ys: Tensors, zs: Tensors, value: float) -> None:
    """x += value * y * z."""
    torch._foreach_addcmul_(list(xs), list(ys), list(zs), value)


def add_quotient_(xs: Tensors, ys: Tensors, zs: Tensors, numbers: Sequence[float]) -> None:
    """x += number * y / z, a number per tensor."""
    torch._foreach_addcdiv_(list(xs), list(ys), list(zs), list(numbers))


def square_roots(xs: Tensors) -> list[Tensor]:
    """The square root of every element."""
    return list(torch._foreach_sqrt(list(xs)))


def norms(xs: Tensors) -> Tensor:
    """Euclidean norms of all tensors, which have one type: float64 [number], on their device.

    Squares of half precision are added in float32.
    """
    if not xs:
        return torch.empty(0, dtype=torch.float64)
    dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    if xs[0].device.type == "cpu":
        return torch.stack([_norm(x, dtype) for x in xs]).double()
    # A GPU adds in a tree, whose error does not grow so.
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype)).double()


def _norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms of rows of `ROW` elements, and the norm of these in float64."""
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    flat = x.view(-1) if x.is_contiguous() else _flat(x)
    if flat.numel() < 4 * ROW:
        return norm(flat, dtype=dtype)
    whole = flat.numel() - flat.numel() % ROW
    parts = norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    if whole < flat.numel():
        parts = torch.cat([parts, norm(flat[whole:], dtype=dtype).view(1)])
    return norm(parts, dtype=torch.float64).to(dtype)


def _flat(x: Tensor) -> Tensor:
    """All elements in the order of memory, so that no dense layout needs a copy."""
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).reshape(-1)
