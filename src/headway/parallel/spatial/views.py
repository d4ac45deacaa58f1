"""Permute, reshape, slice, join and pad spatially split tensors.

A split dimension may move and stay whole beside others; it is never cut or merged. `flatten`
and `view` that would do so leave the split first: the layers behind them want the whole sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from headway.graph.ranges import SlidingWindow
from headway.parallel.spatial.halo_exchange import SINGLE_RANK_AXIS, RangeExchange, fetch_box
from headway.parallel.spatial.pointwise import result_splits
from headway.parallel.spatial.spatial_tensor import (
    SpatialSplit,
    SpatialTensor,
    gather,
    leave_spatial_split,
    local_part_for,
    result_ranges,
    split_tensors,
    splits_from_last_dim,
    unsupported_operator,
)


def permute(x: SpatialTensor, *dims: Any) -> Any:
    """permute."""
    listed = list(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else list(dims)
    order = [dim % x.dim() for dim in listed]
    return x.like(x.local.permute(order), {order.index(d): s for d, s in x.splits.items()})


def transpose(x: SpatialTensor, dim0: int, dim1: int) -> Any:
    """transpose, swapaxes."""
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, order)


def movedim(x: SpatialTensor, source: Any, destination: Any) -> Any:
    """movedim, moveaxis."""
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    places = {t % x.dim(): s % x.dim() for s, t in zip(sources, targets, strict=True)}
    rest = iter(dim for dim in range(x.dim()) if dim not in places.values())
    return permute(x, [places[d] if d in places else next(rest) for d in range(x.dim())])


def unsqueeze(x: SpatialTensor, dim: int) -> Any:
    """unsqueeze."""
    place = dim % (x.dim() + 1)
    return x.like(x.local.unsqueeze(place), {d + (d >= place): s for d, s in x.splits.items()})


def squeeze(x: SpatialTensor, dim: Any = None) -> Any:
    """squeeze."""
    given = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    gone = [d for d in {d % x.dim() for d in given} if x.shape[d] == 1 and d not in x.splits]
    if any(x.shape[d] == 1 for d in x.splits):
        raise unsupported_operator("squeeze", x, "a split dimension has one entry")
    splits = {d - sum(g < d for g in gone): s for d, s in x.splits.items()}
    return x.like(x.local.squeeze(tuple(gone)), splits)


def view(x: SpatialTensor, *shape: Any) -> Any:
    """view, reshape: of the dimensions that are whole; otherwise of whole samples or of all."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise unsupported_operator("Tensor.view(dtype)", x)
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.numel() // -prod(sizes)
    splits, local = _kept(x, sizes), list(sizes)
    if splits is None:
        return (leave_spatial_split(x) if sizes[:1] == [x.shape[0]] else gather(x)).reshape(sizes)
    for dim, split in splits.items():
        local[dim] = split.own[1] - split.own[0]
    return x.like(x.local.reshape(local), splits)


def _kept(x: SpatialTensor, sizes: Sequence[int]) -> dict[int, SpatialSplit] | None:
    """Where the split dimensions stand in a new shape; None where one is cut or merged."""
    places: dict[int, SpatialSplit] = {}
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


def flatten(x: SpatialTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """flatten: what lies before a classifier."""
    first, last = start_dim % x.dim(), end_dim % x.dim()
    merged = x.shape[first : last + 1]
    return view(x, [*x.shape[:first], prod(merged), *x.shape[last + 1 :]])


def _whole(x: SpatialTensor, dim: int, name: str) -> int:
    place = dim % x.dim()
    if place in x.splits:
        raise unsupported_operator(name, x, f"it cuts dimension {place}, which is split")
    return place


def chunk(x: SpatialTensor, chunks: int, dim: int = 0) -> Any:
    """chunk, along a dimension that is whole."""
    return tuple(x.like(part) for part in x.local.chunk(chunks, _whole(x, dim, "chunk")))


def split(x: SpatialTensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    """split, along a dimension that is whole."""
    place = _whole(x, dim, "split")
    return tuple(x.like(part) for part in torch.split(x.local, split_size_or_sections, place))


def narrow(x: SpatialTensor, dim: int, start: int, length: int) -> Any:
    """narrow, along a dimension that is whole."""
    return x.like(x.local.narrow(_whole(x, dim, "narrow"), start, length))


def select(x: SpatialTensor, dim: int, index: int) -> Any:
    """select, along a dimension that is whole."""
    place = _whole(x, dim, "select")
    splits = {d - (d > place): s for d, s in x.splits.items()}
    return x.like(x.local.select(place, index), splits)


def index(x: SpatialTensor, key: Any) -> Any:
    """x[...] with numbers, slices and None; of a split dimension everything."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(not (k is None or k is Ellipsis or isinstance(k, (int, slice))) for k in keys):
        raise unsupported_operator("indexing with tensors or lists", x)
    counted = sum(k is not None and k is not Ellipsis for k in keys)
    fill = [slice(None)] * (x.dim() - counted)
    place = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    keys[place : place + 1] = fill
    splits, source, target = {}, 0, 0
    for k in keys:
        if k is not None:
            held = x.splits.get(source)
            if held is not None and (not isinstance(k, slice) or not _everything(k, held.extent)):
                raise unsupported_operator("indexing a split dimension", x)
            if held is not None:
                splits[target] = held
            source += 1
        target += not isinstance(k, int)
    return x.like(x.local[tuple(_local_keys(x, keys))], splits)


def _everything(key: slice, extent: int) -> bool:
    return key.indices(extent) == (0, extent, 1)


def _local_keys(x: SpatialTensor, keys: Sequence[Any]) -> list[Any]:
    """The keys for this rank's part: all of it along split dimensions."""
    found, source = [], 0
    for key in keys:
        found.append(slice(None) if key is not None and source in x.splits else key)
        source += key is not None
    return found


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """cat, along a dimension that is whole; the parts are laid out alike."""
    first = next(split_tensors(tensors))
    place = _whole(first, dim, "cat") - first.dim()
    operands = [t for t in tensors if t.numel() or t.dim() > 1]
    target = result_splits(first, operands)
    if place in target:
        raise unsupported_operator("cat", first, "it joins along a split dimension")
    local = torch.cat([local_part_for(t, target) for t in operands], place)
    return first.like(local, {d + first.dim(): s for d, s in target.items()})


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """stack."""
    return cat([t.unsqueeze(dim) for t in tensors], dim)


def expand(x: SpatialTensor, *sizes: Any) -> Any:
    """expand, of dimensions that are whole."""
    listed = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    for dim, held in splits_from_last_dim(x).items():
        if listed[dim] not in (-1, held.extent):
            raise unsupported_operator("expand", x, "it enlarges a split dimension")
        listed[dim] = -1
    added = len(listed) - x.dim()
    return x.like(x.local.expand(listed), {d + added: s for d, s in x.splits.items()})


def pad(
    input: SpatialTensor,  # noqa: A002 - torch's name
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
        raise unsupported_operator(f"pad with mode {mode!r}", input)
    needs, splits = [], dict(input.splits)
    for dim, (before, after) in sides.items():
        if not before and not after:
            continue
        extent = input.shape[dim]
        axis, ranges = result_ranges(input, dim, extent + before + after)
        have = input.splits[dim].ranges if dim in splits else ((0, extent),)
        window = SlidingWindow(1, 1, before)
        needs.append(RangeExchange(dim, axis, have, tuple(window.wanted(r) for r in ranges)))
        if axis is not SINGLE_RANK_AXIS:
            splits[dim] = SpatialSplit(axis, ranges)
    return input.like(fetch_box(input.local, needs, value or 0.0), splits)
