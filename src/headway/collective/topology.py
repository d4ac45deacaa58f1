"""The network between ranks: link graphs, published machines, shared capacities and routes.

`LinkGraph` describes point-to-point links that do not share anything: `rates[i][j]` is what
rank i can send to rank j while every other link is busy too. It is the input of tree packing,
and `dgx1v` and `dgx1p` give it for NVIDIA's DGX-1 (unit: one NVLink in one direction).

`NetworkTopology` is the general case: a `DirectedLink` is one direction of anything with a
capacity (a link, a node's network interface, a rank's port on the switch of its node), and a
`NetworkRoute` lists those that a message crosses. Messages that cross the same one share its
capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import Literal

from headway.cluster import Cluster
from headway.cluster.link import Level
from headway.collective.nodes import Nodes
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


# Published machines as link graphs: NVLinks between the GPUs of a DGX-1.


DGX1_DOUBLE_LINKS = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
DGX1_SINGLE_LINKS = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))


def dgx1v(link: float = 1.0) -> LinkGraph:
    """Eight V100, six links each; `link`: the rate of one."""
    return LinkGraph.of(
        8, dict.fromkeys(DGX1_DOUBLE_LINKS, 2 * link) | dict.fromkeys(DGX1_SINGLE_LINKS, link)
    )


def dgx1p(link: float = 1.0) -> LinkGraph:
    """Eight P100, four links each: the same pairs with one link each; `link`: its rate."""
    return LinkGraph.of(8, dict.fromkeys(DGX1_DOUBLE_LINKS + DGX1_SINGLE_LINKS, link))


LINK_GRAPHS: Mapping[str, LinkGraph] = MappingProxyType(
    {"dgx-1p": dgx1p(20e9), "dgx-1v": dgx1v(25e9)}
)
"""By the names of the command line; links in bytes per second: NVLink 1 of a P100, 2 of a V100."""


# The network between ranks as wires: which of them a message crosses, and what each carries.


Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of something that messages share.

    Attributes:
        rate: Bytes per second.
    """

    name: str
    rate: float


@dataclass(frozen=True, slots=True)
class NetworkRoute:
    """How a message gets from one rank to another.

    Attributes:
        wires: Their numbers, from the sender to the receiver; none: nothing limits it.
        latency: Seconds for which the last byte is under way.
    """

    wires: tuple[int, ...]
    latency: float = 0.0


@dataclass(frozen=True)
class NetworkTopology:
    """The network.

    Attributes:
        ways: By (sender, receiver); a pair without a way cannot exchange messages.
    """

    ranks: int
    wires: tuple[DirectedLink, ...]
    ways: Mapping[Pair, NetworkRoute] = field(repr=False)
    nodes: Nodes
    names: tuple[str, ...] = ()

    @staticmethod
    def of_links(graph: LinkGraph, *, latency: float = 0.0) -> NetworkTopology:
        """Point-to-point links, nothing shared; rates in bytes per second."""
        wires: list[DirectedLink] = []
        ways: dict[Pair, NetworkRoute] = {}
        for i, j in graph.arcs:
            ways[i, j] = NetworkRoute((len(wires),), latency)
            wires.append(DirectedLink(f"{i} to {j}", graph.rates[i][j]))
        names = tuple(map(str, range(graph.ranks)))
        return NetworkTopology(graph.ranks, tuple(wires), ways, Nodes.one(graph.ranks), names)

    @staticmethod
    def of_cluster(cluster: Cluster) -> NetworkTopology:
        """The wires of a description: levels, or links inside and between nodes.

        On a switch and at each level a unit has one wire out and one in; in a mesh, and where a
        pair of nodes has a link of its own, that link is a wire for each direction.
        """
        return _TopologyBuilder(cluster).build()

    def way(self, sender: int, receiver: int) -> NetworkRoute:
        """The route of a message; PlanError where nothing joins these ranks."""
        found = self.ways.get((sender, receiver))
        if found is None:
            raise PlanError(
                f"nothing joins rank {sender} and rank {receiver}",
                problems=["a program can only send along links that are there"],
                fix="Use a program that keeps to the links, such as packed trees; or add the link.",
            )
        return found

    @cached_property
    def graph(self) -> LinkGraph:
        """The rate between two ranks; each wire is divided evenly among the pairs that share it."""
        users = [0] * len(self.wires)
        for way in self.ways.values():
            for wire in way.wires:
                users[wire] += 1
        rates = [[0.0] * self.ranks for _ in range(self.ranks)]
        # For pairs that nothing limits: packings compute with rates, which must be finite.
        fastest = max((wire.rate for wire in self.wires), default=1.0)
        for (i, j), way in self.ways.items():
            shares = [self.wires[wire].rate / users[wire] for wire in way.wires]
            rates[i][j] = min(shares, default=fastest)
        return LinkGraph(tuple(map(tuple, rates)))

    @cached_property
    def shared(self) -> bool:
        """Whether some wire is crossed by several pairs."""
        used = [wire for way in self.ways.values() for wire in way.wires]
        return len(used) > len(set(used))

    def across(self, pairs: Iterable[Pair]) -> float:
        """Bytes per second that these pairs can carry together: their first wires, or their last
        ones, whichever is less; infinite where one of them has none."""
        ways = [self.ways[pair].wires for pair in pairs if pair in self.ways]
        if any(not wires for wires in ways):
            return math.inf
        first = {wires[0] for wires in ways}
        last = {wires[-1] for wires in ways}
        return min(math.fsum(self.wires[w].rate for w in side) for side in (first, last))


class _TopologyBuilder:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = cluster.nodes_of_ranks
        self.wires: list[DirectedLink] = []
        self.found: dict[object, int] = {}

    def build(self) -> NetworkTopology:
        ranks = self.cluster.ranks
        ways = {
            (i, j): self._by_level(i, j) if self.cluster.levels else self._way(i, j)
            for i in range(ranks)
            for j in range(ranks)
            if i != j and self._joined(self.nodes[i], self.nodes[j])
        }
        return NetworkTopology(
            ranks, tuple(self.wires), ways, Nodes.of(self.nodes), _names(self.nodes)
        )

    def _wire(self, key: object, name: str, rate: float | None) -> tuple[int, ...]:
        """The number of a link that is made once; none where nothing limits it."""
        if rate is None or math.isinf(rate):
            return ()
        if key not in self.found:
            self.found[key] = len(self.wires)
            self.wires.append(DirectedLink(name, rate))
        return (self.found[key],)

    def _unit(self, key: object, name: str, rate: float | None, side: str) -> tuple[int, ...]:
        return self._wire((key, side), f"{name} {side}", rate)

    def _by_level(self, sender: int, receiver: int) -> NetworkRoute:
        level = self.cluster.level_of([sender, receiver])
        link = level.link
        before = self._inside(level)
        wires: list[int] = []
        for rank, side in ((sender, "out"), (receiver, "in")):
            unit = next(group for group in before if rank in group) if before else (rank,)
            name = self.nodes[rank] if before else f"rank {rank}"
            wires += self._unit((level.name, unit), name, link.rate, side)
        return NetworkRoute(tuple(wires), link.latency)

    def _inside(self, level: Level) -> Sequence[tuple[int, ...]]:
        """The domains of the level below: the units that this one joins; none: ranks."""
        levels = self.cluster.link_levels
        place = levels.index(level)
        return self.cluster.groups(levels[place - 1]) if place else ()

    def _way(self, sender: int, receiver: int) -> NetworkRoute:
        first, second = self.nodes[sender], self.nodes[receiver]
        link = self.cluster.link(first, second)
        latency = link.latency if link else 0.0
        if first == second:
            rate = link.rate if link else None
            out = self._unit(("rank", sender), f"rank {sender}", rate, "out")
            return NetworkRoute(
                out + self._unit(("rank", receiver), f"rank {receiver}", rate, "in"), latency
            )
        out = self._unit(first, first, self.cluster.interface_rate(first), "out")
        into = self._unit(second, second, self.cluster.interface_rate(second), "in")
        between = self._wire((first, second), f"{first} to {second}", self._own(first, second))
        return NetworkRoute(out + between + into, latency)

    def _pair(self, first: str, second: str) -> float | None:
        """The rate of a link between just these two nodes, as the file names it."""
        ends = {first, second}
        return next((pair.rate for pair in self.cluster.links if set(pair.nodes) == ends), None)

    def _own(self, first: str, second: str) -> float | None:
        usual = self.cluster.between if self.cluster.fabric == "mesh" else None
        rate = self._pair(first, second)
        # A link that the file names counts before the usual one of a mesh.
        return rate if rate is not None else usual.rate if usual else None

    def _joined(self, first: str, second: str) -> bool:
        listed = self.cluster.fabric != "links" or self._pair(first, second) is not None
        return first == second or listed


def _names(nodes: Sequence[str]) -> tuple[str, ...]:
    """ "a" where a node has one rank, else "a.0", "a.1"."""
    count: dict[str, int] = {}
    found = []
    for node in nodes:
        count[node] = count.get(node, -1) + 1
        found.append(node if nodes.count(node) == 1 else f"{node}.{count[node]}")
    return tuple(found)
