"""One machine as a cluster: nodes in network namespaces with links shaped by tc; or paced.

host --- hub namespace: bridge --- node namespace: eth0   (ranks of node a)
                               --- node namespace: eth0   (ranks of node b)

`Emulation` (needs root): ranks of one node share its namespace and reach each other over its
loopback at full speed, also when they use the address of eth0; everything else goes through the
node's interface, whose rates are shaped and whose bytes the kernel counts. The bridge has a
namespace of its own, where the host's firewall has no rules.

`NodeShaping` is text for `tc -batch`. A node's interface carries an htb qdisc: class 1:1 is the
interface's rate, below it one class per other node (its ceiling is the pair's rate) and one for the
rest. Arriving traffic is limited a second time at the switch's port, so that several senders
together cannot exceed the receiver's interface. Only htb and u32 are used: kernels of small
machines often lack netem, flower and iptables.

`PacedCluster` (no root): all ranks talk over the loopback, and what a rank sends to another node is
held back until the interface of its node would have sent it. Only the rate of each node's interface
is emulated, and only for the bytes of gradients.
"""

from __future__ import annotations

import ipaddress
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headway.cluster import Cluster
from headway.errors import UsageError
from headway.launch.namespaces import (
    NamespaceGuard,
    Tag,
    check_tools,
    command_json,
    command_output,
    enter_namespace,
    exclusive,
    name_hosts,
    process_start,
    remove_stale,
    run_batch,
    tags_in_use,
)
from headway.run.distributed.launch_env import LOOPBACK
from headway.units import format_rate, format_seconds

UNLIMITED = 12_500_000_000
"""Bytes per second (100 Gbit/s) that stand for "no limit" in a class: more than a veth carries."""

# Numbers of htb classes: 1 is the interface, 2 the rest, 10 and more are the peers.
REST = 2
_FIRST_PEER = 10
_QUANTUM = 60_000


def burst(rate: float) -> int:
    """Bytes that may pass at once after a pause.

    A shaper that sleeps too long catches up from its burst: 128 KiB at 100 Mbit/s and 1 MB at
    1 Gbit/s, 8 to 10 ms, were needed to reach 0.93 of the rate with a second program on the cores.
    """
    return round(max(rate * 0.0084, min(131_072, rate * 0.0105), 16_384))


@dataclass(frozen=True, kw_only=True)
class NodeShaping:
    """The limits of one node's sending side.

    Attributes:
        rate: Bytes per second of the interface; None: no limit.
        peers: Address of every other node -> bytes per second to it; None: no own limit.
    """

    interface: str
    rate: float | None
    peers: Mapping[str, float | None]

    def class_of(self, address: str) -> str:
        """The id of the class through which everything to a peer goes."""
        # tc reads the numbers of classes as hexadecimal.
        return f"1:{_FIRST_PEER + list(self.peers).index(address):x}"

    @staticmethod
    def sent(text: str) -> dict[str, int]:
        """Bytes by class, from what `tc -s class show` says."""
        found = re.findall(r"^class \S+ (\S+) .*\n Sent (\d+) bytes", text, flags=re.MULTILINE)
        return {number: int(count) for number, count in found}

    def commands(self) -> Iterator[str]:
        """For `tc -batch` on an interface without a qdisc."""
        total, device = self.rate or UNLIMITED, self.interface
        yield f"qdisc add dev {device} root handle 1: htb default {REST}"
        yield f"class add dev {device} parent 1: classid 1:1 {_limits(total, total)}"
        yield self._class("add", f"1:{REST}", self._share, total)
        for address, rate in self.peers.items():
            number = self.class_of(address)
            yield self._class("add", number, *self._both(rate))
            yield (
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
                f"match ip dst {address}/32 flowid {number}"
            )

    def limit(self, address: str, rate: float | None) -> Iterator[str]:
        """From now on this rate to a peer; also ends a cut."""
        number = self.class_of(address)
        yield self._class("change", number, *self._both(rate))
        yield f"qdisc replace dev {self.interface} parent {number} pfifo limit 1000"

    def cut(self, address: str) -> Iterator[str]:
        """From now on everything to a peer vanishes without an error, as on a pulled cable."""
        yield f"qdisc replace dev {self.interface} parent {self.class_of(address)} blackhole"

    @property
    def _share(self) -> float:
        """What a class has for itself before it borrows: all shares together are the interface."""
        return (self.rate or UNLIMITED) / (len(self.peers) + 1)

    def _both(self, rate: float | None) -> tuple[float, float]:
        ceiling = min(rate or UNLIMITED, self.rate or UNLIMITED)
        return min(self._share, ceiling), ceiling

    def _class(self, verb: str, number: str, share: float, ceiling: float) -> str:
        limits = _limits(share, ceiling)
        return f"class {verb} dev {self.interface} parent 1:1 classid {number} {limits}"


def receive_limit(interface: str, rate: float) -> Iterator[str]:
    """The limit of a node's receiving side, at the switch's port of this node."""
    yield f"qdisc add dev {interface} root handle 1: htb default 1"
    yield f"class add dev {interface} parent 1: classid 1:1 {_limits(rate, rate)}"


def _limits(share: float, ceiling: float) -> str:
    # Without an explicit quantum the kernel warns of classes as fast as these.
    size = burst(ceiling)
    return (
        f"htb rate {round(share)}bps ceil {round(ceiling)}bps burst {size} cburst {size} "
        f"quantum {_QUANTUM}"
    )


INTERFACE = "eth0"
ROOT_ADVICE = "Use sudo, or a container with CAP_NET_ADMIN and CAP_SYS_ADMIN."
_NETWORK = ipaddress.ip_network("198.18.0.0/15")  # reserved for benchmarks (RFC 2544)
# In a /24: the host's number, the first node's, and how many nodes have room behind it.
_HOST, _FIRST, _LARGEST = 1, 10, 240


@dataclass(frozen=True, kw_only=True)
class EmulatedNode:
    """A running emulated node.

    Attributes:
        port: Name of the other end of its cable, at the switch.
    """

    name: str
    namespace: str
    address: str
    port: str
    shape: NodeShaping


@dataclass(frozen=True, kw_only=True)
class EmulatedCluster:
    """A running emulated cluster; pickles, so that any process of this machine can use it.

    Attributes:
        host: Address of the host, which all nodes reach; for stores and agents.
    """

    cluster: Cluster
    hub: str
    host: str
    nodes: tuple[EmulatedNode, ...]

    @property
    def interface(self) -> str:
        """The interface of every node, for GLOO_SOCKET_IFNAME."""
        return INTERFACE

    def node(self, name: str) -> EmulatedNode:
        """The node of a name.

        Raises:
            KeyError: There is none.
        """
        return self.nodes[self.cluster.names.index(self.cluster.node(name).name)]

    def enter(self, name: str, folder: Path | None = None) -> None:
        """Move this thread, and what it starts from now on, to a node; before sockets are made.

        Args:
            folder: For a file of a moment; None: that for temporary files.

        Raises:
            UsageError: The emulation has ended, or this user may not.
        """
        enter_namespace(self.node(name).namespace)
        self.name_hosts(folder)

    def name_hosts(self, folder: Path | None = None) -> None:
        """Let this thread, and what it starts, know nodes by name; `enter` does it."""
        known = {node.address: node.name for node in self.nodes}
        name_hosts({self.host: "launcher"} | known, folder)

    def pace(self, name: str, folder: Path) -> None:
        """The kernel does the pacing: nobody else needs to."""

    def counters(self, name: str) -> tuple[int, int]:
        """Bytes that a node's interface has sent and received, as the kernel counts them.

        With the headers of Ethernet, IP and TCP; without what stays inside of the node.
        """
        port = self.node(name).port
        facts = command_json("ip", "-s", "link", "show", port, namespace=self.hub)[0]["stats64"]
        # Seen from the switch: what its port receives, the node has sent.
        return int(facts["rx"]["bytes"]), int(facts["tx"]["bytes"])

    def sent_to(self, name: str) -> dict[str, int]:
        """Bytes that a node has sent to each other node, as its shaper counts them."""
        node = self.node(name)
        text = command_output(
            "tc", "-s", "class", "show", "dev", INTERFACE, namespace=node.namespace
        )
        counts = node.shape.sent(text)
        return {
            other.name: counts[node.shape.class_of(other.address)]
            for other in self.nodes
            if other.name != name
        }

    def set_link(self, first: str, second: str, rate: float | None) -> None:
        """Change the rate between two nodes in both directions; also restores a cut link.

        Args:
            rate: Bytes per second; None: the interfaces alone are the limit.
        """
        for node, peer in self._both_ends(first, second):
            run_batch("tc", node.shape.limit(peer.address, rate), namespace=node.namespace)

    def cut(self, first: str, second: str) -> None:
        """Drop everything between two nodes from now on; senders get no error."""
        for node, peer in self._both_ends(first, second):
            run_batch("tc", node.shape.cut(peer.address), namespace=node.namespace)

    def _both_ends(self, first: str, second: str) -> tuple[tuple[EmulatedNode, EmulatedNode], ...]:
        one, other = self.node(first), self.node(second)
        return (one, other), (other, one)


class Emulation:
    """Context manager: the cluster exists inside of it, and nothing of it after.

    Raises (on entry):
        UsageError: No root, no iproute2, too many nodes, or a kernel without htb.
        DocumentError: Such a cluster cannot exist.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stack = ExitStack()

    def __enter__(self) -> EmulatedCluster:
        self._cluster.check()
        check_possible(self._cluster)
        for text in emulation_limits(self._cluster):
            warnings.warn(text, stacklevel=2)
        with ExitStack() as stack, exclusive():
            remove_stale()
            tag = _new_tag()
            # Before anything is made: the guard also removes what a failing `_make` leaves.
            stack.callback(NamespaceGuard(tag).close)
            emulated = _describe(self._cluster, tag)
            _make(emulated, tag)
            # Not before: after an error above the stack removes what has been made.
            self._stack = stack.pop_all()
        return emulated

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def has_root() -> bool:
    """Whether this process may make network namespaces."""
    return Path("/proc/self/ns/net").exists() and os.geteuid() == 0


def check_possible(cluster: Cluster) -> None:
    """Raise unless this process may make the namespaces.

    Raises:
        UsageError: Not Linux, no root, no iproute2, or too many nodes.
    """
    if not has_root():
        raise UsageError(
            "emulated nodes need Linux and root",
            why="Only root may make network namespaces and shape links.",
            fix=ROOT_ADVICE,
        )
    check_tools()
    if len(cluster.nodes) > _LARGEST:
        raise UsageError(f"{len(cluster.nodes)} nodes are too many to emulate: at most {_LARGEST}")


def emulation_limits(cluster: Cluster) -> Iterator[str]:
    """What of a cluster is not emulated, one sentence each."""
    names = cluster.names
    late = [
        link.latency
        for number, first in enumerate(names)
        for second in names[number + 1 :]
        if (link := cluster.link(first, second)) is not None and link.latency > 0
    ]
    if late:
        yield (
            f"the latency between nodes, up to {format_seconds(max(late))}, is not emulated: only "
            "rates are; small messages will be faster than on the real links"
        )
    if cluster.fabric == "links":
        yield (
            "pairs of nodes without a link of their own are not kept apart: they are as fast as "
            "this machine is"
        )
    inside = cluster.link(names[0], names[0])
    if inside is not None:
        yield (
            "the links inside of nodes are not emulated: ranks of one node talk over the loopback "
            f"at this machine's speed, not at {inside}"
        )


def _new_tag() -> Tag:
    pid = os.getpid()
    start = process_start(pid) or 0
    used = {tag.serial for tag in tags_in_use() if (tag.pid, tag.start) == (pid, start)}
    serial = next(number for number in range(len(used) + 1) if number not in used)
    return Tag(pid=pid, start=start, serial=serial)


def _describe(cluster: Cluster, tag: Tag) -> EmulatedCluster:
    """Names and addresses of everything, before anything exists."""
    network = _free_network(tag)
    addresses = {name: str(network[_FIRST + i]) for i, name in enumerate(cluster.names)}
    nodes = []
    for number, name in enumerate(cluster.names):
        links = {other: cluster.link(name, other) for other in cluster.names if other != name}
        shape = NodeShaping(
            interface=INTERFACE,
            rate=cluster.interface_rate(name),
            peers={addresses[o]: None if link is None else link.rate for o, link in links.items()},
        )
        nodes.append(
            EmulatedNode(
                name=name,
                namespace=tag.namespace(str(number)),
                address=addresses[name],
                port=f"node{number}",
                shape=shape,
            )
        )
    return EmulatedCluster(
        cluster=cluster,
        hub=tag.namespace("hub"),
        host=str(network[_HOST]),
        nodes=tuple(nodes),
    )


def _free_network(tag: Tag) -> ipaddress.IPv4Network:
    """A /24 that no interface of this machine has; `exclusive` keeps others from taking it."""
    assert isinstance(_NETWORK, ipaddress.IPv4Network)
    taken = {
        ipaddress.ip_interface(f"{address['local']}/24").network
        for link in command_json("ip", "-4", "addr")
        for address in link["addr_info"]
    }
    choices = list(_NETWORK.subnets(new_prefix=24))
    begin = tag.pid % len(choices)
    for network in choices[begin:] + choices[:begin]:
        if network not in taken:
            return network
    raise UsageError(f"all networks of {_NETWORK} are in use on this machine")


def _make(emulated: EmulatedCluster, tag: Tag) -> None:
    nodes = emulated.nodes
    namespaces = [emulated.hub, *(node.namespace for node in nodes)]
    run_batch(
        "ip",
        [
            *(f"netns add {name}" for name in namespaces),
            f"link add {tag.link} type veth peer name host netns {emulated.hub}",
            f"link set {tag.link} addrgenmode none up",
            f"addr add {emulated.host}/24 dev {tag.link}",
        ],
    )
    run_batch("ip", _switch(emulated), namespace=emulated.hub)
    for node in nodes:
        run_batch("ip", _interface(node), namespace=node.namespace)
        if node.shape.rate is not None or any(node.shape.peers.values()):
            run_batch("tc", node.shape.commands(), namespace=node.namespace)
    ports = [line for n in nodes if n.shape.rate for line in receive_limit(n.port, n.shape.rate)]
    if ports:
        run_batch("tc", ports, namespace=emulated.hub)


def _switch(emulated: EmulatedCluster) -> Iterator[str]:
    # Without IPv6 addresses and multicast snooping nothing but the ranks' bytes is counted.
    yield "link add switch type bridge mcast_snooping 0"
    yield "link set switch addrgenmode none up"
    yield "link set host addrgenmode none master switch up"
    for node in emulated.nodes:
        peer = f"peer name {INTERFACE} netns {node.namespace}"
        yield f"link add {node.port} type veth {peer}"
        yield f"link set {node.port} addrgenmode none master switch up"


def _interface(node: EmulatedNode) -> Iterator[str]:
    yield "link set lo up"
    yield f"addr add {node.address}/24 dev {INTERFACE}"
    yield f"link set {INTERFACE} addrgenmode none up"


@dataclass(frozen=True, kw_only=True)
class PacedCluster:
    """Nodes that share this machine's loopback; pickles."""

    cluster: Cluster

    @property
    def interface(self) -> str:
        """For GLOO_SOCKET_IFNAME."""
        return "lo"

    @property
    def host(self) -> str:
        """Where the launcher's store is."""
        return LOOPBACK

    def enter(self, name: str, folder: Path | None = None) -> None:
        """Nodes have no place of their own here."""

    def pace(self, name: str, folder: Path) -> tuple[Path, float] | None:
        """File and rate of a node's interface, for `Place.pace`; None: no limit.

        Args:
            folder: That all ranks of this launch share, and that is removed after it.
        """
        rate = self.rate(name)
        return None if rate is None else (folder / f"pace-{name}", rate)

    def rate(self, name: str) -> float | None:
        """Bytes per second of a node: of its slowest link, as only the node as a whole is paced."""
        others = (other for other in self.cluster.names if other != name)
        links = (self.cluster.link(name, other) for other in others)
        return min((link.rate for link in links if link is not None), default=None)

    def set_link(self, first: str, second: str, rate: float | None, folder: Path) -> None:
        """Change the rate of both nodes, for all that they send.

        Args:
            rate: Bytes per second; None: as it was in the beginning.
        """
        from headway.comm.traffic_shaper import TrafficShaper  # here: `comm` imports torch

        for name in (first, second):
            found = self.pace(name, folder)
            if found is not None:
                with TrafficShaper.of(*found) as pace:
                    pace.set_rate(found[1] if rate is None else min(rate, found[1]))


def pacing_limits(cluster: Cluster) -> Iterator[str]:
    """What is emulated without root and what is not, one sentence each."""
    paced = PacedCluster(cluster=cluster)
    rates = {name: paced.rate(name) for name in cluster.names}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    told = ", ".join(f"{name} {format_rate(rate)}" for name, rate in known.items()) or "none"
    yield (
        "without root the nodes are emulated inside of the exchange: gradients wait as long as the "
        f"interface of their node would take ({told}); store, checkpoints, heartbeats and "
        "everything that bypasses headway's exchange are not slowed down, no packet header is "
        "counted, and latency is not emulated"
    )
    if cluster.links or cluster.fabric == "mesh":
        yield (
            "the links of a node are emulated as one interface, at the rate of the slowest of them"
        )
