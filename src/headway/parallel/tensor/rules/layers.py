"""Rules for embedding, sums and softmax, norms and losses.

Over a cut dimension the parts are reduced over the ranks that cut it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.parallel.layout_rules import reduced_dims, total
from headway.parallel.split_tensor import WHOLE_DIMENSION, DimensionCut, RuleRefused, SplitTensor
from headway.parallel.tensor.functional import (
    NormOptions,
    SplitClasses,
    split_cross_entropy,
    split_norm,
    vocabulary_parallel_embedding,
)
from headway.parallel.tensor.grid import (
    copy_to_ranks,
    gather_for_partial_use,
    gather_from_ranks,
    local_slice,
    maximum_over_ranks,
    reduce_from_ranks,
    reduce_scatter_to_ranks,
    scatter_to_ranks,
)
from headway.parallel.tensor.layer_context import (
    LayerContext,
    UndecidedParameter,
    cuts_of,
    describe_cuts,
    local_of,
)
from headway.parallel.tensor.rules.alignment import elementwise


def embedding(
    context: LayerContext, func: Any, input: Any, weight: Any, padding_idx: int | None = None,  # noqa: A002
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:  # fmt: skip
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise RuleRefused("max_norm, scale_grad_by_freq and sparse gradients are not supported")
    if isinstance(weight, UndecidedParameter):
        weight = weight.context.decide_table(input, weight)
    index, cuts = local_of(input), cuts_of(input)
    if not isinstance(weight, SplitTensor):
        axes = "".join(cut.axes for cut in cuts)
        # Ranks look up different rows: the table's gradient is the sum over them.
        table = copy_to_ranks(weight, context.grid, axes) if weight.requires_grad else weight
        found = torch.nn.functional.embedding(index, table, padding_idx)
        return context.wrap(found, [*cuts, WHOLE_DIMENSION])
    match context.grid.plan.form:
        case "classic":
            local = vocabulary_parallel_embedding(
                index, weight.local, context.grid, weight.cuts[0].axes, padding_idx
            )
            return context.wrap(
                reduce_from_ranks(local, context.grid, weight.cuts[0].axes),
                [*cuts, WHOLE_DIMENSION],
            )
        case "cuboid":
            return _on_cuboid(context, index, cuts, weight, padding_idx)
        case "summa":
            return _on_square(context, index, cuts, weight, padding_idx)


def _on_cuboid(
    context: LayerContext,
    index: Tensor,
    cuts: Sequence[DimensionCut],
    weight: SplitTensor,
    padding: int | None,
) -> Any:
    """As a linear layer whose X, one-hot rows, every rank can write down; width over l.

    Rows (i, j) of the index are gathered over j; what is found is scattered over it again.
    """
    grid = context.grid
    width = DimensionCut("l") if grid.size("l") > 1 else WHOLE_DIMENSION
    if not cuts or not cuts[0].axes:
        table = gather_from_ranks(weight.local, grid, "i", 0)
        found = reduce_from_ranks(
            vocabulary_parallel_embedding(index, table, grid, "j", padding), grid, "j"
        )
        return context.wrap(found, [*cuts, width])
    rows = "".join(axis for axis in "ij" if grid.size(axis) > 1)
    if cuts[0] != DimensionCut(rows) or any(cut.axes for cut in cuts[1:]):
        raise RuleRefused(
            f"an embedding on a cuboid takes rows over (i, j), and not {describe_cuts(cuts)}"
        )
    table = gather_for_partial_use(weight.local, grid, "i")
    whole = grid.gather(index, "j").wait()
    found = reduce_scatter_to_ranks(
        vocabulary_parallel_embedding(whole, table, grid, "j", padding), grid, "j"
    )
    return context.wrap(found, [*cuts, width])


def _on_square(
    context: LayerContext,
    index: Tensor,
    cuts: Sequence[DimensionCut],
    weight: SplitTensor,
    padding: int | None,
) -> Any:
    """The table [words over j, width over i], as a tied head has it; the result's width over j."""
    grid = context.grid
    rows = bool(cuts) and bool(cuts[0].axes)
    table = weight.local
    if rows:
        table = gather_for_partial_use(gather_for_partial_use(table, grid, "j", 0), grid, "i", 1)
        table = copy_to_ranks(table, grid, "d")
        table = local_slice(table, grid, "j", 1)
    else:
        table = scatter_to_ranks(
            gather_from_ranks(gather_from_ranks(table, grid, "j", 0), grid, "i", 1), grid, "j", 1
        )
    found = torch.nn.functional.embedding(index, table, padding)
    return context.wrap(found, [*cuts, DimensionCut("j")])


# Means, variances and softmax.


def mean(
    context: LayerContext, func: Any, x: SplitTensor, dim: Any = None, keepdim: bool = False,
    *, dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    dims = reduced_dims(x, dim)
    return total(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


def var(
    context: LayerContext, func: Any, x: SplitTensor, dim: Any = None, unbiased: bool | None = None,
    keepdim: bool = False, *, correction: int = 1,
) -> Any:  # fmt: skip
    dims = reduced_dims(x, dim)
    if unbiased is not None:
        correction = int(unbiased)
    count = math.prod(x.shape[d] for d in dims)
    # In two passes: the mean of squares would lose digits to a large mean.
    apart = x - total(x, dims, True) / count
    return apart.square().sum(dims, keepdim) / max(0, count - correction)


def softmax(
    context: LayerContext,
    func: Any,
    x: SplitTensor,
    dim: int | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    return _softmax(context, x, dim, kwargs.get("dtype"), logarithm=False)


def log_softmax(
    context: LayerContext,
    func: Any,
    x: SplitTensor,
    dim: int | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    return _softmax(context, x, dim, kwargs.get("dtype"), logarithm=True)


def _softmax(
    context: LayerContext,
    x: SplitTensor,
    dim: int | None,
    dtype: torch.dtype | None,
    *,
    logarithm: bool,
) -> Any:
    if dim is None:
        raise RuleRefused("it names no dimension")
    axes, grid = x.cuts[dim % x.ndim].axes, context.grid
    if not axes:
        own = torch.log_softmax if logarithm else torch.softmax
        return context.wrap(own(x.local, dim, dtype=dtype), x.cuts)
    local = x.local if dtype is None else x.local.to(dtype)
    # The shift cancels in the result, so that the maximum needs no gradient.
    shifted = local - maximum_over_ranks(local.amax(dim, keepdim=True), grid, axes)
    exponentials = shifted.exp()
    # Each rank divides another part by the sum: its gradients are added up.
    whole = copy_to_ranks(
        reduce_from_ranks(exponentials.sum(dim, keepdim=True), grid, axes), grid, axes
    )
    return context.wrap(shifted - whole.log() if logarithm else exponentials / whole, x.cuts)


# Norms.


def layer_norm(
    context: LayerContext, func: Any, input: Any, normalized_shape: Sequence[int],  # noqa: A002
    weight: Any = None, bias: Any = None, eps: float = 1e-5,
) -> Any:  # fmt: skip
    return _norm(context, input, normalized_shape, weight, bias, eps, centred=True)


def rms_norm(
    context: LayerContext, func: Any, input: Any, normalized_shape: Sequence[int],  # noqa: A002
    weight: Any = None, eps: float | None = None,
) -> Any:  # fmt: skip
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _norm(context, input, normalized_shape, weight, None, eps, centred=False)


def _norm(
    context: LayerContext, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float,
    *, centred: bool,
) -> Any:  # fmt: skip
    cuts = cuts_of(x)
    column = cuts[-1]
    vectors = [
        v.context.decide_vector(v, column) if isinstance(v, UndecidedParameter) else v
        for v in (weight, bias)
    ]
    rows = "".join(cut.axes for cut in cuts[: x.ndim - len(shape)])
    if any(cut.axes for cut in cuts[x.ndim - len(shape) : -1]):
        raise RuleRefused("it norms over a cut dimension that is not the last one")
    if column.axes and (len(shape) > 1 or context.classic):
        raise RuleRefused("it norms over a cut dimension")
    local = local_of(x)
    if not column.axes:
        # Every rank has other rows, so that the gradients of whole vectors are summed over them.
        parts = [
            None if v is None else copy_to_ranks(local_of(v), context.grid, rows) for v in vectors
        ]
        if centred:
            y = torch.nn.functional.layer_norm(local, list(shape), parts[0], parts[1], eps)
        else:
            y = torch.nn.functional.rms_norm(local, list(shape), parts[0], eps)
        return context.wrap(y, cuts)
    parts = [_piece(context, v, column) for v in vectors]
    rule = NormOptions(context.grid, rows, column.axes, eps, centred)
    return context.wrap(split_norm(local, parts[0], parts[1], rule), cuts)


def _piece(context: LayerContext, vector: Any, column: DimensionCut) -> Tensor | None:
    """A vector's part; of a whole one, too."""
    if vector is None or isinstance(vector, SplitTensor):
        if vector is not None and vector.cuts[0] != column:
            raise RuleRefused(f"its input is cut as {column}, its weight as {vector.cuts[0]}")
        return None if vector is None else vector.local
    return scatter_to_ranks(vector, context.grid, column.axes, 0, column.blocks)


# The loss.


def cross_entropy(
    context: LayerContext, func: Any, input: Any, target: Any, weight: Any = None,  # noqa: A002
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Of logits whose classes, or rows, are cut; targets are numbers of classes."""
    if weight is not None or size_average is not None or reduce is not None:
        raise RuleRefused("weights of classes are not supported")
    if target.is_floating_point() or not isinstance(input, SplitTensor):
        raise RuleRefused("its targets are no numbers of classes, or are cut alone")
    # torch has the classes in dimension 1, split_cross_entropy in the last.
    logits: Any = input.movedim(1, -1) if input.ndim > 2 else input
    classes = logits.cuts[-1] if isinstance(logits, SplitTensor) else WHOLE_DIMENSION
    if classes.blocks > 1 or any(cut.blocks > 1 for cut in cuts_of(logits)[:-1]):
        raise RuleRefused("its logits are cut in blocks")
    own = cuts_of(logits)[:-1]
    local_target = _target(context, target, own)
    how = SplitClasses(context.grid, classes.axes, label_smoothing, ignore_index)
    local = local_of(logits)
    losses = split_cross_entropy(local.flatten(0, -2), local_target.flatten(), how)
    rows = context.wrap(losses.view(local_target.shape), own)
    if reduction == "none":
        return rows
    total = rows.sum()
    if reduction == "sum":
        return total
    # Over all ranks, whose parts may have different numbers of targets that count.
    counted = context.wrap(local_target != ignore_index, own).sum()
    return total / counted


def _target(context: LayerContext, target: Any, rows: Sequence[DimensionCut]) -> Tensor:
    if isinstance(target, SplitTensor):
        if target.cuts != tuple(rows):
            raise RuleRefused(f"its targets are cut as {target.cuts}, its logits as {tuple(rows)}")
        return target.local
    local: Tensor = target
    for dim, cut in enumerate(rows):
        if cut.axes:
            local = local_slice(local, context.grid, cut.axes, dim)
    return local


def mse_loss(
    context: LayerContext, func: Any, input: Any, target: Any, size_average: Any = None,  # noqa: A002
    reduce: Any = None, reduction: str = "mean", weight: Any = None,
) -> Any:  # fmt: skip
    if weight is not None:
        raise RuleRefused("weights are not supported")
    apart = elementwise(context, torch.sub, input, target)
    square = apart * apart
    if reduction == "none":
        return square
    return square.sum() / (math.prod(square.shape) if reduction == "mean" else 1)
