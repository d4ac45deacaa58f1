"""Index ranges along one dimension: ownership, sliding windows, halos, redistribution.

A range is half-open, in elements of the whole tensor. The range that a window needs may reach
beyond the tensor; that part is padding. Oyama et al. 2020, "The Case for Strong Scaling in Deep
Learning", generalised to any kernel, stride, padding and dilation, and to halos wider than a
neighbour's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Range, ...]
"""A range for each dimension."""

BoxTransfer: TypeAlias = tuple[int, int, Box]
"""Who sends, who receives, and what."""


def balanced_ranges(extent: int, parts: int) -> tuple[Range, ...]:
    """Equal shares in order; with n = b p + e the first e of them own b + 1."""
    base, extra = divmod(extent, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return tuple((starts[part], starts[part + 1]) for part in range(parts))


def range_intersection(one: Range, other: Range) -> Range:
    """What both hold; an empty range where they have nothing in common."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def range_length(held: Range) -> int:
    return held[1] - held[0]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A sliding window along one dimension: of a convolution or of a pooling.

    Attributes:
        before: Padding before the first element; `after`: behind the last.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """Elements from the window's first entry to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int, *, ceil: bool = False) -> int:
        """The number of outputs; with `ceil` of a pooling in `ceil_mode`."""
        free = extent + self.before + self.after - self.span
        if not ceil:
            return free // self.stride + 1
        count = -(-free // self.stride) + 1
        # No window begins in the padding behind the last element.
        return count - ((count - 1) * self.stride >= extent + self.before)

    def wanted(self, outputs: Range) -> Range:
        """The inputs of a range of outputs, padding included; of no outputs none."""
        if range_length(outputs) <= 0:
            return 0, 0
        first = outputs[0] * self.stride - self.before
        return first, (outputs[1] - 1) * self.stride - self.before + self.span

    def inside(self, have: Range, extent: int, outputs: Range) -> Range:
        """Those of the outputs that want nothing of the tensor beyond `have`."""
        inner = [
            o for o in range(*outputs)
            if range_intersection(self.wanted((o, o + 1)), (0, extent)) ==
            range_intersection(self.wanted((o, o + 1)), have)
        ]  # fmt: skip
        # Windows move on with their outputs, so that those inside are neighbours.
        return (inner[0], inner[-1] + 1) if inner else (outputs[0], outputs[0])


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """The window of a transposed convolution: input i adds to outputs i stride - padding + ...

    Attributes:
        padding: Outputs cut off on each side.
        extra: Outputs added behind the last (`output_padding`).
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    extra: int = 0

    @property
    def span(self) -> int:
        """Outputs from the window's first entry to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int) -> int:
        """The number of outputs."""
        return (extent - 1) * self.stride - 2 * self.padding + self.span + self.extra

    def wanted(self, outputs: Range, extent: int) -> Range:
        """The inputs that reach a range of outputs."""
        if range_length(outputs) <= 0:
            return 0, 0
        # The first input whose last entry reaches the range, and the last one whose first entry
        # does.
        first = -(-(outputs[0] + self.padding - self.span + 1) // self.stride)
        last = (outputs[1] - 1 + self.padding) // self.stride
        return range_intersection((first, last + 1), (0, extent))

    def reached(self, inputs: Range) -> Range:
        """The outputs from the first to the last that a range of inputs adds to."""
        first = inputs[0] * self.stride - self.padding
        return first, first + (range_length(inputs) - 1) * self.stride + self.span


def range_exchange(
    rank: int, have: Sequence[Range], want: Sequence[Range]
) -> tuple[list[tuple[int, Range]], list[tuple[int, Range]]]:
    """What a rank sends and receives when everybody fetches what he wants.

    Returns:
        (peer, range) of what it sends, and of what it receives; in order of the peers.
    """
    peers = [peer for peer in range(len(have)) if peer != rank]
    sends = [(peer, range_intersection(have[rank], want[peer])) for peer in peers]
    receives = [(peer, range_intersection(have[peer], want[rank])) for peer in peers]
    return [s for s in sends if range_length(s[1])], [r for r in receives if range_length(r[1])]


@lru_cache(maxsize=1024)
def box_transfers(have: tuple[Box, ...], want: tuple[Box, ...]) -> tuple[BoxTransfer, ...]:
    """What goes where when all dimensions change at once; by the rank that receives.

    Args:
        have: By rank, what it owns; boxes of two ranks are equal or apart.
        want: By rank, what it wants.

    Returns:
        What a rank has itself it sends to itself. Of equal boxes the receivers take turns.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(have):
        holders.setdefault(box, []).append(rank)
    found = []
    for receiver, wish in enumerate(want):
        for box, ranks in holders.items():
            common = tuple(range_intersection(a, b) for a, b in zip(box, wish, strict=True))
            if all(map(range_length, common)):
                sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
                found.append((sender, receiver, common))
    return tuple(found)
