"""Ring programs, and the order in which a ring visits the ranks of a link graph.

2 (n - 1) rounds for an all-reduce, in which each rank sends 2 (n - 1) / n of the buffer
(Patarasuk and Yuan 2009, optimal where every rank has one link). Broadcast and reduce run along
a chain. `ring_order` finds the Hamiltonian cycle whose slowest link is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.collective.generators import phases
from headway.collective.generators.program_builder import (
    BufferArea,
    ProgramBuilder,
    check_operation,
    parts_of,
)
from headway.collective.generators.trees import chain, trees
from headway.collective.program.program import CollectiveProgram, CollectiveTask, even_sizes
from headway.collective.topology import LinkGraph
from headway.errors import PlanError

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


def ring(
    collective: CollectiveTask, *, chunk: int | None = None, order: Sequence[int] | None = None
) -> CollectiveProgram:
    """A ring, or for one root a chain that begins there; not for all_to_all.

    Args:
        chunk: Elements of a message; None: as large as they come, of a chain one 16th.
        order: The ranks along the ring; None: by number.

    Raises:
        PlanError: No such program for this operation.
    """
    check_operation(collective, "ring", OPS)
    ranks = list(range(collective.ranks) if order is None else order)
    if collective.root is not None:
        place = ranks.index(collective.root)
        along = ranks[place:] + ranks[:place]
        return trees(collective, [(chain(along), 1.0)], chunk=chunk, name="ring")
    writer = ProgramBuilder(collective)
    if collective.op == "all_reduce":
        parts = parts_of(even_sizes(collective.elements, len(ranks)))
        phases.ring(writer, ranks, parts, chunk=chunk)
        return writer.program("ring")
    whole = parts_of(collective.shares)
    parts = [whole[rank] for rank in ranks]
    if collective.op == "all_gather":
        for script, part in zip(writer.ranks, whole, strict=True):
            script.copy(BufferArea("out").span(part), BufferArea("in", part[0]).span(part))
        phases.ring(writer, ranks, parts, chunk=chunk, scatter=False)
    else:
        phases.ring(writer, ranks, parts, chunk=chunk, gather=False, source=BufferArea("in"))
    return writer.program("ring")


# In which order a ring visits the ranks: along links that are there, as fast as can be.


# Attempts to go on; on graphs of up to a dozen ranks never reached.
_SEARCH_LIMIT = 200_000


def ring_order(graph: LinkGraph) -> tuple[int, ...]:
    """The ranks in the order of the ring, from rank 0.

    Raises:
        PlanError: No ring joins all ranks.
    """
    n = graph.ranks
    usual = tuple(range(n))
    rates = sorted({rate for row in graph.rates for rate in row if rate > 0}, reverse=True)
    # From the fastest down: the first rate that allows a ring is that of its slowest link.
    for least in rates:
        order = _HamiltonianSearch(graph, least).order()
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


class _HamiltonianSearch:
    """Depth first, along links of some rate at least."""

    def __init__(self, graph: LinkGraph, least: float) -> None:
        self.next = [[j for j, rate in enumerate(row) if rate >= least] for row in graph.rates]
        self.path = [0]
        self.left = _SEARCH_LIMIT

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
