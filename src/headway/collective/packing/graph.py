"""Links between ranks as data: what tree packing packs into.

Invariant: `rates[i][j]` is what rank i can send to rank j per second while everything else is busy
too; links that share something (the interface of a node) are not such a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from headway.errors import PlanError

Direction = Literal["broadcast", "reduce", "all_reduce"]
"""Which way data goes along a tree: away from the root, towards it, or both at once."""


@dataclass(frozen=True)
class LinkGraph:
    """Ranks and the capacity of each direction of each link between them.

    Attributes:
        rates: Row i, column j: from rank i to rank j, bytes per second or any one unit; 0: no link.
    """

    rates: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(ranks: int, links: Mapping[tuple[int, int], float], *, both: bool = True) -> LinkGraph:
        """From links (i, j): rate.

        Args:
            ranks: How many.
            links: Their rates; what is named twice is added.
            both: Each holds in both directions, as a cable does; False: only from i to j.

        Raises:
            PlanError: With one line per problem.
        """
        problems = [*_problems(ranks, links)]
        if problems:
            raise PlanError("no such link graph", problems=problems, fix="Correct these links.")
        rates = [[0.0] * ranks for _ in range(ranks)]
        for (i, j), rate in links.items():
            rates[i][j] += rate
            if both:
                rates[j][i] += rate
        return LinkGraph(tuple(map(tuple, rates)))

    @staticmethod
    def mesh(ranks: int, rate: float = 1.0) -> LinkGraph:
        """Every pair has a link of its own."""
        return LinkGraph.of(ranks, dict.fromkeys(combinations(range(ranks), 2), rate))

    @property
    def ranks(self) -> int:
        return len(self.rates)

    @property
    def arcs(self) -> tuple[tuple[int, int], ...]:
        """The directions (i, j) that have a rate, ascending."""
        return tuple(
            (i, j) for i, row in enumerate(self.rates) for j, rate in enumerate(row) if rate > 0
        )

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs i < j that reach each other in both directions, ascending."""
        return tuple((i, j) for i, j in self.arcs if i < j and self.rates[j][i] > 0)

    def link_rate(self, i: int, j: int) -> float:
        """What both directions can carry at once: the slower one."""
        return min(self.rates[i][j], self.rates[j][i])

    def part(self, ranks: Sequence[int]) -> LinkGraph:
        """The links among some ranks, which are numbered anew in the given order."""
        return LinkGraph(tuple(tuple(self.rates[i][j] for j in ranks) for i in ranks))

    def turned(self) -> LinkGraph:
        """Every direction the other way: a reduction is a broadcast on this graph."""
        return LinkGraph(tuple(zip(*self.rates, strict=True)))

    def scaled(self, factor: float, links: Iterable[tuple[int, int]] | None = None) -> LinkGraph:
        """With all rates, or those of both directions of some links, times a factor."""
        pairs = {*self.arcs} if links is None else {p for i, j in links for p in ((i, j), (j, i))}
        return LinkGraph(
            tuple(
                tuple(rate * factor if (i, j) in pairs else rate for j, rate in enumerate(row))
                for i, row in enumerate(self.rates)
            )
        )

    def unreached(self, root: int) -> tuple[int, ...]:
        """The ranks to which no path leads from a root."""
        seen, todo = {root}, [root]
        while todo:
            i = todo.pop()
            found = [j for j, rate in enumerate(self.rates[i]) if rate > 0 and j not in seen]
            seen.update(found)
            todo += found
        return tuple(rank for rank in range(self.ranks) if rank not in seen)


def islands(count: int, size: int, *, inside: float, across: float) -> LinkGraph:
    """Full meshes of fast links, and one slow link between the ranks of the same place in each.

    Args:
        count: Islands.
        size: Ranks of each.
        inside: Rate of the links of an island.
        across: Rate of a link between two islands.
    """
    links = {
        (i, j): inside if i // size == j // size else across
        for i, j in combinations(range(count * size), 2)
        if i // size == j // size or i % size == j % size
    }
    return LinkGraph.of(count * size, links)


def _problems(ranks: int, links: Mapping[tuple[int, int], float]) -> Iterable[str]:
    if ranks < 1:
        yield f"{ranks} ranks: at least 1"
    for (i, j), rate in links.items():
        if not (0 <= i < ranks and 0 <= j < ranks):
            yield f"link {i}-{j}: the ranks are 0 to {ranks - 1}"
        elif i == j:
            yield f"link {i}-{j}: a link joins two ranks"
        if not (rate >= 0 and math.isfinite(rate)):
            yield f"link {i}-{j}: rate {rate} is not a number of at least 0"
