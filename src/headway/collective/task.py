"""What a collective has to do: which elements every rank begins with, and which it must end with.

The same description is the goal of a program's check, the sizes of the buffers that an interpreter
allocates, and what a generator is asked for. Invariant: the buffers are those of torch.distributed;
where it works in place (all_reduce, broadcast, reduce) "out" begins as the rank's own contribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]
OPS: tuple[Op, ...] = get_args(Op)
IN_PLACE: frozenset[Op] = frozenset({"all_reduce", "broadcast", "reduce"})
ROOTED: frozenset[Op] = frozenset({"broadcast", "reduce"})

Terms = tuple[tuple[int, int], ...]
"""The sum that an element holds: (rank, offset) for each contribution, ascending; element e of a
buffer holds element e + offset of that rank's own contribution."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation on buffers of exact sizes.

    Attributes:
        op: Which.
        ranks: Among how many, 0 to ranks - 1.
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
    def of(op: Op, ranks: int, elements: int, *, root: int | None = None) -> Collective:
        """With even shares; where elements do not divide, the first ranks have one more.

        Args:
            op: Which.
            ranks: Among how many.
            elements: Of the whole: of all_to_all what each rank has for all ranks.
            root: broadcast, reduce: by default rank 0.

        Raises:
            ValueError: No ranks, a negative size, a root that is none or is not there.
        """
        if op in ROOTED:
            return Collective(op, ranks, (elements,), root=0 if root is None else root)
        if op == "all_reduce":
            return Collective(op, ranks, (elements,), root=root)
        shares = even(elements, ranks)
        if op == "all_to_all":
            return Collective(op, ranks, (), table=(shares,) * ranks, root=root)
        return Collective(op, ranks, shares, root=root)

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

    def sent_to(self, rank: int, peer: int) -> tuple[int, int]:
        """all_to_all: where in `rank`'s "in" lies what it has for `peer`."""
        start = sum(self.table[rank][:peer])
        return start, start + self.table[rank][peer]

    def got_from(self, rank: int, peer: int) -> tuple[int, int]:
        """all_to_all: where in `rank`'s "out" belongs what `peer` has for it."""
        start = sum(row[rank] for row in self.table[:peer])
        return start, start + self.table[peer][rank]

    def goal(self, rank: int) -> Iterator[tuple[int, int, Terms]]:
        """What "out" must hold at the end, from its beginning to its end: (start, stop, terms)."""
        everyone = tuple((source, 0) for source in range(self.ranks))
        if self.op == "all_reduce" or (self.op == "reduce" and rank == self.root):
            yield 0, self.elements, everyone
        elif self.op == "reduce":
            yield 0, self.elements, ((rank, 0),)  # as it was
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
            for source in range(self.ranks):
                start, stop = self.got_from(rank, source)
                yield start, stop, ((source, self.sent_to(source, rank)[0] - start),)


def even(elements: int, parts: int) -> tuple[int, ...]:
    """Sizes that add up; the first ones are larger by one where it does not divide."""
    size, longer = divmod(elements, parts)
    return tuple(size + (part < longer) for part in range(parts))


def proportional(elements: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Sizes that add up, each within one element of its share of the weights."""
    total, sizes, used, seen = sum(weights), [], 0, 0.0
    for weight in weights:
        seen += weight
        upto = round(elements * seen / total)
        sizes.append(upto - used)
        used = upto
    return tuple(sizes)
