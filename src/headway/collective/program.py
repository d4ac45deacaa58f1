"""A collective as data: for each rank the receives, sends, waits and sums that carry it out.

One program is checked (`program_check`), priced and drawn in the pure plane and carried out by one
interpreter in the torch plane; nothing that reads it knows which generator made it. Sources of the
idea: MSCCL (Cowan et al. 2023, programs as data); Blink (Wang et al. 2020, section 4). Invariant: a
program is made for exact numbers of elements, and a step's place in its rank's tuple is its handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.collective.task import Collective, Op
from headway.collective.traffic import Traffic

Buffer = Literal["in", "out", "tmp"]
"""What a collective reads only; its result (and own contribution, where it works in place);
scratch of the program, undefined at the start."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements start to stop (excluded) of one of a rank's buffers."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        """Whether they share an element."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Recv:
    """Begin to receive from a rank; does not wait."""

    peer: int
    tag: int
    into: Span

    def __str__(self) -> str:
        return f"Recv {self.into} from {self.peer} tag {self.tag}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send to a rank; does not wait."""

    peer: int
    tag: int
    of: Span

    def __str__(self) -> str:
        return f"Send {self.of} to {self.peer} tag {self.tag}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until messages are through.

    Attributes:
        steps: Places of their Recv and Send in this rank's tuple, all before this one.
    """

    steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"Wait {', '.join(map(str, self.steps))}"


@dataclass(frozen=True, slots=True)
class Combine:
    """dst = dst op src, element by element."""

    dst: Span
    src: Span

    def __str__(self) -> str:
        return f"Combine {self.dst} with {self.src}"


@dataclass(frozen=True, slots=True)
class Copy:
    """dst = src."""

    dst: Span
    src: Span

    def __str__(self) -> str:
        return f"Copy {self.src} to {self.dst}"


Step = Recv | Send | Wait | Combine | Copy
Place = tuple[int, int]
"""A rank and the place of a step in its tuple."""


@dataclass(frozen=True)
class CollectiveProgram:
    """What every rank does, in order.

    Messages between two ranks are matched by their tag; of one tag the first sent is the first
    received. Sums may be formed in any order that the program says: minimum, maximum and product
    work as sums do, an average is a sum divided at its end.

    Attributes:
        collective: What it is for.
        steps: Of each rank.
        scratch: Elements of each rank's "tmp".
        name: Of the algorithm, for people.
    """

    collective: Collective
    steps: tuple[tuple[Step, ...], ...]
    scratch: tuple[int, ...]
    name: str

    @property
    def op(self) -> Op:
        return self.collective.op

    @property
    def ranks(self) -> int:
        return self.collective.ranks

    @property
    def elements(self) -> int:
        return self.collective.elements

    @property
    def root(self) -> int | None:
        return self.collective.root

    def size(self, rank: int, buffer: Buffer) -> int:
        """Elements of a buffer of a rank."""
        if buffer == "tmp":
            return self.scratch[rank]
        return self.collective.size_in(rank) if buffer == "in" else self.collective.size_out(rank)

    def sent(self) -> dict[tuple[int, int], int]:
        """Elements by (sender, receiver)."""
        found: dict[tuple[int, int], int] = {}
        for rank, steps in enumerate(self.steps):
            for step in steps:
                if isinstance(step, Send):
                    pair = (rank, step.peer)
                    found[pair] = found.get(pair, 0) + step.of.size
        return found

    def traffic(self, element_bytes: int) -> Traffic:
        """Bytes by (sender, receiver)."""
        return Traffic({pair: float(n * element_bytes) for pair, n in self.sent().items()})

    def bytes_on(self, links: Sequence[tuple[int, int]], element_bytes: int) -> float:
        """Bytes that cross a link which these (sender, receiver) pairs share."""
        sent = self.sent()
        return float(sum(sent.get(pair, 0) for pair in links) * element_bytes)

    def messages(self) -> int:
        """How many are sent."""
        return sum(isinstance(step, Send) for steps in self.steps for step in steps)

    def partners(self) -> dict[Place, Place]:
        """Of each Recv its Send and of each Send its Recv; those without one are left out."""
        sends: dict[tuple[int, int, int], list[Place]] = {}
        recvs: dict[tuple[int, int, int], list[Place]] = {}
        for rank, steps in enumerate(self.steps):
            for place, step in enumerate(steps):
                if isinstance(step, Send):
                    sends.setdefault((rank, step.peer, step.tag), []).append((rank, place))
                elif isinstance(step, Recv):
                    recvs.setdefault((step.peer, rank, step.tag), []).append((rank, place))
        found: dict[Place, Place] = {}
        for key, sent in sends.items():
            for one, other in zip(sent, recvs.get(key, []), strict=False):
                found[one], found[other] = other, one
        return found

    def explain(self, rank: int) -> str:
        """The steps of a rank as text, one line each."""
        return "\n".join(f"{place:>4}  {step}" for place, step in enumerate(self.steps[rank]))
