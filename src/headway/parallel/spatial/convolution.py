"""Convolutions of spatially split tensors, plain and transposed, in one to three dimensions.

The part of an activation that backward needs is the part that the rank owns anyway, and its
halos: the padded buffer is laid out anew. In backward the halos of the input's gradient travel
while the weight's gradient is computed; gradients of weights are sums over this rank's outputs.

With `SpatialContext(overlap=True)` the inner outputs, which want nothing from other ranks, are
computed while the halos travel. What is left is a shell: for each split dimension a slab at
either end, of which later dimensions have the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headway.graph.ranges import Range, SlidingWindow, TransposedWindow, range_length
from headway.parallel.spatial.halo_exchange import (
    BoxPiece,
    HaloFetch,
    HaloGradientReturn,
    RangeExchange,
    assemble_box,
    fetch_for_operator,
)
from headway.parallel.spatial.spatial_tensor import (
    IntPerDimension,
    SpatialSplit,
    SpatialTensor,
    autocast_operands,
    check_batched,
    empty_with_graph,
    int_per_dimension,
    leave_split_if_narrow,
    result_ranges,
    return_to_spatial_split,
    unsupported_operator,
    window_ranges,
)

FIRST_SPATIAL_DIM = 2
"""The first spatial dimension."""


def overlapped_convolution(
    fetching: HaloFetch, call: ConvolutionCall, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The outputs of this rank; on return the fetch has finished."""
    inner = list(call.outputs)
    for need in call.needs:
        window, own = (
            call.windows[need.dim - FIRST_SPATIAL_DIM],
            call.outputs[need.dim - FIRST_SPATIAL_DIM],
        )
        inner[need.dim - FIRST_SPATIAL_DIM] = _inside(window, need.own, need.have[-1][1], own)
    if any(2 * range_length(i) < range_length(o) for i, o in zip(inner, call.outputs, strict=True)):
        return call.run(assemble_box(fetching.finish(), call.needs), weight, bias)
    first = _compute(fetching.pieces, inner, call, weight, bias)
    pieces = fetching.finish()
    shape = [*first.shape[:FIRST_SPATIAL_DIM], *map(range_length, call.outputs)]
    out = first.new_empty(shape)
    _place(out, call.outputs, inner, first)
    for box in boundary_boxes(call.outputs, inner):
        _place(out, call.outputs, box, _compute(pieces, box, call, weight, bias))
    return out


@lru_cache(maxsize=4096)
def _inside(window: SlidingWindow, have: Range, extent: int, outputs: Range) -> Range:
    return window.inside(have, extent, outputs)


def boundary_boxes(outer: Sequence[Range], inner: Sequence[Range]) -> Iterator[list[Range]]:
    """Boxes that fill `outer` without `inner`, each element once."""
    for dim, (whole, part) in enumerate(zip(outer, inner, strict=True)):
        for side in ((whole[0], part[0]), (part[1], whole[1])):
            if range_length(side):
                yield [*inner[:dim], side, *outer[dim + 1 :]]


def _compute(
    pieces: Sequence[BoxPiece],
    box: Sequence[Range],
    call: ConvolutionCall,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    axes = [(need, need.dim - FIRST_SPATIAL_DIM) for need in call.needs]
    needs = [_narrowed(need, call.windows[axis].wanted(box[axis])) for need, axis in axes]
    return call.run(assemble_box(pieces, needs), weight, bias)


def _narrowed(need: RangeExchange, wish: Range) -> RangeExchange:
    want = list(need.want)
    want[need.axis.rank] = wish
    return replace(need, want=tuple(want))


def _place(out: Tensor, outer: Sequence[Range], box: Sequence[Range], part: Tensor) -> None:
    for dim, (whole, held) in enumerate(zip(outer, box, strict=True)):
        out = out.narrow(dim + FIRST_SPATIAL_DIM, held[0] - whole[0], range_length(held))
    out.copy_(part)


# Convolutions of split tensors, plain and transposed, in one to three dimensions.


CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """What does not change between forward and backward.

    Attributes:
        needs: What the windows of this rank's outputs want.
        padding: Of the dimensions that are not laid out with their padding.
        outputs: What this rank computes, by spatial dimension.
        overlap: Compute the inner part while the halos are under way.
    """

    needs: tuple[RangeExchange, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    windows: tuple[SlidingWindow, ...]
    outputs: tuple[Range, ...]
    overlap: bool

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of a box that has its padding."""
        return CONV[len(self.stride)](
            x, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )

    def back(
        self, gradient: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> Any:
        """Gradients of (x, weight, bias) where the mask says so."""
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, [weight.shape[0]], self.stride, self.padding, self.dilation,
            False, [0] * len(self.stride), self.groups, mask,
        )  # fmt: skip


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: ConvolutionCall
    ) -> Tensor:
        fetching = HaloFetch(x.detach(), call.needs)
        if call.overlap:
            out = overlapped_convolution(fetching, call, weight, bias)
        else:
            box = assemble_box(fetching.finish(), call.needs)
            out = call.run(box, weight, bias)
        halos = fetching.pieces[1:]
        ctx.call, ctx.boxes = call, [piece.box for piece in fetching.pieces]
        ctx.save_for_backward(x, weight, *(piece.part for piece in halos))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call: ConvolutionCall = ctx.call
        x, weight, *halos = ctx.saved_tensors
        pieces = [BoxPiece(p, box) for p, box in zip([x, *halos], ctx.boxes, strict=True)]
        returning, dx = None, None
        if ctx.needs_input_grad[0]:
            shape = list(x.shape)
            for need in call.needs:
                shape[need.dim] = range_length(need.wish)
            like = x.new_empty(1).expand(shape)
            dbox = call.back(gradient, like, weight, (True, False, False))[0]
            returning = HaloGradientReturn(dbox, call.needs, spare=True)
            del dbox
        mask = (False, bool(ctx.needs_input_grad[1]), bool(ctx.needs_input_grad[2]))
        _, dweight, dbias = call.back(gradient, assemble_box(pieces, call.needs), weight, mask)
        if returning is not None:
            dx = returning.finish().contiguous()
        return dx, dweight, dbias, None


def paddings(
    padding: str | IntPerDimension, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """(before, after) by dimension; "same" puts the odd entry behind, as torch does."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str)
    return [(pad, pad) for pad in int_per_dimension(padding, len(kernel))]


def convolution(
    input: Any,  # noqa: A002 - torch's name
    weight: Any,
    bias: Tensor | None = None,
    stride: IntPerDimension = 1,
    padding: str | IntPerDimension = 0,
    dilation: IntPerDimension = 1,
    groups: int = 1,
) -> Any:
    """conv1d, conv2d, conv3d."""
    if not isinstance(input, SpatialTensor) or isinstance(weight, SpatialTensor):
        raise unsupported_operator("a convolution with a split weight", weight)
    count = weight.dim() - 2
    check_batched(input, f"conv{count}d", count)
    strides, dilations = int_per_dimension(stride, count), int_per_dimension(dilation, count)
    sides = paddings(padding, weight.shape[2:], dilations)
    windows = [
        SlidingWindow(k, s, *side, d)
        for k, s, side, d in zip(weight.shape[2:], strides, sides, dilations, strict=True)
    ]
    uneven = any(before != after for before, after in sides)
    needs, splits, outputs = window_ranges(input, windows, pad_all=uneven)
    laid = {need.dim for need in needs}
    call = ConvolutionCall(
        needs=tuple(needs),
        stride=tuple(strides),
        padding=tuple(0 if dim in laid else side[0] for dim, side in enumerate(sides, 2)),
        dilation=tuple(dilations),
        groups=groups,
        windows=tuple(windows),
        outputs=tuple(outputs),
        overlap=input.context.overlap,
    )
    x, weight, bias = autocast_operands(input.local, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        if all(range_length(out) for out in outputs) and x.shape[0]:
            local = _Convolution.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        else:
            with fetch_for_operator(x, needs) as box:
                shape = [x.shape[0], weight.shape[0], *map(range_length, outputs)]
                local = empty_with_graph(shape, box, weight, bias)
    return leave_split_if_narrow(input.like(local, splits))


def transposed_convolution(
    input: Any,  # noqa: A002 - torch's name
    weight: Any,
    bias: Tensor | None = None,
    stride: IntPerDimension = 1,
    padding: IntPerDimension = 0,
    output_padding: IntPerDimension = 0,
    groups: int = 1,
    dilation: IntPerDimension = 1,
) -> Any:
    """conv_transpose1d, conv_transpose2d, conv_transpose3d."""
    if not isinstance(input, SpatialTensor) or isinstance(weight, SpatialTensor):
        raise unsupported_operator("a convolution with a split weight", weight)
    count = weight.dim() - 2
    check_batched(input, f"conv_transpose{count}d", count)
    lists = [int_per_dimension(v, count) for v in (stride, padding, dilation, output_padding)]
    spreads = [
        TransposedWindow(k, *numbers)
        for k, *numbers in zip(weight.shape[2:], *lists, strict=True)
    ]  # fmt: skip
    grown = [s.outputs(extent) for s, extent in zip(spreads, input.shape[2:], strict=True)]
    input = return_to_spatial_split(input, grown)  # noqa: A001
    needs, splits, crop = [], {d: s for d, s in input.splits.items() if d < 2}, [0] * 2 * count
    sizes: list[int] = []
    native = [list(lists[1]), list(lists[3])]
    for number, spread in enumerate(spreads):
        dim, extent = number + 2, input.shape[number + 2]
        axis, ranges = result_ranges(input, dim, grown[number])
        sizes.append(range_length(ranges[axis.rank]))
        if dim not in input.splits:
            continue
        splits[dim] = SpatialSplit(axis, ranges)
        want = tuple(spread.wanted(r, extent) for r in ranges)
        needs.append(RangeExchange(dim, axis, input.splits[dim].ranges, want))
        start, stop = ranges[axis.rank]
        low, high = spread.reached(want[axis.rank])
        crop[2 * (count - 1 - number) : 2 * (count - number)] = [low - start, stop - high]
        native[0][number] = native[1][number] = 0
    with fetch_for_operator(input.local, needs) as box:
        if 0 in box.shape or 0 in sizes:
            shape = [box.shape[0], weight.shape[1] * groups, *sizes]
            local = empty_with_graph(shape, box, weight)
        else:
            local = TRANSPOSED[count](
                box, weight, None, lists[0], native[0], native[1], groups, lists[2]
            )
            local = F.pad(local, crop) if any(crop) else local
    if bias is not None:
        local = local + bias.to(local.dtype).view(-1, *[1] * count)
    return input.like(local, splits)
