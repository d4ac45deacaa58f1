"""Bytes from rank to rank: what programs and methods say that they send, and counters confirm.

Invariant: what the ranks send and what they receive add up to the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.collective.nodes import Nodes


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
