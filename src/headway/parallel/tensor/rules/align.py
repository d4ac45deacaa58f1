"""One law for elementwise functions, products and sums: dimensions with the same label are cut
alike.

Every operand names a label for each of its dimensions. Where one operand is cut along a label, the
others that have it whole take their part, and those without it are used differently by the ranks,
so that their gradients are summed. A label that the result does not have is summed over the ranks
that cut it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.parallel.tensor.context import Context, Refused
from headway.parallel.tensor.exchange import shared, summed, taken
from headway.parallel.tensor.split_tensor import WHOLE, Cut, SplitTensor, cuts_of, local_of, made

Labels = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Aligned:
    """Operands that fit each other.

    Attributes:
        locals: Their parts.
        cuts: Label -> how it is cut.
        context: Of all.
    """

    locals: list[Tensor]
    cuts: dict[Hashable, Cut]
    context: Context

    def result(self, local: Tensor, labels: Labels) -> Any:
        """The result: sums over labels that it does not have are still to be taken."""
        pending = "".join(cut.axes for label, cut in self.cuts.items() if label not in labels)
        local = summed(local, self.context.grid, pending)
        return made(local, [self.cuts.get(label, WHOLE) for label in labels], self.context)


def align(context: Context, given: Sequence[tuple[Any, Labels]]) -> Aligned:
    """Cut all operands alike.

    Args:
        context: Of the split ones.
        given: Operands with a label for each dimension; None for one of size 1 that is stretched.

    Raises:
        Refused: Operands are cut differently along a label, or two labels by the same axis.
    """
    cuts: dict[Hashable, Cut] = {}
    operands = sorted(enumerate(given), key=lambda entry: not entry[1][0].requires_grad)
    fitting = {}
    for number, (operand, labels) in operands:
        fitting[number] = _agreed(operand, labels, cuts), labels
    locals_ = [_fitted(context, *fitting[number], cuts) for number in range(len(operands))]
    return Aligned(locals_, cuts, context)


def _agreed(operand: Any, labels: Labels, cuts: dict[Hashable, Cut]) -> Any:
    """An operand that fits the cuts, to which it adds its own; a mask that does not comes whole."""
    own = {label: cut for label, cut in zip(labels, cuts_of(operand), strict=True) if cut.axes}
    for label, cut in own.items():
        elsewhere = "".join(other.axes for name, other in cuts.items() if name != label)
        if cuts.get(label, cut) != cut or set(elsewhere) & set(cut.axes):
            if operand.requires_grad:
                raise Refused(
                    f"its operands are cut differently: {cut} and {cuts.get(label, WHOLE)}"
                )
            return operand.full_tensor()
    cuts |= own
    return operand


def _fitted(context: Context, x: Any, labels: Labels, cuts: dict[Hashable, Cut]) -> Tensor:
    own, local, lacking = cuts_of(x), local_of(x), ""
    for label, cut in cuts.items():
        if label not in labels:
            lacking += cut.axes
            continue
        dim = labels.index(label)
        if own[dim] != cut:
            _check_activation(context, x)
            local = taken(local, context.grid, cut.axes, dim, cut.blocks)
    if lacking and local.requires_grad:
        local = shared(local, context.grid, lacking)
    return local


def _check_activation(context: Context, x: Any) -> None:
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
        raise Refused("it meets a whole activation")


def stretched(operands: Sequence[Any]) -> tuple[list[Labels], Labels]:
    """Labels of operands that are broadcast, and of the result: dimensions counted from the end."""
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    found: list[Labels] = []
    for x in operands:
        first = len(shape) - x.ndim
        found.append(
            [None if n == 1 and shape[first + d] != 1 else first + d for d, n in enumerate(x.shape)]
        )
    return found, list(range(len(shape)))


def elementwise(context: Context, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that computes each element of its result of one element of each operand."""
    operands = [x for x in (*args, *kwargs.values()) if is_tensor(x)]
    labels, out = stretched(operands)
    aligned = align(context, list(zip(operands, labels, strict=True)))
    if _in_place(func) and aligned.locals[0] is not local_of(operands[0]):
        raise Refused("in place, its result has to be cut as its first operand is")
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
