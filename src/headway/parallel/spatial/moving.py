"""Boxes of a tensor carried from one way to lie on several ranks to another, in one exchange.

As `exchange`, where not one dimension after the other is fetched but all of them change at once:
from slabs of all samples to all of some samples. Going back, contributions are added in the order
of the ranks: two runs agree to the last bit. Every rank takes part, be its own box empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headway.graph.ranges import Box, Way, length, ways
from headway.parallel.spatial.exchange import Axis, Flight


@dataclass(frozen=True, slots=True)
class Move:
    """How a tensor lies on the ranks of an axis, and how it shall lie.

    Attributes:
        axis: The ranks.
        have: By rank, the box that it has; boxes of two ranks are equal or apart.
        want: By rank, the box that it wants.
    """

    axis: Axis
    have: tuple[Box, ...]
    want: tuple[Box, ...]

    def go(self, x: Tensor) -> Tensor:
        """The wanted box, of the one that this rank has."""
        out = x.new_empty([length(side) for side in self.want[self.axis.rank]])
        for part, box in self._carry(x, self.have, ways(self.have, self.want)):
            _within(out, self.want[self.axis.rank], box).copy_(part)
        return out

    def back(self, gradient: Tensor) -> Tensor:
        """What is in all ranks' wanted boxes, added up in the box that this rank has."""
        out = gradient.new_zeros([length(side) for side in self.have[self.axis.rank]])
        turned = [(to, source, box) for source, to, box in ways(self.have, self.want)]
        for part, box in self._carry(gradient, self.want, turned):
            _within(out, self.have[self.axis.rank], box).add_(part)
        return out

    def _carry(
        self, x: Tensor, held: Sequence[Box], along: Sequence[Way]
    ) -> list[tuple[Tensor, Box]]:
        """What comes to this rank, its own part included, in the order of the ways."""
        me, flight = self.axis.rank, Flight(self.axis)
        found: list[tuple[Tensor, Box]] = []
        for source, to, box in along:
            part = _within(x, held[me], box) if source == me else None
            if to == me:
                here = x.new_empty([length(side) for side in box]) if part is None else part
                found.append((here, box))
                if part is None:
                    flight.receive(here, source)
            elif part is not None:
                flight.send(part, to)
        flight.depart()
        flight.land()
        return found


def _within(x: Tensor, held: Box, box: Box) -> Tensor:
    for dim, (have, want) in enumerate(zip(held, box, strict=True)):
        if have != want:
            x = x.narrow(dim, want[0] - have[0], length(want))
    return x


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, back: bool) -> Tensor:
        ctx.move, ctx.turned = move, back
        return move.back(x) if back else move.go(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        move: Move = ctx.move
        return (move.go(gradient) if ctx.turned else move.back(gradient)), None, None


def moved(x: Tensor, move: Move) -> Tensor:
    """The box that this rank wants; differentiable, all ranks of the axis call it."""
    if move.have == move.want:
        return x
    return _Moved.apply(x, move, False)  # type: ignore[no-untyped-call,no-any-return]


def collected(x: Tensor, move: Move) -> Tensor:
    """The adjoint of `moved`: a sum over ranks, of which each keeps its box; differentiable."""
    return _Moved.apply(x, move, True)  # type: ignore[no-untyped-call,no-any-return]
