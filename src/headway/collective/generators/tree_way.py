"""One rank's way through one tree: its events, and what it does in each of them, chunk by chunk.

Of a tree of depth H a rank of depth d sums chunk c at virtual time c + H - d, turns round one unit
later (what it sent up is through, so that the result may come into its place) and hands the result
on at c + H + d; without sums H counts as 0. Invariant: before a place is received into, all that
was sent from it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headway.collective.generators.writing import OUT, Area, Part, Script
from headway.collective.program import Span
from headway.collective.task import Collective

AHEAD = 2
"""Chunks for which a rank has begun to receive before it needs them."""
UP = frozenset({"all_reduce", "reduce", "reduce_scatter"})
DOWN = frozenset({"all_reduce", "broadcast", "all_gather"})


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank does with a chunk at a virtual time."""

    time: int
    chunk: int
    act: Callable[[int], None]


class Way:
    """A rank in a tree."""

    def __init__(
        self, collective: Collective, script: Script, rank: int, tag: int, pieces: Sequence[Part]
    ) -> None:
        self.script, self.tag, self.pieces = script, tag, pieces
        self.up, self.down = collective.op in UP, collective.op in DOWN
        apart = collective.op in ("reduce_scatter", "all_gather")
        share = collective.borders[rank] if apart else 0
        self.own = OUT  # where its own numbers are
        self.final = OUT  # where, at the root, the sums belong
        if collective.op == "reduce_scatter":
            self.own, self.final = Area("in"), Area("out", share)
        elif collective.op == "all_gather":
            self.own = Area("in", share)
        self.in_place = collective.op == "all_reduce"
        self.handles: dict[tuple[str, int], list[int]] = {}

    def joined(self, parent: int | None, kids: Sequence[int], depth: int, height: int) -> Way:
        """With its neighbours, how far from the root it is, and how deep the tree."""
        self.parent, self.kids = parent, kids
        self.depth, self.height = depth, height if self.up else 0
        size = max(stop - start for start, stop in self.pieces)
        slots = AHEAD if self.up else 0
        self.slots = [[self.script.room(size) for _ in range(slots)] for _ in kids]
        return self

    def begin(self) -> None:
        """Begin to receive the first chunks; nothing is sent yet."""
        for chunk in range(AHEAD):
            if self.up:
                self._expect_sums(chunk)
            elif self.parent is not None:
                self._expect_result(chunk)

    def events(self) -> Iterator[Event]:
        """All that follows."""
        for chunk in range(len(self.pieces)):
            if self.up:
                yield Event(chunk + self.height - self.depth, chunk, self._sum)
                if self.parent is not None:
                    yield Event(chunk + self.height - self.depth + 1, chunk, self._turn)
            if self.down and (self.parent is not None or not self.up):
                yield Event(chunk + self.height + self.depth, chunk, self._hand_on)

    def rest(self) -> list[int]:
        """What is not waited for yet."""
        return [handle for handles in self.handles.values() for handle in handles]

    # -- events --------------------------------------------------------------------------------

    def _sum(self, chunk: int) -> None:
        """The children's sums are there: add, and hand them up, or at the root down."""
        piece = self.pieces[chunk]
        old = self._old_results(chunk) if self.parent is None else []
        self.script.wait([*self._pop("sums", chunk), *old])
        sums = self._sums(chunk)
        if self.parent is None and sums != self.own.span(piece):
            self.script.copy(sums, self.own.span(piece))
        elif self._apart:
            self.script.combine(sums, self.own.span(piece))
        for number in range(1 if self._apart else 0, len(self.kids)):
            self.script.combine(sums, self._slot(number, chunk))
        if not self._apart:
            self._expect_sums(chunk + AHEAD)
        if self.parent is not None:
            self.handles["up", chunk] = self.script.send(self.parent, self.tag, sums)
        elif self.down:
            self._send_down(chunk)

    def _turn(self, chunk: int) -> None:
        """What went up is through: its place is free."""
        self.script.wait(self._pop("up", chunk))
        if self._apart:
            self._expect_sums(chunk + AHEAD)
        if self.down:
            self._expect_result(chunk)

    def _hand_on(self, chunk: int) -> None:
        """The result is there, or the root's own numbers are it: to the children."""
        self.script.wait([*self._pop("result", chunk), *self._old_results(chunk)])
        if self.parent is None:
            piece = self.pieces[chunk]
            if self.own != OUT:
                self.script.copy(OUT.span(piece), self.own.span(piece))
        elif not self.up:
            self._expect_result(chunk + AHEAD)
        self._send_down(chunk)

    # -- their pieces --------------------------------------------------------------------------

    @property
    def _apart(self) -> bool:
        """Whether sums are formed where the first child's arrive: own numbers must stay."""
        return self.parent is not None and bool(self.kids) and not self.in_place

    def _sums(self, chunk: int) -> Span:
        if self._apart:
            return self._slot(0, chunk)
        area = self.final if self.parent is None else self.own
        return area.span(self.pieces[chunk])

    def _slot(self, kid: int, chunk: int) -> Span:
        start, stop = self.pieces[chunk]
        slot = self.slots[kid][chunk % AHEAD]
        return Span("tmp", slot.start, slot.start + stop - start)

    def _expect_sums(self, chunk: int) -> None:
        if chunk < len(self.pieces):
            self.handles["sums", chunk] = [
                handle
                for number, kid in enumerate(self.kids)
                for handle in self.script.recv(kid, self.tag, self._slot(number, chunk))
            ]

    def _expect_result(self, chunk: int) -> None:
        if chunk < len(self.pieces) and self.parent is not None:
            into = OUT.span(self.pieces[chunk])
            self.handles["result", chunk] = self.script.recv(self.parent, self.tag, into)

    def _send_down(self, chunk: int) -> None:
        of = OUT.span(self.pieces[chunk])
        self.handles["down", chunk] = [
            handle for kid in self.kids for handle in self.script.send(kid, self.tag, of)
        ]

    def _old_results(self, chunk: int) -> list[int]:
        """Sends that must be through before more of them begin."""
        return self._pop("down", chunk - AHEAD)

    def _pop(self, what: str, chunk: int) -> list[int]:
        return self.handles.pop((what, chunk), [])
