"""A cluster as data: nodes with their processes, and what the links inside and between them carry.

The same file describes a machine for the emulation and for prices. Invariant: ranks are numbered
node by node, in the order of the file, and every pair of ranks has exactly one link.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from headway.cluster.link import Link, Rate, Seconds
from headway.documents import document, nearest, read_document
from headway.errors import DocumentError
from headway.units import format_rate

_NAME = re.compile(r"[A-Za-z0-9_.]{1,32}")


@document
class Node:
    """One machine.

    Attributes:
        name: Letters, digits, "_" and "."; no hyphen, which joins two names: "link a-b".
        processes: Ranks on it; None: as many as the cluster's `processes`.
        rate: Bytes per second of its own network interface, in each direction; None: on a switch
            the rate of `between`, in a mesh no limit of its own.
    """

    name: str
    processes: int | None = None
    rate: Rate | None = None


@document
class Pair:
    """The link between two nodes, where it differs from the usual one.

    Attributes:
        nodes: The names of its two ends.
        rate: Bytes per second, of one direction.
        latency: Seconds; None: that of `between`.
    """

    nodes: tuple[str, ...]
    rate: Rate
    latency: Seconds | None = None

    @property
    def name(self) -> str:
        return "-".join(self.nodes)


def _nodes(value: object) -> object:
    """A count becomes names; names become tables."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"{value} nodes: at least 1")
        return tuple({"name": name} for name in node_names(value))
    if isinstance(value, list):
        return tuple({"name": item} if isinstance(item, str) else item for item in value)
    raise ValueError(f"{value!r} is neither a number of nodes nor a list of names or tables")


def node_names(count: int) -> list[str]:
    """a, b, c, ...; for more than 26 nodes n0, n1, n2, ..."""
    letters = string.ascii_lowercase
    return list(letters[:count]) if count <= len(letters) else [f"n{i}" for i in range(count)]


@document
class Cluster:
    """All nodes and links.

    Attributes:
        nodes: In a file also a number, or a list of names.
        processes: On each node that does not say otherwise.
        inside: Between ranks of one node; None: as fast as the machine is.
        between: Between nodes; None: as fast as the machine is.
        links: Pairs of nodes whose link differs.
        fabric: "switch": every node has one interface of the rate of `between`, which all its
            links share. "mesh": every pair has a link of its own.
    """

    nodes: Annotated[tuple[Node, ...], BeforeValidator(_nodes)]
    processes: int = 1
    inside: Link | None = None
    between: Link | None = None
    links: tuple[Pair, ...] = ()
    fabric: Literal["switch", "mesh"] = "switch"

    @staticmethod
    def of(
        nodes: int,
        processes: int = 1,
        *,
        rate: str | None = None,
        latency: str = "0 s",
        fabric: Literal["switch", "mesh"] = "switch",
    ) -> Cluster:
        """Like nodes, like links: Cluster.of(2, 2, rate="100 Mbit/s").

        Raises:
            DocumentError: With every problem.
            ValueError: No such unit.
        """
        cluster = Cluster(
            nodes=tuple(Node(name=name) for name in node_names(nodes)),
            processes=processes,
            between=None if rate is None else Link.of(rate, latency),
            fabric=fabric,
        )
        cluster.check()
        return cluster

    # -- ranks and nodes -----------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @property
    def ranks(self) -> int:
        """All processes of all nodes."""
        return sum(self.processes_of(name) for name in self.names)

    @property
    def nodes_of_ranks(self) -> tuple[str, ...]:
        """The node's name of each rank, in order of rank: what `Nodes.of` takes."""
        return tuple(name for name in self.names for _ in range(self.processes_of(name)))

    def node(self, name: str) -> Node:
        """The node of a name.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node {name!r}{nearest(name, self.names)}")

    def processes_of(self, name: str) -> int:
        own = self.node(name).processes
        return self.processes if own is None else own

    def ranks_of(self, name: str) -> range:
        """The ranks of a node, ascending."""
        first = 0
        for node in self.nodes:
            count = self.processes_of(node.name)
            if node.name == name:
                return range(first, first + count)
            first += count
        raise KeyError(f"no node {name!r}{nearest(name, self.names)}")

    # -- links ---------------------------------------------------------------------------------

    def interface_rate(self, name: str) -> float | None:
        """Bytes per second of a node's interface, in each direction; None: no limit."""
        own = self.node(name).rate
        if own is not None or self.fabric == "mesh" or self.between is None:
            return own
        return self.between.rate

    def link(self, first: str, second: str) -> Link | None:
        """The link between two nodes, or inside one; None: not limited.

        On a switch it is never faster than the slower one of the two interfaces; other links of
        these nodes may take their share of it.
        """
        if first == second:
            return self.inside
        latency = self.between.latency if self.between else 0.0
        rates = [self.interface_rate(first), self.interface_rate(second)]
        pair = self._pair(first, second)
        if pair is not None:
            rates.append(pair.rate)
            latency = latency if pair.latency is None else pair.latency
        elif self.fabric == "mesh" and self.between is not None:
            rates.append(self.between.rate)
        known = [rate for rate in rates if rate is not None]
        return Link(rate=min(known), latency=latency) if known else None

    def link_of_ranks(self, first: int, second: int) -> Link | None:
        """The link between two ranks; None: not limited."""
        names = self.nodes_of_ranks
        return self.link(names[first], names[second])

    def _pair(self, first: str, second: str) -> Pair | None:
        ends = {first, second}
        return next((pair for pair in self.links if set(pair.nodes) == ends), None)

    # -- soundness -----------------------------------------------------------------------------

    def check(self, where: str = "cluster") -> None:
        """Raise unless such a cluster can exist.

        Args:
            where: Name of the file, for the message.

        Raises:
            DocumentError: With one line per problem.
        """
        problems = [*self._node_problems(), *self._level_problems(), *self._pair_problems()]
        if problems:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            raise DocumentError(f"{count}:", where=where, problems=problems)

    def _node_problems(self) -> Iterator[str]:
        if not self.nodes:
            yield "nodes: there is none; write nodes = 2, or a list of names"
        if self.processes < 1:
            yield f"processes: {self.processes} on each node; at least 1"
        for number, node in enumerate(self.nodes):
            if not _NAME.fullmatch(node.name):
                yield (
                    f"nodes.{number}.name: {node.name!r} is no name; use letters, digits, "
                    '"_" and "."'
                )
            if self.names.index(node.name) < number:
                yield f"nodes.{number}.name: {node.name!r} stands twice"
            if node.processes is not None and node.processes < 1:
                yield f"nodes.{number}.processes: {node.processes}; at least 1"
            if node.rate is not None:
                yield from Link(rate=node.rate).problems(f"nodes.{number}.rate")

    def _level_problems(self) -> Iterator[str]:
        for name, link in (("inside", self.inside), ("between", self.between)):
            if link is not None:
                yield from link.problems(name)

    def _pair_problems(self) -> Iterator[str]:
        seen: list[frozenset[str]] = []
        for number, pair in enumerate(self.links):
            key, ends = f"links.{number}", frozenset(pair.nodes)
            unknown = [name for name in pair.nodes if name not in self.names]
            for name in unknown:
                yield f"{key}.nodes: no node {name!r}{nearest(name, self.names)}"
            if len(pair.nodes) != 2 or len(ends) != 2:
                yield f'{key}.nodes: a link has two different ends, as in ["a", "b"]'
            if ends in seen:
                yield f"{key}.nodes: the link {pair.name} stands twice"
            seen.append(ends)
            yield from Link(rate=pair.rate, latency=pair.latency or 0.0).problems(key)
            if not unknown:
                yield from self._too_fast(key, pair)

    def _too_fast(self, key: str, pair: Pair) -> Iterator[str]:
        for name in dict.fromkeys(pair.nodes):
            limit = self.interface_rate(name)
            if limit is not None and pair.rate > limit:
                yield (
                    f"{key}.rate: {format_rate(pair.rate)} is more than the interface of node "
                    f"{name} carries, {format_rate(limit)}; give the node a higher rate, or write "
                    'fabric = "mesh"'
                )


def read_cluster(path: Path) -> Cluster:
    """Read and check a cluster.toml.

    Raises:
        DocumentError: The file is missing, is not TOML, or has any problem; all are listed.
    """
    cluster = read_document(path, Cluster)
    cluster.check(str(path))
    return cluster
