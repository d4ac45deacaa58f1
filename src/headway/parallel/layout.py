"""What a message between two stages looks like on the wire: one dense tensor after the other.

Both ends know the layout of a message beforehand, so that a receive can be posted with buffers of
the right size and nothing but payload travels. Memory order is kept (channels-last stays so):
the receiving stage computes with the same strides as it would in the serial run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.parallel.structure import Structure, flatten, is_payload


@dataclass(frozen=True, slots=True)
class Form:
    """One tensor.

    Attributes:
        shape: In memory order: the last dimension is dense.
        order: Dimensions of the tensor in memory order; empty: as they are.
        dtype: Of its elements.
        flows: Its gradient comes back.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    flows: bool

    @staticmethod
    def of(tensor: Tensor) -> Form:
        order: tuple[int, ...] = () if tensor.is_contiguous() else _memory_order(tensor)
        shape = tuple(tensor.shape)
        if order:
            shape = tuple(shape[dim] for dim in order)
        return Form(shape, order, tensor.dtype, tensor.requires_grad)

    def dense(self, tensor: Tensor) -> Tensor:
        """A tensor of this form as it goes over the wire."""
        return (tensor.permute(self.order) if self.order else tensor).contiguous()

    def empty(self, device: torch.device) -> Tensor:
        """A buffer for it, in memory order."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def back(self, dense: Tensor) -> Tensor:
        """The tensor of a buffer."""
        if not self.order:
            return dense
        return dense.permute([self.order.index(dim) for dim in range(len(self.order))])


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the widest stride to the densest, where that makes it dense; else empty."""
    order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A message: the values of one edge for one micro-batch.

    Attributes:
        structure: Of the list of values.
        forms: Of its tensors, in order; None stands for a number.
        kinds: The types of its numbers.
    """

    structure: Structure
    forms: tuple[Form | None, ...]
    kinds: tuple[type, ...]

    @staticmethod
    def of(values: Sequence[Any]) -> tuple[Layout, list[Any]]:
        """The layout of values, and their leaves."""
        leaves, structure = flatten(list(values), is_payload)
        forms = tuple(Form.of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
        kinds = tuple(type(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        return Layout(structure, forms, kinds), leaves

    def fits(self, other: Layout, *, flows: bool) -> bool:
        """Whether a message of the other layout can go by this one.

        Args:
            other: Of the values at hand.
            flows: Look also at which gradients come back.
        """
        if flows or self == other:
            return self == other
        forms = tuple(None if f is None else replace(f, flows=False) for f in self.forms)
        return replace(self, forms=forms) == other

    def flowing(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Of the leaves those whose gradients come back."""
        return [leaf for f, leaf in zip(self.forms, leaves, strict=True) if f and f.flows]

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(math.prod(f.shape) * f.dtype.itemsize for f in self.forms if f is not None)

    @property
    def flowing_bytes(self) -> int:
        """Of the gradients that come back."""
        return replace(self, forms=tuple(f for f in self.forms if f and f.flows)).bytes

    def pack(self, leaves: Sequence[Any]) -> list[Tensor]:
        """What goes over the wire."""
        found = [
            form.dense(leaf.detach())
            for form, leaf in zip(self.forms, leaves, strict=True)
            if form is not None
        ]
        numbers = [n for form, n in zip(self.forms, leaves, strict=True) if form is None]
        if numbers:
            found.append(_encode(numbers))
        return found

    @property
    def packed(self) -> list[Form]:
        """Of what `pack` returns at the other end."""
        found = [form for form in self.forms if form is not None]
        if self.kinds:
            found.append(Form((2 * len(self.kinds),), (), torch.int64, flows=False))
        return found

    def unpack(self, buffers: Sequence[Tensor]) -> list[Any]:
        """The leaves, from filled buffers."""
        tensors = iter(buffers)
        leaves: list[Any] = [form and form.back(next(tensors)) for form in self.forms]
        if self.kinds:
            numbers = iter(_decode(next(tensors), self.kinds))
            leaves = [next(numbers) if leaf is None else leaf for leaf in leaves]
        return leaves


def _encode(numbers: Sequence[int | float]) -> Tensor:
    """Integers as they are, in the first half; the bits of floats in the second."""
    whole = torch.tensor([n if isinstance(n, int) else 0 for n in numbers], dtype=torch.int64)
    exact = torch.tensor([n if isinstance(n, float) else 0.0 for n in numbers], dtype=torch.float64)
    return torch.cat((whole, exact.view(torch.int64)))


def _decode(buffer: Tensor, kinds: Sequence[type]) -> list[int | float]:
    count = len(kinds)
    whole, exact = buffer[:count].tolist(), buffer[count:].view(torch.float64).tolist()
    return [n if kind is int else x for kind, n, x in zip(kinds, whole, exact, strict=True)]
