"""What a gradient meets on its way back through an exchange; five pairs of forward and backward.

The law of all of them: a gradient is cut as its value is, and where the value is whole on several
ranks, its gradient is whole and the same there. So a use by ranks that compute different things
with a whole value has to sum in backward (`shared`), and a sum over ranks hands its gradient
through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from headway.parallel.tensor.grid import Grid


class _Exchange(torch.autograd.Function):
    """A linear exchange and its adjoint."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back  # type: ignore[attr-defined]
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return ctx.back(gradients[0]), None, None


def _apply(
    x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return there(x)
    result: Tensor = _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _dense(x: Tensor) -> Tensor:
    """A copy that may be overwritten."""
    return x.clone(memory_format=torch.contiguous_format)


def shared(x: Tensor, grid: Grid, axes: str) -> Tensor:
    """A whole value, used differently along the axes: its gradients are summed."""
    axes = _real(grid, axes)
    if not axes:
        return x
    return _apply(x, lambda t: t.view_as(t), lambda g: grid.all_reduce_over(_dense(g), axes))


def summed(x: Tensor, grid: Grid, axes: str) -> Tensor:
    """The sum of partial values; its gradient is that of each part."""
    axes = _real(grid, axes)
    if not axes:
        return x
    return _apply(x, lambda t: grid.all_reduce_over(_dense(t), axes), lambda g: g)


def largest(x: Tensor, grid: Grid, axes: str) -> Tensor:
    """The maximum over the ranks, without a gradient."""
    axes = _real(grid, axes)
    return grid.all_reduce_over(_dense(x.detach()), axes, largest=True) if axes else x.detach()


def scattered(x: Tensor, grid: Grid, axis: str, dim: int = 0) -> Tensor:
    """The sum of partial values, of which each rank keeps its part along a dimension."""
    if grid.size(axis) == 1:
        return x
    return _apply(
        x,
        lambda t: grid.scatter_sum(t, axis, dim).wait(),
        lambda g: grid.gather(g, axis, dim).wait(),
    )


def gathered_for_parts(x: Tensor, grid: Grid, axis: str, dim: int = 0) -> Tensor:
    """All parts along a dimension, for a use that is different on each rank of the axis."""
    if grid.size(axis) == 1:
        return x
    return _apply(
        x,
        lambda t: grid.gather(t, axis, dim).wait(),
        lambda g: grid.scatter_sum(g, axis, dim).wait(),
    )


def gathered(x: Tensor, grid: Grid, axes: str, dim: int, blocks: int = 1) -> Tensor:
    """All parts along a dimension; what follows is the same on all ranks."""
    if not _real(grid, axes):
        return x
    return _apply(
        x,
        lambda t: _gather(t, grid, axes, dim, blocks),
        lambda g: part(g, grid, axes, dim, blocks),
    )


def taken(x: Tensor, grid: Grid, axes: str, dim: int, blocks: int = 1) -> Tensor:
    """This rank's part of a whole value; its gradient is put together again."""
    if not _real(grid, axes):
        return x
    return _apply(
        x,
        lambda t: part(t, grid, axes, dim, blocks),
        lambda g: _gather(g.contiguous(), grid, axes, dim, blocks),
    )


def part(x: Tensor, grid: Grid, axes: str, dim: int, blocks: int = 1) -> Tensor:
    """This rank's part along a dimension.

    Blocks: of each of so many consecutive blocks its piece over the first axis, one behind the
    other; the other axes cut what this gives.
    """
    if blocks > 1:
        apart = x.unflatten(dim, (blocks, grid.size(axes[:1]), -1))
        x = apart.select(dim + 1, grid.index(axes[:1])).flatten(dim, dim + 1)
        axes = axes[1:]
    length = x.shape[dim] // grid.size(axes)
    found: Tensor = x.narrow(dim, grid.index(axes) * length, length)
    return found


def _gather(x: Tensor, grid: Grid, axes: str, dim: int, blocks: int) -> Tensor:
    for axis in reversed(axes):
        x = grid.gather(x, axis, dim).wait()
    if blocks == 1:
        return x
    apart = x.unflatten(dim, (grid.size(axes[:1]), blocks, -1))
    found: Tensor = apart.transpose(dim, dim + 1).flatten(dim, dim + 2)
    return found


def _real(grid: Grid, axes: str) -> str:
    return "".join(axis for axis in axes if grid.size(axis) > 1)
