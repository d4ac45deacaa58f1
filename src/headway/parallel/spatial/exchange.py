"""Boxes of a tensor that lies in parts on several ranks: fetched, and given back as gradients.

One dimension after the other, so that corners come through a neighbour. A rank keeps what it
received as thin pieces; the box is laid out once, padding included. Going back, contributions are
added in the order of the ranks: two runs agree to the last bit. Only ranks whose ranges overlap
exchange messages, and every rank takes part in every fetch, be its own box empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.calls import Tell, untold
from headway.graph.ranges import Box, Range, crossing, length, overlap


@dataclass(frozen=True, eq=False, slots=True)
class Axis:
    """Ranks among which one dimension is split.

    Attributes:
        group: Their process group; None: this rank alone, or nothing is moved.
        size: How many they are.
        rank: Of this process among them.
        tell: Told what would be started where nothing is moved.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    tell: Tell = untold

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Axis:
        """The axis of a process group to which this process belongs."""
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


ALONE = Axis()


@dataclass(frozen=True, slots=True)
class Need:
    """What is wanted along one dimension.

    Attributes:
        dim: Of the tensor.
        axis: The ranks that hold it; ALONE: this rank has all of it.
        have: By rank of the axis, what each owns.
        want: By rank, what each wants; beyond the tensor there is padding.
    """

    dim: int
    axis: Axis
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
        return overlap(self.wish, (0, self.have[-1][1]))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the tensor: `box` has a range for each of the needs."""

    part: Tensor
    box: Box


class Flight:
    """Messages under way between the ranks of one axis."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []
        self._kept: list[Tensor] = []

    def send(self, part: Tensor, peer: int) -> None:
        """Add a message."""
        if self._axis.group is None:
            self._axis.tell("send", 2, part.nbytes)
        else:
            self._add(dist.isend, part.contiguous(), peer)

    def receive(self, into: Tensor, peer: int) -> None:
        """Add a message to come."""
        if self._axis.group is None:
            self._axis.tell("receive", 2, into.nbytes)
        else:
            self._add(dist.irecv, into, peer)

    def _add(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> None:
        self._kept.append(tensor)
        self._operations.append(
            dist.P2POp(operation, tensor, group=self._axis.group, group_peer=peer)
        )

    def depart(self) -> None:
        """Start all messages at once."""
        if self._operations:
            self._works = dist.batch_isend_irecv(self._operations)

    def land(self) -> None:
        """Until all of them have been sent and received."""
        for work in self._works:
            work.wait()
        self._works, self._kept = [], []


class Fetching:
    """The exchange of a fetch: the first dimension's messages are under way once it is made."""

    def __init__(self, x: Tensor, needs: Sequence[Need]) -> None:
        self._x = x
        self._needs = [need for need in needs if need.axis.size > 1]
        self._all = tuple(needs)
        self.pieces = [Piece(x, tuple(need.own for need in needs))]
        self._stage = 0
        self._flight, self._coming = self._depart()

    def _depart(self) -> tuple[Flight | None, list[Piece]]:
        """Start the messages of the stage that is due."""
        if self._stage >= len(self._needs):
            return None, []
        need = self._needs[self._stage]
        sends, receives = crossing(need.axis.rank, need.have, need.want)
        flight, coming = Flight(need.axis), []
        for peer, part in sends:
            box = self._box(need, part)
            if all(map(length, box)):
                flight.send(cut(self.pieces, box, self._all), peer)
        for peer, part in receives:
            box = self._box(need, part)
            if all(map(length, box)):
                piece = Piece(_empty(self._x, box, self._all), box)
                flight.receive(piece.part, peer)
                coming.append(piece)
        flight.depart()
        return flight, coming

    def _box(self, now: Need, part: Range) -> Box:
        """`part` of this stage's dimension, what was fetched of those before, own of the rest."""
        done = self._needs[: self._stage]
        return tuple(
            part if need is now else need.real if need in done else need.own for need in self._all
        )

    def finish(self) -> list[Piece]:
        """Wait for the messages, and exchange those of the dimensions that follow."""
        while self._flight is not None:
            self._flight.land()
            self.pieces += self._coming
            self._stage += 1
            self._flight, self._coming = self._depart()
        return self.pieces


def cut(pieces: Sequence[Piece], box: Box, needs: Sequence[Need]) -> Tensor:
    """The tensor of a box that the pieces cover."""
    for piece in pieces:
        if all(b[0] >= p[0] and b[1] <= p[1] for b, p in zip(box, piece.box, strict=True)):
            return _narrow(piece.part, piece.box, box, needs).contiguous()
    whole = _empty(pieces[0].part, box, needs)
    _copy(whole, box, pieces, needs)
    return whole


def assemble(pieces: Sequence[Piece], needs: Sequence[Need], fill: float = 0.0) -> Tensor:
    """The box that this rank wants: one allocation, padding filled in."""
    first, wish = pieces[0], tuple(need.wish for need in needs)
    if wish == first.box:
        return first.part
    out = _empty(first.part, wish, needs)
    for need, (start, stop) in zip(needs, wish, strict=True):
        low, high = need.real if length(need.real) else (stop, stop)
        out.narrow(need.dim, 0, low - start).fill_(fill)
        out.narrow(need.dim, high - start, stop - high).fill_(fill)
    _copy(out, wish, pieces, needs)
    return out


def _copy(into: Tensor, box: Box, pieces: Sequence[Piece], needs: Sequence[Need]) -> None:
    for piece in pieces:
        common = tuple(overlap(b, p) for b, p in zip(box, piece.box, strict=True))
        if all(map(length, common)):
            source = _narrow(piece.part, piece.box, common, needs)
            _narrow(into, box, common, needs).copy_(source)


def _narrow(part: Tensor, held: Box, box: Box, needs: Sequence[Need]) -> Tensor:
    for need, have, want in zip(needs, held, box, strict=True):
        if have != want:
            part = part.narrow(need.dim, want[0] - have[0], length(want))
    return part


def _empty(like: Tensor, box: Box, needs: Sequence[Need]) -> Tensor:
    shape = list(like.shape)
    for need, held in zip(needs, box, strict=True):
        shape[need.dim] = length(held)
    return like.new_empty(shape)


class Returning:
    """The way back of a fetch: adds the gradients of what others fetched to their owner's.

    Args:
        gradient: Of the box that this rank wanted.
        needs: Those of the fetch.
        spare: Nobody else holds the gradient: it may be written to.
    """

    def __init__(self, gradient: Tensor, needs: Sequence[Need], *, spare: bool = False) -> None:
        self._spare = spare
        wish = tuple(need.wish for need in needs)
        real = tuple(need.real for need in needs)
        if not all(map(length, real)):
            self._sum = _empty(gradient, real, needs)
        else:
            self._sum = _narrow(gradient, wish, real, needs)
        alone = [need for need in needs if need.axis.size == 1]
        self._left = [need for need in needs if need.axis.size > 1]
        for need in alone:
            self._sum = _own(self._sum, need)
        self._flight, self._coming = self._depart()

    def _depart(self) -> tuple[Flight | None, list[tuple[Tensor, Range]]]:
        if not self._left:
            return None, []
        need = self._left[-1]
        receives, sends = crossing(need.axis.rank, need.have, need.want)
        flight = Flight(need.axis)
        coming: list[tuple[Tensor, Range]] = []
        shape = list(self._sum.shape)
        shape[need.dim] = 1
        if 0 not in shape:
            for peer, part in sends:
                start = part[0] - need.real[0]
                flight.send(self._sum.narrow(need.dim, start, length(part)), peer)
            for peer, part in receives:
                shape[need.dim] = length(part)
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
                self._sum = self._sum.clone(memory_format=torch.contiguous_format)
                self._spare = True
            self._flight.land()
            for part, (start, _) in self._coming:
                into = self._sum.narrow(need.dim, start - need.own[0], part.shape[need.dim])
                into.add_(part)
            self._flight, self._coming = self._depart()
        return self._sum


def _own(held: Tensor, need: Need) -> Tensor:
    """Of the gradient of what was wanted that of what is owned; 0 where that was not wanted."""
    common = overlap(need.own, need.real)
    start = common[0] - need.real[0]
    part = held.narrow(need.dim, start, length(common)) if length(common) else None
    if common == need.own and part is not None:
        return part
    shape = list(held.shape)
    shape[need.dim] = length(need.own)
    out = held.new_zeros(shape)
    if part is not None:
        out.narrow(need.dim, common[0] - need.own[0], length(common)).copy_(part)
    return out


def all_sum(x: Tensor, axis: Axis) -> Tensor:
    """The sum over an axis, in the order of its ranks: the same bits on all of them."""
    if axis.size == 1:
        return x
    total, *others = all_parts(x, axis)
    for part in others:
        total = total + part
    return total


def all_parts(x: Tensor, axis: Axis) -> list[Tensor]:
    """What each rank of an axis of several has, in their order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    if axis.group is None:
        axis.tell("all_gather", axis.size, x.nbytes * axis.size)
    else:
        dist.all_gather(parts, x.contiguous(), group=axis.group)
    return parts
