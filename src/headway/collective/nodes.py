"""Which ranks share a node: the levels of a hierarchical exchange, as data.

Inside a node links are fast, between nodes they are slow. Hierarchy comes from this description
and never from arithmetic on rank numbers (Shi et al. 2021, section 3.2; MLSL's node groups).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node, ascending; nodes in order of their first rank."""

    members: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str]) -> Nodes:
        """From the name of each rank's node, in order of rank."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return Nodes(tuple(tuple(ranks) for ranks in found.values()))

    @staticmethod
    def one(ranks: int) -> Nodes:
        """All ranks on one node."""
        return Nodes((tuple(range(ranks)),))

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def ranks(self) -> int:
        return sum(map(len, self.members))

    @property
    def uniform(self) -> bool:
        """Every node has the same number of ranks, as a hierarchical exchange needs it."""
        return len({len(ranks) for ranks in self.members}) == 1

    def inside(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return next(ranks for ranks in self.members if rank in ranks)

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place in their nodes, one per node; nodes must be uniform."""
        place = self.inside(rank).index(rank)
        return tuple(ranks[place] for ranks in self.members)
