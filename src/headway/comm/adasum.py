"""Adasum over ranks: recursive vector halving, distance doubling, with three dot products a layer.

At level L = 1, 2, 4, ... a rank and its partner at distance L swap halves of what they hold, so
that both have one half of both operands; each layer's a.b, |a|^2 and |b|^2 are summed over the 2 L
ranks that share the two vectors, and the half is combined. Then the halves travel back the same way
(Maleki et al. 2021, section 4; the formula is in `adasum_rule`). Each rank sends 2 (n - 1) / n of
the buffer, as an all-reduce does. Invariant: the left operand is always that of the lower ranks,
and equals `adasum_tree`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from headway.comm.adasum_rule import Widened, coefficients, combine, power_of_two, statistics
from headway.comm.hierarchical import across_circle, inside_circle
from headway.comm.method import Blocking, Fused, Method, Piece, Route, Waiting, check_nodes
from headway.comm.swap import (
    Circle,
    Scratch,
    Span,
    all_gather,
    conveyor,
    first_tag,
    length,
    reduce_scatter,
    shards,
    stream,
    swap,
)

GROUP_BYTES = 8 * 2**20
"""Whole layers are combined in groups of about this size: while one group waits for its dot
products, the halves of the next one keep the link busy. Smaller ones make streams to several ranks
share the link, which costs more than it hides."""

WINDOW = 2
"""Groups under way."""

DIRECT = 8
"""Up to so many ranks dot products go to all at once; beyond, in a logarithmic number of rounds."""


class Adasum(Method):
    """The buffer of each rank holds its own mean gradient; all get their Adasum.

    A common factor may be applied before or after: A(ca, cb) = c A(a, b).

    Args:
        whole: One set of factors for the whole buffer, instead of one for each of its pieces.
        scratch: Shared by methods of one thread; None: its own.

    Attributes:
        coefficient: Of the last exchange, the mean over layers and levels of the two factors, each
            weighted with its operand's squared norm: 0.5 where gradients agree (their mean), 1.0
            where they are orthogonal (their sum), 1.5 where they are opposed; as this rank saw it,
            nan if it combined nothing (before the first exchange, or beyond a power of two).
    """

    blocking: ClassVar[bool] = True

    def __init__(self, *, whole: bool = False, scratch: Scratch | None = None) -> None:
        self._whole = whole
        self._scratch = scratch or Scratch()
        self._widened: Widened | None = None
        self._turn = 0
        self.coefficient = math.nan

    def rounds(self, fused: Fused, route: Route) -> Iterator[Waiting]:
        if route.size > 1:
            across = Circle.of(route.group, route.ranks, route.rank)
            yield from self._exchange(fused, None, across)

    def _exchange(
        self, fused: Fused, inside: Circle | None, across: Circle | None
    ) -> Iterator[Waiting]:
        self._widened = self._widened or Widened(fused.buffer.device)
        seen: list[float] = []
        tag = first_tag(fused.number, self._turn)
        self._turn += 1
        tasks = (
            _Combination(
                fused.buffer, pieces, flags, inside, across, tag + place,
                self._scratch, self._widened, seen,
            ).rounds()
            for place, (pieces, flags) in enumerate(_groups(fused, self._whole))
        )  # fmt: skip
        yield from conveyor(tasks, WINDOW)
        if seen:
            self.coefficient = sum(seen) / len(seen)


class HierarchicalAdasum(Adasum):
    """The mean inside each node, Adasum across nodes; the factors are still those of whole layers.

    With few large nodes it is closer to the mean than Adasum over all ranks: a plan names it.
    """

    def rounds(self, fused: Fused, route: Route) -> Iterator[Waiting]:
        check_nodes(route.nodes)
        inside = inside_circle(route) if len(route.nodes.members[0]) > 1 else None
        across = across_circle(route) if route.nodes.count > 1 else None
        if inside or across:
            yield from self._exchange(fused, inside, across)


def _groups(fused: Fused, whole: bool) -> Iterator[tuple[tuple[Piece, ...], Tensor]]:
    """Runs of whole layers with their flags; 1024 at most, as they need tags."""
    pieces, flags = fused.pieces, fused.flags
    if whole:
        end = fused.gradients.numel()
        yield (Piece("", 0, end, (end,)),), flags
        return
    size = max(GROUP_BYTES // fused.buffer.element_size(), fused.buffer.numel() // 1000)
    first = 0
    for number, piece in enumerate(pieces, 1):
        if number == len(pieces) or piece.stop - pieces[first].start >= size:
            yield pieces[first:number], flags[first:number]
            first = number


@dataclass(frozen=True)
class _Combination:
    """One group of layers on its way through all levels."""

    flat: Tensor
    pieces: tuple[Piece, ...]
    flags: Tensor
    inside: Circle | None
    across: Circle | None
    tag: int
    scratch: Scratch
    widened: Widened
    seen: list[float]
    used: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # Flags travel with the dot products.
        object.__setattr__(self, "used", self.flags.double())

    def rounds(self) -> Iterator[Waiting]:
        held = slice(self.pieces[0].start, self.pieces[-1].stop)
        spans: Sequence[Span] = (held,)
        if self.inside:
            spans = shards(length(held), self.inside.size, held.start)
            yield from reduce_scatter(self.flat, spans, self.inside, self.tag, self.scratch)
            held = spans[self.inside.place]
            self.flat[held].div_(self.inside.size)
        if self.across:
            yield from self._across(held, self.across)
        elif self.inside:
            yield from self._sum(self.used, self.inside, self.inside.others)
        self.flags.copy_(self.used)
        if self.inside:
            yield from all_gather(self.flat, spans, self.inside, self.tag)

    def _across(self, held: Span, circle: Circle) -> Iterator[Waiting]:
        """Ranks beyond a power of two hand their vector to the one p below and get the result."""
        power = power_of_two(circle.size)
        parcel = [self.flat[held], self.used]
        if circle.place >= power:
            peer = circle.place - power
            yield swap(circle, [], [(part, peer) for part in parcel], self.tag)
            yield swap(circle, [(part, peer) for part in parcel], [], self.tag)
            return
        peer = circle.place + power
        if circle.size > power:
            yield from self._fold(held, circle, peer)
        yield from self._halve_and_double(held, circle, power)
        if circle.size > power:
            sends = [(part, peer) for part in parcel] if peer < circle.size else []
            yield swap(circle, [], sends, self.tag)

    def _fold(self, held: Span, circle: Circle, peer: int) -> Iterator[Waiting]:
        """The first level, with the rank p above, where there is one."""
        if peer >= circle.size:
            # As many rounds as the others have: the conveyor's order must be the same.
            yield from (Blocking(()) for _ in range(2 if self.inside else 1))
            return
        operands = _Operands(self.flat, held, self.pieces, self.scratch, lower=True)
        used = torch.empty_like(self.used)
        yield swap(circle, [(operands.other, peer), (used, peer)], [], self.tag)
        self.used.add_(used)
        operands.measure(slice(0, length(held)), self.widened)
        yield from self._combine(operands, circle, block=1, last=False)

    def _halve_and_double(self, held: Span, circle: Circle, power: int) -> Iterator[Waiting]:
        way: list[tuple[int, Span, Span]] = []
        level = 1
        while level < power:
            partner = circle.place ^ level
            lower = circle.place < partner
            middle = held.start + length(held) // 2
            halves = slice(held.start, middle), slice(middle, held.stop)
            kept, given = halves if lower else halves[::-1]
            operands = _Operands(self.flat, kept, self.pieces, self.scratch, lower=lower)
            for waiting, there in stream(
                circle, operands.other, self.flat[given], partner, self.tag
            ):
                yield waiting
                operands.measure(there, self.widened)
            level *= 2
            yield from self._combine(operands, circle, block=level, last=level == power)
            way.append((partner, kept, given))
            held = kept
        for partner, kept, given in reversed(way):
            for waiting, _ in stream(circle, self.flat[given], self.flat[kept], partner, self.tag):
                yield waiting

    def _combine(
        self, operands: _Operands, circle: Circle, *, block: int, last: bool
    ) -> Iterator[Waiting]:
        """Combine what has been measured here, with factors of the whole layers.

        Args:
            operands: Of this rank.
            circle: Of the levels.
            block: The ranks that share the two operands are so many neighbours.
            last: Sum the flags as well: now all ranks take part.
        """
        sums = torch.tensor(operands.sums, dtype=torch.float64, device=self.flat.device)
        layers = sums.numel()
        if last:
            sums = torch.cat((sums, self.used))
        for places in _stages(circle.place, block):
            yield from self._sum(sums, circle, places)
        if self.inside:
            yield from self._sum(sums, self.inside, self.inside.others)
        if last:
            self.used.copy_(sums[layers:])
        self.seen.extend(operands.combine(sums[:layers].tolist()))

    def _sum(self, values: Tensor, circle: Circle, places: Sequence[int]) -> Iterator[Waiting]:
        """Add up small vectors over these places and one's own; the same bits on all of them."""
        received = {place: torch.empty_like(values) for place in places}
        yield swap(
            circle,
            [(received[place], place) for place in places],
            [(values, place) for place in places],
            self.tag,
        )
        received[circle.place] = values.clone()
        values.zero_()
        for place in sorted(received):
            values.add_(received[place])


def _stages(place: int, block: int) -> list[list[int]]:
    """With whom small sums over a block of neighbours are exchanged, stage by stage."""
    first = place - place % block
    if block <= DIRECT:
        return [[other for other in range(first, first + block) if other != place]][: block - 1]
    return [[place ^ (1 << bit)] for bit in range(block.bit_length() - 1)]


class _Operands:
    """A part of a group, as this rank and its partner had it.

    Args:
        flat: The bucket.
        held: The part; layers may lie in it partly or not at all.
        pieces: The layers of the group.
        lower: What `flat` holds is the left operand.

    Attributes:
        other: The partner's; to be filled.
        sums: a.b, |a|^2 and |b|^2 of each layer.
    """

    def __init__(
        self, flat: Tensor, held: Span, pieces: Sequence[Piece], scratch: Scratch, *, lower: bool
    ) -> None:
        self._flat, self._lower, self._scratch = flat, lower, scratch
        self._own = flat[held]
        self._parts = [_cut(piece, held) for piece in pieces]
        self.other = scratch.take(length(held), flat)
        self.sums = [0.0] * (3 * len(pieces))

    def measure(self, there: Span, widened: Widened) -> None:
        """Add the products of a part that has arrived."""
        for number, part in enumerate(self._parts):
            if part.stop <= there.start or part.start >= there.stop:
                continue
            both = slice(max(part.start, there.start), min(part.stop, there.stop))
            pair = self._own[both], self.other[both]
            found = statistics(*(pair if self._lower else pair[::-1]), widened)
            for place, value in enumerate(found, 3 * number):
                self.sums[place] += value

    def combine(self, sums: Sequence[float]) -> Iterator[float]:
        """Write the combination to the bucket.

        Args:
            sums: Those of all ranks that share the operands.

        Yields:
            The mean factor of each layer.
        """
        for number, part in enumerate(self._parts):
            dot, first, second = sums[3 * number : 3 * number + 3]
            factors = coefficients(dot, first, second)
            own, opposite = factors if self._lower else factors[::-1]
            combine(self._own[part], self.other[part], own, opposite)
            if first + second > 0:
                yield 1 - dot / (first + second)
        self._scratch.give(self.other)


def _cut(piece: Piece, span: Span) -> Span:
    """Where a layer lies inside a span, from its start; empty at its border if it does not."""
    start = min(max(piece.start, span.start), span.stop)
    stop = max(start, min(piece.stop, span.stop))
    return slice(start - span.start, stop - span.start)
