"""A tensor of which this rank has a part, in the place of the whole one in the user's code.

It answers for its shape as the whole tensor would, and hands every function of torch to a rule
(torch's documented `__torch_function__`), which works on the parts and knows what has to be
exchanged. A function without a rule raises with its name. Invariant: a tensor that is cut along no
dimension is a plain one, so that code outside of split layers never meets this class.

It is a dataclass, so that a pipeline sends it from stage to stage as the parts it consists of, and
a node of torch's trees (`torch.utils._pytree`, private): there FSDP hangs its hooks on the part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from headway.parallel.tensor.context import Context
from headway.parallel.tensor.exchange import gathered


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dimension is cut.

    Attributes:
        axes: Of the grid, the major one first; "" for a whole dimension.
        blocks: The dimension is so many blocks, and each of them is cut: queries, keys and values
            in one layer are three.
    """

    axes: str = ""
    blocks: int = 1
    whole_in_messages: ClassVar[bool] = True

    def __str__(self) -> str:
        """ "over j then i in 3 blocks"; "whole"."""
        if not self.axes:
            return "whole"
        blocks = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        return f"over {' then '.join(self.axes)}{blocks}"


WHOLE = Cut()


def said(cuts: Sequence[Cut]) -> str:
    """ "[over j, whole]"."""
    return f"[{', '.join(map(str, cuts))}]"


@dataclass(frozen=True, eq=False)
class SplitTensor:
    """This rank's part of a tensor.

    Attributes:
        local: The part.
        shape: Of the whole tensor.
        cuts: One for each dimension; only axes with more than one rank are named.
        context: Grid and settings.
        origins: In a survey, the weights whose split it comes from.
        parameter: It is a weight, or a view of one, cut as layers want weights.
    """

    local: Tensor
    shape: torch.Size
    cuts: tuple[Cut, ...]
    context: Context
    origins: frozenset[str] = field(default_factory=frozenset)
    parameter: bool = False

    # -- what the whole tensor would say -------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        return bool(self._call(Tensor.__bool__))

    def __repr__(self) -> str:
        cuts = ", ".join(f"{number}: {cut}" for number, cut in enumerate(self.cuts) if cut.axes)
        return f"SplitTensor(shape={tuple(self.shape)}, cut {{{cuts}}}, local={self.local!r})"

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank."""
        x = self.local
        for dim, cut in enumerate(self.cuts):
            x = gathered(x, self.context.grid, cut.axes, dim, cut.blocks)
        return x

    # -- what is handed on ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self.local, name)
        if name in _TURNS:
            return self._call(getattr(Tensor, _TURNS[name]), -2, -1)
        found = None if name.startswith("__") else getattr(Tensor, name, None)
        if not callable(found):
            raise AttributeError(f"a split tensor has no {name}")
        return functools.partial(self._call, found)

    def _call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(func, (), (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        return next(contexts(args, keywords)).call(func, args, keywords)


@dataclass(frozen=True, eq=False)
class Undecided:
    """In a survey, a parameter whose split is not decided yet.

    Attributes:
        name: Its logical name.
        tensor: Stand-in of all of it.
        context: Of the survey.
    """

    name: str
    tensor: Tensor
    context: Context

    def __getattr__(self, name: str) -> Any:
        if name in _SAME or name in ("shape", "ndim"):
            return getattr(self.tensor, name)
        return getattr(self.context.resolve(self), name)

    __torch_function__ = SplitTensor.__torch_function__


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def carry_out(self: Any, *args: Any) -> Any:
        return SplitTensor.__torch_function__(function, (), (self, *args))

    return carry_out


for _name in (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
    "itruediv", "pow", "rpow", "neg", "abs", "matmul", "rmatmul", "getitem", "eq", "ne", "lt", "le",
    "gt", "ge", "and", "or", "invert", "mod", "floordiv",
):  # fmt: skip
    for _class in (SplitTensor, Undecided):
        setattr(_class, f"__{_name}__", _operator(f"__{_name}__"))

_pytree.register_pytree_node(
    SplitTensor,
    lambda x: ([x.local], x),
    lambda leaves, x: replace(x, local=next(iter(leaves))),
)

_SAME = frozenset({
    "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "layout", "is_nested", "is_sparse",
    "is_floating_point", "is_complex", "element_size", "is_quantized", "is_meta", "get_device",
    "is_mkldnn",
})  # fmt: skip
"""What is the same for a part and for the whole."""

_TURNS = {"T": "transpose", "mT": "transpose"}


def contexts(*values: Any) -> Iterator[Context]:
    """Of all split tensors in nested arguments."""
    for value in values:
        if isinstance(value, SplitTensor | Undecided):
            yield value.context
        elif isinstance(value, tuple | list):
            yield from contexts(*value)
        elif isinstance(value, dict):
            yield from contexts(*value.values())


def made(
    local: Tensor, cuts: Sequence[Cut], context: Context, origins: frozenset[str] = frozenset()
) -> Any:
    """A split tensor of a part; a plain tensor where nothing is cut."""
    real = tuple(real_cut(cut, context) for cut in cuts)
    if all(cut is WHOLE for cut in real):
        return local
    shape = shape_of(local, real, context)
    return SplitTensor(local, shape, real, context, origins)


def real_cut(cut: Cut, context: Context) -> Cut:
    """Without the axes that have one rank."""
    size = context.grid.size
    axes = "".join(axis for axis in cut.axes if size(axis) > 1)
    if not axes:
        return WHOLE
    return Cut(axes, cut.blocks if axes[0] == cut.axes[0] else 1)


def cuts_of(x: Any) -> tuple[Cut, ...]:
    """One for each dimension, of a plain tensor as well."""
    return x.cuts if isinstance(x, SplitTensor) else (WHOLE,) * x.ndim


def local_of(x: Any) -> Tensor:
    found: Tensor = x.local if isinstance(x, SplitTensor) else x
    return found


def shape_of(local: Tensor, cuts: Sequence[Cut], context: Context) -> torch.Size:
    return torch.Size(
        n * context.grid.size(cut.axes) for n, cut in zip(local.shape, cuts, strict=True)
    )
