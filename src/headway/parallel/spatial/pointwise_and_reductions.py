"""Rules of split samples that need no neighbours: elementwise, sums and losses, views, norms.

Operands are laid out as the result is: of a tensor that every rank has whole (a position code, a
label), the rank takes its part. A split dimension may move and stay whole beside others; it is
never cut or merged. `view` where it would be leaves the split first: the layers behind it want the
whole sample.

Normalisation has the statistics of the whole tensor. Each rank takes mean and squared deviations
of its part; the parts are combined in the order of the ranks (Chan, Golub, LeVeque 1979), so that
all ranks hold the same bits and nothing is lost to a large mean. Backward adds the two sums that
the gradient of the statistics needs. What is saved is the input, as without a split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headway.graph.ranges import SlidingWindow
from headway.parallel.layout_rules import reduced_dims, size_list, total
from headway.parallel.spatial.halo_exchange import (
    SINGLE_RANK_AXIS,
    RangeExchange,
    fetch_box,
    ordered_all_gather,
    ordered_all_reduce,
    sum_over_axes,
)
from headway.parallel.spatial.spatial_context import (
    SpatialContext,
    by_samples,
    check_whole_channels,
    gather,
    leave_spatial_split,
    local_part_for,
    result_ranges,
    splits_from_last_dim,
    sum_over_space,
)
from headway.parallel.split_tensor import (
    RangeCut,
    RuleRefused,
    SpatialAxis,
    SplitTensor,
    modifies_in_place,
    split_tensors_in,
)

# Elementwise.


def unary(
    context: SpatialContext, func: Callable[..., Any], x: SplitTensor, *args: Any, **kwargs: Any
) -> Any:
    """The operator on this rank's part."""
    if split_tensors_in(args, kwargs):
        return broadcast(context, func, x, *args, **kwargs)
    return x.like(func(x.local, *args, **kwargs))


def broadcast(context: SpatialContext, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The operator on parts that are laid out alike."""
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, (SplitTensor, Tensor))]
    first = split_tensors_in(operands)[0]
    if "out" in kwargs:
        raise RuleRefused("there is no rule for out=")
    target = result_splits(operands)
    if modifies_in_place(func, kwargs):
        target = _of_receiver(func, args[0], target)

    def part(a: Any) -> Any:
        return local_part_for(a, target) if isinstance(a, (SplitTensor, Tensor)) else a

    local = func(*map(part, args), **{key: part(a) for key, a in kwargs.items()})
    if not isinstance(local, Tensor):
        return local  # NotImplemented, of a comparison with something else
    return first.like(local, {local.dim() + dim: split for dim, split in target.items()})


def result_splits(operands: Sequence[Any]) -> dict[int, RangeCut]:
    """How the result is split, by dimension from the end: as any of the operands is.

    Where one lies in parts of space and another one by samples it is in parts of space.
    """
    target: dict[int, RangeCut] = {}
    found = split_tensors_in(operands)
    space = [x for x in found if not by_samples(x)]
    for operand in space or found:
        for dim, split in splits_from_last_dim(operand).items():
            target.setdefault(dim, split)
    if len({split.axis for split in target.values()}) < len(target):
        raise RuleRefused("the same ranks split one dimension of each")
    for dim, split in target.items():
        if split.extent == 1 and any(-dim <= len(o.shape) and o.shape[dim] > 1 for o in operands):
            raise RuleRefused("it broadcasts a split dimension of one entry")
    return target


def _of_receiver(
    func: Callable[..., Any], receiver: Any, target: dict[int, RangeCut]
) -> dict[int, RangeCut]:
    """What is changed in place stays as it lies: otherwise a copy would be changed."""
    have = splits_from_last_dim(receiver) if isinstance(receiver, SplitTensor) else {}
    if have and by_samples(receiver):
        return have
    for dim, split in target.items():
        if dim not in have or have[dim] != split:
            raise RuntimeError(
                f"{func.__name__}: a tensor that is whole cannot take a split one in place"
            )
    return target


# Sums, means and losses: this rank's sum, then the sum over the ranks.


def mean(
    input: SplitTensor,  # noqa: A002 - torch's name
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if not (dtype or input.dtype).is_floating_point:
        raise RuleRefused("torch does not define the mean of integers either")
    dims = reduced_dims(input, dim)
    count = prod(input.shape[d] for d in dims)
    # Behind a mean over all of space come the layers of the head, which may get whole samples.
    if not keepdim and dims and input.dim() - len(dims) == 2 and not {0, 1} & {*dims}:
        return sum_over_space(input, dims, keepdim, dtype=dtype) / count
    return total(input, dim, keepdim, dtype=dtype) / count


def elementwise_loss(
    context: SpatialContext, func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """mse_loss and its kin: of each entry, then their mean or sum."""
    reduction = kwargs.pop("reduction", "mean")
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        raise RuleRefused("size_average and reduce are not supported")
    each = broadcast(context, func, *args, **kwargs, reduction="none")
    if reduction == "none":
        return each
    return each.mean() if reduction == "mean" else each.sum()


def _label_splits(logits: SplitTensor) -> dict[int, RangeCut]:
    """How labels N D H W of logits N C D H W lie, by dimension from the end."""
    count = logits.dim()
    # Labels lack the dimension of classes; counted from the end, only the samples' place differs.
    return {(d - count if d else 1 - count): split for d, split in logits.splits.items()}


def class_loss(
    context: SpatialContext,
    func: Callable[..., Any],
    input: Any,  # noqa: A002 - torch's name
    target: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """cross_entropy, nll_loss: of the entries of this rank, then over all ranks."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
    named = dict(zip(names, args, strict=False)) | kwargs
    if not isinstance(input, SplitTensor):  # gathered logits, labels that were split from the start
        shift = input.dim() - target.dim()
        splits = {d + shift if d else 0: s for d, s in target.splits.items()}
        local = local_part_for(input, {d - input.dim(): s for d, s in splits.items()})
        input = target.like(local, splits)  # noqa: A001
    if 1 in input.splits:
        raise RuleRefused("its classes are split")
    if named.pop("size_average", None) is not None or named.pop("reduce", None) is not None:
        raise RuleRefused("size_average and reduce are not supported")
    reduction = named.pop("reduction", "mean")
    probable = target.dtype.is_floating_point
    splits = splits_from_last_dim(input) if probable else _label_splits(input)
    labels = local_part_for(target, splits)
    if reduction == "none":
        local = func(input.local, labels, reduction="none", **named)
        return input.like(local, {local.dim() + d: s for d, s in _label_splits(input).items()})
    axes = [split.axis for split in input.splits.values()]
    loss = sum_over_axes(func(input.local, labels, reduction="sum", **named), axes)
    if reduction == "sum":
        return loss
    # torch divides by all rows: there is no ignored label among probabilities.
    if probable:
        return loss / (input.numel() // input.shape[1])
    # The mean over all labels that count, which is not the mean of the ranks' means.
    counted = _counted(labels, named.get("weight"), named.get("ignore_index", -100), loss)
    return loss / sum_over_axes(counted, axes)


def _counted(labels: Tensor, weight: Tensor | None, ignored: int, like: Tensor) -> Tensor:
    """What torch divides by: the weights of the labels that count."""
    valid = labels != ignored
    if weight is None:
        return valid.sum().to(like.dtype)
    return weight[labels[valid]].sum().to(like.dtype)


def one_hot(x: SplitTensor, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise RuleRefused("without num_classes it depends on the largest label")
    return x.like(F.one_hot(x.local, num_classes), x.splits)


# Other shapes.


def view(x: SplitTensor, *shape: Any) -> Any:
    """view, reshape: of the dimensions that are whole; otherwise of whole samples or of all."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise RuleRefused("it looks at the bits as another type")
    sizes = size_list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.numel() // -prod(sizes)
    splits, local = _kept(x, sizes), list(sizes)
    if splits is None:
        return (leave_spatial_split(x) if sizes[:1] == [x.shape[0]] else gather(x)).reshape(sizes)
    for dim, split in splits.items():
        local[dim] = split.own[1] - split.own[0]
    return x.like(x.local.reshape(local), splits)


def _kept(x: SplitTensor, sizes: Sequence[int]) -> dict[int, RangeCut] | None:
    """Where the split dimensions stand in a new shape; None where one is cut or merged."""
    places: dict[int, RangeCut] = {}
    ends, total = {}, 1
    for place, size in enumerate(sizes):
        if size != 1 or total not in ends:
            ends[total] = place  # elements before this place
        total *= size
    for dim, split in x.splits.items():
        same = list(x.shape[: dim + 1]) == list(sizes[: dim + 1])
        place = dim if same else ends.get(prod(x.shape[:dim]), len(sizes))
        if place == len(sizes) or sizes[place] != split.extent:
            return None
        places[place] = split
    return places


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """cat, along a dimension that is whole; the parts are laid out alike."""
    first = split_tensors_in(tensors)[0]
    place = dim % first.ndim - first.ndim
    # torch.cat ignores empty tensors of one dimension.
    operands = [t for t in tensors if t.numel() or t.dim() > 1]
    target = result_splits(operands)
    if place in target:
        raise RuleRefused("it joins along a split dimension")
    local = torch.cat([local_part_for(t, target) for t in operands], place)
    return first.like(local, {d + first.dim(): s for d, s in target.items()})


def pad(
    input: SplitTensor,  # noqa: A002 - torch's name
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """F.pad: constant anywhere, the other modes along dimensions that are whole."""
    sides = {input.dim() - 1 - n // 2: (pad[n], pad[n + 1]) for n in range(0, len(pad), 2)}
    touched = {dim: sides[dim] for dim in input.splits if any(sides.get(dim, (0, 0)))}
    if not touched:
        return input.like(F.pad(input.local, list(pad), mode, value))
    if mode != "constant":
        raise RuleRefused(f"it pads with mode {mode!r} along a split dimension")
    needs, splits = [], dict(input.splits)
    for dim, (before, after) in sides.items():
        if not before and not after:
            continue
        extent = input.shape[dim]
        axis, ranges = result_ranges(input, dim, extent + before + after)
        have = input.splits[dim].ranges if dim in splits else ((0, extent),)
        window = SlidingWindow(1, 1, before)  # padding is what a window of one entry would want
        needs.append(RangeExchange(dim, axis, have, tuple(window.wanted(r) for r in ranges)))
        if axis is not SINGLE_RANK_AXIS:
            splits[dim] = RangeCut(axis, ranges)
    return input.like(fetch_box(input.local, needs, value or 0.0), splits)


# Products with weights that are whole.


def linear(
    input: SplitTensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """F.linear: over the last dimension; it leaves the split first where that is split."""
    if input.dim() - 1 in input.splits:
        return F.linear(leave_spatial_split(input), weight, bias)
    return input.like(F.linear(input.local, weight, bias))


def matmul(input: Any, other: Any) -> Any:  # noqa: A002 - torch's name
    """x @ weight, for a weight that is whole and a last dimension that is."""
    if not isinstance(input, SplitTensor) or isinstance(other, SplitTensor) or other.dim() > 2:
        raise RuleRefused("it multiplies by what is no whole weight")
    if input.dim() < 2 or input.dim() - 1 in input.splits:
        raise RuleRefused("its last dimension is split")
    return input.like(torch.matmul(input.local, other))


# Normalisation.


def _statistics(
    x: Tensor, axes: Sequence[SpatialAxis], counted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations and count of each channel (dimension 1), of all ranks.

    Args:
        counted: Whether this rank's part is among them.
    """
    count = x.numel() // max(x.shape[1], 1) if counted else 0
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if count:  # torch.var_mean is three times as slow on a CPU
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        mean, variance = mean.to(wide), variance.to(wide)
    else:
        variance = mean = x.new_zeros(x.shape[1], dtype=wide)
    # Stacked, so that they travel in one message.
    state = torch.stack([mean, variance * count, torch.full_like(mean, count)])
    for axis in axes:
        state = _combined(state, axis)
    return state[0], state[1], state[2]


def _combined(state: Tensor, axis: SpatialAxis) -> Tensor:
    if axis.size == 1:
        return state
    (mean, squares, count), *others = ordered_all_gather(state, axis)
    for other_mean, other_squares, other_count in others:
        total = count + other_count
        # Two empty parts have no samples to divide by.
        share = other_count / total.clamp(min=1)
        apart = other_mean - mean
        mean = mean + apart * share
        squares = squares + other_squares + apart * apart * count * share
        count = total
    return torch.stack([mean, squares, count])


class _Normalise(Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over all ranks of the axes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        axes: Sequence[SpatialAxis],
        eps: float,
        counted: bool,
    ) -> Any:
        mean, squares, count = _statistics(x, axes, counted)
        variance = squares / count
        x = x.contiguous()
        out = x.clone()
        if x.numel():
            out = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.axes, ctx.eps, ctx.counted = axes, eps, counted
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        x, weight, mean, variance, count = ctx.saved_tensors
        if x.numel():
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                gradient.contiguous(), x, weight, mean, variance, None, None, False, ctx.eps,
                [True, True, True],
            )  # fmt: skip
        else:
            # An empty part takes part in the sums that follow, with zeros.
            dx, dweight, dbias = torch.zeros_like(x), mean.clone().zero_(), mean.clone().zero_()
        sums = torch.stack([dweight, dbias]).to(mean.dtype)
        for axis in ctx.axes:
            sums = ordered_all_reduce(sums, axis)
        # The kernel has taken mean and variance as constants: what flows through them is added.
        if ctx.needs_input_grad[0] and ctx.counted:
            # dx = weight scale (dy - mean(dy) - normed mean(dy normed)): Ioffe and Szegedy 2015,
            # section 3.
            scale = torch.rsqrt(variance + ctx.eps)
            common = (scale if weight is None else scale * weight) / count
            slope = -common * scale * sums[0]
            shape = [1, -1, *[1] * (x.dim() - 2)]
            dx.addcmul_(x, slope.to(x.dtype).view(shape))
            dx.sub_((common * sums[1] + slope * mean).to(x.dtype).view(shape))
        given = ctx.needs_input_grad
        return dx, dweight if given[1] else None, dbias if given[2] else None, None, None, None


def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: Sequence[SpatialAxis],
    eps: float,
    counted: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _Normalise.apply(x, weight, bias, tuple(axes), eps, counted)  # type: ignore[no-untyped-call,no-any-return]


def batch_norm_over(
    axis: SpatialAxis,
    counted: bool,
    x: Tensor,
    running: Sequence[Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """F.batch_norm in training, with the statistics of the samples of all ranks of an axis.

    Args:
        axis: Ranks with samples of their own; all must come here, in the same order.
        counted: Whether this rank's samples are among them; else they change nothing.
    """
    out, mean, variance, count = _normalised(x, weight, bias, (axis,), eps, counted)
    _update(running, mean, variance, count, momentum)
    return out


@torch.no_grad()
def _update(
    running: Sequence[Tensor | None], mean: Tensor, variance: Tensor, count: Tensor, momentum: float
) -> None:
    """Running mean and (unbiased) variance, as torch keeps them."""
    # Normalisation uses the biased variance, the running one is unbiased.
    unbiased = variance * (count / (count - 1))
    for held, now in zip(running, (mean, unbiased), strict=True):
        if held is not None:
            held.mul_(1 - momentum).add_(now.to(held.dtype), alpha=momentum)


def batch_norm(
    input: SplitTensor,  # noqa: A002 - torch's name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """F.batch_norm; its statistics are of all ranks of the mesh, and of `context.statistics`."""
    check_whole_channels(input)
    if not training:
        local = F.batch_norm(
            input.local, running_mean, running_var, weight, bias, False, momentum, eps
        )
        return input.like(local)
    axes = [*(split.axis for split in input.splits.values()), *input.context.statistics]
    out, mean, variance, count = _normalised(input.local, weight, bias, axes, eps)
    _update((running_mean, running_var), mean, variance, count, momentum)
    return input.like(out)


def _by_sample(x: SplitTensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised over each group of channels of each sample; without weight and bias."""
    check_whole_channels(x)
    axes = [split.axis for dim, split in x.splits.items() if dim > 1]
    rest = x.local.numel() // max(x.local.shape[0] * groups, 1)
    # A group of a sample becomes a channel, so that one function serves all norms.
    flat = x.local.reshape(1, x.local.shape[0] * groups, rest)
    out, mean, variance, count = _normalised(flat, None, None, axes, eps)
    return out.view(x.local.shape), mean, variance, count


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [-1, *[1] * (x.dim() - 2)]
    x = x if weight is None else x * weight.to(x.dtype).view(shape)
    return x if bias is None else x + bias.to(x.dtype).view(shape)


def group_norm(
    input: SplitTensor,  # noqa: A002 - torch's name
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """F.group_norm over the whole of the split dimensions."""
    out = _by_sample(input, num_groups, eps)[0]
    return input.like(_affine(out, weight, bias))


def instance_norm(
    input: SplitTensor,  # noqa: A002 - torch's name
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """F.instance_norm over the whole of the split dimensions."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    channels = input.shape[1]
    out, mean, variance, count = _by_sample(input, channels, eps)
    if running_mean is not None or running_var is not None:
        if 0 in input.splits:
            raise RuleRefused("it has running statistics, and samples are split")
        # As torch does it: the running values take the mean over the samples' statistics.
        mean, variance, count = (m.view(-1, channels).mean(0) for m in (mean, variance, count))
        _update((running_mean, running_var), mean, variance, count, momentum)
    return input.like(_affine(out, weight, bias))


def layer_norm(
    input: SplitTensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """F.layer_norm over dimensions that are whole on every rank."""
    if any(dim >= input.dim() - len(normalized_shape) for dim in input.splits):
        raise RuleRefused("it normalises over a split dimension")
    return input.like(F.layer_norm(input.local, list(normalized_shape), weight, bias, eps))
