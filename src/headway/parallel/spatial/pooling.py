"""Max, average and adaptive pooling of split tensors.

The padding is laid out with the halos (minus infinity for a maximum); an average is a sum over it,
divided by what torch counts: the window with its padding, without it, or a divisor of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from headway.graph.ranges import Range, SlidingWindow, range_intersection, range_length
from headway.parallel.spatial.halo_exchange import fetch_for_operator
from headway.parallel.spatial.reductions import sum_over_space
from headway.parallel.spatial.spatial_tensor import (
    IntPerDimension,
    check_batched,
    empty_with_graph,
    int_per_dimension,
    leave_split_if_narrow,
    unsupported_operator,
    window_ranges,
)

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}
WHOLE: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
WHOLE_MAX: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}


def _windows(
    count: int,
    kernel: IntPerDimension,
    stride: IntPerDimension | None,
    padding: IntPerDimension,
    dilation: IntPerDimension = 1,
) -> list[SlidingWindow]:
    kernels = int_per_dimension(kernel, count)
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
    name = f"max_pool{count}d"
    check_batched(input, name, count)
    if return_indices:
        raise unsupported_operator(name, input, "indices of a part are not those of the whole")
    windows = _windows(count, kernel_size, stride, padding, dilation)
    needs, splits, outputs = window_ranges(input, windows, ceil=ceil_mode)
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
    check_batched(input, f"avg_pool{count}d", count)
    windows = _windows(count, kernel_size, stride, padding)
    needs, splits, outputs = window_ranges(input, windows, ceil=ceil_mode)
    uniform, uneven = 1, {}
    for dim, (window, own) in enumerate(zip(windows, outputs, strict=True), 2):
        divisors = _divisors(window, own, input.shape[dim], count_include_pad)
        if len(set(divisors)) > 1 and divisor_override is None:
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
    if count == 1:
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
    kind: str,
    count: int,
    input: Any,  # noqa: A002 - torch's name
    output_size: Any,
    return_indices: bool = False,
) -> Any:
    name = f"adaptive_{kind}_pool{count}d"
    check_batched(input, name, count)
    if return_indices:
        raise unsupported_operator(name, input, "indices of a part are not those of the whole")
    sizes = output_size if isinstance(output_size, (list, tuple)) else [output_size] * count
    extents = input.shape[2:]
    targets = [e if size is None else int(size) for size, e in zip(sizes, extents, strict=True)]
    if input.splits.keys() <= {0, 1}:
        whole = WHOLE if pool is _average_pool else WHOLE_MAX
        return input.like(whole[count](input.local, targets))
    if any(extent % target for extent, target in zip(extents, targets, strict=True)):
        raise unsupported_operator(
            name, input, f"{list(extents)} entries are no multiple of {targets}"
        )
    kernel = [extent // target for extent, target in zip(extents, targets, strict=True)]
    if targets == [1] * count and pool is _average_pool:
        return sum_over_space(input, range(2, count + 2), True) / prod(extents)
    return pool(count, input, kernel, kernel)


def _by_count(pool: Callable[..., Any], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A pooling in as many dimensions as the function's name says: 2 of `max_pool2d`."""
    return pool(int(func.__name__[-2]), *args, **kwargs)


max_pool = partial(_by_count, _max_pool)
average_pool = partial(_by_count, _average_pool)
adaptive_average_pool = partial(_by_count, partial(_adaptive, _average_pool, "avg"))
adaptive_max_pool = partial(_by_count, partial(_adaptive, _max_pool, "max"))
