"""What split tensors of both kinds share: torch's functions called on a part as on the whole.

Torch asks such an object what a function does (`__torch_function__`), and its context answers by
the table of its kind: `parallel.tensor` for split layers, `parallel.spatial` for split samples.
The classes are deliberately no subclasses of Tensor: an autograd function of the user's would
take a subclass for its own storage and lose the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class DispatchedOperand:
    """Functions of torch on it are calls of its context.

    Attributes:
        context: The law for the split tensors of one model: `call(func, args, kwargs)` carries out
            a function, and `attribute(x, name)` answers for an attribute of tensors that is no
            method and not the same for part and whole.
    """

    __slots__ = ()
    context: Any

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        first = next(x for x in leaves((args, keywords)) if isinstance(x, DispatchedOperand))
        return first.context.call(func, args, keywords)


class PartialTensor(DispatchedOperand):
    """This rank's part of a tensor, which answers for its shape as the whole one would.

    Attributes:
        local: What this rank has. All gradients flow through it.
        shape: Of the whole.
    """

    __slots__ = ()
    local: Tensor
    shape: torch.Size

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        """What is the same for a part and for the whole; methods of tensors, by their rules."""
        if name in ATTRIBUTES_OF_PART:
            return getattr(self.local, name)
        found = None if name.startswith("__") else getattr(Tensor, name, None)
        if found is None:
            raise AttributeError(f"a split tensor has no attribute {name!r}")
        if not callable(found):
            return self.context.attribute(self, name)
        return partial(call_method, found, self)


def call_method(method: Callable[..., Any], x: DispatchedOperand, *args: Any, **kwargs: Any) -> Any:
    """A method of torch.Tensor on a split one."""
    return x.__torch_function__(method, (), (x, *args), kwargs)


ATTRIBUTES_OF_PART = frozenset({
    "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "layout", "is_nested", "is_sparse",
    "is_floating_point", "is_complex", "element_size", "is_quantized", "is_meta", "get_device",
    "is_mkldnn",
})  # fmt: skip
"""What is the same for a part and for the whole."""


def install_operators(kind: type[DispatchedOperand], *names: str) -> None:
    """Python's operators on a class: "add" for `+`."""
    for name in names:
        method = getattr(Tensor, f"__{name}__")

        def operator(
            self: DispatchedOperand, *args: Any, _method: Callable[..., Any] = method
        ) -> Any:
            return self.__torch_function__(_method, (), (self, *args))

        setattr(kind, f"__{name}__", operator)


install_operators(
    DispatchedOperand,
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs",
    "matmul", "rmatmul", "mod", "floordiv", "rfloordiv", "eq", "ne", "lt", "le", "gt", "ge", "and",
    "or", "xor", "invert", "getitem",
)  # fmt: skip


def torch_function_name(func: Callable[..., Any]) -> str:
    """Of a function of torch; `Tensor.__add__` is "add"."""
    name = getattr(func, "__name__", repr(func))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


# Nested arguments and results; order and structure stay.


def map_nested(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested arguments, a function applied to all that are no containers."""
    if type(value) in (tuple, list):
        return type(value)(map_nested(entry, function) for entry in value)
    if isinstance(value, dict):
        return {key: map_nested(entry, function) for key, entry in value.items()}
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """All that are no containers in nested arguments."""
    if isinstance(value, tuple | list):
        for entry in value:
            yield from leaves(entry)
    elif isinstance(value, Mapping):
        yield from leaves(tuple(value.values()))
    else:
        yield value
