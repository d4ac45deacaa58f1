"""Parallel layers on a process grid: linear (1-D, 2-D, 2.5-D, 3-D), norm, embedding, loss.

Cuboid (3-D) linear: Y = X W^T + b, X cut by rows over (i, a) and by columns over c, the weight by
outputs over (a, i) and by inputs over c. Gather X over a, gather W over i, multiply, and
reduce-scatter the rows of the result over c. Y is cut by rows over (i, c), by columns over a:
the next layer has a and c exchanged. Backward rotates the same three groups. After Bian et al.
2021, generalised from cubes to cuboids. Rows are along dimension 0 of the local tensors. The
1-D forms are Megatron's column and row parallel layers (Shoeybi et al. 2019).

SUMMA (2-D; 2.5-D with a depth d): rank (d, i, j) has block (i, j) of its layer d's rows of X,
and W^T's block (i, j), K over i and N over j (the weight as torch keeps it: [N over j, K over
i]). C_ij = sum over t of A_it B_tj: for each t, A_it is broadcast along the row and B_tj along
the column, the next pair while this one is multiplied, so at most two blocks of each operand
are in flight or in use. Backward: dA_it is a reduction along the row, dB_tj one along the
column; with a depth, dB is summed over it. Sources: van de Geijn and Watts 1997; Xu et al. 2021
(Optimus); Wang et al. 2022 (Tesseract).

Layer norm and RMS norm, with columns cut over an axis: the mean and variance of a row come from
those of its parts (Chan et al. 1979), gathered in one message. Sums of squares, as in the
papers' formula, lose the digits in which a large mean and a small variance differ.

Embedding and cross-entropy with the vocabulary cut over an axis (Shoeybi et al. 2019, section
3): no rank ever has a full row of logits. The loss of a row needs three numbers of each part:
its largest logit, the sum of exponentials and the logit of the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from headway.capture.fake_tensors import is_fake
from headway.parallel.tensor.grid import (
    PendingCollective,
    ProcessGrid,
    WeightPrefetch,
    completed,
    reduce_from_ranks,
)


@dataclass(frozen=True, eq=False, slots=True)
class CuboidAxes:
    """Which axes a layer on a cuboid uses, and how.

    Attributes:
        rows: a: X is gathered along it, and Y's columns are cut over it.
        sums: c: X's columns are cut over it, and Y's rows scattered.
        keep: Gathered operands are kept for backward; if not, they are gathered again.
        chunks: Pieces in which rows are scattered, each while the next one is computed.
        whole_rows: X comes gathered already, from `grid.gather_for_partial_use`.
        ahead: Gathers the next layer's weight as well.
    """

    grid: ProcessGrid
    rows: str
    sums: str
    keep: bool = True
    chunks: int = 1
    whole_rows: bool = False
    ahead: WeightPrefetch | None = None
    name: str = ""

    def x(self, x: Tensor) -> PendingCollective:
        return completed(x) if self.whole_rows else self.grid.gather(x, self.rows)

    def w(self, weight: Tensor, *, backward: bool = False) -> PendingCollective:
        if self.ahead is None:
            return self.grid.gather(weight, "i")
        return self.ahead.gather(self.name, weight, backward=backward)


class _Cuboid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, turn: CuboidAxes
    ) -> Tensor:
        whole_x, whole_w = turn.x(x), turn.w(weight)
        rows, columns = whole_x.wait(), whole_w.wait()
        y = _scattered_product(rows, columns, bias, turn)
        ctx.save_for_backward(*((rows, columns) if turn.keep else (x, weight)))
        ctx.turn, ctx.has_bias = turn, bias is not None  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        turn: CuboidAxes = ctx.turn
        grid = turn.grid
        x, weight = ctx.saved_tensors
        # All gathers are under way before the first one is waited for.
        dy_pending = grid.gather(gradients[0].contiguous(), turn.sums)
        x_pending = completed(x) if turn.keep else turn.x(x)
        columns = weight if turn.keep else turn.w(weight, backward=True).wait()
        dy = dy_pending.wait()
        rows = x_pending.wait()
        flat_dy = dy.flatten(0, -2)
        dx = dw = db = None
        # The product whose sum has to travel farther comes first and travels while the other is
        # computed.
        weights_first = grid.size("i") > 1
        if ctx.needs_input_grad[1] and weights_first:
            dw = grid.scatter_sum(flat_dy.T @ rows.flatten(0, -2), "i")
        if ctx.needs_input_grad[0]:
            found = (flat_dy @ columns).view(rows.shape)
            dx = completed(found) if turn.whole_rows else grid.scatter_sum(found, turn.rows)
        if ctx.needs_input_grad[1] and not weights_first:
            dw = grid.scatter_sum(flat_dy.T @ rows.flatten(0, -2), "i")
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = grid.all_reduce(flat_dy.sum(0), "i")
        return dx and dx.wait(), dw and dw.wait(), db and db.wait(), None


def _scattered_product(
    rows: Tensor, columns: Tensor, bias: Tensor | None, turn: CuboidAxes
) -> Tensor:
    """Rows times columns, summed over `sums`; this rank's rows of it, with the bias."""
    grid, size = turn.grid, turn.grid.size(turn.sums)
    if size == 1:
        return torch.nn.functional.linear(rows, columns, bias)
    each = rows.shape[0] // size
    chunks = min(turn.chunks, each)
    if chunks == 1:
        y = grid.scatter_sum(torch.nn.functional.linear(rows, columns), turn.sums).wait()
    else:
        # Every piece has rows of all ranks, so that each scatter serves all of them.
        apart = rows.unflatten(0, (size, each))
        pending = [
            grid.scatter_sum(torch.nn.functional.linear(piece, columns).flatten(0, 1), turn.sums)
            for piece in apart.tensor_split(chunks, dim=1)
        ]
        y = torch.cat([piece.wait() for piece in pending])
    # Behind the sum over ranks, where the bias counts once.
    return y if bias is None else y.add_(bias)


def cuboid_linear(x: Tensor, weight: Tensor, bias: Tensor | None, turn: CuboidAxes) -> Tensor:
    """A linear layer on a cuboid of ranks.

    Args:
        x: Local part, [rows / (q_i q_a), ..., K / q_c].
        weight: Local part, [N / (q_a q_i), K / q_c].
        bias: Local part, [N / q_a]; the same on the ranks of i and c.

    Returns:
        [rows / (q_i q_c), ..., N / q_a].
    """
    result: Tensor = _Cuboid.apply(x, weight, bias, turn)  # type: ignore[no-untyped-call]
    return result


class _Columns(torch.autograd.Function):
    """Classic, by outputs: the input's gradient is summed while the weight's is computed."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grid: ProcessGrid,
        axis: str,
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


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: ProcessGrid, axis: str = "j"
) -> Tensor:
    """Classic: a whole x, [N / p, K] of the weight; the result's columns are cut.

    f of Shoeybi et al. 2019: identity forward, all-reduce backward.
    """
    result: Tensor = _Columns.apply(x, weight, bias, grid, axis)  # type: ignore[no-untyped-call]
    return result


def row_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: ProcessGrid, axis: str = "j"
) -> Tensor:
    """Classic: x's columns are cut, [N, K / p] of the weight; a whole result.

    g of Shoeybi et al. 2019: all-reduce forward, identity backward. The bias is added once.
    """
    y = reduce_from_ranks(torch.nn.functional.linear(x, weight), grid, axis)
    return y if bias is None else y + bias


# SUMMA: a linear layer on a square of ranks, block by block; with a depth it is 2.5-D.


class _Blocks:
    """The blocks of X along the row of ranks, and of the weight along the column, one after the
    other.
    """

    def __init__(self, grid: ProcessGrid, x: Tensor | None, weight: Tensor | None) -> None:
        self.grid = grid
        self.x = x
        self.weight = weight
        self.q = grid.size("i")

    def start(self, step: int) -> tuple[PendingCollective | None, PendingCollective | None]:
        x, weight = self.x, self.weight
        along_row = None if x is None else self.grid.broadcast(x, "j", step)
        along_column = None if weight is None else self.grid.broadcast(weight, "i", step)
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
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, grid: ProcessGrid
    ) -> Tensor:
        flat = x.flatten(0, -2)
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        rows = y.flatten(0, -2)  # FSDP2 warns of a module whose result is a view
        for step, (block_x, block_w) in enumerate(_Blocks(grid, flat, weight)):
            # With beta 0 addmm does not read the memory, which is not filled yet.
            torch.addmm(rows, block_x, block_w.T, beta=min(step, 1), out=rows)
        if bias is not None:
            y += bias
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.has_bias = grid, bias is not None  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grid: ProcessGrid = ctx.grid
        dy = gradients[0].flatten(0, -2)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(grid, dy, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = grid.all_reduce(_weight_gradient(grid, dy, x.flatten(0, -2)), "d")
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = grid.all_reduce_over(dy.sum(0), "id")
        return dx, dw and dw.wait(), db, None


def _input_gradient(grid: ProcessGrid, dy: Tensor, weight: Tensor) -> Tensor:
    """dA_it = sum over j of dC_ij B_tj^T: at step t the row's ranks reduce to its rank t."""
    blocks = (dy @ block_w for _, block_w in _Blocks(grid, None, weight))
    return _reduced(grid, blocks, "j")


def _weight_gradient(grid: ProcessGrid, dy: Tensor, x: Tensor) -> Tensor:
    """dB_tj = sum over i of A_it^T dC_ij: at step t the column's ranks reduce to its rank t."""
    blocks = (dy.T @ block_x for block_x, _ in _Blocks(grid, x, None))
    return _reduced(grid, blocks, "i")


def _reduced(grid: ProcessGrid, blocks: Iterable[Tensor], axis: str) -> Tensor:
    """Block t summed at rank t of the axis; the next one is computed while one is under way."""
    own: Tensor | None = None
    earlier: PendingCollective | None = None
    for step, block in enumerate(blocks):
        later = grid.reduce(block, axis, step)
        if earlier is not None:
            earlier.wait()
        earlier = later
        if step == grid.place[axis]:
            own = block  # `reduce` works in place
    assert own is not None
    assert earlier is not None
    earlier.wait()
    return own


def summa_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grid: ProcessGrid) -> Tensor:
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


# Layer norm and RMS norm of rows whose columns are cut over an axis.


@dataclass(frozen=True, eq=False, slots=True)
class NormOptions:
    """How to norm.

    Attributes:
        columns: The axis that cuts what is normed.
        centred: Layer norm; if not, RMS norm.
    """

    grid: ProcessGrid
    rows: str
    columns: str
    eps: float
    centred: bool


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: NormOptions
    ) -> Tensor:
        # As torch's own norms do: statistics of half precision in float32.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance = _moments(wide, rule)
        scale = torch.rsqrt(variance + rule.eps)
        normed = (wide - mean) * scale if rule.centred else wide * scale
        ctx.save_for_backward(normed, scale, weight)  # type: ignore[arg-type]
        ctx.rule = rule  # type: ignore[attr-defined]
        y = normed if weight is None else normed * weight
        y = y if bias is None else y + bias
        # What is saved for backward must not be the result, which others may change in place.
        return y.to(x.dtype).clone() if y is normed else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        normed, scale, weight = ctx.saved_tensors
        rule: NormOptions = ctx.rule
        grid, size = rule.grid, normed.shape[-1] * rule.grid.size(rule.columns)
        dy = gradients[0].to(normed.dtype)
        g = dy if weight is None else dy * weight
        # dx = scale (g - mean(g) - normed mean(g normed)), with means over whole rows.
        sums = torch.stack([(g * normed).sum(-1), g.sum(-1)]) / size
        along, mean = grid.all_reduce(sums, rule.columns).wait().unsqueeze(-1)
        dx = g - normed * along
        dx = (dx - mean if rule.centred else dx) * scale
        dw = db = None
        if any(ctx.needs_input_grad[1:3]):
            flat = dy.flatten(0, -2)
            both = torch.stack([(flat * normed.flatten(0, -2)).sum(0), flat.sum(0)])
            both = both if ctx.needs_input_grad[2] else both[:1].clone()
            both = grid.all_reduce_over(both, rule.rows)
            dw = both[0] if ctx.needs_input_grad[1] else None
            db = both[1] if ctx.needs_input_grad[2] else None
        return dx.to(gradients[0].dtype), dw, db, None


def _moments(x: Tensor, rule: NormOptions) -> tuple[Tensor, Tensor]:
    """Mean and variance of whole rows; without centring 0 and the mean square."""
    grid, axis = rule.grid, rule.columns
    if not rule.centred:
        square = x.square().mean(-1, keepdim=True) / grid.size(axis)
        return x.new_zeros(()), grid.all_reduce(square, axis).wait()
    part = torch.stack([x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)])
    parts = grid.gather(part.unsqueeze(0), axis).wait()
    means, variances = parts.unbind(1)
    # The law of total variance, for parts of equal width.
    return means.mean(0), variances.mean(0) + means.var(0, correction=0)


def split_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: NormOptions) -> Tensor:
    """Norm over the last dimension, of which this rank has a part; result as x."""
    result: Tensor = _Norm.apply(x, weight, bias, rule)  # type: ignore[no-untyped-call]
    return result


# Embedding and cross-entropy with the vocabulary cut over an axis; no rank ever has a full row
# of logits.


def vocabulary_parallel_embedding(
    index: Tensor, weight: Tensor, grid: ProcessGrid, axes: str, padding: int | None
) -> Tensor:
    """The vectors of the words that this rank has, zeros for the others.

    Args:
        index: int64, any shape.
        weight: [words / parts, width]: this rank's part of the vocabulary.
        padding: The word, if any, whose vector gets no gradient.

    Returns:
        Pending sum over the axes, [*index.shape, width].
    """
    count = weight.shape[0]
    check_index_range(index, count * grid.size(axes), "word")
    first = grid.index(axes) * count
    local = index - first
    foreign = (local < 0) | (local >= count)
    # In the numbering of this part; torch counts a negative one from the end.
    own = None if padding is None else padding % (count * grid.size(axes)) - first
    own = own if own is not None and 0 <= own < count else None
    found = torch.nn.functional.embedding(local.masked_fill(foreign, 0), weight, padding_idx=own)
    # A foreign word reads row 0, and gives it no gradient: masked_fill's is zero there.
    return found.masked_fill(foreign.unsqueeze(-1), 0)


@dataclass(frozen=True, eq=False, slots=True)
class SplitClasses:
    """How the classes of logits are cut, and the loss.

    Attributes:
        smoothing: epsilon: the target is (1 - epsilon) one-hot + epsilon / classes.
        ignored: A target that does not count.
    """

    grid: ProcessGrid
    axes: str
    smoothing: float = 0.0
    ignored: int = -100


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, target: Tensor, how: SplitClasses) -> Tensor:
        grid, axes = how.grid, how.axes
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        count = wide.shape[-1]
        top = grid.all_reduce_over(wide.amax(-1), axes, largest=True)
        shifted = wide - top.unsqueeze(-1)
        counted = target != how.ignored
        check_index_range(target.masked_fill(~counted, 0), count * grid.size(axes), "target")
        local = target - grid.index(axes) * count
        mine = (local >= 0) & (local < count)
        local = local.masked_fill(~mine, 0)
        chosen = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        all_of_them = shifted.sum(-1) if how.smoothing else torch.zeros_like(chosen)
        # In place: nothing reads the shifted logits from here on.
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), chosen, all_of_them])
        total, chosen, all_of_them = grid.all_reduce_over(sums, axes).unbind()
        log_total = total.log()
        classes = count * grid.size(axes)
        # The largest logit, subtracted everywhere, cancels: the weights of a target add up to 1.
        loss = log_total - (1 - how.smoothing) * chosen - how.smoothing / classes * all_of_them
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, mine, counted)
        ctx.how, ctx.dtype = how, logits.dtype  # type: ignore[attr-defined]
        return loss.masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        probabilities, local, mine, counted = ctx.saved_tensors
        how: SplitClasses = ctx.how
        classes = probabilities.shape[-1] * how.grid.size(how.axes)
        g = probabilities - how.smoothing / classes if how.smoothing else probabilities.clone()
        # A rank without the target adds 0 to its first class.
        hot = mine.to(g.dtype).mul_(how.smoothing - 1).unsqueeze(-1)
        g.scatter_add_(-1, local.unsqueeze(-1), hot)
        g *= (gradients[0] * counted).unsqueeze(-1)
        return g.to(ctx.dtype), None, None


def split_cross_entropy(logits: Tensor, target: Tensor, how: SplitClasses) -> Tensor:
    """Loss of each row, [rows]; 0 for ignored targets.

    Args:
        logits: [rows, classes / parts].
        target: int64[rows]: whole numbers of classes, the same on the ranks of the axes.
    """
    result: Tensor = _Entropy.apply(logits, target, how)  # type: ignore[no-untyped-call]
    return result


def check_index_range(index: Tensor, count: int, what: str) -> None:
    """What torch says of a number outside of a table; a rank's part alone would not notice.

    On a GPU it would have to wait for the numbers, and is left out.

    Raises:
        IndexError: A number is negative or too large.
    """
    if index.device.type == "cpu" and not is_fake(index) and index.numel():
        low, high = torch.aminmax(index)
        if low < 0 or high >= count:
            raise IndexError(f"{what} {int(low if low < 0 else high)} is not among {count}")
