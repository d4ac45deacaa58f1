"""SplitTensor: this rank's part of a tensor, in the place of the whole one in the user's code.

Its layout is data: for each dimension a `DimensionCut` (equal parts over axes of a process grid, as
split layers have them) or a `RangeCut` (ranges of entries by rank, equal or not, as split samples
have them); `WHOLE_DIMENSION` where it is not cut. A tensor that is cut along no dimension is a
plain one. A sum that ranks have in parts is added up by the rule in which it arises.

Torch asks such an object what a function does (`__torch_function__`). The rule is the one that
`parallel.operator_rules` has for the operator's row and the kind of split. It computes what the
whole tensors would give, or raises `RuleRefused`; the context decides what becomes of that: an
error while training, a finding while the split of a model is inferred.

The class is deliberately no subclass of Tensor: an autograd function of the user's would take a
subclass for its own storage and lose the gradient; rules refuse to run inside of one. It is a
dataclass, so that a pipeline sends it from stage to stage as the parts it consists of, and a node
of torch's pytrees (`torch.utils._pytree`, private): there FSDP and DDP find the part to hang their
hooks on.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from headway.collective.collective_calls import CallListener, ignore_call
from headway.errors import PlanError
from headway.graph.ranges import Range
from headway.parallel.stages import user_line
from headway.plans.tensor_layout import AxisDivisor

SplitKind = Literal["layers", "space", "tables"]
OperatorRule = Callable[..., Any]


class RuleRefused(Exception):
    """A rule cannot do what it is asked for.

    Attributes:
        blocks: The number of blocks of its layer with which it could, if any; 0: none.
        needs: What the axes would have to divide.
        of: The operand that is cut as it must not be, if it is one of several.
    """

    def __init__(
        self, why: str, *, blocks: int = 0, needs: tuple[AxisDivisor, ...] = (), of: Any = None
    ) -> None:
        super().__init__(why)
        self.why, self.blocks, self.needs, self.of = why, blocks, needs, of


# How one dimension is cut.


@dataclass(frozen=True, slots=True)
class DimensionCut:
    """A dimension in equal parts.

    Attributes:
        axes: Of the grid, the major one first; "" for a whole dimension.
        blocks: The dimension is so many blocks, and each of them is cut: queries, keys and values
            in one layer are three.
    """

    axes: str = ""
    blocks: int = 1
    # In a message of a pipeline it is part of the structure and is not taken apart.
    whole_in_messages: ClassVar[bool] = True

    def __str__(self) -> str:
        """ "over j then i in 3 blocks"; "whole"."""
        if not self.axes:
            return "whole"
        blocks = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        return f"over {' then '.join(self.axes)}{blocks}"


WHOLE_DIMENSION = DimensionCut()


# Compared by identity: two axes of equal size and rank may be different ranks.
@dataclass(frozen=True, eq=False, slots=True)
class SpatialAxis:
    """Ranks among which one dimension is split.

    Attributes:
        group: Their process group; None: this rank alone, or nothing is moved.
        tell: Told what would be started where nothing is moved.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    tell: CallListener = ignore_call

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SpatialAxis:
        """The axis of a process group to which this process belongs."""
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


@dataclass(frozen=True, slots=True)
class RangeCut:
    """A dimension in ranges of entries.

    Attributes:
        ranges: By rank of the axis, what each owns: in order, without gaps.
    """

    axis: SpatialAxis
    ranges: tuple[Range, ...]
    whole_in_messages: ClassVar[bool] = True

    @property
    def extent(self) -> int:
        return self.ranges[-1][1]

    @property
    def own(self) -> Range:
        return self.ranges[self.axis.rank]

    def __str__(self) -> str:
        return "in ranges " + ", ".join(f"{start}:{stop}" for start, stop in self.ranges)


Cut = DimensionCut | RangeCut


# Functions of torch on parts are calls of the context that the parts belong to.


class SplitContext(ABC):
    """Over which ranks the tensors of one model are split, and what the user chose about it.

    Attributes:
        kind: The column of the table of operators that has its rules.
        remedy: What a user can do about an operator that has no rule.
    """

    kind: ClassVar[SplitKind]
    remedy: ClassVar[str]

    @property
    @abstractmethod
    def rules(self) -> Mapping[str, OperatorRule]:
        """The rules of this kind of split, `operator_rules.RULES[kind]`."""

    @abstractmethod
    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a function of torch on split tensors."""

    @abstractmethod
    def attribute(self, x: SplitTensor, name: str) -> Any:
        """An attribute of tensors that is no method, and not the same for part and whole."""

    @abstractmethod
    def wrap(self, local: Tensor, cuts: Sequence[Any]) -> Any:
        """The split tensor of a part; a plain tensor where nothing is cut."""

    @abstractmethod
    def gather(self, x: SplitTensor) -> Tensor:
        """The whole tensor, on every rank."""

    @abstractmethod
    def local_part(self, whole: Tensor, cuts: Sequence[Any]) -> Tensor:
        """This rank's part of a tensor that every rank has whole; no gradient is asked for.

        A dimension of one entry stays as it is.
        """

    @abstractmethod
    def sum_over_ranks(self, local: Tensor, cuts: Sequence[Any]) -> Tensor:
        """The sum over the ranks among which the given cuts split a dimension."""

    def run_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the function's rule.

        Raises:
            RuleRefused: There is none, or none for tensors that are cut so.
        """
        if in_autograd_function():
            raise RuleRefused(AUTOGRAD_FUNCTION)
        if any(x.context.kind != self.kind for x in split_tensors_in(args, kwargs)):
            raise RuleRefused("one operand is of a split layer, another one of a split sample")
        rule = self.rules.get(torch_function_name(func))
        if rule is None:
            raise RuleRefused("there is no rule that makes it equal to the unsplit model")
        return rule(self, func, *args, **kwargs)


AUTOGRAD_FUNCTION = (
    "a torch.autograd.Function of the model's own was given a part, which is no tensor for it: the "
    "gradient would be lost"
)


def in_autograd_function() -> bool:
    """Whether what runs is the forward pass of an autograd function, which sees no gradients."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    while frame is not None and frame.f_code is not apply:
        frame = frame.f_back
    return frame is not None


class TorchFunctionOperand:
    """Functions of torch on it are calls of its context."""

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
        first = next(x for x in leaves((args, keywords)) if isinstance(x, TorchFunctionOperand))
        return first.context.call(func, args, keywords)


class KnownShape:
    """What tensors answer of their shape, for what is no tensor and has one."""

    __slots__ = ()
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


# eq=False: `==` is torch's, element by element.
@dataclass(frozen=True, eq=False, repr=False)
class SplitTensor(KnownShape, TorchFunctionOperand):
    """This rank's part of a tensor, which answers for its shape as the whole one would.

    Attributes:
        local: What this rank has. All gradients flow through it.
        shape: Of the whole.
        cuts: One for each dimension; only those over more than one rank are named.
        origins: While a split is inferred, the weights that it comes from.
        parameter: It is a weight, or a view of one, cut as layers want weights.
    """

    local: Tensor
    shape: torch.Size
    cuts: tuple[Any, ...]
    context: Any
    origins: frozenset[str] = field(default_factory=frozenset)
    parameter: bool = False

    def like(self, local: Tensor, cuts: Sequence[Cut] | Mapping[int, Cut] | None = None) -> Any:
        """Another tensor of this context; a plain one where nothing is cut.

        Args:
            cuts: One for each dimension, or those of the dimensions that are cut, by number; None:
                as this tensor's.
        """
        if isinstance(cuts, Mapping):
            cuts = [cuts.get(dim, WHOLE_DIMENSION) for dim in range(local.ndim)]
        return self.context.wrap(local, self.cuts if cuts is None else cuts)

    @property
    def splits(self) -> dict[int, Any]:
        """The dimensions that are cut, by number, and how."""
        return {dim: cut for dim, cut in enumerate(self.cuts) if cut != WHOLE_DIMENSION}

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank."""
        whole: Tensor = self.context.gather(self)
        return whole

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))  # type: ignore[index]

    def __bool__(self) -> bool:
        raise unsupported_operator("bool()", self, "ranks would take different branches")

    def __repr__(self) -> str:
        cuts = ", ".join(f"{dim}: {cut}" for dim, cut in self.splits.items())
        return f"SplitTensor(shape={tuple(self.shape)}, cut {{{cuts}}}, local={self.local!r})"

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


def call_method(
    method: Callable[..., Any], x: TorchFunctionOperand, *args: Any, **kwargs: Any
) -> Any:
    """A method of torch.Tensor on a split one."""
    return x.__torch_function__(method, (), (x, *args), kwargs)


ATTRIBUTES_OF_PART = frozenset({
    "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "layout", "is_nested", "is_sparse",
    "is_floating_point", "is_complex", "element_size", "is_quantized", "is_meta", "get_device",
    "is_mkldnn",
})  # fmt: skip
"""What is the same for a part and for the whole."""


def _install_operators(*names: str) -> None:
    """Python's operators: "add" for `+`."""
    for name in names:
        method = getattr(Tensor, f"__{name}__")

        # The default binds this name's method: a closure would see the loop's last one.
        def operator(
            self: TorchFunctionOperand, *args: Any, _method: Callable[..., Any] = method
        ) -> Any:
            return self.__torch_function__(_method, (), (self, *args))

        setattr(TorchFunctionOperand, f"__{name}__", operator)


_install_operators(
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs",
    "matmul", "rmatmul", "mod", "floordiv", "rfloordiv", "eq", "ne", "lt", "le", "gt", "ge", "and",
    "or", "xor", "invert", "getitem", "setitem", "iadd", "isub", "imul", "itruediv",
)  # fmt: skip

_pytree.register_pytree_node(
    SplitTensor,
    lambda x: ([x.local], x),
    lambda leaves, x: replace(x, local=next(iter(leaves))),
)


# Names of functions, and the refusal of an operator.


def torch_function_name(func: Callable[..., Any]) -> str:
    """Of a function of torch; `Tensor.__add__` is "add"."""
    name = getattr(func, "__name__", repr(func))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def qualified_torch_name(func: Callable[..., Any]) -> str:
    """As the user writes it: torch.cumsum, Tensor.sort, torch.nn.functional.fold."""
    module = getattr(func, "__module__", None) or "Tensor"
    return f"{module.replace('torch._C._nn', 'torch.nn.functional')}.{torch_function_name(func)}"


_IN_PLACE = frozenset({
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__", "__ifloordiv__",
    "__iand__", "__ior__", "__ixor__", "__setitem__",
})  # fmt: skip
"""Operators of Python that change what is on their left."""


def modifies_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument in place, or another one (`out=`)."""
    name = func.__name__
    in_place = kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__"))
    return bool(in_place) or kwargs.get("out") is not None or name in _IN_PLACE


def unsupported_operator(name: str, x: SplitTensor, why: str) -> PlanError:
    """The error for an operator that is refused on a tensor."""
    dims = ", ".join(map(str, x.splits))
    return PlanError(
        f"{name} cannot be carried out on a tensor of shape {tuple(x.shape)} that is split over "
        f"dimension {dims}",
        problems=[why],
        where=user_line(),
        fix=x.context.remedy,
    )


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


def split_tensors_in(*values: Any) -> list[SplitTensor]:
    """All split tensors in nested arguments."""
    return [x for x in leaves(values) if isinstance(x, SplitTensor)]
