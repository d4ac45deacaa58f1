"""Rules for reshape, permute, indexing and joining of split tensors.

A cut dimension is a run of `outer x parts x inner` elements; a reshape keeps it cut where the
new dimensions have a border in front of the parts. What would need elements of other ranks is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.parallel.tensor.split_tensor import (
    WHOLE_DIMENSION,
    DimensionCut,
    RuleRefused,
    SplitContext,
    SplitTensor,
    cuts_of,
    local_of,
    wrap_local_part,
)
from headway.plans.tensor_layout import AxisDivisor


def _sizes(args: tuple[Any, ...]) -> list[int]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else list(args)


def reshape(context: SplitContext, func: Any, x: SplitTensor, *shape: Any, **kwargs: Any) -> Any:
    if not shape:
        shape = tuple(kwargs.values())
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise RuleRefused("it looks at the bits as another type")
    return reshaped(context, x, _sizes(shape))


def reshape_as(context: SplitContext, func: Any, x: SplitTensor, other: Any) -> Any:
    return reshaped(context, x, list(other.shape))


def flatten(context: SplitContext, func: Any, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    shape = list(x.shape)
    return reshaped(
        context, x, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    )


def unflatten(context: SplitContext, func: Any, x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    inner = list(sizes)
    if -1 in inner:
        inner[inner.index(-1)] = x.shape[dim] // -math.prod(inner)
    return reshaped(context, x, [*x.shape[:dim], *inner, *x.shape[dim + 1 :]])


def squeeze(context: SplitContext, func: Any, x: Any, dim: int) -> Any:
    dim %= x.ndim
    if x.shape[dim] != 1:
        return x
    return reshaped(context, x, [*x.shape[:dim], *x.shape[dim + 1 :]])


def unsqueeze(context: SplitContext, func: Any, x: Any, dim: int) -> Any:
    dim %= x.ndim + 1
    return reshaped(context, x, [*x.shape[:dim], 1, *x.shape[dim:]])


def reshaped(context: SplitContext, x: Any, shape: list[int]) -> Any:
    """Another shape for the same elements.

    Raises:
        Refused: A cut dimension is joined or taken apart so that parts are no longer runs.
    """
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
    return wrap_local_part(x.local.reshape(local), cuts, context)


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
    context: SplitContext, cut: DimensionCut, before: int, sizes: list[int], x: SplitTensor
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


# -- order of dimensions ----------------------------------------------------------------------


def transpose(context: SplitContext, func: Any, x: Any, *dims: int, **kwargs: int) -> Any:
    first, second = (d % x.ndim for d in dims or kwargs.values())
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    return permuted(context, x, order)


def turned(context: SplitContext, func: Any, x: Any) -> Any:
    return permuted(context, x, list(range(x.ndim))[::-1])


def permute(context: SplitContext, func: Any, x: Any, *dims: Any) -> Any:
    return permuted(context, x, [d % x.ndim for d in _sizes(dims)])


def movedim(context: SplitContext, func: Any, x: Any, source: Any, destination: Any) -> Any:
    probe = torch.empty([*range(2, 2 + x.ndim)], device="meta").movedim(source, destination)
    return permuted(context, x, [n - 2 for n in probe.shape])


def permuted(context: SplitContext, x: SplitTensor, order: list[int]) -> Any:
    local, cuts = x.local.permute(order), [x.cuts[dim] for dim in order]
    return _same_kind(wrap_local_part(local, cuts, context), x)


def _same_kind(found: Any, x: SplitTensor) -> Any:
    """A view of a weight is a weight."""
    if x.parameter and isinstance(found, SplitTensor):
        return replace(found, origins=x.origins, parameter=True)
    return found


def expand(context: SplitContext, func: Any, x: SplitTensor, *shape: Any) -> Any:
    sizes = _sizes(shape)
    cuts = [WHOLE_DIMENSION] * (len(sizes) - x.ndim) + list(x.cuts)
    local = [-1 if cut.axes else size for size, cut in zip(sizes, cuts, strict=True)]
    return wrap_local_part(x.local.expand(local), cuts, context)


# -- parts and joints -------------------------------------------------------------------------


def chunk(context: SplitContext, func: Any, x: SplitTensor, chunks: int, dim: int = 0) -> Any:
    dim %= x.ndim
    length = -(-x.shape[dim] // chunks)
    return split(context, func, x, length, dim)


def split(
    context: SplitContext, func: Any, x: SplitTensor, split_size_or_sections: Any, dim: int = 0,
    **kwargs: Any,
) -> Any:  # fmt: skip
    dim %= x.ndim
    sections = kwargs.get("split_size", split_size_or_sections)
    total = x.shape[dim]
    if isinstance(sections, int):
        sections = [min(sections, total - at) for at in range(0, total, sections)]
    starts = [sum(sections[:number]) for number in range(len(sections))]
    return tuple(
        narrowed(context, x, dim, start, size) for start, size in zip(starts, sections, strict=True)
    )


def unbind(context: SplitContext, func: Any, x: SplitTensor, dim: int = 0) -> Any:
    dim %= x.ndim
    return tuple(select(context, func, x, dim, number) for number in range(x.shape[dim]))


def select(context: SplitContext, func: Any, x: SplitTensor, dim: int, index: int) -> Any:
    dim %= x.ndim
    if x.cuts[dim].axes:
        raise RuleRefused("it takes one entry of a cut dimension", blocks=x.shape[dim])
    cuts = [cut for d, cut in enumerate(x.cuts) if d != dim]
    return wrap_local_part(x.local.select(dim, index), cuts, context)


def narrow(context: SplitContext, func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    return narrowed(context, x, dim % x.ndim, start, length)


def narrowed(context: SplitContext, x: SplitTensor, dim: int, start: int, length: int) -> Any:
    """Entries [start, start + length) of a dimension; of a cut one only whole blocks."""
    cut = x.cuts[dim]
    if not cut.axes:
        return wrap_local_part(x.local.narrow(dim, start, length), x.cuts, context)
    size = x.shape[dim]
    if length == size:
        return x
    block = size // cut.blocks
    if start % block or length % block:
        common = math.gcd(start, length, size)
        fits = size // common if common and common % context.grid.size(cut.axes) == 0 else 0
        raise RuleRefused("it takes a piece of a cut dimension", blocks=fits)
    parts = context.grid.size(cut.axes)
    if len(cut.axes) > 1:
        raise RuleRefused("it takes blocks of a dimension that is cut over two axes")
    cuts = [*x.cuts]
    cuts[dim] = DimensionCut(cut.axes, length // block)
    local = x.local.narrow(dim, start // parts, length // parts)
    return _same_kind(wrap_local_part(local, cuts, context), x)


def getitem(context: SplitContext, func: Any, x: SplitTensor, index: Any) -> Any:
    """Numbers, slices, None and `...`; of cut dimensions whole blocks."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, Tensor | SplitTensor | list) for entry in entries):
        raise RuleRefused("it picks by a tensor")
    rest = x.ndim - sum(entry is not None and entry is not Ellipsis for entry in entries)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = [slice(None)] * rest
    found: Any = x
    dim = 0
    for entry in entries:
        if entry is None:
            found = unsqueeze(context, func, found, dim) if _split(found) else found.unsqueeze(dim)
            dim += 1
        elif isinstance(entry, slice):
            found = _sliced(context, found, dim, entry)
            dim += 1
        else:
            found = (
                select(context, func, found, dim, int(entry))
                if _split(found)
                else local_of(found).select(dim, int(entry))
            )
    return found


def _split(x: Any) -> bool:
    return isinstance(x, SplitTensor)


def _sliced(context: SplitContext, x: Any, dim: int, entry: slice) -> Any:
    start, stop, step = entry.indices(x.shape[dim])
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x
    if cuts_of(x)[dim].axes and step != 1:
        raise RuleRefused("it takes every so many entries of a cut dimension")
    if step == 1 and _split(x):
        return narrowed(context, x, dim, start, max(0, stop - start))
    where = (slice(None),) * dim + (entry,)
    return wrap_local_part(local_of(x)[where], cuts_of(x), context)


def cat(context: SplitContext, func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    dim %= tensors[0].ndim
    cuts = _alike(context, tensors)
    if cuts[dim].axes:
        raise RuleRefused("it joins tensors along a cut dimension")
    return wrap_local_part(torch.cat([local_of(x) for x in tensors], dim), cuts, context)


def stack(context: SplitContext, func: Any, tensors: Any, dim: int = 0) -> Any:
    dim %= tensors[0].ndim + 1
    cuts = [*_alike(context, tensors)]
    cuts.insert(dim, WHOLE_DIMENSION)
    return wrap_local_part(torch.stack([local_of(x) for x in tensors], dim), cuts, context)


def _alike(context: SplitContext, tensors: Sequence[Any]) -> tuple[DimensionCut, ...]:
    cuts = cuts_of(tensors[0])
    if any(cuts_of(x) != cuts for x in tensors):
        raise RuleRefused("it joins tensors that are cut differently")
    return cuts


def repeat_interleave(
    context: SplitContext,
    func: Any,
    x: SplitTensor,
    repeats: int,
    dim: int | None = None,
    **kwargs: Any,
) -> Any:
    if dim is None or not isinstance(repeats, int):
        raise RuleRefused("it repeats by a tensor, or without a dimension")
    return wrap_local_part(x.local.repeat_interleave(repeats, dim), x.cuts, context)
