"""Batches are tensors in tuples, lists and dicts; these functions act on every tensor of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def map_tensors(
    value: Any,
    function: Callable[[Tensor], Tensor],
    texts: Callable[[Any], Any] = lambda found: found,
) -> Any:
    """The same structure with `function` applied to every tensor, `texts` to lists of texts."""
    match value:
        case Tensor():
            return function(value)
        case dict():
            return {key: map_tensors(inner, function, texts) for key, inner in value.items()}
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(map_tensors(inner, function, texts) for inner in value))
        case list() | tuple() if value and all(isinstance(inner, str | bytes) for inner in value):
            return texts(value)
        case list() | tuple():
            return type(value)(map_tensors(inner, function, texts) for inner in value)
        case _:
            return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of the structure, in order."""
    match value:
        case Tensor():
            yield value
        case dict():
            for inner in value.values():
                yield from tensors_in(inner)
        case list() | tuple():
            for inner in value:
                yield from tensors_in(inner)


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move every tensor; floating-point tensors also change type where `dtype` is given."""

    def move(tensor: Tensor) -> Tensor:
        wanted = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            wanted = dtype
        elif dtype is not None and tensor.is_complex():
            wanted = dtype.to_complex()
        return tensor.to(device=device, dtype=wanted, non_blocking=True)

    return map_tensors(value, move)


def resize(value: Any, samples: int) -> Any:
    """The first sample of every tensor and list of texts, `samples` times along dimension 0."""

    def repeat(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:  # one number for the whole batch
            return tensor
        return tensor[:1].expand(samples, *tensor.shape[1:]).contiguous()

    return map_tensors(value, repeat, texts=lambda texts: type(texts)(texts[:1] * samples))
