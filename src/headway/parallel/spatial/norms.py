"""Batch, group and instance normalisation with the statistics of the whole tensor.

Each rank takes mean and squared deviations of its part; the parts are combined in the order of the
ranks (Chan, Golub, LeVeque 1979), so that all ranks hold the same bits and nothing is lost to a
large mean. Backward adds the two sums that the gradient of the statistics needs. What is saved is
the input, as without a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headway.parallel.spatial.halo_exchange import (
    SpatialAxis,
    ordered_all_gather,
    ordered_all_reduce,
)
from headway.parallel.spatial.spatial_tensor import SpatialTensor, unsupported_operator


def _statistics(x: Tensor, axes: Sequence[SpatialAxis]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations and count of each channel (dimension 1), of all ranks."""
    count = x.numel() // max(x.shape[1], 1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if count:  # torch.var_mean is three times as slow on a CPU
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        mean, variance = mean.to(wide), variance.to(wide)
    else:
        variance = mean = x.new_zeros(x.shape[1], dtype=wide)
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
    ) -> Any:
        mean, squares, count = _statistics(x, axes)
        variance = squares / count
        x = x.contiguous()
        out = x.clone()
        if x.numel():
            out = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.axes, ctx.eps = axes, eps
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
            dx, dweight, dbias = torch.zeros_like(x), mean.clone().zero_(), mean.clone().zero_()
        sums = torch.stack([dweight, dbias]).to(mean.dtype)
        for axis in ctx.axes:
            sums = ordered_all_reduce(sums, axis)
        if ctx.needs_input_grad[0]:
            scale = torch.rsqrt(variance + ctx.eps)
            common = (scale if weight is None else scale * weight) / count
            slope = -common * scale * sums[0]
            shape = [1, -1, *[1] * (x.dim() - 2)]
            dx.addcmul_(x, slope.to(x.dtype).view(shape))
            dx.sub_((common * sums[1] + slope * mean).to(x.dtype).view(shape))
        given = ctx.needs_input_grad
        return dx, dweight if given[1] else None, dbias if given[2] else None, None, None


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: Sequence[SpatialAxis], eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _Normalise.apply(x, weight, bias, tuple(axes), eps)  # type: ignore[no-untyped-call,no-any-return]


@torch.no_grad()
def _update(
    running: Sequence[Tensor | None], mean: Tensor, variance: Tensor, count: Tensor, momentum: float
) -> None:
    """Running mean and (unbiased) variance, as torch keeps them."""
    unbiased = variance * (count / (count - 1))
    for held, now in zip(running, (mean, unbiased), strict=True):
        if held is not None:
            held.mul_(1 - momentum).add_(now.to(held.dtype), alpha=momentum)


def batch_norm(
    input: SpatialTensor,  # noqa: A002 - torch's name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """F.batch_norm; its statistics are of all ranks of the mesh, and of `context.statistics`."""
    if 1 in input.splits:
        raise unsupported_operator("batch_norm", input, "its channels are split")
    if not training:
        local = F.batch_norm(
            input.local, running_mean, running_var, weight, bias, False, momentum, eps
        )
        return input.like(local)
    axes = [*(split.axis for split in input.splits.values()), *input.context.statistics]
    out, mean, variance, count = _normalised(input.local, weight, bias, axes, eps)
    _update((running_mean, running_var), mean, variance, count, momentum)
    return input.like(out)


def _by_sample(
    x: SpatialTensor, groups: int, eps: float, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised over each group of channels of each sample; without weight and bias."""
    if 1 in x.splits:
        raise unsupported_operator(name, x, "its channels are split")
    axes = [split.axis for dim, split in x.splits.items() if dim > 1]
    rest = x.local.numel() // max(x.local.shape[0] * groups, 1)
    flat = x.local.reshape(1, x.local.shape[0] * groups, rest)
    out, mean, variance, count = _normalised(flat, None, None, axes, eps)
    return out.view(x.local.shape), mean, variance, count


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [-1, *[1] * (x.dim() - 2)]
    x = x if weight is None else x * weight.to(x.dtype).view(shape)
    return x if bias is None else x + bias.to(x.dtype).view(shape)


def group_norm(
    input: SpatialTensor,  # noqa: A002 - torch's name
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """F.group_norm over the whole of the split dimensions."""
    out = _by_sample(input, num_groups, eps, "group_norm")[0]
    return input.like(_affine(out, weight, bias))


def instance_norm(
    input: SpatialTensor,  # noqa: A002 - torch's name
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
    out, mean, variance, count = _by_sample(input, channels, eps, "instance_norm")
    if running_mean is not None or running_var is not None:
        if 0 in input.splits:
            raise unsupported_operator(
                "instance_norm", input, "running statistics of split samples"
            )
        mean, variance, count = (m.view(-1, channels).mean(0) for m in (mean, variance, count))
        _update((running_mean, running_var), mean, variance, count, momentum)
    return input.like(_affine(out, weight, bias))


def layer_norm(
    input: SpatialTensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """F.layer_norm over dimensions that are whole on every rank."""
    if any(dim >= input.dim() - len(normalized_shape) for dim in input.splits):
        raise unsupported_operator("layer_norm", input, "it normalises over a split dimension")
    return input.like(F.layer_norm(input.local, list(normalized_shape), weight, bias, eps))
