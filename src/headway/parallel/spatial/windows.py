"""What rules of windows share: what is wanted, how results are split, where a split ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.graph.ranges import Range, Window, balanced
from headway.parallel.spatial.exchange import ALONE, Axis, Need
from headway.parallel.spatial.samples import leave
from headway.parallel.spatial.tensor import Split, SplitTensor, unsupported

Several = int | Sequence[int]


def several(value: Several, count: int) -> list[int]:
    """An argument that is one number or one per dimension."""
    if isinstance(value, int):
        return [value] * count
    listed = [int(entry) for entry in value]
    return listed * count if len(listed) == 1 else listed


def check_batched(x: SplitTensor, name: str, count: int) -> None:
    """Refuse inputs without a dimension of samples, and channels that are split."""
    if x.dim() != count + 2:
        raise unsupported(name, x, f"it needs {count + 2} dimensions: samples and channels first")
    if 1 in x.splits:
        raise unsupported(name, x, "its channels are split")


def shares(x: SplitTensor, dim: int, extent: int) -> tuple[Axis, tuple[Range, ...]]:
    """Who holds what of a result of `extent` entries along a dimension of x."""
    split = x.splits.get(dim)
    if split is None:
        return ALONE, ((0, extent),)
    return split.axis, balanced(extent, split.axis.size)


def slide(
    x: SplitTensor, windows: Sequence[Window], *, ceil: bool = False, pad_all: bool = True
) -> tuple[list[Need], dict[int, Split], list[Range]]:
    """What windows over the last dimensions want.

    Args:
        x: The input.
        windows: One for each of the last dimensions.
        ceil: As in pooling.
        pad_all: Lay out the padding of dimensions that are not split, too.

    Returns:
        The needs, how the result is split, and the outputs that this rank computes, by dimension.
    """
    first = x.dim() - len(windows)
    needs, splits, outputs = [], {d: s for d, s in x.splits.items() if d < first}, []
    for dim, window in enumerate(windows, first):
        extent = x.shape[dim]
        axis, ranges = shares(x, dim, window.outputs(extent, ceil=ceil))
        if ranges[-1][1] < 1:
            raise unsupported("a window larger than its input", x, f"{window} on {extent} entries")
        outputs.append(ranges[axis.rank])
        if dim in x.splits:
            splits[dim] = Split(axis, ranges)
        if dim in x.splits or pad_all:
            have = x.splits[dim].ranges if dim in x.splits else ((0, extent),)
            needs.append(Need(dim, axis, have, tuple(window.wanted(r) for r in ranges)))
    return needs, splits, outputs


def settled(x: Any) -> Any:
    """The tensor; it leaves the split where that is narrower than the context allows."""
    if not isinstance(x, SplitTensor):
        return x
    least = x.context.min_width
    narrow = any(split.extent < least * split.axis.size for d, split in x.splits.items() if d > 1)
    return leave(x) if narrow else x


def nothing(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """A result without elements that keeps the graph: gradients of 0 reach the sources."""
    found = [source for source in sources if source is not None]
    empty = found[0].new_zeros(list(shape))
    for source in found:
        empty = empty + source.reshape(-1)[:0].sum()
    return empty


def autocast(x: Tensor, *others: Tensor | None) -> list[Any]:
    """Arguments of an operator that torch runs in lower precision within `torch.autocast`."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return [x, *others]
    dtype = torch.get_autocast_dtype(kind)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *others)]
