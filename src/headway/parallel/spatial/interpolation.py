"""Interpolation of spatially split tensors; also dropout and linear layers.

Where an output of an interpolation comes from is asked of torch itself: it interpolates the
numbers 0, 1, 2, ... along one dimension. A dropout mask is drawn for the whole tensor on every
rank and cut, so that an element meets the same number however the tensor is split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.graph.ranges import Range, range_length
from headway.parallel.spatial.halo_exchange import RangeExchange, fetch_box
from headway.parallel.spatial.spatial_tensor import (
    SpatialSplit,
    SpatialTensor,
    check_batched,
    empty_with_graph,
    int_per_dimension,
    leave_spatial_split,
    local_part_for,
    result_ranges,
    return_to_spatial_split,
    splits_from_last_dim,
    unsupported_operator,
)

LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}


def interpolate(
    input: SpatialTensor,  # noqa: A002 - torch's name
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """F.interpolate: nearest, nearest-exact, linear, bilinear, trilinear."""
    count = input.dim() - 2
    check_batched(input, "interpolate", count)
    linear = LINEAR.get(mode) == count
    if antialias or not (linear or mode in {"nearest", "nearest-exact"}):
        raise unsupported_operator(f"interpolate with mode {mode!r}", input)
    sizes = [None] * count if size is None else int_per_dimension(size, count)
    scales = _scales(scale_factor, count)
    along = partial(
        _coordinates,
        mode="linear" if linear else mode,
        align_corners=align_corners,
        recompute_scale_factor=recompute_scale_factor,
    )
    input = return_to_spatial_split(input, _grown(input, sizes, scales))  # noqa: A001
    local, splits = input.local, dict(input.splits)
    for dim in [d for d in splits if d > 1]:
        places = along(input.shape[dim], sizes[dim - 2], scales[dim - 2])
        local, splits[dim] = _resized(input, local, dim, places)
    rest = [None if dim in splits else dim for dim in range(2, count + 2)]
    if any(rest):
        given: dict[str, Any] = {"size": None, "scale_factor": None}
        if size is None:
            given["scale_factor"] = [1.0 if d is None else scales[d - 2] for d in rest]
        else:
            held = local.shape[2:]
            given["size"] = [h if d is None else sizes[d - 2] for d, h in zip(rest, held)]  # noqa: B905
        local = _locally(local, given, mode, align_corners, recompute_scale_factor)
    return input.like(local, splits)


def _grown(x: SpatialTensor, sizes: Sequence[int | None], scales: Sequence[float]) -> list[int]:
    """Sizes of the result, from dimension 2."""
    return [
        int(extent * scale) if size is None else size
        for extent, size, scale in zip(x.shape[2:], sizes, scales, strict=True)
    ]


def _locally(
    local: Tensor, given: dict[str, Any], mode: str, corners: bool | None, again: bool | None
) -> Tensor:
    if local.numel():
        return F.interpolate(
            local, **given, mode=mode, align_corners=corners, recompute_scale_factor=again
        )
    like = F.interpolate(
        local.new_empty([1, 1, *(max(n, 1) for n in local.shape[2:])]), **given, mode=mode
    )
    sizes = [0 if n == 0 else m for n, m in zip(local.shape[2:], like.shape[2:], strict=True)]
    return empty_with_graph([*local.shape[:2], *sizes], local)


def _scales(scale_factor: Any, count: int) -> list[float]:
    if isinstance(scale_factor, (list, tuple)):
        return [float(entry) for entry in scale_factor]
    return [1.0 if scale_factor is None else float(scale_factor)] * count


@lru_cache(maxsize=1024)
def _coordinates(
    extent: int, size: int | None, scale: float, *, mode: str, **options: Any
) -> list[float]:
    """Where each output along one dimension comes from."""
    line = torch.arange(extent, dtype=torch.float64).view(1, 1, -1)
    given = {"scale_factor": scale} if size is None else {"size": size}
    found = F.interpolate(line, **given, mode=mode, **options)
    return [float(place) for place in found.flatten().tolist()]


def _resized(
    x: SpatialTensor, local: Tensor, dim: int, places: Sequence[float]
) -> tuple[Tensor, SpatialSplit]:
    """One split dimension: fetch the sources, and mix them."""
    extent, (axis, ranges) = x.shape[dim], result_ranges(x, dim, len(places))
    lows = [min(int(place), extent - 1) for place in places]
    highs = [low + (place > low) for low, place in zip(lows, places, strict=True)]
    want = tuple(_span(lows[slice(*r)], highs[slice(*r)]) for r in ranges)
    box = fetch_box(local, [RangeExchange(dim, axis, x.splits[dim].ranges, want)])
    start, own = want[axis.rank][0], ranges[axis.rank]
    mine = slice(*own)
    low = torch.tensor(lows[mine], device=local.device) - start
    high = torch.tensor(highs[mine], device=local.device) - start
    if range_length(own) == 0:
        return box.narrow(dim, 0, 0), SpatialSplit(axis, ranges)
    out = box.index_select(dim, low)
    shares_of_high = [place - low for place, low in zip(places[mine], lows[mine], strict=True)]
    if any(shares_of_high):
        shape = [-1 if place == dim else 1 for place in range(x.dim())]
        share = local.new_tensor(shares_of_high).view(shape)
        out = torch.lerp(out, box.index_select(dim, high), share)
    return out, SpatialSplit(axis, ranges)


def _span(lows: Sequence[int], highs: Sequence[int]) -> Range:
    return (lows[0], highs[-1] + 1) if lows else (0, 0)


def dropout(
    func: Callable[..., Tensor],
    input: SpatialTensor,  # noqa: A002 - torch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """dropout and, of whole channels, dropout1d to dropout3d."""
    if not training:
        return input
    shape = list(input.shape)
    if func.__name__ != "dropout":
        check_batched(input, func.__name__, int(func.__name__[-2]))
        shape[2:] = [1] * len(shape[2:])
    mask = func(input.local.new_ones(shape), p, True)
    own = local_part_for(mask, splits_from_last_dim(input))
    return input.like(input.local.mul_(own) if inplace else input.local * own)


def linear(
    input: SpatialTensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """F.linear: over the last dimension; it leaves the split first where that is split."""
    if input.dim() - 1 in input.splits:
        return F.linear(leave_spatial_split(input), weight, bias)  # type: ignore[arg-type]
    return input.like(F.linear(input.local, weight, bias))


def matmul(input: Any, other: Any) -> Any:  # noqa: A002 - torch's name
    """x @ weight, for a weight that is whole and a last dimension that is."""
    if not isinstance(input, SpatialTensor) or isinstance(other, SpatialTensor) or other.dim() > 2:
        raise unsupported_operator("matmul", other if isinstance(other, SpatialTensor) else input)
    if input.dim() < 2 or input.dim() - 1 in input.splits:
        raise unsupported_operator("matmul", input, "its last dimension is split")
    return input.like(torch.matmul(input.local, other))
