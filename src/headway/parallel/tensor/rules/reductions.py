"""Rules for sums, means, variances, extrema and softmax of split tensors.

Over a cut dimension the parts are reduced over the ranks that cut it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from headway.parallel.tensor.grid import copy_to_ranks, maximum_over_ranks, reduce_from_ranks
from headway.parallel.tensor.split_tensor import (
    WHOLE_DIMENSION,
    RuleRefused,
    SplitContext,
    SplitTensor,
    wrap_local_part,
)


def _dims(x: SplitTensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _total(
    context: SplitContext, x: SplitTensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None
) -> Any:
    axes = "".join(x.cuts[d].axes for d in dims)
    local = reduce_from_ranks(x.local.sum(dims, keepdim=keepdim, dtype=dtype), context.grid, axes)
    if keepdim:
        cuts = [WHOLE_DIMENSION if d in dims else cut for d, cut in enumerate(x.cuts)]
    else:
        cuts = [cut for d, cut in enumerate(x.cuts) if d not in dims]
    return wrap_local_part(local, cuts, context)


def total(
    context: SplitContext, func: Any, x: SplitTensor, dim: Any = None, keepdim: bool = False,
    *, dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    return _total(context, x, _dims(x, dim), keepdim, dtype)


def mean(
    context: SplitContext, func: Any, x: SplitTensor, dim: Any = None, keepdim: bool = False,
    *, dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    dims = _dims(x, dim)
    return _total(context, x, dims, keepdim, dtype) / math.prod(x.shape[d] for d in dims)


def var(
    context: SplitContext, func: Any, x: SplitTensor, dim: Any = None, unbiased: bool | None = None,
    keepdim: bool = False, *, correction: int = 1,
) -> Any:  # fmt: skip
    dims = _dims(x, dim)
    if unbiased is not None:
        correction = int(unbiased)
    count = math.prod(x.shape[d] for d in dims)
    apart = x - _total(context, x, dims, True, None) / count
    return apart.square().sum(dims, keepdim) / max(0, count - correction)


def extreme(
    context: SplitContext, func: Any, x: SplitTensor, dim: Any = None, keepdim: bool = False
) -> Any:
    """max, min, argmax, ...: along whole dimensions."""
    dims = _dims(x, dim)
    if any(x.cuts[d].axes for d in dims):
        raise RuleRefused("it compares along a cut dimension")
    cuts = [WHOLE_DIMENSION if d in dims else cut for d, cut in enumerate(x.cuts)]
    if not keepdim:
        cuts = [cut for d, cut in enumerate(x.cuts) if d not in dims]
    found = func(x.local, dim, keepdim=keepdim)
    if isinstance(found, tuple):
        return type(found)(wrap_local_part(part, cuts, context) for part in found)
    return wrap_local_part(found, cuts, context)


def softmax(
    context: SplitContext,
    func: Any,
    x: SplitTensor,
    dim: int | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    return _softmax(context, x, dim, kwargs.get("dtype"), logarithm=False)


def log_softmax(
    context: SplitContext,
    func: Any,
    x: SplitTensor,
    dim: int | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    return _softmax(context, x, dim, kwargs.get("dtype"), logarithm=True)


def _softmax(
    context: SplitContext,
    x: SplitTensor,
    dim: int | None,
    dtype: torch.dtype | None,
    *,
    logarithm: bool,
) -> Any:
    if dim is None:
        raise RuleRefused("it names no dimension")
    axes, grid = x.cuts[dim % x.ndim].axes, context.grid
    if not axes:
        own = torch.log_softmax if logarithm else torch.softmax
        return wrap_local_part(own(x.local, dim, dtype=dtype), x.cuts, context)
    local = x.local if dtype is None else x.local.to(dtype)
    shifted = local - maximum_over_ranks(local.amax(dim, keepdim=True), grid, axes)
    exponentials = shifted.exp()
    whole = copy_to_ranks(
        reduce_from_ranks(exponentials.sum(dim, keepdim=True), grid, axes), grid, axes
    )
    return wrap_local_part(
        shifted - whole.log() if logarithm else exponentials / whole, x.cuts, context
    )


def of_both(context: SplitContext, func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """What is the same of a part and of the whole: a type, or a new tensor of another size."""
    return func(x.local, *args, **kwargs)


def triangle(context: SplitContext, func: Any, x: SplitTensor, diagonal: int = 0) -> Any:
    if any(cut.axes for cut in x.cuts[-2:]):
        raise RuleRefused("it takes a triangle of a cut dimension")
    return wrap_local_part(func(x.local, diagonal), x.cuts, context)
