"""A lower bound on the time of a collective on a network, whatever the program.

For each set of ranks something must leave it: as much of its sums as the others need, or of
what only it has. For an all-reduce of D bytes 2 (p - 1) D must cross between the parts of any
partition into p parts (Tutte and Nash-Williams 1961; for n ranks with one port each this is the
ring's 2 (n - 1) / n, Patarasuk and Yuan 2009). For a broadcast the sets give Edmonds' bound
(1973). Latency is not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from headway.collective.nodes import set_partitions
from headway.collective.packing.pack import highest_rate
from headway.collective.program.program import CollectiveTask
from headway.collective.topology import Direction, NetworkTopology

# Up to so many ranks all sets and partitions are looked at; of more ranks those by ranks and
# nodes, and, where links are not shared, the exact bounds of tree packing.
ALL_SETS = 8


def collective_lower_bound(
    collective: CollectiveTask, wires: NetworkTopology, element_bytes: int = 4
) -> float:
    """The bound.

    Returns:
        Seconds; infinite where ranks are not joined.
    """
    if collective.ranks == 1 or not collective.elements:
        return 0.0
    if collective.op == "all_reduce":
        return _all_reduce(collective.elements * element_bytes, wires)
    if collective.root is not None and not wires.shared:
        way: Direction = "broadcast" if collective.op == "broadcast" else "reduce"
        rate = highest_rate(wires.graph, way, collective.root)
        return collective.elements * element_bytes / rate
    worst = 0.0
    for inside in _sets(wires):
        needed = _leaves(collective, frozenset(inside)) * element_bytes
        if needed:
            worst = max(worst, _seconds(needed, _out(wires, frozenset(inside))))
    return worst


def _seconds(needed: float, rate: float) -> float:
    return needed / rate if rate else math.inf


def _leaves(collective: CollectiveTask, inside: frozenset[int]) -> int:
    """Elements that must leave a set of ranks."""
    shares = collective.shares
    if collective.op == "all_gather":
        return sum(shares[rank] for rank in inside)
    if collective.op == "reduce_scatter":
        return sum(share for rank, share in enumerate(shares) if rank not in inside)
    if collective.op == "all_to_all":
        return sum(
            count
            for rank in inside
            for other, count in enumerate(collective.table[rank])
            if other not in inside
        )
    sender = collective.op == "broadcast"
    return collective.elements if (collective.root in inside) == sender else 0


def _out(wires: NetworkTopology, inside: frozenset[int]) -> float:
    return wires.across((i, j) for i, j in wires.ways if i in inside and j not in inside)


def _sets(wires: NetworkTopology) -> Iterator[Iterable[int]]:
    n = wires.ranks
    if n <= ALL_SETS:
        for mask in range(1, (1 << n) - 1):
            yield [rank for rank in range(n) if mask >> rank & 1]
        return
    groups = [*((rank,) for rank in range(n)), *wires.nodes.members]
    for group in groups:
        if len(group) < n:
            yield group
            # The rest as well: what leaves it is what has to reach the group.
            yield [rank for rank in range(n) if rank not in group]


def _all_reduce(num_bytes: float, wires: NetworkTopology) -> float:
    if not wires.shared:
        return num_bytes / highest_rate(wires.graph, "all_reduce")
    worst = 0.0
    for inside in _sets(wires):
        # What a set of ranks contributes has to leave it once, summed: D in this direction alone.
        worst = max(worst, _seconds(num_bytes, _out(wires, frozenset(inside))))
    for home in _partitions(wires):
        # Both directions: the sums of p parts come together, and the result goes back to p - 1.
        crossing = wires.across(pair for pair in wires.ways if home[pair[0]] != home[pair[1]])
        # Parts are numbered from 0: p - 1 is the largest number.
        worst = max(worst, _seconds(2 * max(home) * num_bytes, crossing))
    return worst


def _partitions(wires: NetworkTopology) -> Iterator[Sequence[int]]:
    """The part of each rank: all partitions of few ranks; of many into ranks and into nodes."""
    if wires.ranks <= ALL_SETS:
        yield from (labels for labels in set_partitions(wires.ranks) if max(labels))
        return
    yield range(wires.ranks)
    if wires.nodes.count > 1:
        members = wires.nodes.members
        homes = {rank: number for number, ranks in enumerate(members) for rank in ranks}
        yield [homes[rank] for rank in range(wires.ranks)]
