"""How long the exchange of one bucket occupies the link, and what it costs besides.

Each method is turned into the bytes of an all-reduce that would occupy the link as long, so that
one fitted line prices all of them, and into seconds of the processor and of further rounds.
Invariant: the plain all-reduce is priced at exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import Protocol

from headway.collective.carrier import CARRIED
from headway.collective.link import LinkFit, ring_factor
from headway.collective.nodes import Nodes
from headway.collective.payload import payloads
from headway.collective.wire import SPARSE, is_layered, shard_parcels

SEGMENT = 2 * 2**20
"""A hierarchical exchange sends its phases one after the other in segments of this many bytes."""


class Chosen(Protocol):
    """What of a scheme decides on the price of a bucket."""

    @property
    def compressor(self) -> str: ...
    @property
    def amount(self) -> float: ...
    @property
    def reduce(self) -> str: ...
    @property
    def collective(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a compressor: seconds of one processor per byte of gradient.

    Attributes:
        encode: Before it leaves.
        decode: Of what one rank has sent; gathered payloads are decoded once per rank.
    """

    encode: float
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Service:
    """What a bucket costs.

    Attributes:
        num_bytes: Of an all-reduce that occupies the link as long.
        encode: Seconds before.
        decode: Seconds after.
        delay: Seconds of further rounds, in which the link is free for others.
    """

    num_bytes: float
    encode: float = 0.0
    decode: float = 0.0
    delay: float = 0.0


@dataclass(frozen=True)
class Network:
    """The links of a job.

    Attributes:
        link: All-reduce over all ranks.
        nodes: Which ranks share a node.
        inside: All-reduce inside a node.
        across: All-reduce with one rank per node, as fast as one of them alone can go.
        carried: All-reduce by the program of the exchange, as played; None: as `link`.
    """

    link: LinkFit
    nodes: Nodes
    inside: LinkFit | None = None
    across: LinkFit | None = None
    carried: LinkFit | None = None

    @staticmethod
    def flat(link: LinkFit) -> Network:
        """Every rank has a link of its own."""
        return Network(link, Nodes(tuple((rank,) for rank in range(link.ranks))))

    @staticmethod
    def of_rates(nodes: int, width: int, *, rate: float, inside: float, latency: float) -> Network:
        """`nodes` nodes of `width` ranks that share the node's link.

        Args:
            nodes: How many.
            width: Ranks of each.
            rate: Bytes per second of a node's link.
            inside: Bytes per second between two ranks of a node.
            latency: Seconds of a small all-reduce over all ranks.
        """
        count = nodes * width
        members = tuple(tuple(range(n * width, (n + 1) * width)) for n in range(nodes))
        slow = inside if nodes == 1 else rate
        return Network(
            LinkFit.of_rate(slow, latency, count),
            Nodes(members),
            LinkFit.of_rate(inside, latency * width / count, width),
            LinkFit.of_rate(rate, latency * nodes / count, nodes),
        )

    def link_of(self, collective: str) -> LinkFit:
        """The link that limits: of a hierarchical exchange that between the nodes; a program has a
        fit of its own."""
        if collective in CARRIED and self.carried is not None:
            return self.carried
        if is_layered(self.nodes, collective) and self.across is not None:
            return self.across
        return self.link

    def among(self, ranks: Sequence[int]) -> Network:
        """The same links for a group of ranks: a ring of fewer sends each byte less often."""
        members = tuple(
            kept for m in self.nodes.members if (kept := tuple(r for r in m if r in ranks))
        )
        before, after = ring_factor(self.link.ranks), ring_factor(len(ranks))
        if not before:
            return self
        link = LinkFit(
            self.link.latency * (len(ranks) - 1) / (self.link.ranks - 1),
            self.link.seconds_per_byte * after / before,
            self.link.error,
            len(ranks),
        )
        return Network(link, Nodes(members), self.inside, self.across)


def service(
    chosen: Chosen,
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    speeds: Mapping[str, Speed],
    element_bytes: int = 4,
) -> Service:
    """Price one bucket.

    Args:
        chosen: A scheme.
        shapes: Of its parameters.
        network: As measured.
        speeds: Of compressors, by name; "adasum" for its arithmetic.
        element_bytes: Of a gradient.
    """
    dense = element_bytes * sum(map(prod, shapes))
    if chosen.reduce == "adasum":
        return _adasum(chosen, dense, network, speeds.get("adasum", Speed(0.0)))
    speed = speeds.get(chosen.compressor, Speed(0.0))
    if chosen.collective == "hierarchical":
        if network.nodes.count == 1:
            return Service(dense)
        if chosen.compressor in SPARSE:
            return _sparse_levels(chosen, shapes, network, speed, element_bytes)
        if is_layered(network.nodes, chosen.collective):
            width = element_bytes if chosen.compressor == "none" else 2
            return _levels(dense, dense * width / element_bytes, network, speed)
    return _flat(chosen, shapes, network, speed, element_bytes)


def seen_link(
    chosen: Chosen,
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    element_bytes: int = 4,
) -> LinkFit:
    """The link as gradients see it that are compressed on the way: fewer bytes, more rounds.

    Buckets are to be fitted to this one: compressed gradients are small, so that smaller buckets
    pay, and a further round costs latency again.

    Args:
        chosen: A scheme.
        shapes: Of all parameters.
        network: As measured.
        element_bytes: Of a gradient.
    """
    link = network.link_of(chosen.collective)
    total = element_bytes * sum(map(prod, shapes))
    if not total:
        return link
    whole = service(chosen, shapes, network, {}, element_bytes)
    ratio = whole.num_bytes / total
    return LinkFit(
        link.latency + whole.delay, link.seconds_per_byte * ratio, link.error, link.ranks
    )


def _flat(
    chosen: Chosen,
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    speed: Speed,
    element_bytes: int,
) -> Service:
    link, ranks = network.link, network.link.ranks
    factor = ring_factor(ranks)
    if not factor:
        return Service(0.0)
    dense = element_bytes * sum(map(prod, shapes))
    parts = payloads(chosen.compressor, chosen.amount, shapes, element_bytes, ranks, flags=False)
    sent, copies = 0.0, 1
    for part in parts:
        if part.operation == "all_reduce":
            sent += factor * part.num_bytes
        elif part.operation == "all_gather":
            sent += (ranks - 1) * part.num_bytes
            copies = ranks
        else:
            sent += (ranks - 1) / ranks * part.num_bytes
    return Service(
        sent / factor,
        speed.encode * dense,
        speed.decode * dense * copies,
        link.latency * max(0, len(parts) - 1),
    )


def _levels(dense: float, inner: float, network: Network, speed: Speed) -> Service:
    """Three phases in segments that follow each other: the slowest level decides."""
    inside, across = _both(network)
    within = inside.seconds_per_byte * dense  # reduce-scatter and all-gather: one all-reduce
    beyond = across.seconds_per_byte * inner
    rate = across.seconds_per_byte or 1.0
    fill = within * min(1.0, SEGMENT / dense) if dense else 0.0
    return Service(
        max(within, beyond) / rate,
        speed.encode * dense / len(network.nodes.members[0]),
        speed.decode * dense / len(network.nodes.members[0]),
        2 * inside.latency + fill,
    )


def _sparse_levels(
    chosen: Chosen,
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    speed: Speed,
    element_bytes: int,
) -> Service:
    """HiTopKComm: dense reduce-scatter inside, parcels across, gather inside."""
    inside, across = _both(network)
    width, count = len(network.nodes.members[0]), network.nodes.count
    elements = sum(map(prod, shapes)) + len(shapes)
    parcels = shard_parcels(elements, len(shapes), width, chosen.amount, element_bytes)
    dense = element_bytes * elements
    beyond = across.wire_seconds((count - 1) * sum(parcels))
    scatter = inside.seconds_per_byte * dense / 2 + inside.latency if width > 1 else 0.0
    rows = min(count * sum(parcels), dense)
    gather = inside.wire_seconds((width - 1) * rows / width) + inside.latency if width > 1 else 0.0
    return Service(
        beyond / (network.link_of(chosen.collective).seconds_per_byte or 1.0),
        scatter + speed.encode * dense / width,
        gather + speed.decode * dense * count / width,
    )


def _adasum(chosen: Chosen, dense: float, network: Network, speed: Speed) -> Service:
    """Halving and doubling send as much as a ring; what is left over from a power of two sends its
    whole buffer there and back before and after."""
    work = speed.encode * dense
    if is_layered(network.nodes, chosen.collective):
        levels = _levels(dense, dense, network, Speed(0.0))
        _, across = _both(network)
        delay = levels.delay + _rounds(network.nodes.count, across) + work
        return Service(levels.num_bytes, 0.0, 0.0, delay)
    n = network.link.ranks
    factor = ring_factor(n)
    if not factor:
        return Service(0.0)
    power = 1 << (n.bit_length() - 1)
    sent = ring_factor(power) * dense + (2 * dense if n > power else 0.0)
    return Service(sent / factor, 0.0, work, _rounds(n, network.link))


def _rounds(n: int, link: LinkFit) -> float:
    """Latency beyond that of one all-reduce: each level sums its dot products in one of its own."""
    return log2(n) * link.latency if n > 1 else 0.0


def _both(network: Network) -> tuple[LinkFit, LinkFit]:
    """Links inside and across; where they were not measured, inside costs nothing."""
    inside = network.inside or LinkFit(0.0, 0.0, 0.0, len(network.nodes.members[0]))
    return inside, network.across or network.link
