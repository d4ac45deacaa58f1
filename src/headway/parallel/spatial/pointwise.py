"""Operators that work entry by entry, with broadcasting; and those of one dimension that is whole.

Operands are laid out as the result is: of a tensor that every rank has whole (a position code, a
label), the rank takes its part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headway.parallel.spatial.spatial_tensor import (
    SpatialSplit,
    SpatialTensor,
    local_part_for,
    modifies_in_place,
    qualified_torch_name,
    split_tensors,
    splits_from_last_dim,
    unsupported_operator,
)


def unary(func: Callable[..., Any], x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """The operator on this rank's part."""
    if any(True for _ in split_tensors((args, tuple(kwargs.values())))):
        return broadcast(func, x, *args, **kwargs)
    return x.like(func(x.local, *args, **kwargs))


def broadcast(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The operator on parts that are laid out alike."""
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, (SpatialTensor, Tensor))]
    first = next(split_tensors(operands))
    if "out" in kwargs:
        raise unsupported_operator(f"{qualified_torch_name(func)} with out=", first)
    target = result_splits(first, operands)
    if modifies_in_place(func, kwargs):
        target = _of_receiver(func, args[0], target)
    found = [
        local_part_for(a, target) if isinstance(a, (SpatialTensor, Tensor)) else a for a in args
    ]
    named = {
        key: local_part_for(a, target) if isinstance(a, (SpatialTensor, Tensor)) else a
        for key, a in kwargs.items()
    }
    local = func(*found, **named)
    if not isinstance(local, Tensor):
        return local  # NotImplemented, of a comparison with something else
    return first.like(local, {local.dim() + dim: split for dim, split in target.items()})


def result_splits(first: SpatialTensor, operands: list[Any]) -> dict[int, SpatialSplit]:
    """How the result is split, by dimension from the end: as any of the operands is.

    Where one lies in parts of space and another one by samples it is in parts of space.
    """
    target: dict[int, SpatialSplit] = {}
    found = list(split_tensors(operands))
    space = [x for x in found if not x.by_samples]
    for operand in space or found:
        for dim, split in splits_from_last_dim(operand).items():
            target.setdefault(dim, split)
    if len({split.axis for split in target.values()}) < len(target):
        raise unsupported_operator("joining", first, "the same ranks split one dimension of each")
    for dim, split in target.items():
        if split.extent == 1 and any(-dim <= len(o.shape) and o.shape[dim] > 1 for o in operands):
            raise unsupported_operator("broadcasting a split dimension of one entry", first)
    return target


def _of_receiver(
    func: Callable[..., Any], receiver: Any, target: dict[int, SpatialSplit]
) -> dict[int, SpatialSplit]:
    """What is changed in place stays as it lies: otherwise a copy would be changed."""
    have = splits_from_last_dim(receiver) if isinstance(receiver, SpatialTensor) else {}
    if have and receiver.by_samples:
        return have
    for dim, split in target.items():
        if dim not in have or not have[dim].same(split):
            raise RuntimeError(
                f"{func.__name__}: a tensor that is whole cannot take a split one in place"
            )
    return target


def along_whole_dims(func: Callable[..., Any], x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """The operator along dimensions that are not split; on all of them it is refused."""
    dims = {dim % x.dim() for dim in _dims_of(func.__name__, args, kwargs)}
    if not dims or dims & set(x.splits):
        raise unsupported_operator(
            qualified_torch_name(func), x, "it works along a split dimension"
        )
    local = func(x.local, *args, **kwargs)
    if isinstance(local, Tensor) and local.dim() == x.dim():
        return x.like(local)
    if not isinstance(local, Tensor) or local.dim() != x.dim() - len(dims):
        raise unsupported_operator(qualified_torch_name(func), x)
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    return x.like(local, {kept.index(dim): split for dim, split in x.splits.items()})


def _dims_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The dimensions that a call names; none where it means all of them."""
    place = 1 if name in {"norm", "normalize"} else 0
    given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
    if name == "flip" and args and isinstance(args[0], int):
        given = args
    if name == "normalize" and given is None:
        given = 1
    if given is None or isinstance(given, bool):
        return set()
    return {given} if isinstance(given, int) else set(given)


def of_both(func: Callable[..., Any], x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """What is the same of a part and of the whole: a type, or a new tensor of another size."""
    return func(x.local, *args, **kwargs)
