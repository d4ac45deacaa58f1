"""How cuts go from operands to results: elementwise functions, products, sums, reshapes, joints.

Every operand has a label per dimension, and dimensions with the same label are cut alike: operands
that are whole along a label that another one cuts take their part, those without the label are
used differently by the ranks, so that their gradients are summed. A label that the result lacks is
summed over the ranks that cut it.

A cut dimension is a run of `outer x parts x inner` elements; a reshape keeps it cut where the new
dimensions have a border in front of the parts. What would need elements of other ranks is refused.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.parallel.layout_rules import size_list
from headway.parallel.split_tensor import (
    WHOLE_DIMENSION,
    DimensionCut,
    RuleRefused,
    SplitTensor,
    modifies_in_place,
)
from headway.parallel.tensor.grid import copy_to_ranks, reduce_from_ranks, scatter_to_ranks
from headway.parallel.tensor.layer_context import LayerContext, cuts_of, local_of
from headway.plans.tensor_layout import AxisDivisor

DimensionLabels = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class AlignedOperands:
    """Operands that fit each other.

    Attributes:
        cuts: Label -> how it is cut.
    """

    locals: list[Tensor]
    cuts: dict[Hashable, DimensionCut]
    context: LayerContext

    def result(self, local: Tensor, labels: DimensionLabels) -> Any:
        """The result: sums over labels that it does not have are still to be taken."""
        pending = "".join(cut.axes for label, cut in self.cuts.items() if label not in labels)
        local = reduce_from_ranks(local, self.context.grid, pending)
        return self.context.wrap(local, [self.cuts.get(label, WHOLE_DIMENSION) for label in labels])


def align_operands(
    context: LayerContext, given: Sequence[tuple[Any, DimensionLabels]]
) -> AlignedOperands:
    """Cut all operands alike.

    Args:
        given: Operands with a label for each dimension; None for one of size 1 that is stretched.

    Raises:
        RuleRefused: Operands are cut differently along a label, or two labels by the same axis.
    """
    cuts: dict[Hashable, DimensionCut] = {}
    # Operands with gradients say how labels are cut; masks come behind and may be made whole.
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
        # An axis of ranks can cut one label only.
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
    context: LayerContext, x: Any, labels: DimensionLabels, cuts: dict[Hashable, DimensionCut]
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


def _check_activation(context: LayerContext, x: Any) -> None:
    """In the classic form an activation is whole or stays cut from one layer to the next.

    A sum of both, as behind a projection into the residual stream, means that the layer is none
    of a pair; it is left whole.
    """
    if (
        context.infers
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


def elementwise(context: LayerContext, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that computes each element of its result of one element of each operand."""
    operands = [x for x in (*args, *kwargs.values()) if is_tensor(x)]
    labels, out = broadcast_labels(operands)
    aligned = align_operands(context, list(zip(operands, labels, strict=True)))
    if modifies_in_place(func, kwargs) and aligned.locals[0] is not local_of(operands[0]):
        raise RuleRefused("in place, its result has to be cut as its first operand is")
    parts = iter(aligned.locals)
    local = func(
        *(next(parts) if is_tensor(x) else x for x in args),
        **{key: next(parts) if is_tensor(x) else x for key, x in kwargs.items()},
    )
    # In place: the user's own object, as torch returns it.
    if isinstance(args[0], SplitTensor) and local is args[0].local:
        return args[0]
    return aligned.result(local, out)


def is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor | SplitTensor)


# Reshapes, joints, and what repeats or masks entries.


def reshape(context: LayerContext, func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Another shape for the same elements.

    Raises:
        RuleRefused: A cut dimension is joined or taken apart so that parts are no longer runs.
    """
    given = args or tuple(kwargs.values())
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        raise RuleRefused("it looks at the bits as another type")
    shape = size_list(given)
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = x.numel() // rest if rest else 0
    cuts = [WHOLE_DIMENSION] * len(shape)
    for old, new in _groups(list(x.shape), shape):
        cut_dims = [dim for dim in old if x.cuts[dim].axes]
        if len(cut_dims) > 1:
            raise RuleRefused("it joins two cut dimensions")
        if cut_dims:
            before = math.prod(x.shape[dim] for dim in old if dim < cut_dims[0])
            place, cut = _placed(
                context, x.cuts[cut_dims[0]], before, [shape[dim] for dim in new], x
            )
            cuts[new[place]] = cut
    local = [n // context.grid.size(cut.axes) for n, cut in zip(shape, cuts, strict=True)]
    return context.wrap(x.local.reshape(local), cuts)


def _groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of old and new dimensions with as many elements."""
    groups, i, k = [], 0, 0
    while i < len(old) or k < len(new):
        left: list[int] = []
        right: list[int] = []
        sizes = [1, 1]
        while True:
            if i < len(old) and ((sizes[0] <= sizes[1] and not left) or sizes[0] < sizes[1]):
                sizes[0] *= old[i]
                left.append(i)
                i += 1
            elif k < len(new) and (not right or sizes[1] < sizes[0]):
                sizes[1] *= new[k]
                right.append(k)
                k += 1
            elif sizes[0] == sizes[1]:
                break
            elif i < len(old):
                sizes[0] *= old[i]
                left.append(i)
                i += 1
            else:
                raise RuleRefused(f"{old} does not have as many elements as {new}")
        groups.append((left, right))
    return groups


def _placed(
    context: LayerContext, cut: DimensionCut, before: int, sizes: list[int], x: SplitTensor
) -> tuple[int, DimensionCut]:
    """The new dimension that is cut, and how; `before` counts the runs in front of the old one."""
    parts, outer = context.grid.size(cut.axes), before * cut.blocks
    prefix = 1
    for place, size in enumerate(sizes):
        if size > 1 and outer % prefix == 0:
            blocks = outer // prefix
            if size % (blocks * parts) == 0:
                return place, DimensionCut(cut.axes, blocks)
        prefix *= size
    # A layer whose outputs are taken apart into (3, heads, width), say, would fit in 3 blocks.
    real = [n for n in sizes if n > 1]
    blocks = real[0] if len(real) > 1 and before == 1 and real[1] % parts == 0 else 0
    need = AxisDivisor(
        cut.axes, real[0] if real else 1, "the first of the dimensions it is taken apart to"
    )
    raise RuleRefused(
        f"{real} cannot be cut into {parts} parts as {list(x.shape)} is",
        blocks=blocks,
        needs=(need,),
    )


def cat(context: LayerContext, func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    dim %= tensors[0].ndim
    cuts = cuts_of(tensors[0])
    if any(cuts_of(x) != cuts for x in tensors):
        raise RuleRefused("it joins tensors that are cut differently")
    if cuts[dim].axes:
        raise RuleRefused("it joins tensors along a cut dimension")
    return context.wrap(torch.cat([local_of(x) for x in tensors], dim), cuts)


def repeat_interleave(
    context: LayerContext,
    func: Any,
    x: SplitTensor,
    repeats: int,
    dim: int | None = None,
    **kwargs: Any,
) -> Any:
    if dim is None or not isinstance(repeats, int):
        raise RuleRefused("it repeats by a tensor, or without a dimension")
    return context.wrap(x.local.repeat_interleave(repeats, dim), x.cuts)


def triangle(context: LayerContext, func: Any, x: SplitTensor, diagonal: int = 0) -> Any:
    if any(cut.axes for cut in x.cuts[-2:]):
        raise RuleRefused("it takes a triangle of a cut dimension")
    return context.wrap(func(x.local, diagonal), x.cuts)
