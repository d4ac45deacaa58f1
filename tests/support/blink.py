"""Blink's trees and shares where links are not a graph of their own (Wang et al. 2020).

Switch and servers (section 3.5): on a switch every rank is the root of 1/n of the data, one hop
from all others. On several servers the trees of each server reduce every part to its root there,
the roots of a part reduce and broadcast it in one hop, and the trees broadcast it; written as one
tree over all ranks for each part and each server that owns a share of it.

Parallel channels (section 3.4, PCIe beside NVLink): with D bytes, bandwidths B_p and B_n and t
seconds to switch PCIe on, both finish together at

    D_p / B_p + t = D_n / B_n   =>   D_p = D B_p / (B_p + B_n) - t B_p B_n / (B_p + B_n),  0 <= D_p
    <= D
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.collective.nodes import Parents
from headway.collective.packing.tree import WeightedTree
from headway.errors import PlanError

# Trees where links are not a graph of their own: a switch inside a machine, and several
# servers.


def one_hop_trees(ranks: int) -> tuple[WeightedTree, ...]:
    """n trees of depth 1, each rank the root of 1/n: for a switch as in a DGX-2.

    Each rank sends and receives 2 (n - 1) / n of the data in an all-reduce, as in a ring.
    """
    return tuple(
        WeightedTree(tuple(None if rank == root else root for rank in range(ranks)), 1 / ranks)
        for root in range(ranks)
    )


def trees_over_servers(
    members: Sequence[Sequence[int]], local: Sequence[Sequence[WeightedTree]]
) -> list[WeightedTree]:
    """Trees over all ranks from the trees inside of each server.

    Args:
        local: The trees of each server's all-reduce, over its members numbered from 0; their
            weights say how they share the data. A server of one rank has `Tree((None,), 1.0)`.

    Raises:
        PlanError: Trees and members do not belong together.
    """
    problems = [*_problems(members, local)]
    if problems:
        fix = "Give each rank to one server, and pack each server alone: LinkGraph.part."
        raise PlanError("these servers' trees do not join", problems=problems, fix=fix)
    found = []
    for weight, places in _parts([[tree.weight for tree in trees] for trees in local]):
        trees = [own[place].parent for own, place in zip(local, places, strict=True)]
        found += [
            WeightedTree(_joined(members, trees, owner), weight / len(members))
            for owner in range(len(members))
        ]
    return found


def servers_rate(local: Sequence[float], interface: float) -> float:
    """Algorithm bandwidth of the three phases, which run at once on a long message.

    Args:
        local: Rate of each server's packing; infinite for one rank.
        interface: Of the slowest server, bytes per second in each direction: it sends and receives
            2 (S - 1) / S of the data.
    """
    servers = len(local)
    if servers == 1:
        return local[0]
    return min(*local, interface * servers / (2 * (servers - 1)))


def _parts(weights: Sequence[Sequence[float]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Shares of the data in which every server uses one tree, and the place of that tree."""
    ends = []
    for own in weights:
        total = sum(own)
        ends.append([*(x / total for x in itertools.accumulate(own[:-1])), 1.0])
    start = 0.0
    for end in sorted({round(x, 12) for own in ends for x in own}):
        middle = (start + end) / 2
        yield end - start, tuple(sum(x < middle for x in own) for own in ends)
        start = end


def _joined(members: Sequence[Sequence[int]], trees: Sequence[Parents], owner: int) -> Parents:
    """Local trees below the root of one of them."""
    roots = [ranks[tree.index(None)] for ranks, tree in zip(members, trees, strict=True)]
    parent: list[int | None] = [None] * sum(map(len, members))
    for ranks, tree, root in zip(members, trees, roots, strict=True):
        for place, up in enumerate(tree):
            parent[ranks[place]] = roots[owner] if up is None else ranks[up]
        if root == roots[owner]:
            parent[root] = None
    return tuple(parent)


def _problems(
    members: Sequence[Sequence[int]], local: Sequence[Sequence[WeightedTree]]
) -> Iterator[str]:
    if len(members) != len(local):
        yield f"{len(members)} servers and the trees of {len(local)}"
        return
    ranks = sorted(itertools.chain(*members))
    if ranks != list(range(len(ranks))) or not ranks:
        yield f"the servers hold the ranks {ranks}, not each of 0 to {len(ranks) - 1} once"
    for number, (own, trees) in enumerate(zip(members, local, strict=True)):
        wrong = [tree for tree in trees if len(tree.parent) != len(own) or not tree.weight > 0]
        if wrong or not trees:
            yield f"server {number} has {len(own)} ranks and the trees {wrong}"


# One buffer over several channels that work beside each other, so that all finish together.


@dataclass(frozen=True)
class TransferChannel:
    """A way for bytes.

    Attributes:
        rate: Algorithm bandwidth, bytes per second: of trees the rate of their packing.
        start: Seconds before its first byte, for example to switch to it.
    """

    rate: float
    start: float = 0.0


def channel_shares(num_bytes: float, channels: Sequence[TransferChannel]) -> tuple[float, ...]:
    """The bytes of each channel.

    The moment T at which all end: sum over the channels with start < T of rate (T - start) = bytes.

    Raises:
        PlanError: No channel, or one that has no rate.
    """
    if not channels or any(channel.rate <= 0 or channel.start < 0 for channel in channels):
        raise PlanError(
            "these channels cannot share a buffer",
            problems=[f"{channel}" for channel in channels] or ["there is none"],
            fix="Give each a rate above 0 and a start of at least 0.",
        )
    end = rate = before = 0.0
    for channel in sorted(channels, key=lambda channel: channel.start):
        if rate and end <= channel.start:
            break
        rate, before = rate + channel.rate, before + channel.rate * channel.start
        end = (num_bytes + before) / rate
    return tuple(max(0.0, (end - channel.start) * channel.rate) for channel in channels)
