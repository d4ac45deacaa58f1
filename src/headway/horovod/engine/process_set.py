"""`ProcessSet`: some of the ranks, which do operations of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.horovod.exceptions import InvalidArgument


class ProcessSet:
    """Some of the ranks; it is of use from `hvd.init` or `hvd.add_process_set` on.

    Args:
        ranks_or_comm: Global ranks, in any order. (Horovod takes a communicator of mpi4py as well.)

    Attributes:
        process_set_id: Its number, the same on all ranks; None while it is not registered.
        ranks: Ascending; those of the global set are known after `hvd.init`.

    Raises:
        ValueError: They are no list of whole numbers.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        # A generator can be read once.
        given = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in given):
            raise ValueError(f"a process set is made of a list of ranks, not of {ranks_or_comm!r}")
        self.ranks: list[int] | None = sorted(set(given))
        self.process_set_id: int | None = None
        self._own_rank = -1
        self.mpi_comm = None

    def register(self, number: int | None, ranks: Sequence[int] | None, own_rank: int) -> None:
        """Take up a number, or with None lose it."""
        self.process_set_id = number
        self.ranks = None if ranks is None else list(ranks)
        self._own_rank = own_rank

    def size(self) -> int | None:
        """The number of its ranks; None: it is not registered."""
        return len(self.ranks or ()) if self.registered else None

    def rank(self) -> int | None:
        """The place of this process among its ranks; None: it is not registered.

        Raises:
            ValueError: This process does not belong to it.
        """
        if not self.registered:
            return None
        if not self.included():
            raise ValueError(f"this process is not part of {self}")
        return self.members().index(self._own_rank)

    def included(self) -> bool | None:
        """Whether this process belongs to it; None: it is not registered."""
        return self._own_rank in self.members() if self.registered else None

    @property
    def registered(self) -> bool:
        """Whether operations may name it."""
        return self.process_set_id is not None and self.ranks is not None

    def members(self) -> list[int]:
        """Its ranks, ascending.

        Raises:
            InvalidArgument: It is not registered.
        """
        if self.process_set_id is None or self.ranks is None:
            raise InvalidArgument(
                f"{self} is not registered. Give it to hvd.init(process_sets=[...]) or "
                "hvd.add_process_set() first."
            )
        return self.ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return (self.process_set_id, self.ranks) == (other.process_set_id, other.ranks)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        facts = f"process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None"
        return f"ProcessSet({facts})"
