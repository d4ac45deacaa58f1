"""`ProcessSet`: some of the ranks, which do operations of their own."""

from __future__ import annotations

from collections.abc import Sequence


class ProcessSet:
    """Some of the ranks; it is of use from `hvd.init` or `hvd.add_process_set` on.

    Args:
        ranks: Global ranks, in any order. (Horovod takes a communicator of mpi4py as well.)

    Attributes:
        process_set_id: Its number, the same on all ranks; None while it is not registered.
        ranks: Ascending; those of the global set are known after `hvd.init`.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] | None = sorted({int(rank) for rank in ranks})
        self.process_set_id: int | None = None
        self._own_rank = -1
        self.mpi_comm = None

    def register(self, number: int | None, ranks: Sequence[int] | None, own_rank: int) -> None:
        """Take up a number, or with None lose it."""
        self.process_set_id = number
        self.ranks = None if ranks is None else list(ranks)
        self._own_rank = own_rank

    def size(self) -> int:
        """The number of its ranks.

        Raises:
            ValueError: It is not registered.
        """
        return len(self._registered())

    def rank(self) -> int:
        """The place of this process among its ranks.

        Raises:
            ValueError: It is not registered, or this process does not belong to it.
        """
        ranks = self._registered()
        if self._own_rank not in ranks:
            raise ValueError(f"rank {self._own_rank} does not belong to {self}")
        return ranks.index(self._own_rank)

    def included(self) -> bool:
        """Whether this process belongs to it."""
        return self._own_rank in self._registered()

    def _registered(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(
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
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"
