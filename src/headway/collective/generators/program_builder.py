"""Builds the steps of all ranks of a collective program; empty messages are left out.

Generators therefore need no special cases for parts of no elements: such a message becomes a
step on neither end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headway.collective.program.program import (
    Buffer,
    BufferSpan,
    CollectiveProgram,
    CollectiveTask,
    Combine,
    Copy,
    Recv,
    Send,
    Step,
    Wait,
)
from headway.errors import PlanError

Part = tuple[int, int]
"""Start and stop of elements of the whole."""


@dataclass(frozen=True, slots=True)
class BufferArea:
    """Where a rank keeps elements of the whole: element e of it at place e - first of a buffer."""

    buffer: Buffer
    first: int = 0

    def span(self, part: Part) -> BufferSpan:
        """Of elements start to stop of the whole."""
        return BufferSpan(self.buffer, part[0] - self.first, part[1] - self.first)


OUT = BufferArea("out")


@dataclass(slots=True)
class RankScript:
    """One rank's steps as they are written."""

    steps: list[Step] = field(default_factory=list)
    scratch: int = 0

    def room(self, size: int) -> BufferSpan:
        """Scratch of its own."""
        self.scratch += size
        return BufferSpan("tmp", self.scratch - size, self.scratch)

    def recv(self, peer: int, tag: int, into: BufferSpan) -> list[int]:
        """Begin to receive; returns its handle, or none for nothing."""
        return self._message(Recv(peer, tag, into), into)

    def send(self, peer: int, tag: int, of: BufferSpan) -> list[int]:
        """Begin to send; returns its handle, or none for nothing."""
        return self._message(Send(peer, tag, of), of)

    def wait(self, handles: Iterable[int]) -> None:
        """Wait for messages."""
        steps = tuple(handles)
        if steps:
            self.steps.append(Wait(steps))

    def combine(self, dst: BufferSpan, src: BufferSpan) -> None:
        if dst.size:
            self.steps.append(Combine(dst, src))

    def copy(self, dst: BufferSpan, src: BufferSpan) -> None:
        if dst.size:
            self.steps.append(Copy(dst, src))

    def _message(self, step: Recv | Send, span: BufferSpan) -> list[int]:
        if not span.size:
            return []
        self.steps.append(step)
        return [len(self.steps) - 1]


class ProgramBuilder:
    """The scripts of all ranks."""

    def __init__(self, collective: CollectiveTask) -> None:
        self.collective = collective
        self.ranks = [RankScript() for _ in range(collective.ranks)]
        self._tag = 0

    def tag(self) -> int:
        """One that no message has yet."""
        self._tag += 1
        return self._tag - 1

    def program(self, name: str) -> CollectiveProgram:
        """What was written."""
        return CollectiveProgram(
            self.collective,
            tuple(tuple(script.steps) for script in self.ranks),
            tuple(script.scratch for script in self.ranks),
            name,
        )


def parts_of(sizes: Sequence[int], first: int = 0) -> list[Part]:
    """Parts that follow each other."""
    found, at = [], first
    for size in sizes:
        found.append((at, at + size))
        at += size
    return found


def piece_count(size: int, chunk: int | None) -> int:
    """How many of at most `chunk` elements; None: one. At least one."""
    return 1 if chunk is None else max(1, -(-size // max(1, chunk)))


def split_evenly(part: Part, count: int) -> list[Part]:
    """As even as can be."""
    start, size = part[0], part[1] - part[0]
    return [(start + size * n // count, start + size * (n + 1) // count) for n in range(count)]


def check_operation(collective: CollectiveTask, name: str, ops: Sequence[str]) -> None:
    """Raise unless a generator makes programs for this operation.

    Raises:
        PlanError: Names the operations that it makes.
    """
    if collective.op not in ops:
        raise PlanError(
            f"there is no {name} program for {collective.op}",
            problems=[f"{name} makes {', '.join(ops)}"],
            fix="Use another program: direct makes all of them.",
        )
