"""Rules that follow from a tensor's layout alone, whatever kind of cut it has.

They carry each dimension's cut to where the dimension goes, and refuse what would need entries of
other ranks. Each takes the arguments of torch's function, but for those at the end, which take the
context and the function before them, as rules of one kind of split do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.parallel.split_tensor import (
    WHOLE_DIMENSION,
    Cut,
    DimensionCut,
    RuleRefused,
    SplitContext,
    SplitTensor,
)


def size_list(args: tuple[Any, ...]) -> list[int]:
    """Sizes or dimensions that are given as one sequence or one by one."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else list(args)


def reduced_dims(x: SplitTensor, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions that a reduction names, from 0; all, where it names none."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


# Order and number of dimensions.


def permute(x: SplitTensor, *dims: Any) -> Any:
    order = [dim % x.ndim for dim in size_list(dims)]
    return _same_use(x.like(x.local.permute(order), [x.cuts[dim] for dim in order]), x)


def _same_use(found: Any, x: SplitTensor) -> Any:
    """A view of a weight is a weight."""
    if x.parameter and isinstance(found, SplitTensor):
        return replace(found, origins=x.origins, parameter=True)
    return found


def transpose(x: SplitTensor, *dims: int, **kwargs: int) -> Any:
    first, second = dims or kwargs.values()  # torch has two pairs of names: dim0, axis0
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return permute(x, order)


def t(x: SplitTensor) -> Any:
    return permute(x, list(range(x.ndim))[::-1])


def movedim(x: SplitTensor, source: Any, destination: Any) -> Any:
    # Torch moves the dimensions of a stand-in whose sizes are their numbers.
    probe = torch.empty([*range(2, 2 + x.ndim)], device="meta").movedim(source, destination)
    return permute(x, [n - 2 for n in probe.shape])


def unsqueeze(x: SplitTensor, dim: int) -> Any:
    dim %= x.ndim + 1
    return x.like(x.local.unsqueeze(dim), [*x.cuts[:dim], WHOLE_DIMENSION, *x.cuts[dim:]])


def squeeze(x: SplitTensor, dim: Any = None) -> Any:
    dims = [d for d in {*reduced_dims(x, dim)} if x.shape[d] == 1]
    if any(x.shape[d] == 1 for d in x.splits):
        raise RuleRefused("a cut dimension has one entry")
    # Dimensions of the whole tensor: a part may have one entry where the whole has several.
    return x.like(x.local.squeeze(tuple(dims)), _without(x, dims))


def _without(x: SplitTensor, dims: Sequence[int]) -> list[Cut]:
    return [cut for dim, cut in enumerate(x.cuts) if dim not in dims]


def flatten(x: SplitTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    merged = math.prod(x.shape[first : last + 1])
    return x.reshape([*x.shape[:first], merged, *x.shape[last + 1 :]])


def unflatten(x: SplitTensor, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    inner = list(sizes)
    if -1 in inner:
        # The -1 itself makes the product negative.
        inner[inner.index(-1)] = x.shape[dim] // -math.prod(inner)
    return x.reshape([*x.shape[:dim], *inner, *x.shape[dim + 1 :]])


def reshape_as(x: SplitTensor, other: Any) -> Any:
    return x.reshape(list(other.shape))


def expand(x: SplitTensor, *shape: Any) -> Any:
    sizes = size_list(shape)
    cuts = [*(WHOLE_DIMENSION,) * (len(sizes) - x.ndim), *x.cuts]
    for dim, cut in enumerate(cuts):
        if cut != WHOLE_DIMENSION:
            if sizes[dim] not in (-1, x.shape[dim - len(sizes)]):
                raise RuleRefused("it enlarges a cut dimension")
            # -1 keeps the size of this rank's part.
            sizes[dim] = -1
    return x.like(x.local.expand(sizes), cuts)


# Parts and joints.


def narrow(x: SplitTensor, dim: int, start: int, length: int) -> Any:
    """Entries [start, start + length) of a dimension; of a cut one only whole blocks."""
    dim %= x.ndim
    cut, size = x.cuts[dim], x.shape[dim]
    if cut == WHOLE_DIMENSION:
        return x.like(x.local.narrow(dim, start, length))
    if length == size:
        return x
    if not isinstance(cut, DimensionCut):
        raise RuleRefused("it takes a piece of a cut dimension")
    parts = x.context.grid.size(cut.axes)
    block = size // cut.blocks
    if start % block or length % block:
        common = math.gcd(start, length, size)
        fits = size // common if common and common % parts == 0 else 0
        raise RuleRefused("it takes a piece of a cut dimension", blocks=fits)
    if len(cut.axes) > 1:
        raise RuleRefused("it takes blocks of a dimension that is cut over two axes")
    cuts = [*x.cuts]
    cuts[dim] = DimensionCut(cut.axes, length // block)
    return _same_use(x.like(x.local.narrow(dim, start // parts, length // parts), cuts), x)


def chunk(x: SplitTensor, chunks: int, dim: int = 0) -> Any:
    return split(x, -(-x.shape[dim] // chunks), dim)


def split(x: SplitTensor, split_size_or_sections: Any, dim: int = 0, **kwargs: Any) -> Any:
    dim %= x.ndim
    sections = kwargs.get("split_size", split_size_or_sections)
    if x.cuts[dim] == WHOLE_DIMENSION:
        return tuple(x.like(part) for part in torch.split(x.local, sections, dim))
    total = x.shape[dim]
    if isinstance(sections, int):
        sections = [min(sections, total - at) for at in range(0, total, sections)]
    starts = [sum(sections[:number]) for number in range(len(sections))]
    return tuple(narrow(x, dim, start, size) for start, size in zip(starts, sections, strict=True))


def unbind(x: SplitTensor, dim: int = 0) -> Any:
    return tuple(select(x, dim, number) for number in range(x.shape[dim]))


def select(x: SplitTensor, dim: int, index: int) -> Any:
    dim %= x.ndim
    if x.cuts[dim] != WHOLE_DIMENSION:
        raise RuleRefused("it takes one entry of a cut dimension", blocks=x.shape[dim])
    return x.like(x.local.select(dim, index), _without(x, [dim]))


def getitem(x: SplitTensor, index: Any) -> Any:
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
            found = found.unsqueeze(dim)
            dim += 1
        elif isinstance(entry, slice):
            found = _slice(found, dim, entry)
            dim += 1
        else:
            found = found.select(dim, int(entry))
    return found


def _slice(x: Any, dim: int, entry: slice) -> Any:
    start, stop, step = entry.indices(x.shape[dim])
    if (start, stop, step) == (0, x.shape[dim], 1):
        return x
    if step == 1:
        return x.narrow(dim, start, max(0, stop - start))
    where = (slice(None),) * dim + (entry,)
    if not isinstance(x, SplitTensor):
        return x[where]
    if x.cuts[dim] != WHOLE_DIMENSION:
        raise RuleRefused("it takes every so many entries of a cut dimension")
    return x.like(x.local[where])


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


# Sums and what works along whole dimensions.


def total(
    x: SplitTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """sum: this rank's sum, then the sum over the ranks that cut a dimension of it."""
    dims = reduced_dims(x, dim)
    local = x.local.sum(dims, keepdim=keepdim, dtype=dtype)
    local = x.context.sum_over_ranks(local, [x.cuts[d] for d in dims])
    if keepdim:
        return x.like(local, [WHOLE_DIMENSION if d in dims else c for d, c in enumerate(x.cuts)])
    return x.like(local, _without(x, dims))


def along_whole_dims(
    context: SplitContext, func: Callable[..., Any], x: SplitTensor, *args: Any, **kwargs: Any
) -> Any:
    """The function along dimensions that are not cut; on all of them it is refused."""
    dims = {dim % x.ndim for dim in _dims_of(func.__name__, args, kwargs)}
    if not dims or dims & x.splits.keys():
        raise RuleRefused("it works along a cut dimension")

    def wrapped(local: Any) -> Any:
        if isinstance(local, Tensor) and local.ndim == x.ndim:
            return x.like(local)
        if isinstance(local, Tensor) and local.ndim == x.ndim - len(dims):
            return x.like(local, _without(x, [*dims]))
        raise RuleRefused("its result is no tensor along the other dimensions")

    found = func(x.local, *args, **kwargs)
    return type(found)(map(wrapped, found)) if isinstance(found, tuple) else wrapped(found)


def _dims_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The dimensions that a call names; none where it means all of them."""
    # The exponent comes before the dimension: norm(p, dim), normalize(p, dim).
    place = 1 if name in {"norm", "normalize"} else 0
    given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
    # flip(0, 1) is as good as flip([0, 1]).
    if name == "flip" and args and isinstance(args[0], int):
        given = args
    if name == "normalize" and given is None:
        given = 1
    if given is None or isinstance(given, bool):
        return set()
    return {given} if isinstance(given, int) else set(given)


def local_result(
    context: SplitContext, func: Callable[..., Any], x: SplitTensor, *args: Any, **kwargs: Any
) -> Any:
    """What is the same of a part and of the whole: a type, or a new tensor of another size."""
    return func(x.local, *args, **kwargs)


# Dropout: the mask is drawn for the whole tensor, and each rank takes its part. Ranks that split a
# tensor have the same random numbers, so that the result is that of the serial run; masks drawn for
# the parts would differ between layouts.


def dropout(
    context: SplitContext,
    func: Callable[..., Any],
    input: SplitTensor,  # noqa: A002 - torch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """dropout and, of whole channels, dropout1d to dropout3d."""
    if not training or p == 0:
        return input
    shape = list(input.shape)
    if func.__name__ != "dropout":
        if input.ndim != int(func.__name__[-2]) + 2:
            raise RuleRefused(
                "it needs a dimension of samples, one of channels, and those it names"
            )
        shape[2:] = [1] * len(shape[2:])
    mask = context.local_part(func(input.local.new_ones(shape), p, True), input.cuts)
    return input.like(input.local.mul_(mask) if inplace else input.local * mask)
