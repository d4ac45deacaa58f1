"""What the exchange of one bucket costs: bytes from rank to rank, and time on the link.

`bucket_traffic` follows what `headway.comm` sends: Gloo's ring for all-reduces and gathers over
all ranks, direct messages inside and across nodes, vector halving and distance doubling for
Adasum (Maleki et al. 2021), the levels of HiTopKComm (Shi et al. 2021), and the steps of a
program where one performs the sum. Network counters must confirm it; transport headers (0.2 to
5 %) are not included.

`bucket_service` converts each method into the bytes of an all-reduce that would occupy the link
as long, so that one fitted line prices all of them, plus processor seconds and latency of
further rounds. The plain all-reduce is priced at exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import log2, prod

from headway.collective.all_reduce.algorithm import (
    ALL_REDUCE_KINDS,
    AllReduceOptions,
    all_reduce_traffic,
    bucket_elements,
)
from headway.collective.compression import (
    UNCOMPRESSED,
    Compression,
    CompressorSpeed,
    sparse_shards,
)
from headway.collective.model.link_fit import LinkFit, ring_factor
from headway.collective.nodes import NOTHING, Nodes, Traffic

NUMBER_BYTES = 8
"""Of each layer and level Adasum sums three numbers in double precision."""
DIRECT_BLOCK_RANKS = 8
"""Up to so many ranks Adasum's dot products go to all at once; beyond, in log2(ranks) rounds."""


def ring_all_reduce_traffic(ranks: Sequence[int], num_bytes: float) -> Traffic:
    """Each rank sends 2 (n - 1) / n of the buffer to its right neighbour."""
    return _circle(ranks, ring_factor(len(ranks)) * num_bytes)


def ring_all_gather_traffic(ranks: Sequence[int], payload: float) -> Traffic:
    """Each rank hands n - 1 payloads of this size to its right neighbour."""
    return _circle(ranks, (len(ranks) - 1) * payload)


def direct_traffic(ranks: Sequence[int], num_bytes: float) -> Traffic:
    """Each rank sends this much to each other one: a gather of it, or a reduce-scatter of n."""
    return Traffic({(a, b): num_bytes for a in ranks for b in ranks if a != b and num_bytes})


def adasum_traffic(ranks: Sequence[int], num_bytes: float, layers: int) -> Traffic:
    """Adasum's vector halving and distance doubling (Maleki et al. 2021, section 4).

    At distance L partners exchange a half of what they hold, later the same back; before that each
    rank above the largest power of two hands its whole buffer to a partner, and gets the result.
    Three numbers per layer and level are summed over the 2 L ranks that share a vector; in the last
    level one more per layer, its flag.
    """
    n = len(ranks)
    power = 1 << (n.bit_length() - 1)
    sent: dict[tuple[int, int], float] = {}

    def send(a: int, b: int, size: float) -> None:
        pair = (ranks[a], ranks[b])
        sent[pair] = sent.get(pair, 0.0) + size

    for extra in range(power, n):
        # The flags go along, one number for each layer.
        whole = num_bytes + NUMBER_BYTES * layers
        send(extra, extra - power, whole)
        send(extra - power, extra, whole)
    distance = 1
    while distance < power:
        block = 2 * distance
        sums = dot_bytes(layers, last=block == power)
        for place in range(power):
            # num_bytes / block to the partner, and as much back in the second phase.
            send(place, place ^ distance, 2 * num_bytes / block)
            for other in chain(*dot_partners(place, block)):
                send(place, other, sums)
        distance = block
    return Traffic(sent)


def dot_bytes(layers: int, *, last: bool) -> int:
    """Of the dot products of one level; in the last one flags go with them."""
    return NUMBER_BYTES * layers * (4 if last else 3)


def dot_partners(place: int, block: int) -> list[list[int]]:
    """With whom Adasum's small sums over a block of neighbours are exchanged, round by round."""
    first = place - place % block
    if block <= DIRECT_BLOCK_RANKS:
        # Cut to no round at all for a block of one.
        return [[other for other in range(first, first + block) if other != place]][: block - 1]
    return [[place ^ (1 << bit)] for bit in range(block.bit_length() - 1)]


def hierarchical_traffic(nodes: Nodes, num_bytes: float, inner: float) -> Traffic:
    """Reduce-scatter inside a node, all-reduce across with each shard, all-gather inside.

    Args:
        num_bytes: Of the buffer, as it is inside a node.
        inner: Of one shard, as it travels between nodes.
    """
    total = NOTHING
    width = len(nodes.members[0])
    for members in nodes.members:
        # num_bytes / width to each other one in the reduce-scatter, and again in the all-gather.
        total += direct_traffic(members, 2 * num_bytes / width)
    for place in range(width):
        total += ring_all_reduce_traffic([members[place] for members in nodes.members], inner)
    return total


def bucket_traffic(
    shapes: Sequence[tuple[int, ...]],
    nodes: Nodes,
    *,
    reduce: str = "mean",
    collective: str = "all_reduce",
    compression: Compression = UNCOMPRESSED,
    carrier: AllReduceOptions | None = None,
    element_bytes: int = 4,
) -> Traffic:
    """What the exchange of one bucket sends; keywords as in the plan's exchange.

    Args:
        shapes: Of the parameters of the bucket, in their memory order.

    Raises:
        ValueError: A compressor that needs whole tensors, in a hierarchical exchange, or one that
            is more than a sum, in one that a program carries.
    """
    ranks = sorted(rank for members in nodes.members for rank in members)
    if len(ranks) == 1:
        return NOTHING
    elements = bucket_elements(shapes)
    if collective in ALL_REDUCE_KINDS:
        return all_reduce_traffic(collective, carrier, ranks, elements, compression, element_bytes)
    layered = is_hierarchical(nodes, collective)
    if reduce == "adasum":
        # Adasum's flags travel with its dot products, not in the buffer.
        whole = element_bytes * (elements - len(shapes))
        if collective == "hierarchical":
            return adasum_hierarchical_traffic(nodes, whole, len(shapes))
        return adasum_traffic(ranks, whole, len(shapes))
    if collective == "hierarchical" and nodes.count == 1:
        return ring_all_reduce_traffic(ranks, element_bytes * elements)  # nothing is slow here
    if collective == "hierarchical" and _is_sparse(compression):
        density = compression.amount
        return sparse_hierarchical_traffic(nodes, elements, len(shapes), density, element_bytes)
    if not layered:
        return flat_traffic(shapes, ranks, compression, element_bytes)
    if not compression.elementwise:
        raise ValueError(
            f"a hierarchical exchange cuts gradients anywhere, not so {compression.name}"
        )
    width = compression.wire_element_bytes(element_bytes)
    shard = elements / len(nodes.members[0])
    return hierarchical_traffic(nodes, element_bytes * elements, width * shard)


def flat_traffic(
    shapes: Sequence[tuple[int, ...]],
    ranks: Sequence[int],
    compression: Compression,
    element_bytes: int,
) -> Traffic:
    """All ranks with each other, operation by operation."""
    total, n = NOTHING, len(ranks)
    for payload in compression.payloads(shapes, element_bytes, n):
        if payload.operation == "all_reduce":
            total += ring_all_reduce_traffic(ranks, payload.num_bytes)
        elif payload.operation == "all_gather":
            total += ring_all_gather_traffic(ranks, payload.num_bytes)
        else:
            total += direct_traffic(ranks, payload.num_bytes / n)
    return total


def _is_sparse(compression: Compression) -> bool:
    """Whether HiTopKComm takes the place of the hierarchical sum."""
    return compression.hierarchical and not compression.elementwise


def is_hierarchical(nodes: Nodes, collective: str) -> bool:
    """Whether an exchange has a level inside nodes and one across."""
    return collective == "hierarchical" and nodes.count > 1 and len(nodes.members[0]) > 1


def sparse_hierarchical_traffic(
    nodes: Nodes, elements: int, flags: int, density: float, element_bytes: int
) -> Traffic:
    """HiTopKComm (Shi et al. 2021, section 3.2): dense inside, a parcel per shard across.

    Args:
        elements: Of the buffer, flags included; they are its end.
        density: Share of each shard that is sent.
    """
    width = len(nodes.members[0])
    parcels = shard_parcels(elements, flags, width, density, element_bytes)
    dense = element_bytes * elements
    # Inside nodes the payloads travel, or their sum if it is smaller; both give the same bits.
    sparse_inside = sum(parcels) * nodes.count < dense
    total = NOTHING
    for members in nodes.members:
        total += direct_traffic(members, dense / width)
        if not sparse_inside:
            total += direct_traffic(members, dense / width)
            continue
        for place, parcel in enumerate(parcels):
            row = nodes.count * parcel
            total += Traffic({(members[place], to): row for to in members if to != members[place]})
    for place, parcel in enumerate(parcels):
        total += direct_traffic([members[place] for members in nodes.members], parcel)
    return total


def shard_parcels(
    elements: int, flags: int, width: int, density: float, element_bytes: int
) -> tuple[int, ...]:
    """Bytes of the parcel of each shard: values, flags, and indices, aligned to 8 bytes."""
    shards = sparse_shards(elements, flags, width, density, element_bytes)
    return tuple(shard.parcel_bytes for shard in shards)


def adasum_hierarchical_traffic(nodes: Nodes, num_bytes: float, layers: int) -> Traffic:
    """The mean inside each node, Adasum across; dot products are summed inside nodes, too."""
    width, count = len(nodes.members[0]), nodes.count
    power = 1 << (count.bit_length() - 1)
    total = NOTHING
    for members in nodes.members:
        total += direct_traffic(members, 2 * num_bytes / width)
        if count == 1:
            total += direct_traffic(members, NUMBER_BYTES * layers)
    for node, members in enumerate(nodes.members):
        levels = power.bit_length() - 1 if node < power else 0
        for level in range(levels):
            total += direct_traffic(members, dot_bytes(layers, last=level == levels - 1))
        if node + power < count:
            total += direct_traffic(members, dot_bytes(layers, last=False))
    for place in range(width):
        column = [members[place] for members in nodes.members]
        total += adasum_traffic(column, num_bytes / width, layers)
    return total


def _circle(ranks: Sequence[int], size: float) -> Traffic:
    if len(ranks) < 2 or not size:
        return NOTHING
    return Traffic(dict.fromkeys(pairwise([*ranks, ranks[0]]), float(size)))


# How long the exchange of one bucket occupies the link, and what it costs besides.


# Bytes of a segment of a hierarchical exchange, run (comm/algorithms/hierarchical.py) and priced.
# Segments follow each other through the three phases, so that the slow link waits for the fast one
# only until the first is through the inner phase; smaller ones cost more than they hide.
SEGMENT_BYTES = 2 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeScheme:
    """How gradients are exchanged; the words are those of the plan's `Exchange`.

    Attributes:
        reduce: "mean", "sum" or "adasum".
        collective: "all_reduce", "hierarchical", or one of `ALL_REDUCE_KINDS`.
        bucket: Bytes; None: fitted to the link.
        priority: Chunks in planned order across the border of the step.
        chunk: Bytes; None: fitted to the link.
        credit: Chunks on their way at the same time.
    """

    compression: Compression = UNCOMPRESSED
    reduce: str = "mean"
    collective: str = "all_reduce"
    carrier: AllReduceOptions | None = None
    bucket: int | None = None
    overlap: bool = True
    priority: bool = False
    chunk: int | None = None
    credit: int = 2

    @property
    def compress(self) -> str:
        """As it is written in a plan."""
        return str(self.compression)


@dataclass(frozen=True, slots=True)
class BucketService:
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
class ExchangeNetwork:
    """The links of a job.

    Attributes:
        nodes: Which ranks share a node.
        across: All-reduce with one rank per node, as fast as one of them alone can go.
        carried: All-reduce by the program of the exchange, as simulated; None: as `link`.
    """

    link: LinkFit
    nodes: Nodes
    inside: LinkFit | None = None
    across: LinkFit | None = None
    carried: LinkFit | None = None

    @staticmethod
    def flat(link: LinkFit) -> ExchangeNetwork:
        """Every rank has a link of its own."""
        return ExchangeNetwork(link, Nodes(tuple((rank,) for rank in range(link.ranks))))

    @staticmethod
    def of_rates(
        nodes: int, width: int, *, rate: float, inside: float, latency: float
    ) -> ExchangeNetwork:
        """`nodes` nodes of `width` ranks that share the node's link.

        Args:
            rate: Bytes per second of a node's link.
            inside: Bytes per second between two ranks of a node.
            latency: Seconds of a small all-reduce over all ranks.
        """
        count = nodes * width
        members = tuple(tuple(range(n * width, (n + 1) * width)) for n in range(nodes))
        slow = inside if nodes == 1 else rate
        # The rounds of a ring grow with its ranks, and its latency is taken to grow with them.
        return ExchangeNetwork(
            LinkFit.of_rate(slow, latency, count),
            Nodes(members),
            LinkFit.of_rate(inside, latency * width / count, width),
            LinkFit.of_rate(rate, latency * nodes / count, nodes),
        )

    def link_of(self, collective: str) -> LinkFit:
        """The fit of what limits an exchange: a program's own, or the link between nodes."""
        if collective in ALL_REDUCE_KINDS and self.carried is not None:
            return self.carried
        if is_hierarchical(self.nodes, collective) and self.across is not None:
            return self.across
        return self.link

    def among(self, ranks: Sequence[int]) -> ExchangeNetwork:
        """The same links for a group of ranks: a ring of fewer sends each byte less often."""
        before, after = ring_factor(self.link.ranks), ring_factor(len(ranks))
        if not before:
            return self
        # A ring of n ranks has 2 (n - 1) rounds.
        link = LinkFit(
            self.link.latency * (len(ranks) - 1) / (self.link.ranks - 1),
            self.link.seconds_per_byte * after / before,
            self.link.error,
            len(ranks),
        )
        return ExchangeNetwork(link, self.nodes.among(ranks), self.inside, self.across)


def bucket_service(
    scheme: ExchangeScheme,
    shapes: Sequence[tuple[int, ...]],
    network: ExchangeNetwork,
    speeds: Mapping[str, CompressorSpeed],
    element_bytes: int = 4,
) -> BucketService:
    """Price one bucket.

    Args:
        speeds: Of compressors, by name; "adasum" for its arithmetic.
    """
    dense = element_bytes * sum(map(prod, shapes))
    if scheme.reduce == "adasum":
        return _adasum(scheme, dense, network, speeds.get("adasum", CompressorSpeed(0.0)))
    speed = speeds.get(scheme.compression.name, CompressorSpeed(0.0))
    if scheme.collective == "hierarchical":
        if network.nodes.count == 1:
            return BucketService(dense)
        if _is_sparse(scheme.compression):
            return _sparse_levels(scheme, shapes, network, speed, element_bytes)
        if is_hierarchical(network.nodes, scheme.collective):
            width = scheme.compression.wire_element_bytes(element_bytes)
            return _levels(dense, dense * width / element_bytes, network, speed)
    return _flat(scheme, shapes, network, speed, element_bytes)


def compressed_link(
    scheme: ExchangeScheme,
    shapes: Sequence[tuple[int, ...]],
    network: ExchangeNetwork,
    element_bytes: int = 4,
) -> LinkFit:
    """The link as compressed gradients see it: fewer bytes, more rounds.

    Buckets are to be fitted to this one: compressed gradients are small, so that smaller buckets
    pay, and a further round costs latency again.
    """
    link = network.link_of(scheme.collective)
    total = element_bytes * sum(map(prod, shapes))
    if not total:
        return link
    # Without speeds, because the processor's work is no property of the link.
    whole = bucket_service(scheme, shapes, network, {}, element_bytes)
    ratio = whole.num_bytes / total
    return LinkFit(
        link.latency + whole.delay, link.seconds_per_byte * ratio, link.error, link.ranks
    )


def _flat(
    scheme: ExchangeScheme,
    shapes: Sequence[tuple[int, ...]],
    network: ExchangeNetwork,
    speed: CompressorSpeed,
    element_bytes: int,
) -> BucketService:
    link, ranks = network.link, network.link.ranks
    factor = ring_factor(ranks)
    if not factor:
        return BucketService(0.0)
    dense = element_bytes * sum(map(prod, shapes))
    # Without flags: a plain all-reduce is then priced at exactly what was measured.
    parts = scheme.compression.payloads(shapes, element_bytes, ranks, flags=False)
    sent, copies = 0.0, 1
    for part in parts:
        if part.operation == "all_reduce":
            sent += factor * part.num_bytes
        elif part.operation == "all_gather":
            sent += (ranks - 1) * part.num_bytes
            copies = ranks
        else:
            sent += (ranks - 1) / ranks * part.num_bytes
    # The line of the link already contains the latency of the first operation.
    return BucketService(
        sent / factor,
        speed.encode * dense,
        speed.decode * dense * copies,
        link.latency * max(0, len(parts) - 1),
    )


def _levels(
    dense: float, inner: float, network: ExchangeNetwork, speed: CompressorSpeed
) -> BucketService:
    """Three phases in segments that follow each other: the slowest level decides."""
    inside, across = _both(network)
    within = inside.seconds_per_byte * dense  # reduce-scatter and all-gather: one all-reduce
    beyond = across.seconds_per_byte * inner
    # Of a link that costs nothing any number of bytes costs nothing.
    rate = across.seconds_per_byte or 1.0
    fill = within * min(1.0, SEGMENT_BYTES / dense) if dense else 0.0
    return BucketService(
        max(within, beyond) / rate,
        speed.encode * dense / len(network.nodes.members[0]),
        speed.decode * dense / len(network.nodes.members[0]),
        2 * inside.latency + fill,
    )


def _sparse_levels(
    scheme: ExchangeScheme,
    shapes: Sequence[tuple[int, ...]],
    network: ExchangeNetwork,
    speed: CompressorSpeed,
    element_bytes: int,
) -> BucketService:
    """HiTopKComm: dense reduce-scatter inside, parcels across, gather inside."""
    inside, across = _both(network)
    width, count = len(network.nodes.members[0]), network.nodes.count
    elements = sum(map(prod, shapes)) + len(shapes)
    parcels = shard_parcels(elements, len(shapes), width, scheme.compression.amount, element_bytes)
    dense = element_bytes * elements
    beyond = across.wire_seconds((count - 1) * sum(parcels))
    # The fit is that of an all-reduce, of which a reduce-scatter is half.
    scatter = inside.seconds_per_byte * dense / 2 + inside.latency if width > 1 else 0.0
    rows = min(count * sum(parcels), dense)
    gather = inside.wire_seconds((width - 1) * rows / width) + inside.latency if width > 1 else 0.0
    return BucketService(
        beyond / (network.link_of(scheme.collective).seconds_per_byte or 1.0),
        scatter + speed.encode * dense / width,
        gather + speed.decode * dense * count / width,
    )


def _adasum(
    scheme: ExchangeScheme, dense: float, network: ExchangeNetwork, speed: CompressorSpeed
) -> BucketService:
    """Halving and doubling send as much as a ring; what is left over from a power of two sends its
    whole buffer there and back before and after."""
    work = speed.encode * dense
    if is_hierarchical(network.nodes, scheme.collective):
        levels = _levels(dense, dense, network, CompressorSpeed(0.0))
        _, across = _both(network)
        delay = levels.delay + _rounds(network.nodes.count, across) + work
        return BucketService(levels.num_bytes, 0.0, 0.0, delay)
    n = network.link.ranks
    factor = ring_factor(n)
    if not factor:
        return BucketService(0.0)
    power = 1 << (n.bit_length() - 1)
    sent = ring_factor(power) * dense + (2 * dense if n > power else 0.0)
    return BucketService(sent / factor, 0.0, work, _rounds(n, network.link))


def _rounds(n: int, link: LinkFit) -> float:
    """Latency beyond that of one all-reduce: one round of dot products per level."""
    return log2(n) * link.latency if n > 1 else 0.0


def _both(network: ExchangeNetwork) -> tuple[LinkFit, LinkFit]:
    """Links inside and across; where they were not measured, inside costs nothing."""
    inside = network.inside or LinkFit(0.0, 0.0, 0.0, len(network.nodes.members[0]))
    return inside, network.across or network.link
