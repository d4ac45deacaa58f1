"""Rules of layers and losses: linear, matmul, einsum, attention; embedding, norms, softmax, loss.

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
    CuboidAxes,
    NormOptions,
    SplitClasses,
    column_parallel_linear,
    cuboid_linear,
    row_parallel_linear,
    split_cross_entropy,
    split_norm,
    summa_linear,
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
    resolve,
)
from headway.parallel.tensor.rules.alignment import (
    DimensionLabels,
    align_operands,
    broadcast_labels,
    elementwise,
)


def linear(context: LayerContext, func: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    if isinstance(weight, UndecidedParameter):
        weight, bias = weight.context.decide_linear(input, weight, bias)
    elif (
        context.classic and isinstance(weight, SplitTensor) and isinstance(bias, UndecidedParameter)
    ):
        bias = bias.context.decide_vector(
            bias, weight.cuts[0]
        )  # the weight is another layer's, too
    bias = resolve(bias)
    return _linear(context, input, weight, bias)


def addmm(context: LayerContext, func: Any, input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Any:  # noqa: A002
    if kwargs:
        raise RuleRefused("it scales a sum")
    return _times(context, mat1, mat2, input)


def _times(context: LayerContext, x: Any, weight: Any, bias: Any) -> Any:
    """x [..., K] times a weight [K, N]."""
    if isinstance(weight, UndecidedParameter):
        weight, bias = weight.context.decide_linear(x, weight, bias, flipped=True)
    bias = resolve(bias)
    return _linear(context, x, weight.transpose(0, 1), bias)


def _linear(context: LayerContext, x: Any, weight: Any, bias: Any) -> Any:
    if not (isinstance(weight, SplitTensor) and weight.parameter):
        y = _contracted(context, x, weight)
        return y if bias is None else elementwise(context, torch.add, y, bias)
    match context.grid.plan.form:
        case "classic":
            return _classic(context, x, weight, bias)
        case "cuboid":
            return _cuboid(context, x, weight, bias)
        case "summa":
            return _summa(context, x, weight, bias)


def _contracted(context: LayerContext, x: Any, weight: Any) -> Any:
    """By a whole weight, or by what is no weight, whatever cuts x."""
    if not isinstance(x, SplitTensor) and not isinstance(weight, SplitTensor):
        return torch.nn.functional.linear(x, weight)
    rows = list(range(x.ndim - 1))
    aligned = align_operands(context, [(x, [*rows, "k"]), (weight, ["n", "k"])])
    return aligned.result(torch.nn.functional.linear(*aligned.locals), [*rows, "n"])


def _classic(context: LayerContext, x: Any, weight: SplitTensor, bias: Any) -> Any:
    grid = context.grid
    outputs, inputs = weight.cuts
    cuts = cuts_of(x)
    axes = "".join(cut.axes for cut in cuts[:-1])
    if set(axes) & set(outputs.axes + inputs.axes):
        raise RuleRefused("its input is cut over the same ranks already")
    local = local_of(x)
    w, b = _weights(weight, bias)
    if inputs.axes:
        if cuts[-1] != inputs:
            raise RuleRefused(f"its input is cut as {cuts[-1]}, its weight as {inputs}")
        y = row_parallel_linear(_cast(local), w, b, grid, inputs.axes)
        return context.wrap(y, [*cuts[:-1], WHOLE_DIMENSION], weight.origins)
    if cuts[-1].axes:
        raise RuleRefused("its input is cut along what it sums over, its weight is not")
    # The gradient of an input of several layers is summed once for all of them.
    if weight.origins & context.companions:
        local = _once(local, lambda t: copy_to_ranks(_cast(t), grid, outputs.axes))
        y = torch.nn.functional.linear(local, w, b)
    else:
        y = column_parallel_linear(_cast(local), w, b, grid, outputs.axes)
    return context.wrap(y, [*cuts[:-1], outputs], weight.origins)


def _cuboid(context: LayerContext, x: Any, weight: SplitTensor, bias: Any) -> Any:
    grid, settings = context.grid, context.settings
    rows, sums = cuboid_axes_for(context, x)
    _check_turned(context, weight, rows + "i", sums)
    local, cuts = local_of(x), cuts_of(x)
    if not cuts[-1].axes:
        local = scatter_to_ranks(local, grid, sums, x.ndim - 1, weight.cuts[1].blocks)
    elif cuts[-1] != weight.cuts[1]:
        raise RuleRefused(f"its input is cut as {cuts[-1]}, its weight as {weight.cuts[1]}")
    w, b = _weights(weight, bias)
    gathered = bool(weight.origins & context.companions)
    if gathered:
        local = _once(local, lambda t: gather_for_partial_use(_cast(t), grid, rows))
    turn = CuboidAxes(
        grid,
        rows,
        sums,
        keep=settings.keep,
        chunks=settings.chunks,
        whole_rows=gathered,
        ahead=context.ahead,
        name=next(iter(weight.origins), ""),
    )
    y = cuboid_linear(_cast(local), w, b, turn)
    outputs = DimensionCut(rows, weight.cuts[0].blocks)
    return context.wrap(y, [DimensionCut("i" + sums), *cuts[1:-1], outputs], weight.origins)


def cuboid_axes_for(context: LayerContext, x: Any) -> tuple[str, str]:
    """The axes a and c of a cuboid's layer: x's rows are cut over (i, a), its columns over c.

    Raises:
        RuleRefused: x is cut otherwise.
    """
    size = context.grid.size
    cuts = cuts_of(x)
    for rows, sums in ("jl", "lj"):
        there = [rows_ for rows_ in "i" + rows if size(rows_) > 1]
        last = cuts[-1].axes in ("", *([sums] if size(sums) > 1 else []))
        if x.ndim > 1 and cuts[0].axes == "".join(there) and cuts[0].blocks == 1 and last:
            if any(cut.axes for cut in cuts[1:-1]):
                break
            return rows, sums
    raise RuleRefused(
        f"a layer on a cuboid takes rows over (i, j) or (i, l), and not {describe_cuts(cuts)}"
    )


def _check_turned(context: LayerContext, weight: SplitTensor, *wanted: str) -> None:
    """A weight that has two uses is cut as the first one wanted it.

    Raises:
        RuleRefused: This input wants it cut otherwise.
    """
    cuts = [
        DimensionCut("".join(axis for axis in axes if context.grid.size(axis) > 1))
        for axes in wanted
    ]
    if [cut.axes for cut in cuts] != [cut.axes for cut in weight.cuts]:
        raise RuleRefused(
            f"its input wants its weight cut {describe_cuts(cuts)}, "
            f"and it is cut {describe_cuts(weight.cuts)}"
        )


def _summa(context: LayerContext, x: Any, weight: SplitTensor, bias: Any) -> Any:
    grid = context.grid
    local, cuts = local_of(x), cuts_of(x)
    rows = "".join(axis for axis in "di" if grid.size(axis) > 1)
    if cuts[0] != DimensionCut(rows) or any(cut.axes for cut in cuts[1:-1]):
        raise RuleRefused(
            f"a layer on a square takes rows over (d, i), and not {describe_cuts(cuts)}"
        )
    if not cuts[-1].axes:
        local = scatter_to_ranks(local, grid, "j", x.ndim - 1, weight.cuts[1].blocks)
    elif cuts[-1].blocks != weight.cuts[1].blocks:
        raise RuleRefused(f"its input is cut as {cuts[-1]}, its weight as {weight.cuts[1]}")
    w, b = _weights(weight, bias)
    y = summa_linear(_cast(local), w, b, grid)
    outputs = DimensionCut("j", weight.cuts[0].blocks)
    return context.wrap(y, [*cuts[:-1], outputs], weight.origins)


def _once(x: Tensor, function: Any) -> Tensor:
    """The same exchange for all layers that take x: its gradients are added before they travel.

    It is kept at the tensor and dies with it. A leaf would keep itself alive through it.
    """
    if x.is_leaf and x.requires_grad:
        found: Tensor = function(x)
        return found
    # On these, too, depends what the function makes of x.
    key = (x._version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type))
    held: tuple[Any, Tensor] | None = x.__dict__.get("_headway_exchanged")
    if held is None or held[0] != key:
        held = x.__dict__["_headway_exchanged"] = (key, function(x))
    return held[1]


def _cast(x: Tensor) -> Tensor:
    """As autocast would cast the operands of a linear layer."""
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _weights(weight: SplitTensor, bias: Any) -> tuple[Tensor, Tensor | None]:
    return _cast(weight.local), None if bias is None else _cast(local_of(bias))


# -- products of activations ------------------------------------------------------------------


def matmul(context: LayerContext, func: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    b = kwargs.get("other", b)
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if b.ndim == 2 and a.ndim >= 2 and isinstance(b, SplitTensor | UndecidedParameter):
        return _times(context, a, b, None)
    if isinstance(a, UndecidedParameter) or a.ndim < 2 or b.ndim < 2:
        raise RuleRefused("it multiplies by a vector, or from the left by a parameter")
    b = resolve(b)
    batch_a, batch_b = (_Front(x) for x in (a, b))
    (labels_a, labels_b), batch = broadcast_labels([batch_a, batch_b])
    aligned = align_operands(context, [(a, [*labels_a, "m", "k"]), (b, [*labels_b, "k", "n"])])
    return aligned.result(torch.matmul(*aligned.locals), [*batch, "m", "n"])


class _Front:
    """All dimensions of a tensor but the last two."""

    def __init__(self, x: Any) -> None:
        self.shape = x.shape[:-2]
        self.ndim = len(self.shape)


def einsum(context: LayerContext, func: Any, equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    words = equation.replace(" ", "")
    if "->" not in words or "." in words:
        raise RuleRefused(f"{equation!r} names no result, or has an ellipsis")
    inputs, result = words.split("->")
    labels = inputs.split(",")
    aligned = align_operands(
        context, list(zip(map(resolve, operands), map(list, labels), strict=True))
    )
    return aligned.result(torch.einsum(words, *aligned.locals), list(result))


def attention(
    context: LayerContext, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """scaled_dot_product_attention of heads and samples that are cut; never along positions."""
    batch = list(range(query.ndim - 3))
    group = None if key.shape[-3] == 1 else "h"  # one head of keys for all queries is stretched
    operands: list[tuple[Any, DimensionLabels]] = [
        (query, [*batch, "h", "t", "k"]),
        (key, [*batch, group, "s", "k"]),
        (value, [*batch, group, "s", "e"]),
    ]
    for operand, labels in operands:
        for label, cut in zip(labels, cuts_of(operand), strict=True):
            if cut.axes and label in ("t", "s", "k", "e"):
                what = "positions" if label in ("t", "s") else "the width of a head"
                raise RuleRefused(f"attention is cut along {what}", of=operand)
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        names = [*batch, "h", "t", "s"][len(shape) - attn_mask.ndim :]
        sizes = shape[len(shape) - attn_mask.ndim :]
        stretch = [
            None if n == 1 and m != 1 else name
            for n, m, name in zip(attn_mask.shape, sizes, names, strict=True)
        ]
        operands.append((attn_mask, stretch))
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        _check_groups(context, query, key)
    aligned = align_operands(context, operands)
    if "t" in aligned.cuts or "s" in aligned.cuts:
        raise RuleRefused("its mask is cut along positions")
    q, k, v = aligned.locals[:3]
    mask = aligned.locals[3] if attn_mask is not None else None
    if dropout_p:
        cuts = [aligned.cuts.get(label, WHOLE_DIMENSION) for label in (*batch, "h", "t", "s")]
        local = _with_dropout(context, (q, k, v), mask, dropout_p, is_causal, scale, cuts)
    else:
        local = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return aligned.result(local, [*batch, "h", "t", "e"])


def _check_groups(context: LayerContext, query: Any, key: Any) -> None:
    """Queries share their group's keys: both are cut by heads, or there is one head of keys."""
    cut = cuts_of(query)[-3].axes, cuts_of(key)[-3].axes
    if cut[0] != cut[1] and key.shape[-3] != 1:
        raise RuleRefused("the heads of its queries are cut, and those of its keys are not")


def _with_dropout(
    context: LayerContext, operands: tuple[Tensor, ...], mask: Tensor | None, p: float,
    is_causal: bool, scale: float | None, cuts: list[DimensionCut],
) -> Tensor:  # fmt: skip
    """The weights in full: a kernel's own mask would not be drawn per element of the whole."""
    query, key, value = operands
    if key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hidden else scores + mask
    weights = torch.nn.functional.dropout(context.wrap(scores.softmax(-1), cuts), p)
    return local_of(weights) @ value


def multi_head_attention(
    context: LayerContext, func: Any, query: Any, key: Any, value: Any, embed_dim_to_check: int,
    num_heads: int, in_proj_weight: Any, in_proj_bias: Any, bias_k: Any, bias_v: Any,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Any, out_proj_bias: Any,
    training: bool = True, key_padding_mask: Any = None, need_weights: bool = True,
    attn_mask: Any = None, use_separate_proj_weight: bool = False, q_proj_weight: Any = None,
    k_proj_weight: Any = None, v_proj_weight: Any = None, static_k: Any = None,
    static_v: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> Any:  # fmt: skip
    """torch.nn.MultiheadAttention: [positions, samples, width]."""
    if need_weights or bias_k is not None or add_zero_attn or static_k is not None:
        raise RuleRefused("need_weights, bias_k, bias_v and add_zero_attn are not supported")
    if use_separate_proj_weight or in_proj_weight is None:
        raise RuleRefused("kdim and vdim other than the width are not supported")
    # Self-attention: one product makes all three, as in torch.
    together = query is key and key is value
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if isinstance(in_proj_weight, UndecidedParameter):
        in_proj_weight, in_proj_bias = in_proj_weight.context.decide_linear(
            query, in_proj_weight, in_proj_bias, blocks=3
        )
    if together:
        parts = _linear(context, query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        weights = in_proj_weight.chunk(3)
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        inputs = (query, key, value)
        parts = tuple(
            _linear(context, *operands) for operands in zip(inputs, weights, biases, strict=True)
        )
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in parts)
    mask = _masks(attn_mask, key_padding_mask, q.dtype, num_heads)
    # Beside a mask is_causal is a hint that says the same, and the kernel refuses both together.
    y = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p if training else 0.0, is_causal and mask is None
    )
    y = y.transpose(1, 2).flatten(2)
    if isinstance(out_proj_weight, UndecidedParameter):
        out_proj_weight, out_proj_bias = out_proj_weight.context.decide_linear(
            y, out_proj_weight, out_proj_bias
        )
    return _linear(context, y, out_proj_weight, out_proj_bias).transpose(0, 1), None


def _masks(attn_mask: Any, padding: Any, dtype: torch.dtype, num_heads: int) -> Any:
    """Both masks of a MultiheadAttention as one that is added to the scores."""
    mask = _added(attn_mask, dtype)
    # torch's three-dimensional masks are [samples x heads, positions, positions].
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if padding is None:
        return mask
    hidden = _added(padding, dtype)[:, None, None, :]
    return hidden if mask is None else mask + hidden


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask of what is hidden as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


# Embedding.


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
    logarithm: bool = False,
    **kwargs: Any,
) -> Any:
    # torch then guesses by the number of dimensions, which it has deprecated.
    if dim is None:
        raise RuleRefused("it names no dimension")
    dtype = kwargs.get("dtype")
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
        # A norm that is used several times may have met a cut activation before.
        for vector in vectors:
            if isinstance(vector, SplitTensor):
                raise RuleRefused("its weight is cut, its input is not", of=vector)
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
