"""Halo exchange: boxes of a tensor that lies in parts on several ranks, fetched and returned.

A fetch goes one dimension after the other, so that corners come through a neighbour. A rank
keeps what it received as thin pieces; the box is laid out once, padding included. A
redistribution (`BoxRedistribution`) changes all dimensions in one exchange, from slabs of all
samples to all of some samples, say. Only ranks whose ranges overlap exchange messages, and
every rank takes part, be its own box empty.

On the way back, contributions are added in the order of the ranks: two runs agree to the last
bit. What a rank computes is its own copy of the loss, and the objective is the sum over all
ranks; each differentiable function here has the exact adjoint of that. A loss that is the same
number on p ranks therefore counts p times: divide by p, and add gradients over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from headway.capture.fake_tensors import is_fake
from headway.errors import RunError
from headway.graph.ranges import (
    Box,
    BoxTransfer,
    Range,
    box_transfers,
    range_exchange,
    range_intersection,
    range_length,
)
from headway.parallel.split_tensor import SpatialAxis

SINGLE_RANK_AXIS = SpatialAxis()


@dataclass(frozen=True, slots=True)
class RangeExchange:
    """What is wanted along one dimension.

    Attributes:
        axis: The ranks that hold it; SINGLE_RANK_AXIS: this rank has all of it.
        have: By rank of the axis, what each owns.
        want: By rank, what each wants; beyond the tensor there is padding.
    """

    dim: int
    axis: SpatialAxis
    have: tuple[Range, ...]
    want: tuple[Range, ...]

    @property
    def own(self) -> Range:
        """What this rank owns."""
        return self.have[self.axis.rank]

    @property
    def wish(self) -> Range:
        """What this rank wants, padding included."""
        return self.want[self.axis.rank]

    @property
    def real(self) -> Range:
        """What this rank wants of the tensor itself."""
        return range_intersection(self.wish, (0, self.have[-1][1]))


@dataclass(frozen=True, slots=True)
class BoxPiece:
    """A part of the tensor: `box` has a range for each of the needs."""

    part: Tensor
    box: Box


class AxisMessages:
    """Messages under way between the ranks of one axis."""

    def __init__(self, axis: SpatialAxis) -> None:
        self._axis = axis
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []
        self._kept: list[Tensor] = []

    def send(self, part: Tensor, peer: int) -> None:
        if self._axis.group is None:
            self._axis.tell("send", 2, part.nbytes)
        else:
            self._add(dist.isend, part.contiguous(), peer)

    def receive(self, into: Tensor, peer: int) -> None:
        if self._axis.group is None:
            self._axis.tell("receive", 2, into.nbytes)
        else:
            self._add(dist.irecv, into, peer)

    def _add(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
        self._kept.append(tensor)  # until the message has left
        self._operations.append(
            dist.P2POp(operation, tensor, group=self._axis.group, group_peer=peer)
        )

    def depart(self) -> None:
        if self._operations:
            # In one batch: NCCL may wait for ever where two ranks start theirs in different orders.
            self._works = dist.batch_isend_irecv(self._operations)

    def land(self) -> None:
        """Until all of them have been sent and received."""
        for work in self._works:
            work.wait()
        self._works, self._kept = [], []


class HaloFetch:
    """The exchange of a fetch: the first dimension's messages are under way once it is made."""

    def __init__(self, x: Tensor, needs: Sequence[RangeExchange]) -> None:
        self._x = x
        # Along the other dimensions this rank has everything.
        self._needs = [need for need in needs if need.axis.size > 1]
        self._all = tuple(needs)
        self.pieces = [BoxPiece(x, tuple(need.own for need in needs))]
        self._stage = 0
        self._flight, self._coming = self._depart()

    def _depart(self) -> tuple[AxisMessages | None, list[BoxPiece]]:
        """Start the messages of the stage that is due."""
        if self._stage >= len(self._needs):
            return None, []
        need = self._needs[self._stage]
        sends, receives = range_exchange(need.axis.rank, need.have, need.want)
        flight, coming = AxisMessages(need.axis), []
        for peer, part in sends:
            # Both ends know the box, so that both leave out a message without elements.
            box = self._box(need, part)
            if all(map(range_length, box)):
                flight.send(box_from_pieces(self.pieces, box, self._all), peer)
        for peer, part in receives:
            box = self._box(need, part)
            if all(map(range_length, box)):
                piece = BoxPiece(_empty(self._x, box, self._all), box)
                flight.receive(piece.part, peer)
                coming.append(piece)
        flight.depart()
        return flight, coming

    def _box(self, now: RangeExchange, part: Range) -> Box:
        """`part` of this stage's dimension, what was fetched of those before, own of the rest."""
        done = self._needs[: self._stage]
        return tuple(
            part if need is now else need.real if need in done else need.own for need in self._all
        )

    def finish(self) -> list[BoxPiece]:
        """Wait for the messages, and exchange those of the dimensions that follow."""
        while self._flight is not None:
            self._flight.land()
            self.pieces += self._coming
            self._stage += 1
            self._flight, self._coming = self._depart()
        return self.pieces


def box_from_pieces(pieces: Sequence[BoxPiece], box: Box, needs: Sequence[RangeExchange]) -> Tensor:
    """The tensor of a box that the pieces cover."""
    for piece in pieces:
        if all(b[0] >= p[0] and b[1] <= p[1] for b, p in zip(box, piece.box, strict=True)):
            return _narrow(piece.part, piece.box, box, needs).contiguous()
    whole = _empty(pieces[0].part, box, needs)
    _copy(whole, box, pieces, needs)
    return whole


def assemble_box(
    pieces: Sequence[BoxPiece], needs: Sequence[RangeExchange], fill: float = 0.0
) -> Tensor:
    """The box that this rank wants: one allocation, padding filled in."""
    first, wish = pieces[0], tuple(need.wish for need in needs)
    if wish == first.box:
        return first.part
    out = _empty(first.part, wish, needs)
    for need, (start, stop) in zip(needs, wish, strict=True):
        # Of a box that is padding only, the first of the two fills everything.
        low, high = need.real if range_length(need.real) else (stop, stop)
        out.narrow(need.dim, 0, low - start).fill_(fill)
        out.narrow(need.dim, high - start, stop - high).fill_(fill)
    _copy(out, wish, pieces, needs)
    return out


def _copy(
    into: Tensor, box: Box, pieces: Sequence[BoxPiece], needs: Sequence[RangeExchange]
) -> None:
    for piece in pieces:
        common = tuple(range_intersection(b, p) for b, p in zip(box, piece.box, strict=True))
        if all(map(range_length, common)):
            source = _narrow(piece.part, piece.box, common, needs)
            _narrow(into, box, common, needs).copy_(source)


def _narrow(part: Tensor, held: Box, box: Box, needs: Sequence[RangeExchange]) -> Tensor:
    return narrow_to_box(part, held, box, [need.dim for need in needs])


def narrow_to_box(
    part: Tensor, held: Sequence[Range], box: Sequence[Range], dims: Iterable[int]
) -> Tensor:
    """The view of a box, of a part that covers it; a range for each of the dimensions."""
    for dim, have, want in zip(dims, held, box, strict=True):
        if have != want:
            part = part.narrow(dim, want[0] - have[0], range_length(want))
    return part


def _empty(like: Tensor, box: Box, needs: Sequence[RangeExchange]) -> Tensor:
    shape = list(like.shape)
    for need, held in zip(needs, box, strict=True):
        shape[need.dim] = range_length(held)
    return like.new_empty(shape)


class HaloGradientReturn:
    """The way back of a fetch: adds the gradients of what others fetched to their owner's.

    Args:
        gradient: Of the box that this rank wanted.
        spare: Nobody else holds the gradient: it may be written to.
    """

    def __init__(
        self, gradient: Tensor, needs: Sequence[RangeExchange], *, spare: bool = False
    ) -> None:
        self._spare = spare
        wish = tuple(need.wish for need in needs)
        real = tuple(need.real for need in needs)
        if not all(map(range_length, real)):
            self._sum = _empty(gradient, real, needs)
        else:
            self._sum = _narrow(gradient, wish, real, needs)
        alone = [need for need in needs if need.axis.size == 1]
        self._left = [need for need in needs if need.axis.size > 1]
        for need in alone:
            self._sum = _own(self._sum, need)
        self._flight, self._coming = self._depart()

    def _depart(self) -> tuple[AxisMessages | None, list[tuple[Tensor, Range]]]:
        if not self._left:
            return None, []
        # Dimensions in the reverse order of the fetch: corners go back by the way that they came.
        need = self._left[-1]
        # Fetched and owned exchange roles: what was received is now sent.
        receives, sends = range_exchange(need.axis.rank, need.have, need.want)
        flight = AxisMessages(need.axis)
        coming: list[tuple[Tensor, Range]] = []
        shape = list(self._sum.shape)
        shape[need.dim] = 1
        if 0 not in shape:
            for peer, part in sends:
                start = part[0] - need.real[0]
                flight.send(self._sum.narrow(need.dim, start, range_length(part)), peer)
            for peer, part in receives:
                shape[need.dim] = range_length(part)
                coming.append((self._sum.new_empty(shape), part))
                flight.receive(coming[-1][0], peer)
        flight.depart()
        return flight, coming

    def finish(self) -> Tensor:
        """The gradient of what this rank owns."""
        while self._flight is not None:
            need = self._left.pop()
            self._sum = _own(self._sum, need)
            if not self._spare:
                # Autograd may have given the same gradient to others as well.
                self._sum = self._sum.clone(memory_format=torch.contiguous_format)
                self._spare = True
            self._flight.land()
            for part, (start, _) in self._coming:
                into = self._sum.narrow(need.dim, start - need.own[0], part.shape[need.dim])
                into.add_(part)
            self._flight, self._coming = self._depart()
        return self._sum


def _own(held: Tensor, need: RangeExchange) -> Tensor:
    """Of the gradient of what was wanted that of what is owned; 0 where that was not wanted."""
    common = range_intersection(need.own, need.real)
    start = common[0] - need.real[0]
    part = held.narrow(need.dim, start, range_length(common)) if range_length(common) else None
    if common == need.own and part is not None:
        return part
    shape = list(held.shape)
    shape[need.dim] = range_length(need.own)
    out = held.new_zeros(shape)
    if part is not None:
        out.narrow(need.dim, common[0] - need.own[0], range_length(common)).copy_(part)
    return out


def ordered_all_reduce(x: Tensor, axis: SpatialAxis) -> Tensor:
    """The sum over an axis, in the order of its ranks: the same bits on all of them."""
    if axis.size == 1:
        return x
    total, *others = ordered_all_gather(x, axis)
    for part in others:
        total = total + part
    return total


def ordered_all_gather(x: Tensor, axis: SpatialAxis) -> list[Tensor]:
    """What each rank of an axis of several has, in their order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    if axis.group is None:
        axis.tell("all_gather", axis.size, x.nbytes * axis.size)
    else:
        dist.all_gather(parts, x.contiguous(), group=axis.group)
    return parts


# Boxes of a tensor carried from one way to lie on several ranks to another, in one exchange.


@dataclass(frozen=True, slots=True)
class BoxRedistribution:
    """How a tensor lies on the ranks of an axis, and how it shall lie.

    Attributes:
        have: By rank, the box that it has; boxes of two ranks are equal or apart.
        want: By rank, the box that it wants.
    """

    axis: SpatialAxis
    have: tuple[Box, ...]
    want: tuple[Box, ...]

    def go(self, x: Tensor) -> Tensor:
        """The wanted box, of the one that this rank has."""
        out = x.new_empty([range_length(side) for side in self.want[self.axis.rank]])
        for part, box in self._carry(x, self.have, box_transfers(self.have, self.want)):
            _within(out, self.want[self.axis.rank], box).copy_(part)
        return out

    def back(self, gradient: Tensor) -> Tensor:
        """What is in all ranks' wanted boxes, added up in the box that this rank has."""
        out = gradient.new_zeros([range_length(side) for side in self.have[self.axis.rank]])
        turned = [(to, source, box) for source, to, box in box_transfers(self.have, self.want)]
        for part, box in self._carry(gradient, self.want, turned):
            _within(out, self.have[self.axis.rank], box).add_(part)
        return out

    def _carry(
        self, x: Tensor, held: Sequence[Box], along: Sequence[BoxTransfer]
    ) -> list[tuple[Tensor, Box]]:
        """What comes to this rank, its own part included, in the order of the ways."""
        me, flight = self.axis.rank, AxisMessages(self.axis)
        found: list[tuple[Tensor, Box]] = []
        for source, to, box in along:
            part = _within(x, held[me], box) if source == me else None
            if to == me:
                here = x.new_empty([range_length(side) for side in box]) if part is None else part
                found.append((here, box))
                if part is None:
                    flight.receive(here, source)
            elif part is not None:
                flight.send(part, to)
        flight.depart()
        flight.land()
        return found


def _within(x: Tensor, held: Box, box: Box) -> Tensor:
    return narrow_to_box(x, held, box, range(x.ndim))


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: BoxRedistribution, back: bool) -> Tensor:
        ctx.move, ctx.turned = move, back
        return move.back(x) if back else move.go(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        move: BoxRedistribution = ctx.move
        return (move.go(gradient) if ctx.turned else move.back(gradient)), None, None


def redistribute_box(x: Tensor, move: BoxRedistribution) -> Tensor:
    """The box that this rank wants; differentiable, all ranks of the axis call it."""
    if move.have == move.want:
        return x
    return _Moved.apply(x, move, False)  # type: ignore[no-untyped-call,no-any-return]


def sum_into_boxes(x: Tensor, move: BoxRedistribution) -> Tensor:
    """The adjoint of `redistribute_box`: a sum over ranks, of which each keeps its box;
    differentiable.
    """
    return _Moved.apply(x, move, True)  # type: ignore[no-untyped-call,no-any-return]


# Fetching that can be differentiated: ranges, sums over ranks, and buffers laid out again.


class _Fetch(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, needs: Sequence[RangeExchange], fill: float, kept: list[BoxPiece]
    ) -> Any:
        ctx.needs = needs
        kept += HaloFetch(x.detach(), needs).finish()
        box = assemble_box(kept, needs, fill)
        # A function may not return its input itself.
        return box.view_as(box) if box is kept[0].part else box

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return HaloGradientReturn(gradient, ctx.needs).finish().contiguous(), None, None, None


def fetch_box(x: Tensor, needs: Sequence[RangeExchange], fill: float = 0.0) -> Tensor:
    """The box that this rank wants of a tensor that lies in parts on several ranks.

    Args:
        x: The part that this rank owns.
        needs: One for each dimension along which something else than that is wanted. All ranks
            that hold parts call this with the same.
    """
    return x if _nothing(needs) else _fetched(x, needs, fill)[0]


def _nothing(needs: Sequence[RangeExchange]) -> bool:
    return all(need.have == need.want for need in needs)


def _fetched(
    x: Tensor, needs: Sequence[RangeExchange], fill: float
) -> tuple[Tensor, list[BoxPiece]]:
    kept: list[BoxPiece] = []
    box = _Fetch.apply(x, tuple(needs), fill, kept)  # type: ignore[no-untyped-call]
    return box, kept


def _lay_out_again(
    pieces: list[BoxPiece], needs: Sequence[RangeExchange], fill: float, version: int
) -> Tensor:
    """A box, from parts that are alive anyway and thin halos."""
    if pieces[0].part._version != version:
        raise RunError(
            "a split activation was changed in place after an operator had saved it",
            why="backward would compute with the changed numbers",
            fix="Use the operator behind it without inplace=True.",
        )
    return assemble_box(pieces, needs, fill)


@contextmanager
def fetch_for_operator(
    x: Tensor, needs: Sequence[RangeExchange], fill: float = 0.0, *, values: bool = True
) -> Iterator[Tensor]:
    """As `fetch_box`; what operators in the context save of the box is not a copy of `x`.

    Backward lays the box out again, from `x` and the halos, without messages.

    Args:
        x: As there, like the other arguments.
        values: Backward of the operators needs the entries of the box, not its sizes alone.
    """
    if _nothing(needs):
        yield x
        return
    box, pieces = _fetched(x, needs, fill)
    again: Callable[[], Tensor] = partial(_lay_out_again, pieces, needs, fill, x._version)
    if not values:
        # An expanded element has the shape of the box and none of its memory.
        again = partial(x.new_empty(1).expand, box.shape)
    place, shape, stride = _place(box), box.shape, box.stride()

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        same = _place(saved) == place and saved.shape == shape and saved.stride() == stride
        # Tensors without elements all lie at address 0.
        return again if same and saved.numel() else saved

    def unpack(found: Tensor | Callable[[], Tensor]) -> Tensor:
        return found if isinstance(found, Tensor) else found()

    with saved_tensors_hooks(pack, unpack):
        yield box


def _place(x: Tensor) -> tuple[int, int]:
    """Where it lies in memory; a stand-in has its storage alone."""
    if is_fake(x):
        return id(x.untyped_storage()), int(x.storage_offset())
    return x.data_ptr(), 0


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[SpatialAxis]) -> Tensor:
        ctx.axes = axes
        for axis in axes:
            x = ordered_all_reduce(x, axis)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for axis in ctx.axes:
            gradient = ordered_all_reduce(gradient, axis)
        return gradient, None


def sum_over_axes(x: Tensor, axes: Sequence[SpatialAxis]) -> Tensor:
    """The sum over all ranks of some axes; its adjoint is the sum of the gradients."""
    split = tuple(axis for axis in axes if axis.size > 1)
    return _Sum.apply(x, split) if split else x  # type: ignore[no-untyped-call]
