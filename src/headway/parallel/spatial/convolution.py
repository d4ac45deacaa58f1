"""Convolutions of split tensors, plain and transposed, in one to three dimensions.

The part of an activation that backward needs is the part that the rank owns anyway, and its halos:
the padded buffer is laid out anew. In backward the halos of the input's gradient travel while the
weight's gradient is computed; gradients of weights are sums over this rank's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headway.graph.ranges import Range, Spread, Window, length
from headway.parallel.spatial.exchange import Fetching, Need, Piece, Returning, assemble
from headway.parallel.spatial.fetch import fetched
from headway.parallel.spatial.interior import inner_first
from headway.parallel.spatial.samples import returned
from headway.parallel.spatial.tensor import Split, SplitTensor, unsupported
from headway.parallel.spatial.windows import (
    Several,
    autocast,
    check_batched,
    nothing,
    settled,
    several,
    shares,
    slide,
)

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True, slots=True)
class Call:
    """What does not change between forward and backward.

    Attributes:
        needs: What the windows of this rank's outputs want.
        padding: Of the dimensions that are not laid out with their padding.
        windows: Of all spatial dimensions.
        outputs: What this rank computes, by spatial dimension.
        overlap: Compute the inner part while the halos are under way.
    """

    needs: tuple[Need, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    windows: tuple[Window, ...]
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        fetching = Fetching(x.detach(), call.needs)
        if call.overlap:
            out = inner_first(fetching, call, weight, bias)
        else:
            box = assemble(fetching.finish(), call.needs)
            out = call.run(box, weight, bias)
        halos = fetching.pieces[1:]
        ctx.call, ctx.boxes = call, [piece.box for piece in fetching.pieces]
        ctx.save_for_backward(x, weight, *(piece.part for piece in halos))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call: Call = ctx.call
        x, weight, *halos = ctx.saved_tensors
        pieces = [Piece(p, box) for p, box in zip([x, *halos], ctx.boxes, strict=True)]
        returning, dx = None, None
        if ctx.needs_input_grad[0]:
            shape = list(x.shape)
            for need in call.needs:
                shape[need.dim] = length(need.wish)
            like = x.new_empty(1).expand(shape)
            dbox = call.back(gradient, like, weight, (True, False, False))[0]
            returning = Returning(dbox, call.needs, spare=True)
            del dbox
        mask = (False, bool(ctx.needs_input_grad[1]), bool(ctx.needs_input_grad[2]))
        _, dweight, dbias = call.back(gradient, assemble(pieces, call.needs), weight, mask)
        if returning is not None:
            dx = returning.finish().contiguous()
        return dx, dweight, dbias, None


def paddings(
    padding: str | Several, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """(before, after) by dimension; "same" puts the odd entry behind, as torch does."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str)
    return [(pad, pad) for pad in several(padding, len(kernel))]


def convolution(
    input: Any,  # noqa: A002 - torch's name
    weight: Any,
    bias: Tensor | None = None,
    stride: Several = 1,
    padding: str | Several = 0,
    dilation: Several = 1,
    groups: int = 1,
) -> Any:
    """conv1d, conv2d, conv3d."""
    if not isinstance(input, SplitTensor) or isinstance(weight, SplitTensor):
        raise unsupported("a convolution with a split weight", weight)
    count = weight.dim() - 2
    check_batched(input, f"conv{count}d", count)
    strides, dilations = several(stride, count), several(dilation, count)
    sides = paddings(padding, weight.shape[2:], dilations)
    windows = [
        Window(k, s, *side, d)
        for k, s, side, d in zip(weight.shape[2:], strides, sides, dilations, strict=True)
    ]
    uneven = any(before != after for before, after in sides)
    needs, splits, outputs = slide(input, windows, pad_all=uneven)
    laid = {need.dim for need in needs}
    call = Call(
        needs=tuple(needs),
        stride=tuple(strides),
        padding=tuple(0 if dim in laid else side[0] for dim, side in enumerate(sides, 2)),
        dilation=tuple(dilations),
        groups=groups,
        windows=tuple(windows),
        outputs=tuple(outputs),
        overlap=input.context.overlap,
    )
    x, weight, bias = autocast(input.local, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        if all(length(out) for out in outputs) and x.shape[0]:
            local = _Convolution.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        else:
            with fetched(x, needs) as box:
                shape = [x.shape[0], weight.shape[0], *map(length, outputs)]
                local = nothing(shape, box, weight, bias)
    return settled(input.like(local, splits))


def transposed(
    input: Any,  # noqa: A002 - torch's name
    weight: Any,
    bias: Tensor | None = None,
    stride: Several = 1,
    padding: Several = 0,
    output_padding: Several = 0,
    groups: int = 1,
    dilation: Several = 1,
) -> Any:
    """conv_transpose1d, conv_transpose2d, conv_transpose3d."""
    if not isinstance(input, SplitTensor) or isinstance(weight, SplitTensor):
        raise unsupported("a convolution with a split weight", weight)
    count = weight.dim() - 2
    check_batched(input, f"conv_transpose{count}d", count)
    lists = [several(v, count) for v in (stride, padding, dilation, output_padding)]
    spreads = [
        Spread(k, *numbers)
        for k, *numbers in zip(weight.shape[2:], *lists, strict=True)
    ]  # fmt: skip
    grown = [s.outputs(extent) for s, extent in zip(spreads, input.shape[2:], strict=True)]
    input = returned(input, grown)  # noqa: A001
    needs, splits, crop = [], {d: s for d, s in input.splits.items() if d < 2}, [0] * 2 * count
    sizes: list[int] = []
    native = [list(lists[1]), list(lists[3])]
    for number, spread in enumerate(spreads):
        dim, extent = number + 2, input.shape[number + 2]
        axis, ranges = shares(input, dim, grown[number])
        sizes.append(length(ranges[axis.rank]))
        if dim not in input.splits:
            continue
        splits[dim] = Split(axis, ranges)
        want = tuple(spread.wanted(r, extent) for r in ranges)
        needs.append(Need(dim, axis, input.splits[dim].ranges, want))
        start, stop = ranges[axis.rank]
        low, high = spread.reached(want[axis.rank])
        crop[2 * (count - 1 - number) : 2 * (count - number)] = [low - start, stop - high]
        native[0][number] = native[1][number] = 0
    with fetched(input.local, needs) as box:
        if 0 in box.shape or 0 in sizes:
            shape = [box.shape[0], weight.shape[1] * groups, *sizes]
            local = nothing(shape, box, weight)
        else:
            local = TRANSPOSED[count](
                box, weight, None, lists[0], native[0], native[1], groups, lists[2]
            )
            local = F.pad(local, crop) if any(crop) else local
    if bias is not None:
        local = local + bias.to(local.dtype).view(-1, *[1] * count)
    return input.like(local, splits)
