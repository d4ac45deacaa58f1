"""SUMMA: a linear layer on a square of ranks, block by block; with a depth it is 2.5-D.

Rank (d, i, j) has block (i, j) of its layer d's rows of X, and W^T's block (i, j), K over i and N
over j (the weight as torch keeps it: [N over j, K over i]). C_ij = sum over t of A_it B_tj: for
each t, A_it is broadcast along the row and B_tj along the column, the next pair while this one is
multiplied. Backward: dA_it is a reduction along the row, dB_tj one along the column, and with a
depth dB is summed over it. Sources: van de Geijn and Watts 1997; Xu et al. 2021 (Optimus); Wang et
al. 2022 (Tesseract).

Invariant: at most two blocks of each operand are on their way or at work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from headway.parallel.tensor.grid import Grid, Pending


class _Blocks:
    """The blocks of X along the row of ranks, and of the weight along the column, one after the
    other.
    """

    def __init__(self, grid: Grid, x: Tensor | None, weight: Tensor | None) -> None:
        self.grid = grid
        self.x = x
        self.weight = weight
        self.q = grid.size("i")

    def start(self, step: int) -> tuple[Pending | None, Pending | None]:
        x, weight = self.x, self.weight
        along_row = None if x is None else self.grid.broadcast(x, x, "j", step)
        along_column = None if weight is None else self.grid.broadcast(weight, weight, "i", step)
        return along_row, along_column

    def __iter__(self) -> Any:
        coming = self.start(0)
        for step in range(self.q):
            here = coming
            if step + 1 < self.q:
                coming = self.start(step + 1)
            yield tuple(pending and pending.wait() for pending in here)


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid
    ) -> Tensor:
        flat = x.flatten(0, -2)
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        rows = y.flatten(0, -2)  # FSDP2 warns of a module whose result is a view
        for step, (block_x, block_w) in enumerate(_Blocks(grid, flat, weight)):
            torch.addmm(rows, block_x, block_w.T, beta=min(step, 1), out=rows)
        if bias is not None:
            y += bias
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.has_bias = grid, bias is not None  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grid: Grid = ctx.grid
        dy = gradients[0].flatten(0, -2)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(grid, dy, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = grid.all_reduce(_weight_gradient(grid, dy, x.flatten(0, -2)), "d")
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = grid.all_reduce_over(dy.sum(0), "id")
        return dx, dw and dw.wait(), db, None


def _input_gradient(grid: Grid, dy: Tensor, weight: Tensor) -> Tensor:
    """dA_it = sum over j of dC_ij B_tj^T: at step t the row's ranks reduce to its rank t."""
    blocks = (dy @ block_w for _, block_w in _Blocks(grid, None, weight))
    return _reduced(grid, blocks, "j")


def _weight_gradient(grid: Grid, dy: Tensor, x: Tensor) -> Tensor:
    """dB_tj = sum over i of A_it^T dC_ij: at step t the column's ranks reduce to its rank t."""
    blocks = (dy.T @ block_x for block_x, _ in _Blocks(grid, x, None))
    return _reduced(grid, blocks, "i")


def _reduced(grid: Grid, blocks: Iterable[Tensor], axis: str) -> Tensor:
    """Block t summed at rank t of the axis; the next one is computed while one is under way."""
    own: Tensor | None = None
    earlier: Pending | None = None
    for step, block in enumerate(blocks):
        later = grid.reduce(block, axis, step)
        if earlier is not None:
            earlier.wait()
        earlier = later
        if step == grid.place[axis]:
            own = block
    assert own is not None
    assert earlier is not None
    earlier.wait()
    return own


def summa_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    """A linear layer on a square (2-D) or on a stack of squares (2.5-D).

    Args:
        x: Local block, [rows / (d q), ..., K / q].
        weight: Local block, [N / q, K / q]; the same on all depths.
        bias: Local part, [N / q], cut over j and the same on i and d.
        grid: Of the form "summa".

    Returns:
        [rows / (d q), ..., N / q].
    """
    result: Tensor = _Summa.apply(x, weight, bias, grid)  # type: ignore[no-untyped-call]
    return result
