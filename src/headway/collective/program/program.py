"""A collective as data: what it must do, and for each rank the steps that do it.

`CollectiveTask` says which elements every rank begins with and which it must end with; its
buffers are those of torch.distributed. `CollectiveProgram` holds for each rank a tuple of
`Recv`, `Send`, `Wait`, `Combine` and `Copy`, for exact numbers of elements; the index of a step
in that tuple is its handle. The same program is checked, priced, drawn and simulated here and
executed by the interpreter in `headway.comm`; none of them knows which generator made it.

`in_order` finds an order in which the steps of all ranks can happen on a rendezvous transport,
the strictest one (a send completes only after its receive was posted). `rounds` is the length
of the longest chain of dependent messages, the latency term of the alpha-beta model.

Sources: MSCCL (Cowan et al. 2023) for programs as data; Blink (Wang et al. 2020), section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from headway.collective.nodes import Traffic

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]
IN_PLACE: frozenset[Op] = frozenset({"all_reduce", "broadcast", "reduce"})
ROOTED: frozenset[Op] = frozenset({"broadcast", "reduce"})

Terms = tuple[tuple[int, int], ...]
"""The sum that an element holds: (rank, offset) for each contribution, ascending; element e of a
buffer holds element e + offset of that rank's own contribution."""


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """One operation on buffers of exact sizes.

    Attributes:
        shares: reduce_scatter, all_gather: elements of each rank's part of the whole; others: the
            whole as one number.
        table: all_to_all: row i holds how many elements rank i has for each rank.
        root: broadcast, reduce: of which rank; others: None.
    """

    op: Op
    ranks: int
    shares: tuple[int, ...]
    table: tuple[tuple[int, ...], ...] = ()
    root: int | None = None

    def __post_init__(self) -> None:
        wanted = {"reduce_scatter": self.ranks, "all_gather": self.ranks, "all_to_all": 0}
        counts = [*self.shares, *(count for row in self.table for count in row)]
        rows = self.ranks if self.op == "all_to_all" else 0
        if (
            self.ranks < 1
            or len(self.shares) != wanted.get(self.op, 1)
            or [len(row) for row in self.table] != [self.ranks] * rows
            or any(count < 0 for count in counts)
        ):
            raise ValueError(
                f"{self.op} of {self.ranks} ranks with shares {self.shares} and table {self.table}"
            )
        if (self.root is not None) != (self.op in ROOTED) or not 0 <= (self.root or 0) < self.ranks:
            raise ValueError(f"{self.op} of {self.ranks} ranks with root {self.root}")

    @staticmethod
    def of(op: Op, ranks: int, elements: int, *, root: int | None = None) -> CollectiveTask:
        """With even shares; where elements do not divide, the first ranks have one more.

        Args:
            elements: Of the whole: of all_to_all what each rank has for all ranks.

        Raises:
            ValueError: No ranks, a negative size, a root that is none or is not there.
        """
        if op in ROOTED:
            return CollectiveTask(op, ranks, (elements,), root=0 if root is None else root)
        if op == "all_reduce":
            return CollectiveTask(op, ranks, (elements,), root=root)
        shares = even_sizes(elements, ranks)
        if op == "all_to_all":
            return CollectiveTask(op, ranks, (), table=(shares,) * ranks, root=root)
        return CollectiveTask(op, ranks, shares, root=root)

    @property
    def elements(self) -> int:
        """Of the whole; of all_to_all the most that a rank has."""
        return sum(self.shares) if self.shares else max(map(sum, self.table))

    @property
    def borders(self) -> tuple[int, ...]:
        """Where each rank's share begins in the whole, and where the last one ends."""
        return (0, *accumulate(self.shares))

    def size_in(self, rank: int) -> int:
        """Elements of a rank's "in"; 0 where the operation works in place."""
        if self.op == "all_to_all":
            return sum(self.table[rank])
        if self.op == "reduce_scatter":
            return self.elements
        return self.shares[rank] if self.op == "all_gather" else 0

    def size_out(self, rank: int) -> int:
        """Elements of a rank's "out"."""
        if self.op == "all_to_all":
            return sum(row[rank] for row in self.table)
        return self.shares[rank] if self.op == "reduce_scatter" else self.elements

    def goal(self, rank: int) -> Iterator[tuple[int, int, Terms]]:
        """What "out" must hold at the end, from its beginning to its end: (start, stop, terms)."""
        everyone = tuple((source, 0) for source in range(self.ranks))
        if self.op == "all_reduce" or (self.op == "reduce" and rank == self.root):
            yield 0, self.elements, everyone
        elif self.op == "reduce":
            yield 0, self.elements, ((rank, 0),)  # unchanged
        elif self.op == "broadcast":
            yield 0, self.elements, ((self.root or 0, 0),)
        elif self.op == "reduce_scatter":
            first = self.borders[rank]
            yield 0, self.shares[rank], tuple((source, first) for source in range(self.ranks))
        elif self.op == "all_gather":
            for source, share in enumerate(self.shares):
                first = self.borders[source]
                yield first, first + share, ((source, -first),)
        else:
            start = 0
            for source, row in enumerate(self.table):
                yield start, start + row[rank], ((source, sum(row[:rank]) - start),)
                start += row[rank]


def even_sizes(elements: int, parts: int) -> tuple[int, ...]:
    """Sizes that add up; the first ones are larger by one where it does not divide."""
    size, longer = divmod(elements, parts)
    return tuple(size + (part < longer) for part in range(parts))


def proportional_sizes(elements: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Sizes that add up, each within one element of its share of the weights."""
    total, sizes, used, seen = sum(weights), [], 0, 0.0
    for weight in weights:
        seen += weight
        # Rounding the running total keeps each size within one element of its share.
        upto = round(elements * seen / total)
        sizes.append(upto - used)
        used = upto
    return tuple(sizes)


Buffer = Literal["in", "out", "tmp"]
"""What a collective reads only; its result (and own contribution, where it works in place);
scratch of the program, undefined at the start."""


@dataclass(frozen=True, slots=True)
class BufferSpan:
    """Elements start to stop (excluded) of one of a rank's buffers."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: BufferSpan) -> bool:
        """Whether they share an element."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Recv:
    """Begin to receive from a rank; does not wait."""

    peer: int
    tag: int
    into: BufferSpan

    def __str__(self) -> str:
        return f"Recv {self.into} from {self.peer} tag {self.tag}"


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send to a rank; does not wait."""

    peer: int
    tag: int
    of: BufferSpan

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

    dst: BufferSpan
    src: BufferSpan

    def __str__(self) -> str:
        return f"Combine {self.dst} with {self.src}"


@dataclass(frozen=True, slots=True)
class Copy:
    """dst = src."""

    dst: BufferSpan
    src: BufferSpan

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
        scratch: Elements of each rank's "tmp".
    """

    collective: CollectiveTask
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
            # Not strict: the surplus on one side has no partner, which `check_program` reports.
            for one, other in zip(sent, recvs.get(key, []), strict=False):
                found[one], found[other] = other, one
        return found


def in_order(
    program: CollectiveProgram, partners: Mapping[Place, Place]
) -> tuple[list[Place], dict[int, Place]]:
    """All steps in an order in which they can happen.

    Args:
        partners: `program.partners()`; a message without one is never through.

    Returns:
        The places, and of each rank that cannot go on the Recv or Send that it waits for.
    """
    at = [0] * program.ranks
    order: list[Place] = []
    stuck: dict[int, Place] = {}
    waiting: dict[int, list[int]] = {}  # by whom they wait for
    queue = deque(range(program.ranks))
    while queue:
        rank = queue.popleft()
        steps = program.steps[rank]
        stuck.pop(rank, None)
        while at[rank] < len(steps):
            blocked = _blocked(rank, steps[at[rank]], partners, at)
            if blocked is not None:
                stuck[rank] = blocked
                if blocked in partners:
                    waiting.setdefault(partners[blocked][0], []).append(rank)
                break
            order.append((rank, at[rank]))
            at[rank] += 1
        # A rank that waits is tried again only when the rank it waits for has gone on far enough.
        waits = waiting.pop(rank, [])
        woken = [one for one in waits if at[rank] > partners[stuck[one]][1]]
        queue.extend(woken)
        waiting[rank] = [one for one in waits if one not in woken]
    return order, stuck


def _blocked(
    rank: int, step: object, partners: Mapping[Place, Place], at: list[int]
) -> Place | None:
    """What a Wait waits for and whose other end has not begun."""
    if not isinstance(step, Wait):
        return None
    for place in step.steps:
        other = partners.get((rank, place))
        if other is None or at[other[0]] <= other[1]:
            return rank, place
    return None


def rounds(program: CollectiveProgram) -> int:
    """Messages on the longest chain in which each needs what the one before brought.

    The time of a program whose messages cost one unit each and whose bytes cost nothing.

    Raises:
        ValueError: It cannot be carried out; `check_program` says why.
    """
    partners = program.partners()
    order, stuck = in_order(program, partners)
    if stuck:
        raise ValueError(f"{program.name}: ranks {sorted(stuck)} wait forever")
    now = [0] * program.ranks
    begun: dict[Place, int] = {}
    for rank, place in order:
        step = program.steps[rank][place]
        begun[rank, place] = now[rank]
        if isinstance(step, Wait):
            for one in step.steps:
                # A message begins once both ends are there; one unit later its receiver has it.
                met = max(begun[rank, one], begun[partners[rank, one]])
                arrived = met + isinstance(program.steps[rank][one], Recv)
                now[rank] = max(now[rank], arrived)
    return max(now, default=0)
