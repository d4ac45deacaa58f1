"""A tensor of which every rank holds a part, on which torch's functions work as on the whole.

Torch asks such an object what a function does (`__torch_function__`); the answers are the rules of
`table`. A function without a rule raises: there is no silent wrong number. It is no subclass of
Tensor on purpose: an autograd function of the user's would take a subclass for its own storage and
lose the gradient; here that is noticed (`severed`). A dataclass and a node of torch's trees
(`torch.utils._pytree`, private): there FSDP and DDP find the part to hang their hooks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from headway.errors import PlanError
from headway.graph.ranges import Range
from headway.parallel.spatial.exchange import Axis, Need
from headway.parallel.spatial.fetch import fetch_box
from headway.parallel.spatial.moving import Move, moved

if TYPE_CHECKING:
    from headway.parallel.spatial.context import SpatialContext

REMEDY = "Gather it first: headway.parallel.spatial.gather(x) gives the whole tensor."


@dataclass(frozen=True, slots=True)
class Split:
    """How one dimension is split.

    Attributes:
        axis: The ranks among which.
        ranges: By rank of the axis, what each owns: in order, without gaps.
    """

    axis: Axis
    ranges: tuple[Range, ...]
    whole_in_messages: ClassVar[bool] = True

    @property
    def extent(self) -> int:
        """Of the whole dimension."""
        return self.ranges[-1][1]

    @property
    def own(self) -> Range:
        """What this rank owns."""
        return self.ranges[self.axis.rank]

    def same(self, other: Split) -> bool:
        """Whether both give the same elements to the same ranks."""
        return self.axis is other.axis and self.ranges == other.ranges


Splits = Mapping[int, Split]
"""Dimension, counted from 0, to how it is split; the others are whole on every rank."""


@dataclass(slots=True, eq=False, repr=False)
class SplitTensor:
    """A part of a tensor that knows the whole.

    Attributes:
        local: What this rank owns. All gradients flow through it.
        splits: Which dimensions are split, and how.
        context: The mesh, and the choices of the user.
        shape: Of the whole.
        severed: Computed without gradients from something that has them.
    """

    local: Tensor
    splits: dict[int, Split]
    context: SpatialContext
    severed: bool = False
    shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        sizes = list(self.local.shape)
        for dim, split in self.splits.items():
            sizes[dim] = split.extent
        self.shape = torch.Size(sizes)

    def like(self, local: Tensor, splits: Splits | None = None) -> Any:
        """Another tensor of this mesh; a plain one where nothing is split."""
        chosen = self.splits if splits is None else splits
        return SplitTensor(local, dict(chosen), self.context) if chosen else local

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from headway.parallel.spatial.table import answer

        keywords = kwargs or {}
        found = list(split_tensors((args, tuple(keywords.values()))))
        grad = torch.is_grad_enabled()
        if grad and any(x.severed for x in found) and func is not Tensor.detach:
            raise _lost(name_of(func))
        result = answer(func, found, args, keywords)
        if not grad and func is not Tensor.detach:
            lost = any(x.severed or x.local.requires_grad for x in found)
            for out in split_tensors((result,)):
                out.severed |= lost
        return result

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors, by their rules; an attribute that has none does not exist."""
        method = getattr(Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(f"a split tensor has no attribute {name!r}")
        if not callable(method):
            if self.by_samples:
                return getattr(gather(self), name)
            raise unsupported(f"Tensor.{name}", self)
        return _bound(self, method)

    @property
    def by_samples(self) -> bool:
        """Whether this rank has whole samples, of which others have others."""
        return _by_samples(self.splits.values(), self.context)

    def size(self, dim: int | None = None) -> Any:
        """Sizes of the whole, or of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    ndimension = dim
    ndim = property(dim)

    def numel(self) -> int:
        """Elements of the whole."""
        return self.shape.numel()

    nelement = numel
    dtype = property(lambda self: self.local.dtype)
    device = property(lambda self: self.local.device)
    layout = property(lambda self: self.local.layout)
    requires_grad = property(lambda self: self.local.requires_grad)
    is_cuda = property(lambda self: self.local.is_cuda)
    is_cpu = property(lambda self: self.local.is_cpu)
    is_quantized = property(lambda self: False)
    is_sparse = property(lambda self: False)
    is_nested = property(lambda self: False)

    def is_floating_point(self) -> bool:
        """Of the elements."""
        return self.local.is_floating_point()

    def is_complex(self) -> bool:
        """Of the elements."""
        return self.local.is_complex()

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise unsupported("bool()", self)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return self.__torch_function__(Tensor.__getitem__, (), (self, index))

    def __repr__(self) -> str:
        parts = {dim: list(split.ranges) for dim, split in self.splits.items()}
        return f"SplitTensor(shape={tuple(self.shape)}, own={tuple(self.local.shape)}, {parts})"


def _bound(x: SplitTensor, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return SplitTensor.__torch_function__(method, (), (x, *args), kwargs)

    return call


def _put_together(
    local: Any, splits: Splits, context: SpatialContext, shape: torch.Size, severed: bool
) -> SplitTensor:
    """The way back of torch's trees, of whatever they have made of the part."""
    x = SplitTensor.__new__(SplitTensor)
    x.local, x.splits, x.context = local, dict(splits), context
    x.shape, x.severed = shape, severed
    return x


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def call(self: SplitTensor, *args: Any) -> Any:
        return SplitTensor.__torch_function__(method, (), (self, *args))

    return call


OPERATORS = (
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for side in "ri"),
    *(f"__{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "neg", "abs", "invert")),
    *(f"__{name}__" for name in ("matmul", "rmatmul", "mod", "floordiv", "rfloordiv")),
    *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor")),
)
for _name in OPERATORS:
    setattr(SplitTensor, _name, _operator(_name))
_pytree.register_pytree_node(
    SplitTensor,
    lambda x: ([x.local], (x.splits, x.context, x.shape, x.severed)),
    lambda leaves, facts: _put_together(next(iter(leaves)), *facts),
)
SplitTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


def split_tensors(values: Any) -> Iterator[SplitTensor]:
    """All split tensors among arguments, in lists and tuples, too."""
    for value in values:
        if isinstance(value, SplitTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from split_tensors(value)


def name_of(func: Callable[..., Any]) -> str:
    """As the user writes it: torch.cumsum, Tensor.sort, torch.nn.functional.fold."""
    module = getattr(func, "__module__", None) or "Tensor"
    return f"{module.replace('torch._C._nn', 'torch.nn.functional')}.{func.__name__}"


def unsupported(name: str, x: SplitTensor, why: str = "", fix: str = "") -> PlanError:
    """The refusal of an operator."""
    dims = ", ".join(str(dim) for dim in x.splits)
    return PlanError(
        f"{name} is not possible on an activation of shape {tuple(x.shape)} that is split over "
        f"dimension {dims}",
        problems=[why or "there is no rule that makes it equal to the unsplit model"],
        fix=fix or REMEDY,
    )


def _lost(name: str) -> PlanError:
    return PlanError(
        f"{name} was given a split activation that was computed without gradients",
        problems=[
            "it comes out of torch.no_grad() or of a torch.autograd.Function of the model's own, "
            "whose gradient would be lost"
        ],
        fix="Write .detach() where that is meant; around a function of your own, gather first (in "
        "a head, a plan does: split.head = 'gathered').",
    )


def from_right(x: Any) -> dict[int, Split]:
    """Splits by dimension counted from the end: -1 is the last."""
    return {dim - len(x.shape): split for dim, split in x.splits.items()}


def lay(x: SplitTensor | Tensor, target: Splits) -> Tensor:
    """The part of a tensor, split or whole, that a layout gives to this rank.

    Args:
        x: The tensor.
        target: By dimension counted from the end. Where it has more, a dimension of one entry
            stays as it is.
    """
    have = from_right(x) if isinstance(x, SplitTensor) else {}
    local = x.local if isinstance(x, SplitTensor) else x
    if isinstance(x, SplitTensor) and x.by_samples != _by_samples(target.values(), x.context):
        return _relaid(x, target)
    needs = []
    for dim, split in target.items():
        if -dim > len(x.shape) or (x.shape[dim] == 1 and split.extent > 1):
            continue
        _check_extent(x, dim, split)
        if dim not in have:
            local = local.narrow(dim, split.own[0], split.own[1] - split.own[0])
        elif not have[dim].same(split):
            if have[dim].axis is not split.axis:
                raise unsupported("joining", x, "the other one is split over other ranks")  # type: ignore[arg-type]
            needs.append(Need(len(x.shape) + dim, split.axis, have[dim].ranges, split.ranges))
    return fetch_box(local, needs) if needs else local


def _by_samples(splits: Iterable[Split], context: SpatialContext) -> bool:
    return any(split.axis is context.everyone for split in splits)


def _check_extent(x: SplitTensor | Tensor, dim: int, split: Split) -> None:
    if x.shape[dim] != split.extent:
        raise PlanError(
            f"shapes do not match: {tuple(x.shape)} against a dimension of {split.extent}",
            problems=[f"dimension {dim} has {x.shape[dim]} entries"],
            fix="Give the whole tensor, or its part as a split one (SpatialContext.adopt).",
        )


def _relaid(x: SplitTensor, target: Splits) -> Tensor:
    """`lay`, from parts of space to whole samples or back."""
    wanted = {}
    for dim, split in target.items():
        if -dim <= x.dim() and (x.shape[dim] != 1 or split.extent == 1):
            _check_extent(x, dim, split)
            wanted[x.dim() + dim] = split
    return carried(x, wanted)


def carried(x: SplitTensor, splits: Splits) -> Tensor:
    """The part of a tensor that other splits give to this rank, in one exchange of all ranks."""
    everyone = x.context.everyone
    assert everyone is not None
    boxes = x.context.boxes(x.shape, x.splits), x.context.boxes(x.shape, splits)
    return moved(x.local, Move(everyone, *boxes))


def gather(x: Any) -> Any:
    """The whole tensor on every rank; what is no split tensor is returned as it is."""
    if not isinstance(x, SplitTensor):
        return x
    needs = [
        Need(dim, split.axis, split.ranges, ((0, split.extent),) * split.axis.size)
        for dim, split in x.splits.items()
    ]
    return fetch_box(x.local, needs)
