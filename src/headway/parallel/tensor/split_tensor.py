"""SplitTensor: this rank's part of a tensor, in the place of the whole one in the user's code.

Every function of torch goes to a rule (`parallel.split_dispatch`). A rule either computes what the
whole tensors would give, or raises `RuleRefused`; the context decides what becomes of a refusal:
an error while training, a finding while the split is inferred. A function without a rule raises
with its name. A tensor that is cut along no dimension is a plain one, so code outside of split
layers never meets this class.

It is a dataclass, so that a pipeline sends it from stage to stage as the parts it consists of,
and a node of torch's pytrees (`torch.utils._pytree`, private): there FSDP hangs its hooks.

`align_operands` is the one law for elementwise functions, products and sums. Every operand has
a label per dimension, and dimensions with the same label are cut alike: operands that are whole
along a label that another one cuts take their part, those without the label are used
differently by the ranks, so that their gradients are summed. A label that the result lacks is
summed over the ranks that cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from headway.parallel.split_dispatch import (
    ATTRIBUTES_OF_PART,
    DispatchedOperand,
    PartialTensor,
    call_method,
    install_operators,
    leaves,
)
from headway.parallel.tensor.grid import (
    ProcessGrid,
    WeightPrefetch,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_to_ranks,
)
from headway.plans.tensor_layout import AxisDivisor

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


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How split layers are carried out.

    Attributes:
        keep: A cuboid's gathered operands are kept for backward; if not, gathered again.
        chunks: Pieces in which a cuboid scatters the sums of a product, each while the next one
            is computed.
        ahead: A cuboid's next weight is gathered while this layer computes.
    """

    keep: bool = True
    chunks: int = 1
    ahead: bool = True


class SplitContext:
    """The law for all split tensors of one model.

    It is no dataclass, so that messages of a pipeline take it for a constant.

    Args:
        rules: Function's name -> rule.
        companions: Names of weights whose input other weights take as well.

    Attributes:
        surveys: It decides what is split, and nothing is computed.
        ahead: Gathers the next layer's weight.
    """

    surveys = False
    ahead: WeightPrefetch | None = None

    def __init__(
        self,
        grid: ProcessGrid,
        settings: SplitSettings,
        rules: Mapping[str, OperatorRule],
        companions: frozenset[str] = frozenset(),
    ) -> None:
        self.grid, self.settings, self.rules = grid, settings, rules
        self.companions = companions

    @property
    def classic(self) -> bool:
        return self.grid.plan.form == "classic"

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a function of torch on split tensors."""
        raise NotImplementedError

    def leave(self, x: Any) -> Any:
        """A split tensor, whole, where it enters what is split otherwise."""
        raise NotImplementedError

    def attribute(self, x: SplitTensor, name: str) -> Any:
        """An attribute of tensors that is no method: transposes alone are known."""
        if name in ("T", "mT"):
            return x.transpose(-2, -1)
        raise AttributeError(f"a split tensor has no {name}")

    # Parameters are undecided only while a split is inferred (`model.split_inference`).

    def resolve(self, parameter: Any) -> Any:
        """An undecided parameter that is to be used as it is."""
        raise NotImplementedError

    def decide_linear(
        self, x: Any, weight: Any, bias: Any, *, flipped: bool = False, blocks: int = 1
    ) -> tuple[Any, Any]:
        """How the weight and the bias of a linear layer are cut.

        Args:
            weight: Undecided; [outputs, inputs].
            bias: Undecided or None.
            flipped: The weight is [inputs, outputs].
            blocks: Of its outputs, where they are known.
        """
        raise NotImplementedError

    def decide_table(self, index: Any, weight: Any) -> Any:
        """How the weight of an embedding is cut."""
        raise NotImplementedError

    def decide_vector(self, weight: Any, cut: Any) -> Any:
        """A vector of parameters, cut as the activations that it scales."""
        raise NotImplementedError


# A tensor of which this rank has a part, in the place of the whole one in the user's code.


@dataclass(frozen=True, slots=True)
class DimensionCut:
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


WHOLE_DIMENSION = DimensionCut()


def describe_cuts(cuts: Sequence[DimensionCut]) -> str:
    """ "[over j, whole]"."""
    return f"[{', '.join(map(str, cuts))}]"


@dataclass(frozen=True, eq=False)
class SplitTensor(PartialTensor):
    """This rank's part of a tensor.

    Attributes:
        cuts: One for each dimension; only axes with more than one rank are named.
        origins: In a survey, the weights whose split it comes from.
        parameter: It is a weight, or a view of one, cut as layers want weights.
    """

    local: Tensor
    shape: torch.Size
    cuts: tuple[DimensionCut, ...]
    context: SplitContext
    origins: frozenset[str] = field(default_factory=frozenset)
    parameter: bool = False

    def __bool__(self) -> bool:
        return bool(call_method(Tensor.__bool__, self))

    def __repr__(self) -> str:
        cuts = ", ".join(f"{number}: {cut}" for number, cut in enumerate(self.cuts) if cut.axes)
        return f"SplitTensor(shape={tuple(self.shape)}, cut {{{cuts}}}, local={self.local!r})"

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank."""
        x = self.local
        for dim, cut in enumerate(self.cuts):
            x = gather_from_ranks(x, self.context.grid, cut.axes, dim, cut.blocks)
        return x


@dataclass(frozen=True, eq=False)
class UndecidedParameter(DispatchedOperand):
    """In a survey, a parameter whose split is not decided yet.

    Attributes:
        name: Its logical name.
    """

    name: str
    tensor: Tensor
    context: SplitContext

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES_OF_PART or name in ("shape", "ndim"):
            return getattr(self.tensor, name)
        return getattr(self.context.resolve(self), name)


for _class in (SplitTensor, UndecidedParameter):
    install_operators(_class, "iadd", "isub", "imul", "itruediv")
_pytree.register_pytree_node(
    SplitTensor,
    lambda x: ([x.local], x),
    lambda leaves, x: replace(x, local=next(iter(leaves))),
)


def wrap_local_part(
    local: Tensor,
    cuts: Sequence[DimensionCut],
    context: SplitContext,
    origins: frozenset[str] = frozenset(),
) -> Any:
    """A split tensor of a part; a plain tensor where nothing is cut."""
    real = tuple(without_unit_axes(cut, context) for cut in cuts)
    if all(cut is WHOLE_DIMENSION for cut in real):
        return local
    shape = shape_of(local, real, context)
    return SplitTensor(local, shape, real, context, origins)


def without_unit_axes(cut: DimensionCut, context: SplitContext) -> DimensionCut:
    """Without the axes that have one rank."""
    size = context.grid.size
    axes = "".join(axis for axis in cut.axes if size(axis) > 1)
    if not axes:
        return WHOLE_DIMENSION
    return DimensionCut(axes, cut.blocks if axes[0] == cut.axes[0] else 1)


def cuts_of(x: Any) -> tuple[DimensionCut, ...]:
    """One for each dimension, of a plain tensor as well."""
    return x.cuts if isinstance(x, SplitTensor) else (WHOLE_DIMENSION,) * x.ndim


def local_of(x: Any) -> Tensor:
    found: Tensor = x.local if isinstance(x, SplitTensor) else x
    return found


def shape_of(local: Tensor, cuts: Sequence[DimensionCut], context: SplitContext) -> torch.Size:
    return torch.Size(
        n * context.grid.size(cut.axes) for n, cut in zip(local.shape, cuts, strict=True)
    )


def split_tensors_in(*values: Any) -> list[Any]:
    """All split tensors in nested arguments."""
    return [x for x in leaves(values) if isinstance(x, SplitTensor)]


def with_origins(result: Any, origins: frozenset[str]) -> Any:
    """The result, with the weights that its split comes from."""
    if isinstance(result, SplitTensor):
        return result if result.origins or not origins else replace(result, origins=origins)
    if type(result) in (tuple, list):
        return type(result)(with_origins(entry, origins) for entry in result)
    return result


# One law for elementwise functions, products and sums: dimensions with the same label are cut
# alike.


DimensionLabels = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class AlignedOperands:
    """Operands that fit each other.

    Attributes:
        cuts: Label -> how it is cut.
    """

    locals: list[Tensor]
    cuts: dict[Hashable, DimensionCut]
    context: SplitContext

    def result(self, local: Tensor, labels: DimensionLabels) -> Any:
        """The result: sums over labels that it does not have are still to be taken."""
        pending = "".join(cut.axes for label, cut in self.cuts.items() if label not in labels)
        local = reduce_from_ranks(local, self.context.grid, pending)
        return wrap_local_part(
            local, [self.cuts.get(label, WHOLE_DIMENSION) for label in labels], self.context
        )


def align_operands(
    context: SplitContext, given: Sequence[tuple[Any, DimensionLabels]]
) -> AlignedOperands:
    """Cut all operands alike.

    Args:
        given: Operands with a label for each dimension; None for one of size 1 that is stretched.

    Raises:
        Refused: Operands are cut differently along a label, or two labels by the same axis.
    """
    cuts: dict[Hashable, DimensionCut] = {}
    operands = sorted(enumerate(given), key=lambda entry: not entry[1][0].requires_grad)
    fitting = {}
    for number, (operand, labels) in operands:
        fitting[number] = _agreed(operand, labels, cuts), labels
    locals_ = [_fitted(context, *fitting[number], cuts) for number in range(len(operands))]
    return AlignedOperands(locals_, cuts, context)


def _agreed(operand: Any, labels: DimensionLabels, cuts: dict[Hashable, DimensionCut]) -> Any:
    """An operand that fits the cuts, to which it adds its own; a mask that does not comes whole."""
    own = {label: cut for label, cut in zip(labels, cuts_of(operand), strict=True) if cut.axes}
    for label, cut in own.items():
        elsewhere = "".join(other.axes for name, other in cuts.items() if name != label)
        if cuts.get(label, cut) != cut or set(elsewhere) & set(cut.axes):
            if operand.requires_grad:
                raise RuleRefused(
                    f"its operands are cut differently: {cut} and "
                    f"{cuts.get(label, WHOLE_DIMENSION)}"
                )
            return operand.full_tensor()
    cuts |= own
    return operand


def _fitted(
    context: SplitContext, x: Any, labels: DimensionLabels, cuts: dict[Hashable, DimensionCut]
) -> Tensor:
    own, local, lacking = cuts_of(x), local_of(x), ""
    for label, cut in cuts.items():
        if label not in labels:
            lacking += cut.axes
            continue
        dim = labels.index(label)
        if own[dim] != cut:
            _check_activation(context, x)
            local = scatter_to_ranks(local, context.grid, cut.axes, dim, cut.blocks)
    if lacking and local.requires_grad:
        local = copy_to_ranks(local, context.grid, lacking)
    return local


def _check_activation(context: SplitContext, x: Any) -> None:
    """In the classic form an activation is whole or stays cut from one layer to the next.

    A sum of both, as behind a projection into the residual stream, means that the layer is none
    of a pair; it is left whole.
    """
    if (
        context.surveys
        and context.classic
        and isinstance(x, Tensor)
        and x.requires_grad
        and not x.is_leaf
    ):
        raise RuleRefused("it meets a whole activation")


def broadcast_labels(operands: Sequence[Any]) -> tuple[list[DimensionLabels], DimensionLabels]:
    """Labels of operands that are broadcast, and of the result: dimensions counted from the end."""
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    found: list[DimensionLabels] = []
    for x in operands:
        first = len(shape) - x.ndim
        found.append(
            [None if n == 1 and shape[first + d] != 1 else first + d for d, n in enumerate(x.shape)]
        )
    return found, list(range(len(shape)))


def elementwise(context: SplitContext, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that computes each element of its result of one element of each operand."""
    operands = [x for x in (*args, *kwargs.values()) if is_tensor(x)]
    labels, out = broadcast_labels(operands)
    aligned = align_operands(context, list(zip(operands, labels, strict=True)))
    if _in_place(func) and aligned.locals[0] is not local_of(operands[0]):
        raise RuleRefused("in place, its result has to be cut as its first operand is")
    parts = iter(aligned.locals)
    local = func(
        *(next(parts) if is_tensor(x) else x for x in args),
        **{key: next(parts) if is_tensor(x) else x for key, x in kwargs.items()},
    )
    if isinstance(args[0], SplitTensor) and local is args[0].local:
        return args[0]
    return aligned.result(local, out)


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i")
        and name
        not in (
            "__invert__",
            "__int__",
        )
    )


def is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor | SplitTensor)
