"""Sums, means and losses over split dimensions: this rank's sum, then the sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.parallel.spatial.halo_exchange import sum_over_axes
from headway.parallel.spatial.pointwise import broadcast
from headway.parallel.spatial.spatial_tensor import (
    SpatialSplit,
    SpatialTensor,
    local_part_for,
    reduce_scatter_samples,
    splits_from_last_dim,
    switches_to_samples,
    unsupported_operator,
)


def total(
    input: SpatialTensor,  # noqa: A002 - torch's name
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """sum, over all dimensions or some."""
    dims = _dims(input, dim)
    local = input.local.sum([*dims], keepdim, dtype=dtype)
    local = sum_over_axes(local, [split.axis for d, split in input.splits.items() if d in dims])
    kept = [d for d in range(input.dim()) if keepdim or d not in dims]
    return input.like(
        local, {kept.index(d): split for d, split in input.splits.items() if d not in dims}
    )


def mean(
    input: SpatialTensor,  # noqa: A002 - torch's name
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """mean, over all dimensions or some."""
    if not (dtype or input.dtype).is_floating_point:
        raise unsupported_operator("mean of integers", input, "torch does not define it either")
    dims = _dims(input, dim)
    count = prod(input.shape[d] for d in dims)
    if not keepdim and dims and input.dim() - len(dims) == 2 and not {0, 1} & {*dims}:
        return sum_over_space(input, dims, keepdim, dtype=dtype) / count
    return total(input, dim, keepdim, dtype=dtype) / count


def sum_over_space(
    input: SpatialTensor,  # noqa: A002 - torch's name
    dims: Sequence[int],
    keepdim: bool,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A sum over all of space, as before a classifier: each rank gets that of its samples."""
    held = prod(split.axis.size for split in input.splits.values())
    alike = held < input.context.copies  # what several ranks have would count several times
    if alike or not switches_to_samples(input) or not input.splits.keys() <= {*dims}:
        return total(input, dims, keepdim, dtype=dtype)
    return reduce_scatter_samples(input, input.local.sum([*dims], keepdim, dtype=dtype))


def _dims(x: SpatialTensor, dim: Any) -> list[int]:
    if dim is None or dim == ():
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def entrywise_loss(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """mse_loss and its kin: of each entry, then their mean or sum."""
    reduction = kwargs.pop("reduction", "mean")
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        first = next(a for a in args if isinstance(a, SpatialTensor))
        raise unsupported_operator(f"{func.__name__} with size_average or reduce", first)
    each = broadcast(func, *args, **kwargs, reduction="none")
    if reduction == "none":
        return each
    return each.mean() if reduction == "mean" else each.sum()


def _label_splits(logits: SpatialTensor) -> dict[int, SpatialSplit]:
    """How labels N D H W of logits N C D H W lie, by dimension from the end."""
    count = logits.dim()
    return {(d - count if d else 1 - count): split for d, split in logits.splits.items()}


def class_loss(func: Callable[..., Any], input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """cross_entropy, nll_loss: of the entries of this rank, then over all ranks."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
    named = dict(zip(names, args, strict=False)) | kwargs
    if not isinstance(
        input, SpatialTensor
    ):  # gathered logits, labels that were split from the start
        shift = input.dim() - target.dim()
        splits = {d + shift if d else 0: s for d, s in target.splits.items()}
        local = local_part_for(input, {d - input.dim(): s for d, s in splits.items()})
        input = target.like(local, splits)  # noqa: A001
    if 1 in input.splits:
        raise unsupported_operator(func.__name__, input, "its classes are split")
    if named.pop("size_average", None) is not None or named.pop("reduce", None) is not None:
        raise unsupported_operator(f"{func.__name__} with size_average or reduce", input)
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
    if probable:
        return loss / (input.numel() // input.shape[1])
    counted = _counted(labels, named.get("weight"), named.get("ignore_index", -100), loss)
    return loss / sum_over_axes(counted, axes)


def _counted(labels: Tensor, weight: Tensor | None, ignored: int, like: Tensor) -> Tensor:
    """What torch divides by: the weights of the labels that count."""
    valid = labels != ignored
    if weight is None:
        return valid.sum().to(like.dtype)
    return weight[labels[valid]].sum().to(like.dtype)


def one_hot(x: SpatialTensor, num_classes: int = -1) -> Any:
    """one_hot with a number of classes."""
    if num_classes < 0:
        raise unsupported_operator(
            "one_hot", x, "without num_classes it depends on the largest label"
        )
    return x.like(F.one_hot(x.local, num_classes))
