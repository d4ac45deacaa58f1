"""Linear layers on a cuboid of ranks, and in the classic 1-D form; forward and backward.

Y = X W^T + b, X cut by rows over (i, a) and by columns over c, the weight by outputs over (a, i)
and by inputs over c: gather X over a, gather W over i, multiply, and reduce-scatter the rows of the
result over c. Y is cut by rows over (i, c), by columns over a: the next layer's turn, with a and c
exchanged. Backward rotates the same three groups. After Bian et al. 2021 ("Maximizing Parallelism
..."), generalised from cubes to cuboids. Rows are along dimension 0 of the local tensors.

Invariant: gradients are complete where the values are whole (see `exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from headway.parallel.tensor.ahead import Ahead
from headway.parallel.tensor.exchange import summed
from headway.parallel.tensor.grid import Grid, Pending


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """Which axes a layer on a cuboid uses, and how.

    Attributes:
        grid: The ranks.
        rows: a: X is gathered along it, and Y's columns are cut over it.
        sums: c: X's columns are cut over it, and Y's rows scattered.
        keep: Gathered operands are kept for backward; if not, they are gathered again.
        chunks: Pieces in which rows are scattered, each while the next one is computed.
        whole_rows: X comes gathered already, from `exchange.gathered_for_parts`.
        ahead: Gathers the next layer's weight as well.
        name: Of the weight.
    """

    grid: Grid
    rows: str
    sums: str
    keep: bool = True
    chunks: int = 1
    whole_rows: bool = False
    ahead: Ahead | None = None
    name: str = ""

    def x(self, x: Tensor) -> Pending:
        return Pending(None, lambda: x) if self.whole_rows else self.grid.gather(x, self.rows)

    def w(self, weight: Tensor, *, backward: bool = False) -> Pending:
        if self.ahead is None:
            return self.grid.gather(weight, "i")
        return self.ahead.gather(self.name, weight, backward=backward)


class _Cuboid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, turn: Turn
    ) -> Tensor:
        whole_x, whole_w = turn.x(x), turn.w(weight)
        rows, columns = whole_x.wait(), whole_w.wait()
        y = _scattered_product(rows, columns, bias, turn)
        ctx.save_for_backward(*((rows, columns) if turn.keep else (x, weight)))
        ctx.turn, ctx.has_bias = turn, bias is not None  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        turn: Turn = ctx.turn
        grid = turn.grid
        x, weight = ctx.saved_tensors
        dy_pending = grid.gather(gradients[0].contiguous(), turn.sums)
        x_pending = Pending(None, lambda: x) if turn.keep else turn.x(x)
        columns = weight if turn.keep else turn.w(weight, backward=True).wait()
        dy = dy_pending.wait()
        rows = x_pending.wait()
        flat_dy = dy.flatten(0, -2)
        dx = dw = db = None
        weights_first = grid.size("i") > 1
        if ctx.needs_input_grad[1] and weights_first:
            dw = grid.scatter_sum(flat_dy.T @ rows.flatten(0, -2), "i")
        if ctx.needs_input_grad[0]:
            found = (flat_dy @ columns).view(rows.shape)
            dx = (
                Pending(None, lambda: found)
                if turn.whole_rows
                else grid.scatter_sum(found, turn.rows)
            )
        if ctx.needs_input_grad[1] and not weights_first:
            dw = grid.scatter_sum(flat_dy.T @ rows.flatten(0, -2), "i")
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = grid.all_reduce(flat_dy.sum(0), "i")
        return dx and dx.wait(), dw and dw.wait(), db and db.wait(), None


def _scattered_product(rows: Tensor, columns: Tensor, bias: Tensor | None, turn: Turn) -> Tensor:
    """Rows times columns, summed over `sums`; this rank's rows of it, with the bias."""
    grid, size = turn.grid, turn.grid.size(turn.sums)
    if size == 1:
        return torch.nn.functional.linear(rows, columns, bias)
    each = rows.shape[0] // size
    chunks = min(turn.chunks, each)
    if chunks == 1:
        y = grid.scatter_sum(torch.nn.functional.linear(rows, columns), turn.sums).wait()
    else:
        apart = rows.unflatten(0, (size, each))
        pending = [
            grid.scatter_sum(torch.nn.functional.linear(piece, columns).flatten(0, 1), turn.sums)
            for piece in apart.tensor_split(chunks, dim=1)
        ]
        y = torch.cat([piece.wait() for piece in pending])
    return y if bias is None else y.add_(bias)


def cuboid_linear(x: Tensor, weight: Tensor, bias: Tensor | None, turn: Turn) -> Tensor:
    """A linear layer on a cuboid of ranks.

    Args:
        x: Local part, [rows / (q_i q_a), ..., K / q_c].
        weight: Local part, [N / (q_a q_i), K / q_c].
        bias: Local part, [N / q_a]; the same on the ranks of i and c.
        turn: The axes' roles.

    Returns:
        [rows / (q_i q_c), ..., N / q_a].
    """
    result: Tensor = _Cuboid.apply(x, weight, bias, turn)  # type: ignore[no-untyped-call]
    return result


class _Columns(torch.autograd.Function):
    """Classic, by outputs: the input's gradient is summed while the weight's is computed."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, axis: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.axis = grid, axis  # type: ignore[attr-defined]
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0]
        flat = dy.flatten(0, -2)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.grid.all_reduce((flat @ weight).view(x.shape), ctx.axis)
        if ctx.needs_input_grad[1]:
            dw = flat.T @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            db = flat.sum(0)
        return dx and dx.wait(), dw, db, None, None


def by_outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, axis: str = "j"
) -> Tensor:
    """Classic: a whole x, [N / p, K] of the weight; the result's columns are cut.

    f of Shoeybi et al. 2019: identity forward, all-reduce backward.
    """
    result: Tensor = _Columns.apply(x, weight, bias, grid, axis)  # type: ignore[no-untyped-call]
    return result


def by_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, axis: str = "j"
) -> Tensor:
    """Classic: x's columns are cut, [N, K / p] of the weight; a whole result.

    g of Shoeybi et al. 2019: all-reduce forward, identity backward. The bias is added once.
    """
    y = summed(torch.nn.functional.linear(x, weight), grid, axis)
    return y if bias is None else y + bias
