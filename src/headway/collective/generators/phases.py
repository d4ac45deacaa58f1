"""Reduce-scatter and all-gather phases among a subset of ranks, the parts of most programs.

A phase works in place on one area of the buffers of its ranks. Before a reduce-scatter each
rank holds its own numbers, after it member k holds the sums of part k; an all-gather is the way
back. A phase ends with every message waited for, so that phases can follow each other in any
order.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.collective.generators.program_builder import (
    OUT,
    BufferArea,
    Part,
    ProgramBuilder,
    RankScript,
    piece_count,
    split_evenly,
)
from headway.collective.program.program import BufferSpan

MESSAGES_IN_FLIGHT = 4
"""Messages in flight of a rank that sends something else to each other one."""


def scatter_direct(
    writer: ProgramBuilder,
    group: Sequence[int],
    parts: Sequence[Part],
    *,
    source: BufferArea = OUT,
    result: Sequence[BufferArea] | None = None,
) -> None:
    """Each member receives its part from all others at once and sums in order of distance.

    Args:
        parts: Of the whole, by member.
        source: Where every member has its own numbers.
        result: Where member k wants its sums; None: in the source's place.
    """
    tag = writer.tag()
    for own, rank in enumerate(group):
        script = writer.ranks[rank]
        others = [(own + step) % len(group) for step in range(1, len(group))]
        part = parts[own]
        slots = [script.room(part[1] - part[0]) for _ in others]
        # The left neighbour comes first: it sends to this rank before it sends to any other.
        arriving = [
            (script.recv(group[other], tag, slot), slot)
            for other, slot in zip(reversed(others), slots, strict=True)
        ]
        leaving = [
            handle
            for other in others
            for handle in script.send(group[other], tag, source.span(parts[other]))
        ]
        sums = (source if result is None else result[own]).span(part)
        if result is not None:
            script.copy(sums, source.span(part))
        # One by one, so that sums are formed while later messages are still arriving.
        for handle, slot in arriving:
            script.wait(handle)
            script.combine(sums, slot)
        script.wait(leaving)


def gather_direct(
    writer: ProgramBuilder,
    group: Sequence[int],
    parts: Sequence[Part],
    *,
    area: BufferArea = OUT,
    source: Sequence[BufferArea] | None = None,
) -> None:
    """Each member sends its part to all others at once.

    Args:
        parts: Of the whole, by member.
        area: Where every member wants the whole.
        source: Where member k has its part; None: there already.
    """
    tag = writer.tag()
    for own, rank in enumerate(group):
        script = writer.ranks[rank]
        others = [(own + step) % len(group) for step in range(1, len(group))]
        handles = [
            handle
            for other in reversed(others)
            for handle in script.recv(group[other], tag, area.span(parts[other]))
        ]
        mine = (area if source is None else source[own]).span(parts[own])
        for other in others:
            handles += script.send(group[other], tag, mine)
        if source is not None:
            script.copy(area.span(parts[own]), mine)
        script.wait(handles)


def ring(
    writer: ProgramBuilder,
    group: Sequence[int],
    parts: Sequence[Part],
    *,
    scatter: bool = True,
    gather: bool = True,
    chunk: int | None = None,
    source: BufferArea | None = None,
) -> None:
    """Parts go round a ring of the members; in pieces, so that sums and messages overlap.

    In step s a member sends part own - 1 - s and receives part own - 2 - s: n - 1 steps sum
    (member k ends with part k), n - 1 more hand the sums on.

    Args:
        group: The ranks, in the order of the ring.
        parts: Of the whole, by member.
        chunk: Elements of a piece; None: whole parts.
        source: Where every member has its own numbers, which stay as they are; "out" then is no
            more than the member's part. None: in "out", the whole of it.
    """
    if len(group) == 1 and source is not None:
        writer.ranks[group[0]].copy(OUT.span(parts[0]), source.span(parts[0]))
    if len(group) == 1:
        return
    tag = writer.tag()
    for own in range(len(group)):
        first = 0 if scatter else len(group) - 1
        last = 2 * len(group) - 2 if gather else len(group) - 1
        _Ring(writer, group, parts, own, tag, chunk, source).go(first, last)


class _Ring:
    """One member's way through a ring."""

    def __init__(
        self,
        writer: ProgramBuilder,
        group: Sequence[int],
        parts: Sequence[Part],
        own: int,
        tag: int,
        chunk: int | None,
        source: BufferArea | None,
    ) -> None:
        self.script: RankScript = writer.ranks[group[own]]
        self.size = len(group)
        self.left, self.right = group[own - 1], group[(own + 1) % self.size]
        self.parts, self.own, self.tag = parts, own, tag
        sizes = [stop - start for start, stop in parts if stop > start]
        # as many pieces of each part, so that none has a receive without a wait before it
        self.count = min(piece_count(max(sizes), chunk), *sizes) if sizes else 1
        self.source = source
        self.area = OUT if source is None else BufferArea("out", parts[own][0])
        self.slots: list[BufferSpan] = []

    def go(self, first: int, last: int) -> None:
        """Steps `first` to `last`, the last one excluded."""
        if first < self.size - 1:
            largest = max(stop - start for start, stop in self.parts)
            count = 2 if self.source is None else 3  # one arrives, one is summed, one leaves
            self.slots = [self.script.room(largest) for _ in range(count)]
        open_ones: dict[tuple[int, int], list[int]] = {}
        for place, piece in enumerate(self._pieces(first + 1)):
            open_ones[first, place] = self._recv(first, piece)
        for place, piece in enumerate(self._pieces(first)):
            open_ones.setdefault((first, place), []).extend(self._send(first, piece))
        for step in range(first, last):
            here = self._pieces(step + 1)
            after = self._pieces(step + 2) if step + 1 < last else []
            for place in range(max(len(self._pieces(step)), len(here), len(after))):
                self.script.wait(open_ones.pop((step, place), []))
                if place < len(here):
                    self._sum(step, here[place])
                begun: list[int] = []
                if place < len(after):
                    begun += self._recv(step + 1, after[place])
                if step + 1 < last and place < len(here):
                    begun += self._send(step + 1, here[place])
                open_ones[step + 1, place] = begun

    def _part(self, step: int) -> Part:
        """What is sent in a step; what is received in it is what the next one sends."""
        return self.parts[(self.own - 1 - step) % self.size]

    def _pieces(self, step: int) -> list[Part]:
        return split_evenly(self._part(step), self.count)

    def _slot(self, step: int, piece: Part) -> BufferSpan:
        """Where what is received in a step is summed, if not in its final place."""
        slot = self.slots[step % len(self.slots)]
        return BufferArea("tmp", self._part(step + 1)[0] - slot.start).span(piece)

    def _recv(self, step: int, piece: Part) -> list[int]:
        final = self.size - (1 if self.source is None else 2)
        # Results arrive in place; with a source apart, so do the sums of the last step (`_sum`).
        into = self.area.span(piece) if step >= final else self._slot(step, piece)
        return self.script.recv(self.left, self.tag, into)

    def _sum(self, step: int, piece: Part) -> None:
        if step >= self.size - 1:
            return
        if self.source is None:
            self.script.combine(self.area.span(piece), self._slot(step, piece))
        else:
            last = step == self.size - 2
            sums = self.area.span(piece) if last else self._slot(step, piece)
            self.script.combine(sums, self.source.span(piece))

    def _send(self, step: int, piece: Part) -> list[int]:
        of = self.area.span(piece)
        if self.source is not None and step < self.size - 1:
            of = self._slot(step - 1, piece) if step else self.source.span(piece)
        return self.script.send(self.right, self.tag, of)
