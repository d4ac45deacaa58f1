"""In which order a ring visits the ranks: along links that are there, as fast as can be.

Invariant: where any ring exists the order is one, and no other ring has a faster slowest link.
"""

from __future__ import annotations

from headway.collective.packing.graph import LinkGraph
from headway.errors import PlanError

_MOST = 200_000
"""Attempts to go on; on graphs of up to a dozen ranks never reached."""


def ring_order(graph: LinkGraph) -> tuple[int, ...]:
    """The ranks in the order of the ring, from rank 0.

    Raises:
        PlanError: No ring joins all ranks.
    """
    n = graph.ranks
    usual = tuple(range(n))
    rates = sorted({rate for row in graph.rates for rate in row if rate > 0}, reverse=True)
    for least in rates:
        order = _Visit(graph, least).order()
        if order is not None:
            same = all(graph.rates[r][(r + 1) % n] >= least for r in usual)
            return usual if same else order
    if n == 1:
        return usual
    raise PlanError(
        f"no ring of links joins all {n} ranks",
        problems=["every order of the ranks has a neighbour without a link"],
        fix="Use trees, which need no ring.",
    )


class _Visit:
    """Depth first, along links of some rate at least."""

    def __init__(self, graph: LinkGraph, least: float) -> None:
        self.next = [[j for j, rate in enumerate(row) if rate >= least] for row in graph.rates]
        self.path = [0]
        self.left = _MOST

    def order(self) -> tuple[int, ...] | None:
        return tuple(self.path) if self._go() else None

    def _go(self) -> bool:
        if len(self.path) == len(self.next):
            return 0 in self.next[self.path[-1]]
        for rank in self.next[self.path[-1]]:
            self.left -= 1
            if rank in self.path or self.left < 0:
                continue
            self.path.append(rank)
            if self._go():
                return True
            self.path.pop()
        return False
