"""Adasum: the formula, and the reduction over ranks and nodes.

Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation". Two gradients of one
layer that point the same way are averaged, orthogonal ones are added, and in between it is gradual
(equation 3):

    A(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

More than two are combined pairwise in a tree; A is not associative, so the tree is part of the
method. Dot products and squared norms are sums of exact products in float64, whatever the
gradients' type.

Over ranks it is recursive vector halving with distance doubling (section 4): at level L = 1, 2, 4,
... a rank and its partner at distance L swap halves of what they hold; each layer's a.b, |a|^2 and
|b|^2 are summed over the 2 L ranks that share the two vectors, and the half is combined. Then the
halves travel back the same way. Each rank sends 2 (n - 1) / n of the buffer, as an all-reduce does.
The left operand is always that of the lower ranks, so that all ranks compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from headway.collective.model.bucket_cost import dot_partners
from headway.comm.algorithms.hierarchical import inter_node_group, intra_node_group
from headway.comm.algorithms.method import (
    ElementSpan,
    FusedBuffer,
    GradientSlice,
    PeerGroup,
    PendingOperation,
    PointToPointOperations,
    Route,
    ScratchBuffers,
    StatelessMethod,
    all_gather,
    check_uniform_nodes,
    first_tag,
    pipeline_rounds,
    reduce_scatter,
    send_receive,
    send_receive_chunked,
    span_length,
    split_evenly,
)

# A squared norm below the square root of the smallest normal double counts as zero.
TINY = math.sqrt(torch.finfo(torch.float64).tiny)

# Elements that are widened to float64 at a time: on a CPU they stay in the cache.
STATISTICS_BLOCK = 2**15


class Float64Workspace:
    """Memory for one block of both operands in float64."""

    def __init__(self, device: torch.device) -> None:
        # On a GPU each call costs a kernel launch, so blocks are larger.
        self.size = STATISTICS_BLOCK if device.type == "cpu" else 512 * STATISTICS_BLOCK
        self._blocks = torch.empty((2, self.size), dtype=torch.float64, device=device)

    def __call__(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Both in float64; valid until the next call."""
        if left.dtype == torch.float64:
            return left, right
        size = left.numel()
        return self._blocks[0, :size].copy_(left), self._blocks[1, :size].copy_(right)


def dot_and_norms(
    left: Tensor, right: Tensor, widened: Float64Workspace
) -> tuple[float, float, float]:
    """left.right, |left|^2 and |right|^2 of two 1-D tensors, in float64."""
    dot = first = second = 0.0
    for start in range(0, left.numel(), widened.size):
        block = slice(start, start + widened.size)
        one, other = widened(left[block], right[block])
        dot += torch.dot(one, other).item()
        first += torch.dot(one, one).item()
        second += torch.dot(other, other).item()
    return dot, first, second


def adasum_coefficients(dot: float, first: float, second: float) -> tuple[float, float]:
    """The factors of both operands; 1 for one that is zero."""
    return (
        1.0 if first < TINY else 1.0 - dot / (2.0 * first),
        1.0 if second < TINY else 1.0 - dot / (2.0 * second),
    )


def combine_scaled(own: Tensor, other: Tensor, factor: float, other_factor: float) -> None:
    """own = factor * own + other_factor * other."""
    if own.element_size() >= 4:
        own.mul_(factor).add_(other, alpha=other_factor)
    else:  # in 16 bits each of the two operations would round
        own.copy_(own.float().mul_(factor).add_(other.float(), alpha=other_factor))


def largest_power_of_two(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


# Adasum over ranks: recursive vector halving, distance doubling, three dot products per layer.


# Whole layers are combined in groups of about this size: while one group waits for its dot
# products, the halves of the next one keep the link busy. Smaller ones make streams to several
# ranks share the link, which costs more than it hides.
GROUP_BYTES = 8 * 2**20

GROUPS_IN_FLIGHT = 2


class Adasum(StatelessMethod):
    """The buffer of each rank holds its own mean gradient; all get their Adasum.

    A common factor may be applied before or after: A(ca, cb) = c A(a, b).

    Args:
        hierarchical: The mean inside each node, Adasum across nodes; the factors are still those of
            whole layers. With few large nodes it is closer to the mean than Adasum over all ranks:
            a plan names it.
    """

    blocking: ClassVar[bool] = True

    def __init__(
        self, *, hierarchical: bool = False, scratch: ScratchBuffers | None = None
    ) -> None:
        self._hierarchical = hierarchical
        self._scratch = scratch or ScratchBuffers()
        self._widened: Float64Workspace | None = None
        self._turn = 0

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        inside = across = None
        if self._hierarchical:
            check_uniform_nodes(route.nodes)
            inside = intra_node_group(route) if len(route.nodes.members[0]) > 1 else None
            across = inter_node_group(route) if route.nodes.count > 1 else None
        elif route.size > 1:
            across = PeerGroup.of(route.group, route.ranks, route.rank)
        if not (inside or across):
            return
        self._widened = self._widened or Float64Workspace(fused.buffer.device)
        tag = first_tag(fused.number, self._turn)
        self._turn += 1
        tasks = (
            _Combination(
                fused.buffer, pieces, flags, inside, across, tag + place,
                self._scratch, self._widened,
            ).rounds()
            for place, (pieces, flags) in enumerate(_groups(fused))
        )  # fmt: skip
        yield from pipeline_rounds(tasks, GROUPS_IN_FLIGHT)


def _groups(fused: FusedBuffer) -> Iterator[tuple[tuple[GradientSlice, ...], Tensor]]:
    """Runs of whole layers with their flags; 1024 at most, as they need tags."""
    pieces, flags = fused.pieces, fused.flags
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
    pieces: tuple[GradientSlice, ...]
    flags: Tensor
    inside: PeerGroup | None
    across: PeerGroup | None
    tag: int
    scratch: ScratchBuffers
    widened: Float64Workspace
    used: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # Flags travel with the dot products.
        object.__setattr__(self, "used", self.flags.double())

    def rounds(self) -> Iterator[PendingOperation]:
        held = slice(self.pieces[0].start, self.pieces[-1].stop)
        spans: Sequence[ElementSpan] = (held,)
        if self.inside:
            spans = split_evenly(span_length(held), self.inside.size, held.start)
            yield from reduce_scatter(self.flat, spans, self.inside, self.tag, self.scratch)
            held = spans[self.inside.place]
            self.flat[held].div_(self.inside.size)
        if self.across:
            yield from self._across(held, self.across)
        elif self.inside:
            # Without a level that takes them along, the flags are summed on their own.
            yield from self._sum(self.used, self.inside, self.inside.others)
        self.flags.copy_(self.used)
        if self.inside:
            yield from all_gather(self.flat, spans, self.inside, self.tag)

    def _across(self, held: ElementSpan, circle: PeerGroup) -> Iterator[PendingOperation]:
        """Ranks beyond a power of two hand their vector to the one p below and get the result."""
        power = largest_power_of_two(circle.size)
        parcel = [self.flat[held], self.used]
        if circle.place >= power:
            peer = circle.place - power
            yield send_receive(circle, [], [(part, peer) for part in parcel], self.tag)
            yield send_receive(circle, [(part, peer) for part in parcel], [], self.tag)
            return
        peer = circle.place + power
        if circle.size > power:
            yield from self._fold(held, circle, peer)
        yield from self._halve_and_double(held, circle, power)
        if circle.size > power:
            sends = [(part, peer) for part in parcel] if peer < circle.size else []
            yield send_receive(circle, [], sends, self.tag)

    def _fold(self, held: ElementSpan, circle: PeerGroup, peer: int) -> Iterator[PendingOperation]:
        """The first level, with the rank p above, where there is one."""
        if peer >= circle.size:
            # As many rounds as the others have: `pipeline_rounds` must keep the same order.
            yield from (PointToPointOperations(()) for _ in range(2 if self.inside else 1))
            return
        operands = _Operands(self.flat, held, self.pieces, self.scratch, lower=True)
        used = torch.empty_like(self.used)
        yield send_receive(circle, [(operands.other, peer), (used, peer)], [], self.tag)
        self.used.add_(used)
        # Both whole vectors are here, so that no other rank has a part of the products (block 1).
        operands.measure(slice(0, span_length(held)), self.widened)
        yield from self._combine(operands, circle, block=1, last=False)

    def _halve_and_double(
        self, held: ElementSpan, circle: PeerGroup, power: int
    ) -> Iterator[PendingOperation]:
        way: list[tuple[int, ElementSpan, ElementSpan]] = []
        level = 1
        while level < power:
            partner = circle.place ^ level
            lower = circle.place < partner
            middle = held.start + span_length(held) // 2
            halves = slice(held.start, middle), slice(middle, held.stop)
            kept, given = halves if lower else halves[::-1]
            operands = _Operands(self.flat, kept, self.pieces, self.scratch, lower=lower)
            for waiting, there in send_receive_chunked(
                circle, operands.other, self.flat[given], partner, self.tag
            ):
                yield waiting
                # The products are formed while the next parts are on their way.
                operands.measure(there, self.widened)
            level *= 2
            yield from self._combine(operands, circle, block=level, last=level == power)
            way.append((partner, kept, given))
            held = kept
        for partner, kept, given in reversed(way):
            for waiting, _ in send_receive_chunked(
                circle, self.flat[given], self.flat[kept], partner, self.tag
            ):
                yield waiting

    def _combine(
        self, operands: _Operands, circle: PeerGroup, *, block: int, last: bool
    ) -> Iterator[PendingOperation]:
        """Combine what has been measured here, with factors of the whole layers.

        Args:
            block: The ranks that share the two operands are so many neighbours.
            last: Sum the flags as well, because all ranks take part in the last level.
        """
        sums = torch.tensor(operands.sums, dtype=torch.float64, device=self.flat.device)
        layers = sums.numel()
        if last:
            sums = torch.cat((sums, self.used))
        for places in dot_partners(circle.place, block):
            yield from self._sum(sums, circle, places)
        if self.inside:
            yield from self._sum(sums, self.inside, self.inside.others)
        if last:
            self.used.copy_(sums[layers:])
        operands.combine(sums[:layers].tolist())

    def _sum(
        self, values: Tensor, circle: PeerGroup, places: Sequence[int]
    ) -> Iterator[PendingOperation]:
        """Add up small vectors over these places and one's own; the same bits on all of them."""
        received = {place: torch.empty_like(values) for place in places}
        yield send_receive(
            circle,
            [(received[place], place) for place in places],
            [(values, place) for place in places],
            self.tag,
        )
        # Its own numbers take their turn: all places add in the same order.
        received[circle.place] = values.clone()
        values.zero_()
        for place in sorted(received):
            values.add_(received[place])


class _Operands:
    """A part of a group, as this rank and its partner had it.

    Args:
        held: The part; layers may lie in it partly or not at all.
        lower: What `flat` holds is the left operand.

    Attributes:
        other: The partner's; to be filled.
        sums: a.b, |a|^2 and |b|^2 of each layer.
    """

    def __init__(
        self,
        flat: Tensor,
        held: ElementSpan,
        pieces: Sequence[GradientSlice],
        scratch: ScratchBuffers,
        *,
        lower: bool,
    ) -> None:
        self._flat, self._lower, self._scratch = flat, lower, scratch
        self._own = flat[held]
        self._parts = [_cut(piece, held) for piece in pieces]
        self.other = scratch.take(span_length(held), flat)
        self.sums = [0.0] * (3 * len(pieces))

    def measure(self, there: ElementSpan, widened: Float64Workspace) -> None:
        """Add the products of a part that has arrived."""
        for number, part in enumerate(self._parts):
            if part.stop <= there.start or part.start >= there.stop:
                continue
            both = slice(max(part.start, there.start), min(part.stop, there.stop))
            pair = self._own[both], self.other[both]
            found = dot_and_norms(*(pair if self._lower else pair[::-1]), widened)
            for place, value in enumerate(found, 3 * number):
                self.sums[place] += value

    def combine(self, sums: Sequence[float]) -> None:
        """Write the combination to the bucket; `sums` are of all ranks that share the operands."""
        for number, part in enumerate(self._parts):
            dot, first, second = sums[3 * number : 3 * number + 3]
            factors = adasum_coefficients(dot, first, second)
            own, opposite = factors if self._lower else factors[::-1]
            combine_scaled(self._own[part], self.other[part], own, opposite)
        self._scratch.give(self.other)


def _cut(piece: GradientSlice, span: ElementSpan) -> ElementSpan:
    """Where a layer lies inside a span, from its start; empty at its border if it does not."""
    start = min(max(piece.start, span.start), span.stop)
    stop = max(start, min(piece.stop, span.stop))
    return slice(start - span.start, stop - span.start)
