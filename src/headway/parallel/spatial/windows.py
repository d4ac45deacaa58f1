"""Rules of split samples that look at neighbours: convolution, pooling, interpolation.

Convolution: the part of an activation that backward needs is the part that the rank owns anyway,
and its halos: the padded buffer is laid out anew. In backward the halos of the input's gradient
travel while the weight's gradient is computed; gradients of weights are sums over this rank's
outputs. With `SpatialContext(overlap=True)` the inner outputs, which want nothing from other ranks,
are computed while the halos travel. What is left is a shell: for each split dimension a slab at
either end, of which later dimensions have the rest.

Pooling: the padding is laid out with the halos (minus infinity for a maximum); an average is a sum
over it, divided by what torch counts: the window with its padding, without it, or a divisor of the
user's.

Interpolation: where an output comes from is asked of torch itself: it interpolates the numbers
0, 1, 2, ... along one dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headway.graph.ranges import (
    Range,
    SlidingWindow,
    TransposedWindow,
    range_intersection,
    range_length,
)
from headway.parallel.spatial.halo_exchange import (
    BoxPiece,
    HaloFetch,
    HaloGradientReturn,
    RangeExchange,
    assemble_box,
    fetch_box,
    fetch_for_operator,
    narrow_to_box,
)
from headway.parallel.spatial.spatial_context import (
    IntPerDimension,
    autocast_operands,
    check_batched,
    empty_with_graph,
    int_per_dimension,
    leave_split_if_narrow,
    result_ranges,
    return_to_spatial_split,
    sum_over_space,
    window_ranges,
)
from headway.parallel.split_tensor import RangeCut, RuleRefused, SplitTensor

FIRST_SPATIAL_DIM = 2
"""The first spatial dimension."""


def overlapped_convolution(
    fetching: HaloFetch, call: ConvolutionCall, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The outputs of this rank; on return the fetch has finished."""
    inner = list(call.outputs)
    for need in call.needs:
        axis = need.dim - FIRST_SPATIAL_DIM
        inner[axis] = _inside(call.windows[axis], need.own, need.have[-1][1], call.outputs[axis])
    # So little would be left to overlap that one convolution is cheaper than the shell's pieces.
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
    narrow_to_box(out, outer, box, range(FIRST_SPATIAL_DIM, out.ndim)).copy_(part)


# Convolutions, plain and transposed, in one to three dimensions.


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
            # Of the input its gradient needs the shape alone; nothing is allocated for that.
            like = x.new_empty(1).expand(shape)
            dbox = call.back(gradient, like, weight, (True, False, False))[0]
            returning = HaloGradientReturn(dbox, call.needs, spare=True)
            del dbox
        mask = (False, bool(ctx.needs_input_grad[1]), bool(ctx.needs_input_grad[2]))
        # While the gradients of the halos travel.
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
    if not isinstance(input, SplitTensor) or isinstance(weight, SplitTensor):
        raise RuleRefused("its weight is split")
    count = weight.dim() - 2
    check_batched(input, count)
    strides, dilations = int_per_dimension(stride, count), int_per_dimension(dilation, count)
    sides = paddings(padding, weight.shape[2:], dilations)
    windows = [
        SlidingWindow(k, s, *side, d)
        for k, s, side, d in zip(weight.shape[2:], strides, sides, dilations, strict=True)
    ]
    # torch's convolution pads both sides alike, so that unequal padding has to be laid out.
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
    # Cast before the function, so that autograd casts the gradients back.
    with torch.autocast(x.device.type, enabled=False):
        if all(range_length(out) for out in outputs) and x.shape[0]:
            local = _Convolution.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        else:
            # A rank without outputs still owns inputs that others want: it takes part in the
            # exchange.
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
    if not isinstance(input, SplitTensor) or isinstance(weight, SplitTensor):
        raise RuleRefused("its weight is split")
    count = weight.dim() - 2
    check_batched(input, count)
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
        splits[dim] = RangeCut(axis, ranges)
        want = tuple(spread.wanted(r, extent) for r in ranges)
        needs.append(RangeExchange(dim, axis, input.splits[dim].ranges, want))
        start, stop = ranges[axis.rank]
        # The operator makes the outputs low to high; `crop` turns these into this rank's own.
        low, high = spread.reached(want[axis.rank])
        # F.pad begins with the last dimension.
        crop[2 * (count - 1 - number) : 2 * (count - number)] = [low - start, stop - high]
        # `crop` stands for the padding and the output padding.
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
    # Behind the rest, so that a rank without outputs gives the bias a gradient of zeros as well.
    if bias is not None:
        local = local + bias.to(local.dtype).view(-1, *[1] * count)
    return input.like(local, splits)


# Pooling.


MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}


def _windows(
    count: int,
    kernel: IntPerDimension,
    stride: IntPerDimension | None,
    padding: IntPerDimension,
    dilation: IntPerDimension = 1,
) -> list[SlidingWindow]:
    kernels = int_per_dimension(kernel, count)
    # [] is the default of stride in torch's own signatures.
    strides = kernels if stride is None or stride == [] else int_per_dimension(stride, count)
    lists = kernels, strides, int_per_dimension(padding, count), int_per_dimension(dilation, count)
    return [SlidingWindow(k, s, p, p, d) for k, s, p, d in zip(*lists, strict=True)]


def _max_pool(
    count: int,
    input: Any,  # noqa: A002 - torch's name
    kernel_size: IntPerDimension,
    stride: IntPerDimension | None = None,
    padding: IntPerDimension = 0,
    dilation: IntPerDimension = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    check_batched(input, count)
    if return_indices:
        raise RuleRefused("indices of a part are not those of the whole")
    windows = _windows(count, kernel_size, stride, padding, dilation)
    needs, splits, outputs = window_ranges(input, windows, ceil=ceil_mode)
    # A maximum's backward takes the saved indices, and of its input the shape.
    with fetch_for_operator(input.local, needs, float("-inf"), values=False) as box:
        local = _pooled(box, outputs, windows, partial(MAX[count], dilation=dilation))
    return leave_split_if_narrow(input.like(local, splits))


def _pooled(
    box: Tensor,
    outputs: Sequence[Range],
    windows: Sequence[SlidingWindow],
    pool: Callable[..., Tensor],
) -> Tensor:
    """The pooling of a box that has its padding."""
    shape = [*box.shape[:2], *map(range_length, outputs)]
    if 0 in shape:
        return empty_with_graph(shape, box)
    return pool(box, [w.kernel for w in windows], [w.stride for w in windows])


def _average_pool(
    count: int,
    input: Any,  # noqa: A002 - torch's name
    kernel_size: IntPerDimension,
    stride: IntPerDimension | None = None,
    padding: IntPerDimension = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    check_batched(input, count)
    windows = _windows(count, kernel_size, stride, padding)
    needs, splits, outputs = window_ranges(input, windows, ceil=ceil_mode)
    uniform, uneven = 1, {}
    for dim, (window, own) in enumerate(zip(windows, outputs, strict=True), 2):
        divisors = _divisors(window, own, input.shape[dim], count_include_pad)
        if len(set(divisors)) > 1 and divisor_override is None:
            # Windows at the edge count fewer entries: these outputs are divided afterwards.
            uneven[dim] = divisors
        else:
            uniform *= divisors[0] if divisors else 1
    divisor = uniform if divisor_override is None else divisor_override
    with fetch_for_operator(input.local, needs, values=False) as box:
        local = _pooled(box, outputs, windows, partial(_average, count, divisor))
    for dim, divisors in uneven.items():
        shape = [-1 if place == dim else 1 for place in range(count + 2)]
        local = local / local.new_tensor(divisors).view(shape)
    return leave_split_if_narrow(input.like(local, splits))


def _average(count: int, divisor: int, box: Tensor, kernel: list[int], stride: list[int]) -> Tensor:
    """Sums over windows, divided."""
    if count == 1:  # avg_pool1d has no divisor_override
        flat = F.avg_pool2d(box[..., None], [*kernel, 1], [*stride, 1], divisor_override=divisor)
        return flat[..., 0]
    return AVERAGE[count](box, kernel, stride, divisor_override=divisor)


@lru_cache(maxsize=4096)
def _divisors(window: SlidingWindow, own: Range, extent: int, with_padding: bool) -> list[int]:
    """How many entries torch counts in each window along one dimension."""
    counted = (-window.before, extent + window.after) if with_padding else (0, extent)
    return [
        range_length(range_intersection(window.wanted((o, o + 1)), counted)) for o in range(*own)
    ]


def _adaptive(
    pool: Callable[..., Any],
    count: int,
    input: Any,  # noqa: A002 - torch's name
    output_size: Any,
    return_indices: bool = False,
) -> Any:
    check_batched(input, count)
    if return_indices:
        raise RuleRefused("indices of a part are not those of the whole")
    sizes = output_size if isinstance(output_size, (list, tuple)) else [output_size] * count
    extents = input.shape[2:]
    targets = [e if size is None else int(size) for size, e in zip(sizes, extents, strict=True)]
    # Space is whole: torch's own function, whatever the sizes.
    if input.splits.keys() <= {0, 1}:
        kind = "avg" if pool is _average_pool else "max"
        whole: Callable[..., Tensor] = getattr(F, f"adaptive_{kind}_pool{count}d")
        return input.like(whole(input.local, targets))
    if any(extent % target for extent, target in zip(extents, targets, strict=True)):
        raise RuleRefused(f"{list(extents)} entries are no multiple of {targets}")
    # Windows that divide the input are all equal: an ordinary pooling.
    kernel = [extent // target for extent, target in zip(extents, targets, strict=True)]
    if targets == [1] * count and pool is _average_pool:
        return sum_over_space(input, range(2, count + 2), True) / prod(extents)
    return pool(count, input, kernel, kernel)


def _by_count(
    pool: Callable[..., Any], context: Any, func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A pooling in as many dimensions as the function's name says: 2 of `max_pool2d`."""
    return pool(int(func.__name__[-2]), *args, **kwargs)


max_pool = partial(_by_count, _max_pool)
average_pool = partial(_by_count, _average_pool)
adaptive_average_pool = partial(_by_count, partial(_adaptive, _average_pool))
adaptive_max_pool = partial(_by_count, partial(_adaptive, _max_pool))


# Interpolation.


LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}


def interpolate(
    input: SplitTensor,  # noqa: A002 - torch's name
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """F.interpolate: nearest, nearest-exact, linear, bilinear, trilinear."""
    count = input.dim() - 2
    check_batched(input, count)
    linear = LINEAR.get(mode) == count
    if antialias or not (linear or mode in {"nearest", "nearest-exact"}):
        raise RuleRefused(f"there is no rule for mode {mode!r}")
    sizes = [None] * count if size is None else int_per_dimension(size, count)
    scales = _scales(scale_factor, count)
    input = return_to_spatial_split(input, _grown(input, sizes, scales))  # noqa: A001
    local, splits = input.local, dict(input.splits)
    # Interpolation is separable: one split dimension after the other, then the rest at once.
    for dim in [d for d in splits if d > 1]:
        places = _coordinates(
            input.shape[dim],
            sizes[dim - 2],
            scales[dim - 2],
            mode="linear" if linear else mode,
            align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
        )
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


def _grown(x: SplitTensor, sizes: Sequence[int | None], scales: Sequence[float]) -> list[int]:
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
    x: SplitTensor, local: Tensor, dim: int, places: Sequence[float]
) -> tuple[Tensor, RangeCut]:
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
        return box.narrow(dim, 0, 0), RangeCut(axis, ranges)
    out = box.index_select(dim, low)
    shares_of_high = [place - low for place, low in zip(places[mine], lows[mine], strict=True)]
    if any(shares_of_high):
        shape = [-1 if place == dim else 1 for place in range(x.dim())]
        share = local.new_tensor(shares_of_high).view(shape)
        out = torch.lerp(out, box.index_select(dim, high), share)
    return out, RangeCut(axis, ranges)


def _span(lows: Sequence[int], highs: Sequence[int]) -> Range:
    return (lows[0], highs[-1] + 1) if lows else (0, 0)
