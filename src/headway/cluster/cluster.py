"""A cluster as data: nodes with their ranks and devices, and the links inside and between them.

The same file, cluster.toml, describes a machine for the emulation and for the planner. Ranks are
numbered node by node, in the order of the file, and every pair of ranks has exactly one link.
`read_cluster` and `to_toml` are inverse to 12 digits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from headway.cluster.device import Device, device_problems
from headway.cluster.link import Level, Link, Rate, Seconds, level_order_problems
from headway.documents import document, nearest, read_document
from headway.errors import DocumentError, PlanError
from headway.units import (
    Price,
    exact_bytes,
    exact_flops,
    exact_rate,
    exact_seconds,
    format_rate,
)

_NAME = re.compile(r"[A-Za-z0-9_.]{1,32}")


@document
class Node:
    """One machine.

    Attributes:
        name: Letters, digits, "_" and "."; no hyphen, which joins two names: "link a-b".
        processes: Ranks on it; None: as many as the cluster's `processes`.
        rate: Bytes per second of its own network interface, in each direction; None: on a switch
            the rate of `between`, in a mesh no limit of its own.
        device: Of each of its ranks, of the cluster's `devices`; None: the cluster's `device`.
    """

    name: str
    processes: int | None = None
    rate: Rate | None = None
    device: str | None = None


@document
class Pair:
    """The link between two nodes, where it differs from the usual one.

    Attributes:
        rate: Bytes per second, of one direction.
        latency: Seconds; None: that of `between`.
    """

    nodes: tuple[str, ...]
    rate: Rate
    latency: Seconds | None = None

    @property
    def name(self) -> str:
        return "-".join(self.nodes)


MAX_RANKS = 2**18
"""Of a cluster: more than the largest ones have. Each has its place in a table."""


def _nodes(value: object) -> object:
    """A count becomes names; names become tables."""
    # Python takes true for the number 1; `nodes = true` is a mistake.
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"{value} nodes: at least 1")
        return tuple({"name": name} for name in node_names(value))
    if isinstance(value, list):
        return tuple({"name": item} if isinstance(item, str) else item for item in value)
    raise ValueError(f"{value!r} is neither a number of nodes nor a list of names or tables")


def node_names(count: int) -> list[str]:
    """a, b, c, ...; for more than 26 nodes n0, n1, n2, ...

    Raises:
        ValueError: More than `MAX_RANKS`.
    """
    if count > MAX_RANKS:
        raise ValueError(f"{count} nodes: at most {MAX_RANKS}")
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
            links share. "mesh": every pair has a link of its own; "links": those of `links` have.
        levels: All levels of links, from the innermost outwards, instead of `inside` and `between`.
        device: Of the nodes that do not say otherwise; None: the only one of `devices`.
        measured: Of a measurement the date, and on what: see `fingerprint`.
    """

    nodes: Annotated[tuple[Node, ...], BeforeValidator(_nodes)]
    processes: int = 1
    inside: Link | None = None
    between: Link | None = None
    links: tuple[Pair, ...] = ()
    fabric: Literal["switch", "mesh", "links"] = "switch"
    levels: tuple[Level, ...] = ()
    devices: dict[str, Device] = dataclasses.field(default_factory=dict)
    device: str | None = None
    measured: dict[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(
        nodes: int,
        processes: int = 1,
        *,
        rate: str | None = None,
        latency: str = "0 s",
        fabric: Literal["switch", "mesh", "links"] = "switch",
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
        return len(self._places)

    @cached_property
    def nodes_of_ranks(self) -> tuple[str, ...]:
        """The node's name of each rank, in order of rank: what `Nodes.of` takes."""
        return tuple(self.nodes[number].name for number, _ in self._places)

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """Of each rank: the number of its node, and its own one there."""
        counts = (n.processes if n.processes is not None else self.processes for n in self.nodes)
        return tuple((n, local) for n, count in enumerate(counts) for local in range(count))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of the node of each name; of a name that stands twice the first."""
        found: dict[str, int] = {}
        for number, node in enumerate(self.nodes):
            found.setdefault(node.name, number)
        return found

    def node(self, name: str) -> Node:
        """The node of a name.

        Raises:
            KeyError: There is none.
        """
        number = self._numbers.get(name)
        if number is None:
            raise KeyError(f"no node {name!r}{nearest(name, self.names)}")
        return self.nodes[number]

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

    # -- devices -------------------------------------------------------------------------------

    def device_of(self, name: str) -> str | None:
        """The name of the devices of a node; None: the cluster says nothing of devices."""
        only = next(iter(self.devices)) if len(self.devices) == 1 else None
        return self.node(name).device or self.device or only

    @property
    def devices_of_ranks(self) -> tuple[str | None, ...]:
        """The device's name of each rank, in order of rank."""
        by_node = [self.device_of(name) for name in self.names]
        return tuple(by_node[number] for number, _ in self._places)

    # -- links ---------------------------------------------------------------------------------

    @cached_property
    def link_levels(self) -> tuple[Level, ...]:
        """All levels, from the innermost outwards; of unequal links the slowest counts.

        A link of which nothing is said is infinitely fast.
        """
        if self.levels:
            return self.levels
        free = Link(rate=math.inf)
        inside, several = self.inside or free, len(self.nodes) > 1
        found = [Level(name="node", nodes=1, rate=inside.rate, latency=inside.latency)]
        if several and all(local == 0 for _, local in self._places):
            found = []  # a rank for each node: nothing happens inside
        if several:
            outside = self._slowest()
            found.append(Level(name="cluster", rate=outside.rate, latency=outside.latency))
        return tuple(found)

    def _slowest(self) -> Link:
        """Of the links between nodes, where the file names no levels."""
        usual = self.between or Link(rate=math.inf)
        own = [node.rate for node in self.nodes if node.rate is not None]
        late = [pair.latency for pair in self.links if pair.latency is not None]
        rates = [usual.rate, *own, *(pair.rate for pair in self.links)]
        return Link(rate=min(rates), latency=max([usual.latency, *late]))

    def groups(self, level: Level) -> tuple[tuple[int, ...], ...]:
        """The ranks of each domain of a level, ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self._places):
            found.setdefault(level.domain(*place), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    def level_of(self, ranks: Iterable[int]) -> Level:
        """The innermost level that joins all of these ranks: the slowest that they exchange over.

        Raises:
            PlanError: A rank that the cluster does not have.
        """
        members = sorted(set(ranks))
        if not members or members[0] < 0 or members[-1] >= self.ranks:
            raise PlanError(
                f"no level joins the ranks {members}",
                problems=[f"the cluster has ranks 0 to {self.ranks - 1}"],
                fix="Ask for one or more of them.",
            )
        places = [self._places[rank] for rank in members]
        # The last level joins all nodes (`level_order_problems`), so that one is always found.
        return next(
            level for level in self.link_levels if len({level.domain(*p) for p in places}) == 1
        )

    def interface_rate(self, name: str) -> float | None:
        """Bytes per second of a node's interface, in each direction; None: no limit."""
        own = self.node(name).rate
        if own is not None or self.fabric != "switch":
            return own
        outer = next((level.rate for level in self.levels if not level.in_node), None)
        return self.between.rate if self.between else outer

    def link(self, first: str, second: str) -> Link | None:
        """The link between two nodes, or inside one; None: not limited.

        On a switch it is never faster than the slower one of the two interfaces; other links of
        these nodes may take their share of it.
        """
        if self.levels:
            # Of a single node the last and the first rank, which its inner level joins.
            joining = self.level_of([self.ranks_of(first)[-1], self.ranks_of(second)[0]])
            return joining.alone
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

    def _pair(self, first: str, second: str) -> Pair | None:
        ends = {first, second}
        return next((pair for pair in self.links if set(pair.nodes) == ends), None)

    # -- soundness -----------------------------------------------------------------------------

    def check(self, where: str = "cluster") -> None:
        """Raise unless such a cluster can exist.

        Raises:
            DocumentError: With one line per problem.
        """
        problems = [
            *self._node_problems(),
            *self._device_problems(),
            *self._level_problems(),
            *self._pair_problems(),
        ]
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
            if self._numbers[node.name] < number:
                yield f"nodes.{number}.name: {node.name!r} stands twice"
            if node.processes is not None and node.processes < 1:
                yield f"nodes.{number}.processes: {node.processes}; at least 1"
            if node.rate is not None:
                yield from Link(rate=node.rate).problems(f"nodes.{number}.rate")
        own = (node.processes for node in self.nodes)
        ranks = sum(self.processes if count is None else count for count in own)
        if ranks > MAX_RANKS:
            yield f"processes: {ranks} on all nodes; at most {MAX_RANKS}"

    def _device_problems(self) -> Iterator[str]:
        users = {"device": self.device}
        users |= {f"nodes.{number}.device": node.device for number, node in enumerate(self.nodes)}
        return device_problems(self.devices, users)

    def _level_problems(self) -> Iterator[str]:
        for number, level in enumerate(self.levels):
            yield from level.problems(f"levels.{number}")
        yield from level_order_problems(self.levels, len(self.nodes))
        if self.levels and (self.inside or self.between or self.links):
            yield "levels: they say all; leave inside, between and links out"
        for name, link in (("inside", self.inside), ("between", self.between)):
            if link is not None:
                yield from link.problems(name)

    def _pair_problems(self) -> Iterator[str]:
        seen = set[frozenset[str]]()
        for number, pair in enumerate(self.links):
            key, ends = f"links.{number}", frozenset(pair.nodes)
            unknown = [name for name in pair.nodes if name not in self._numbers]
            for name in unknown:
                yield f"{key}.nodes: no node {name!r}{nearest(name, self.names)}"
            if len(pair.nodes) != 2 or len(ends) != 2:
                yield f'{key}.nodes: a link has two different ends, as in ["a", "b"]'
            if ends in seen:
                yield f"{key}.nodes: the link {pair.name} stands twice"
            seen.add(ends)
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


# A cluster as the text of a cluster.toml; reading it gives the cluster back, to 12 digits.


_WRITERS: Mapping[str, Callable[[float], str]] = {
    "memory": exact_bytes,
    **dict.fromkeys(("rate", "memory_rate"), exact_rate),
    **dict.fromkeys(("latency", "kernel", "dispatch", "update", "gather"), exact_seconds),
    **dict.fromkeys(("small", "middle", "large"), exact_seconds),
    **dict.fromkeys(
        ("step", "microbatch", "tensor", "piped_step", "piped_microbatch"), exact_seconds
    ),
    **dict.fromkeys(("forward", "backward"), exact_flops),
    **dict.fromkeys(("forward_stream", "backward_stream"), exact_rate),
    **dict.fromkeys(("forward_weights", "backward_weights"), exact_rate),
    **dict.fromkeys(("forward_far", "backward_far"), exact_rate),
    **dict.fromkeys(("forward_call", "backward_call"), exact_seconds),
}
"""By key of the file: what writes its amount with a unit."""
_TABLES = {"peak": exact_flops}
"""Tables of which all entries have one unit."""
_BARE = frozenset(f"{string.ascii_letters}{string.digits}_-")


def to_toml(cluster: Cluster, head: Sequence[str] = ()) -> str:
    """The text.

    Args:
        head: Lines of a comment at the top.
    """
    # Nodes with the names that a number gives them are written as that number.
    named = None if cluster.nodes == Cluster.of(len(cluster.nodes)).nodes else cluster.nodes
    tables = {"nodes": named or (), "levels": cluster.levels, "links": cluster.links}
    lines = [f"# {line}".rstrip() for line in head]
    if named is None:
        lines.append(f"nodes = {len(cluster.nodes)}")
    # Plain keys before all tables: TOML counts what follows [table] as keys of it.
    lines += _entries(_facts(cluster, without=("devices", *tables)))
    for table, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{table}]]", *_entries(_facts(row))]
    for name, device in cluster.devices.items():
        lines += ["", f"[devices.{_key(name)}]", *_entries(_facts(device))]
    return "\n".join(lines) + "\n"


def _facts(row: object, without: Sequence[str] = ()) -> dict[str, object]:
    """The fields that say something."""
    assert dataclasses.is_dataclass(row)
    return {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.name not in without and getattr(row, field.name) not in (None, field.default, {})
    }


def _entries(facts: Mapping[str, object]) -> Iterator[str]:
    for name, value in facts.items():
        yield f"{name} = {_value(name, value)}"


def _value(
    name: str, value: object, by_key: Mapping[str, Callable[[float], str]] = _WRITERS
) -> str:
    if isinstance(value, str | Price):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f'"{by_key[name](value)}"' if name in by_key else repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_value(name, item) for item in value)}]"
    facts = value if isinstance(value, Mapping) else _facts(value)
    units = {str(key): _TABLES[name] for key in facts} if name in _TABLES else _WRITERS
    inner = [f"{_key(key)} = {_value(key, v, units)}" for key, v in facts.items()]
    return f"{{ {', '.join(inner)} }}"


def _key(name: str) -> str:
    return name if name and set(name) <= _BARE else json.dumps(name)
