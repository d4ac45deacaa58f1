"""Which ranks share a node, and the bytes that go from rank to rank and node to node.

`Nodes` is the only source of hierarchy: inside a node links are fast, between nodes they are
slow, and no code derives that from arithmetic on rank numbers (Shi et al. 2021, section 3.2).
`Traffic` is the matrix of bytes by (sender, receiver) that programs and exchange methods
predict and that the counters of the network interfaces confirm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Parents = tuple[int | None, ...]
"""A tree: of each rank the next one on the way to the root; None: the root."""


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

    def among(self, ranks: Sequence[int]) -> Nodes:
        """Only these ranks, on the same nodes; a node without any of them is left out."""
        kept = (tuple(rank for rank in members if rank in ranks) for members in self.members)
        return Nodes(tuple(filter(None, kept)))

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


def children(parents: Parents) -> list[list[int]]:
    """Of each rank."""
    found: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            found[parent].append(rank)
    return found


def depths(parents: Parents) -> list[int]:
    """Of each rank how far from the root it is.

    Raises:
        ValueError: Not a tree.
    """
    found = [-1] * len(parents)
    roots = [rank for rank, parent in enumerate(parents) if parent is None]
    if len(roots) != 1:
        raise ValueError(f"the parents {parents} make no tree: {len(roots)} roots")
    below, reached = children(parents), roots
    found[roots[0]] = 0
    # The list grows while it is walked: level by level, from the root.
    for rank in reached:
        for child in below[rank]:
            found[child] = found[rank] + 1
        reached += below[rank]
    if -1 in found:
        raise ValueError(f"the parents {parents} make no tree: rank {found.index(-1)} is not in it")
    return found


# Bytes from rank to rank: what programs and methods say that they send, and counters confirm.


@dataclass(frozen=True)
class Traffic:
    """Bytes by (sender, receiver), global ranks; pairs that exchange nothing are left out."""

    sent: Mapping[tuple[int, int], float]

    def __add__(self, other: Traffic) -> Traffic:
        total = dict(self.sent)
        for pair, size in other.sent.items():
            total[pair] = total.get(pair, 0.0) + size
        return Traffic(total)

    @property
    def total(self) -> float:
        """What all ranks send."""
        return math.fsum(self.sent.values())

    def by_rank(self, rank: int) -> float:
        """What one rank sends."""
        return math.fsum(size for (sender, _), size in self.sent.items() if sender == rank)

    def by_node(self, nodes: Nodes, node: int) -> float:
        """What leaves a node through its network interface."""
        home = set(nodes.members[node])
        return math.fsum(
            size
            for (sender, receiver), size in self.sent.items()
            if sender in home and receiver not in home
        )

    def busiest_rank(self) -> float:
        """What the rank that sends most sends."""
        totals: dict[int, float] = {}
        for (sender, _), size in self.sent.items():
            totals[sender] = totals.get(sender, 0.0) + size
        return max(totals.values(), default=0.0)

    def busiest_node(self, nodes: Nodes) -> float:
        """What leaves the node that sends most."""
        return max(self.by_node(nodes, node) for node in range(nodes.count))


NOTHING = Traffic({})


def set_partitions(ranks: int, labels: Sequence[int] = (0,)) -> Iterator[Sequence[int]]:
    """All partitions of ranks: of each rank the number of its part (a restricted growth string).

    Args:
        labels: Of the first ranks; each is at most one above all before it.
    """
    if len(labels) == ranks:
        yield labels
        return
    for label in range(max(labels) + 2):
        yield from set_partitions(ranks, [*labels, label])
