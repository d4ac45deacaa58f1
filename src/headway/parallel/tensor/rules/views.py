"""Rules for reshape, cat and what repeats or masks entries of split layers' tensors.

A cut dimension is a run of `outer x parts x inner` elements; a reshape keeps it cut where the
new dimensions have a border in front of the parts. What would need elements of other ranks is
refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from headway.parallel.layout_rules import size_list
from headway.parallel.split_tensor import WHOLE_DIMENSION, DimensionCut, RuleRefused, SplitTensor
from headway.parallel.tensor.layer_context import LayerContext, cuts_of, local_of
from headway.plans.tensor_layout import AxisDivisor


def reshape(context: LayerContext, func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Another shape for the same elements.

    Raises:
        RuleRefused: A cut dimension is joined or taken apart so that parts are no longer runs.
    """
    given = args or tuple(kwargs.values())
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        raise RuleRefused("it looks at the bits as another type")
    shape = size_list(given)
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = x.numel() // rest if rest else 0
    cuts = [WHOLE_DIMENSION] * len(shape)
    for old, new in _groups(list(x.shape), shape):
        cut_dims = [dim for dim in old if x.cuts[dim].axes]
        if len(cut_dims) > 1:
            raise RuleRefused("it joins two cut dimensions")
        if cut_dims:
            before = math.prod(x.shape[dim] for dim in old if dim < cut_dims[0])
            place, cut = _placed(
                context, x.cuts[cut_dims[0]], before, [shape[dim] for dim in new], x
            )
            cuts[new[place]] = cut
    local = [n // context.grid.size(cut.axes) for n, cut in zip(shape, cuts, strict=True)]
    return context.wrap(x.local.reshape(local), cuts)


def _groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of old and new dimensions with as many elements."""
    groups, i, k = [], 0, 0
    while i < len(old) or k < len(new):
        left: list[int] = []
        right: list[int] = []
        sizes = [1, 1]
        while True:
            if i < len(old) and ((sizes[0] <= sizes[1] and not left) or sizes[0] < sizes[1]):
                sizes[0] *= old[i]
                left.append(i)
                i += 1
            elif k < len(new) and (not right or sizes[1] < sizes[0]):
                sizes[1] *= new[k]
                right.append(k)
                k += 1
            elif sizes[0] == sizes[1]:
                break
            elif i < len(old):
                sizes[0] *= old[i]
                left.append(i)
                i += 1
            else:
                raise RuleRefused(f"{old} does not have as many elements as {new}")
        groups.append((left, right))
    return groups


def _placed(
    context: LayerContext, cut: DimensionCut, before: int, sizes: list[int], x: SplitTensor
) -> tuple[int, DimensionCut]:
    """The new dimension that is cut, and how; `before` counts the runs in front of the old one."""
    parts, outer = context.grid.size(cut.axes), before * cut.blocks
    prefix = 1
    for place, size in enumerate(sizes):
        if size > 1 and outer % prefix == 0:
            blocks = outer // prefix
            if size % (blocks * parts) == 0:
                return place, DimensionCut(cut.axes, blocks)
        prefix *= size
    real = [n for n in sizes if n > 1]
    blocks = real[0] if len(real) > 1 and before == 1 and real[1] % parts == 0 else 0
    need = AxisDivisor(
        cut.axes, real[0] if real else 1, "the first of the dimensions it is taken apart to"
    )
    raise RuleRefused(
        f"{real} cannot be cut into {parts} parts as {list(x.shape)} is",
        blocks=blocks,
        needs=(need,),
    )


def cat(context: LayerContext, func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    dim %= tensors[0].ndim
    cuts = cuts_of(tensors[0])
    if any(cuts_of(x) != cuts for x in tensors):
        raise RuleRefused("it joins tensors that are cut differently")
    if cuts[dim].axes:
        raise RuleRefused("it joins tensors along a cut dimension")
    return context.wrap(torch.cat([local_of(x) for x in tensors], dim), cuts)


def repeat_interleave(
    context: LayerContext,
    func: Any,
    x: SplitTensor,
    repeats: int,
    dim: int | None = None,
    **kwargs: Any,
) -> Any:
    if dim is None or not isinstance(repeats, int):
        raise RuleRefused("it repeats by a tensor, or without a dimension")
    return context.wrap(x.local.repeat_interleave(repeats, dim), x.cuts)


def triangle(context: LayerContext, func: Any, x: SplitTensor, diagonal: int = 0) -> Any:
    if any(cut.axes for cut in x.cuts[-2:]):
        raise RuleRefused("it takes a triangle of a cut dimension")
    return context.wrap(func(x.local, diagonal), x.cuts)
