"""The network between ranks as wires: which of them a message crosses, and what each carries.

A wire is one direction of something with a capacity: of a link between two ranks, of a node's
interface, of a rank's port on its node's switch. Messages that cross the same wire share it.
Invariant: between two ranks every message takes the same wires.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from headway.cluster import Cluster
from headway.cluster.level import Level
from headway.collective.nodes import Nodes
from headway.collective.packing.graph import LinkGraph
from headway.errors import PlanError

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction of something that messages share.

    Attributes:
        name: For people: "a out", "link a to b".
        rate: Bytes per second.
    """

    name: str
    rate: float


@dataclass(frozen=True, slots=True)
class Way:
    """How a message gets from one rank to another.

    Attributes:
        wires: Their numbers, from the sender to the receiver; none: nothing limits it.
        latency: Seconds for which the last byte is under way.
    """

    wires: tuple[int, ...]
    latency: float = 0.0


@dataclass(frozen=True)
class Wires:
    """The network.

    Attributes:
        ranks: How many.
        wires: All.
        ways: By (sender, receiver); a pair without a way cannot exchange messages.
        nodes: Which ranks share a node.
        names: Of the ranks, for people.
    """

    ranks: int
    wires: tuple[Wire, ...]
    ways: Mapping[Pair, Way] = field(repr=False)
    nodes: Nodes
    names: tuple[str, ...] = ()

    @staticmethod
    def of_links(graph: LinkGraph, *, latency: float = 0.0) -> Wires:
        """Point-to-point links, nothing shared; rates in bytes per second."""
        wires: list[Wire] = []
        ways: dict[Pair, Way] = {}
        for i, j in graph.arcs:
            ways[i, j] = Way((len(wires),), latency)
            wires.append(Wire(f"{i} to {j}", graph.rates[i][j]))
        names = tuple(map(str, range(graph.ranks)))
        return Wires(graph.ranks, tuple(wires), ways, Nodes.one(graph.ranks), names)

    @staticmethod
    def of_cluster(cluster: Cluster) -> Wires:
        """The wires of a description: levels, or links inside and between nodes.

        On a switch and at each level a unit has one wire out and one in; in a mesh, and where a
        pair of nodes has a link of its own, that link is a wire for each direction.
        """
        return _Laying(cluster).laid()

    def way(self, sender: int, receiver: int) -> Way:
        """Raises:
        PlanError: Nothing joins these ranks.
        """
        found = self.ways.get((sender, receiver))
        if found is None:
            raise PlanError(
                f"nothing joins rank {sender} and rank {receiver}",
                problems=["a program can only send along links that are there"],
                fix="Use a program that keeps to the links, such as packed trees; or add the link.",
            )
        return found

    @cached_property
    def complete(self) -> bool:
        """Whether every rank can send to every other one."""
        return len(self.ways) == self.ranks * (self.ranks - 1)

    @cached_property
    def graph(self) -> LinkGraph:
        """What a message alone between two ranks gets. Where wires are shared, this is what trees
        are packed into after each wire was divided evenly among the pairs that use it.
        """
        users = [0] * len(self.wires)
        for way in self.ways.values():
            for wire in way.wires:
                users[wire] += 1
        rates = [[0.0] * self.ranks for _ in range(self.ranks)]
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
        """The most that these pairs can carry together, bytes per second: their first wires, or
        their last ones, whichever is less; infinite where one of them has none."""
        ways = [self.ways[pair].wires for pair in pairs if pair in self.ways]
        if any(not wires for wires in ways):
            return math.inf
        first = {wires[0] for wires in ways}
        last = {wires[-1] for wires in ways}
        return min(math.fsum(self.wires[w].rate for w in side) for side in (first, last))


class _Laying:
    """Lays the wires of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = cluster.nodes_of_ranks
        self.wires: list[Wire] = []
        self.found: dict[object, int] = {}

    def laid(self) -> Wires:
        ranks = self.cluster.ranks
        ways = {
            (i, j): self._by_level(i, j) if self.cluster.levels else self._way(i, j)
            for i in range(ranks)
            for j in range(ranks)
            if i != j and self._joined(self.nodes[i], self.nodes[j])
        }
        return Wires(ranks, tuple(self.wires), ways, Nodes.of(self.nodes), _names(self.nodes))

    def _wire(self, key: object, name: str, rate: float | None) -> tuple[int, ...]:
        """One that is laid once; none where nothing limits it."""
        if rate is None or math.isinf(rate):
            return ()
        if key not in self.found:
            self.found[key] = len(self.wires)
            self.wires.append(Wire(name, rate))
        return (self.found[key],)

    def _unit(self, key: object, name: str, rate: float | None, side: str) -> tuple[int, ...]:
        return self._wire((key, side), f"{name} {side}", rate)

    def _by_level(self, sender: int, receiver: int) -> Way:
        level = self.cluster.level_of([sender, receiver])
        link = level.link
        before = self._inside(level)
        wires: list[int] = []
        for rank, side in ((sender, "out"), (receiver, "in")):
            unit = next(group for group in before if rank in group) if before else (rank,)
            name = self.nodes[rank] if before else f"rank {rank}"
            wires += self._unit((level.name, unit), name, link.rate, side)
        return Way(tuple(wires), link.latency)

    def _inside(self, level: Level) -> Sequence[tuple[int, ...]]:
        """The domains of the level below: the units that this one joins; none: ranks."""
        levels = self.cluster.link_levels
        place = levels.index(level)
        return self.cluster.groups(levels[place - 1]) if place else ()

    def _way(self, sender: int, receiver: int) -> Way:
        first, second = self.nodes[sender], self.nodes[receiver]
        link = self.cluster.link(first, second)
        latency = link.latency if link else 0.0
        if first == second:
            rate = link.rate if link else None
            out = self._unit(("rank", sender), f"rank {sender}", rate, "out")
            return Way(
                out + self._unit(("rank", receiver), f"rank {receiver}", rate, "in"), latency
            )
        out = self._unit(first, first, self.cluster.interface_rate(first), "out")
        into = self._unit(second, second, self.cluster.interface_rate(second), "in")
        between = self._wire((first, second), f"{first} to {second}", self._own(first, second))
        return Way(out + between + into, latency)

    def _pair(self, first: str, second: str) -> float | None:
        """The rate of a link of their own that the file names."""
        ends = {first, second}
        return next((pair.rate for pair in self.cluster.links if set(pair.nodes) == ends), None)

    def _own(self, first: str, second: str) -> float | None:
        """The rate of the link that these two nodes have for themselves."""
        usual = self.cluster.between if self.cluster.fabric == "mesh" else None
        rate = self._pair(first, second)
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
