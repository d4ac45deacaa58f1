"""Bytes that the exchange of one bucket sends, from rank to rank: the plan's own figure.

The figure that counters of the network must confirm. It follows how `comm` sends: Gloo's ring for
all-reduces and gathers over all ranks, direct messages inside and across nodes, vector halving and
distance doubling for Adasum, and the steps of programs where one carries the sums. Headers of the
transport (0.2 to 5 %) are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headway.collective.carried import bucket_elements, carried_traffic
from headway.collective.carrier import CARRIED, Carrier
from headway.collective.link import ring_factor
from headway.collective.nodes import Nodes
from headway.collective.payload import INDEX_BYTES, payloads
from headway.collective.traffic import NOTHING, Traffic

ELEMENTWISE = frozenset({"none", "fp16", "bf16"})
"""Compressors of which any slice can be exchanged alone."""
SPARSE = frozenset({"topk", "mstopk", "adaptive"})
"""Compressors that send some elements with their indices."""
NUMBER_BYTES = 8
"""Of each layer and level Adasum sums three numbers in double precision."""
ALL_AT_ONCE = 8
"""Up to so many ranks Adasum's small sums go to all at once."""


def ring_all_reduce(ranks: Sequence[int], num_bytes: float) -> Traffic:
    """Each rank sends 2 (n - 1) / n of the buffer to its right neighbour."""
    return _circle(ranks, ring_factor(len(ranks)) * num_bytes)


def ring_all_gather(ranks: Sequence[int], payload: float) -> Traffic:
    """Each rank hands n - 1 payloads of this size to its right neighbour."""
    return _circle(ranks, (len(ranks) - 1) * payload)


def direct(ranks: Sequence[int], num_bytes: float) -> Traffic:
    """Each rank sends this much to each other one: a gather of it, or a reduce-scatter of n."""
    return Traffic({(a, b): num_bytes for a in ranks for b in ranks if a != b and num_bytes})


def halving_doubling(ranks: Sequence[int], num_bytes: float, layers: int) -> Traffic:
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
        whole = num_bytes + NUMBER_BYTES * layers
        send(extra, extra - power, whole)
        send(extra - power, extra, whole)
    distance = 1
    while distance < power:
        block = 2 * distance
        sums = dot_bytes(layers, last=block == power)
        for place in range(power):
            send(place, place ^ distance, 2 * num_bytes / block)
            for other in _partners(place, block):
                send(place, other, sums)
        distance = block
    return Traffic(sent)


def dot_bytes(layers: int, *, last: bool) -> int:
    """Of the dot products of one level; in the last one flags go with them."""
    return NUMBER_BYTES * layers * (4 if last else 3)


def _partners(place: int, block: int) -> list[int]:
    """To whom small sums go: to all of a small block at once, else in log2(block) rounds."""
    if block <= ALL_AT_ONCE:
        first = place - place % block
        return [other for other in range(first, first + block) if other != place]
    return [place ^ (1 << bit) for bit in range(block.bit_length() - 1)]


def hierarchical(nodes: Nodes, num_bytes: float, inner: float) -> Traffic:
    """Reduce-scatter inside a node, all-reduce across with each shard, all-gather inside.

    Args:
        nodes: Uniform.
        num_bytes: Of the buffer, as it is inside a node.
        inner: Of one shard, as it travels between nodes.
    """
    total = NOTHING
    width = len(nodes.members[0])
    for members in nodes.members:
        total += direct(members, 2 * num_bytes / width)
    for place in range(width):
        total += ring_all_reduce([members[place] for members in nodes.members], inner)
    return total


def bucket_traffic(
    shapes: Sequence[tuple[int, ...]],
    nodes: Nodes,
    *,
    reduce: str = "mean",
    collective: str = "all_reduce",
    compressor: str = "none",
    amount: float = 0.0,
    carrier: Carrier | None = None,
    element_bytes: int = 4,
) -> Traffic:
    """What the exchange of one bucket sends.

    Args:
        shapes: Of the parameters of the bucket, in their memory order.
        nodes: Of the ranks that exchange.
        reduce: As in the plan's `Exchange`.
        collective: As in the plan's `Exchange`.
        compressor: Name, as in the plan's `Compression`.
        amount: Its density or rank.
        carrier: As in the plan's `Exchange`.
        element_bytes: Of a gradient.

    Raises:
        ValueError: A compressor that needs whole tensors, in a hierarchical exchange, or one that
            is more than a sum, in one that a program carries.
    """
    ranks = sorted(rank for members in nodes.members for rank in members)
    if len(ranks) == 1:
        return NOTHING
    elements = bucket_elements(shapes)
    if collective in CARRIED:
        return carried_traffic(collective, carrier, ranks, elements, compressor, element_bytes)
    layered = is_layered(nodes, collective)
    if reduce == "adasum":
        whole = element_bytes * (elements - len(shapes))
        if collective == "hierarchical":
            return adasum_levels(nodes, whole, len(shapes))
        return halving_doubling(ranks, whole, len(shapes))
    if collective == "hierarchical" and nodes.count == 1:
        return ring_all_reduce(ranks, element_bytes * elements)  # nothing is slow here
    if collective == "hierarchical" and compressor in SPARSE:
        return sparse_levels(nodes, elements, len(shapes), amount, element_bytes)
    if not layered:
        return flat_traffic(shapes, ranks, compressor, amount, element_bytes)
    if compressor not in ELEMENTWISE:
        raise ValueError(f"a hierarchical exchange cuts gradients anywhere, not so {compressor}")
    width = element_bytes if compressor == "none" else 2
    shard = elements / len(nodes.members[0])
    return hierarchical(nodes, element_bytes * elements, width * shard)


def flat_traffic(
    shapes: Sequence[tuple[int, ...]],
    ranks: Sequence[int],
    compressor: str,
    amount: float,
    element_bytes: int,
) -> Traffic:
    """All ranks with each other, operation by operation."""
    total, n = NOTHING, len(ranks)
    for payload in payloads(compressor, amount, shapes, element_bytes, n):
        if payload.operation == "all_reduce":
            total += ring_all_reduce(ranks, payload.num_bytes)
        elif payload.operation == "all_gather":
            total += ring_all_gather(ranks, payload.num_bytes)
        else:
            total += direct(ranks, payload.num_bytes / n)
    return total


def is_layered(nodes: Nodes, collective: str) -> bool:
    """Whether an exchange has a level inside nodes and one across."""
    return collective == "hierarchical" and nodes.count > 1 and len(nodes.members[0]) > 1


def sparse_levels(
    nodes: Nodes, elements: int, flags: int, density: float, element_bytes: int
) -> Traffic:
    """HiTopKComm (Shi et al. 2021, section 3.2): dense inside, a parcel per shard across.

    Args:
        nodes: Uniform.
        elements: Of the buffer, flags included; they are its end.
        flags: How many.
        density: Share of each shard that is sent.
        element_bytes: Of a gradient.
    """
    width = len(nodes.members[0])
    parcels = shard_parcels(elements, flags, width, density, element_bytes)
    dense = element_bytes * elements
    sparse_inside = sum(parcels) * nodes.count < dense
    total = NOTHING
    for members in nodes.members:
        total += direct(members, dense / width)
        if not sparse_inside:
            total += direct(members, dense / width)
            continue
        for place, parcel in enumerate(parcels):
            row = nodes.count * parcel
            total += Traffic({(members[place], to): row for to in members if to != members[place]})
    for place, parcel in enumerate(parcels):
        total += direct([members[place] for members in nodes.members], parcel)
    return total


def shard_parcels(
    elements: int, flags: int, width: int, density: float, element_bytes: int
) -> tuple[int, ...]:
    """Bytes of the parcel of each shard: values, flags, and indices, aligned to 8 bytes."""
    end = elements - flags
    size, longer = divmod(elements, width)
    borders = [place * size + min(place, longer) for place in range(width + 1)]
    found = []
    for start, stop in pairwise(borders):
        middle = min(max(end, start), stop)
        count = max(1, round(density * (middle - start))) if middle > start else 0
        values = _aligned((count + stop - middle) * element_bytes)
        found.append(values + _aligned(count * INDEX_BYTES))
    return tuple(found)


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def adasum_levels(nodes: Nodes, num_bytes: float, layers: int) -> Traffic:
    """The mean inside each node, Adasum across; dot products are summed inside nodes, too."""
    width, count = len(nodes.members[0]), nodes.count
    power = 1 << (count.bit_length() - 1)
    total = NOTHING
    for members in nodes.members:
        total += direct(members, 2 * num_bytes / width)
        if count == 1:
            total += direct(members, NUMBER_BYTES * layers)
    for node, members in enumerate(nodes.members):
        levels = power.bit_length() - 1 if node < power else 0
        for level in range(levels):
            total += direct(members, dot_bytes(layers, last=level == levels - 1))
        if node + power < count:
            total += direct(members, dot_bytes(layers, last=False))
    for place in range(width):
        column = [members[place] for members in nodes.members]
        total += halving_doubling(column, num_bytes / width, layers)
    return total


def _circle(ranks: Sequence[int], size: float) -> Traffic:
    if len(ranks) < 2 or not size:
        return NOTHING
    return Traffic(dict.fromkeys(pairwise([*ranks, ranks[0]]), float(size)))
