"""Hierarchical programs: sums inside a node first, so that little crosses between nodes.

Each byte crosses a node's interface once per node and not once per rank (Shi et al. 2021,
section 3.2). Nodes come from the cluster's description and may have different numbers of ranks.
"""

from __future__ import annotations

from headway.collective.generators.phases import gather_direct, ring, scatter_direct
from headway.collective.generators.program_builder import (
    OUT,
    BufferArea,
    ProgramBuilder,
    RankScript,
    check_operation,
    parts_of,
)
from headway.collective.generators.trees import trees, two_level
from headway.collective.nodes import Nodes
from headway.collective.program.program import (
    BufferSpan,
    CollectiveProgram,
    CollectiveTask,
    even_sizes,
)
from headway.errors import PlanError

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
NEAR = 8
"""Up to so many nodes exchange directly, more in a ring."""


def hierarchical(
    collective: CollectiveTask, nodes: Nodes, *, chunk: int | None = None
) -> CollectiveProgram:
    """A program for these nodes.

    Args:
        chunk: Elements of a message in rings and trees.

    Raises:
        PlanError: No such program for this operation, or nodes of other ranks.
    """
    check_operation(collective, "hierarchical", OPS)
    if sorted(rank for members in nodes.members for rank in members) != [*range(collective.ranks)]:
        raise PlanError(
            f"nodes with the ranks {nodes.members} for {collective.ranks} ranks",
            problems=["each rank is on one node"],
        )
    if collective.root is not None:
        tree = two_level(nodes, collective.root)
        return trees(collective, [(tree, 1.0)], chunk=chunk, name="hierarchical")
    writer = ProgramBuilder(collective)
    if collective.op == "all_reduce":
        _all_reduce(writer, nodes, chunk)
    elif collective.op == "reduce_scatter":
        _reduce_scatter(writer, nodes)
    else:
        _all_gather(writer, nodes)
    return writer.program("hierarchical")


def _all_reduce(writer: ProgramBuilder, nodes: Nodes, chunk: int | None) -> None:
    """Reduce-scatter inside, all-reduce of each shard across, all-gather inside.

    As many shards as the smallest node has ranks; others only add to them.
    """
    width = min(map(len, nodes.members))
    shards = parts_of(even_sizes(writer.collective.elements, width))
    # Ranks beyond the width get empty shards, whose messages the builder leaves out.
    inside = {len(m): [*shards, *[(0, 0)] * (len(m) - width)] for m in nodes.members}
    for members in nodes.members:
        scatter_direct(writer, members, inside[len(members)])
    for place, shard in enumerate(shards):
        column = [members[place] for members in nodes.members]
        parts = parts_of(even_sizes(shard[1] - shard[0], len(column)), shard[0])
        if len(column) <= NEAR:
            scatter_direct(writer, column, parts)
            gather_direct(writer, column, parts)
        else:
            ring(writer, column, parts, chunk=chunk)
    for members in nodes.members:
        gather_direct(writer, members, inside[len(members)])


class _Gateways:
    """Which rank of a node exchanges messages with a rank of another node: its door."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.home = {rank: members for members in nodes.members for rank in members}

    def door(self, members: tuple[int, ...], rank: int) -> int:
        """Of a node for a rank: itself if it is there, else the one with its place."""
        home = self.home[rank]
        return rank if home == members else members[home.index(rank) % len(members)]

    def mates(self, rank: int) -> list[int]:
        return [mate for mate in self.home[rank] if mate != rank]

    def kept(self, rank: int) -> list[int]:
        """For whom this rank is its node's door, itself included."""
        home = self.home[rank]
        return [other for other in self.home if self.door(home, other) == rank]

    def others(self, rank: int) -> list[tuple[int, ...]]:
        """The nodes where this rank is not."""
        return [members for members in self.nodes.members if members != self.home[rank]]


def _reduce_scatter(writer: ProgramBuilder, nodes: Nodes) -> None:
    """Each node sums its parts of every share at a door, doors send the sums to the shares' owners.

    One tag for each share.
    """
    doors, parts = _Gateways(nodes), parts_of(writer.collective.shares)
    tags = [writer.tag() for _ in parts]
    for rank, script in enumerate(writer.ranks):
        sums = _sum_inside(script, rank, doors, parts, tags)
        own = sums.pop(rank)
        arriving = []
        for members in doors.others(rank):
            slot = script.room(own.size)
            arriving.append((script.recv(doors.door(members, rank), tags[rank], slot), slot))
        leaving = [h for other, span in sums.items() for h in script.send(other, tags[other], span)]
        for handle, slot in arriving:
            script.wait(handle)
            script.combine(own, slot)
        script.wait(leaving)


def _sum_inside(
    script: RankScript, rank: int, doors: _Gateways, parts: list[tuple[int, int]], tags: list[int]
) -> dict[int, BufferSpan]:
    """The node's sums of those shares whose door this rank is, formed here."""
    source, mates, home = BufferArea("in"), doors.mates(rank), doors.home[rank]
    sums: dict[int, BufferSpan] = {}
    arriving = []
    for other in doors.kept(rank):
        start, stop = parts[other]
        sums[other] = BufferArea("out", start).span((start, stop))
        if other != rank:
            sums[other] = script.room(stop - start)
        for mate in mates:
            slot = script.room(stop - start)
            arriving.append((script.recv(mate, tags[other], slot), other, slot))
    leaving = [
        handle
        for other, part in enumerate(parts)
        if other not in sums
        for handle in script.send(doors.door(home, other), tags[other], source.span(part))
    ]
    # The copies run while the numbers of the node's other ranks arrive.
    for other, span in sums.items():
        script.copy(span, source.span(parts[other]))
    for handle, other, slot in arriving:
        script.wait(handle)
        script.combine(sums[other], slot)
    script.wait(leaving)
    return sums


def _all_gather(writer: ProgramBuilder, nodes: Nodes) -> None:
    """Each rank sends to its node and to one door of each other node, doors to their node."""
    doors, parts = _Gateways(nodes), parts_of(writer.collective.shares)
    tags = [writer.tag() for _ in parts]
    for rank, script in enumerate(writer.ranks):
        own = BufferArea("in", parts[rank][0]).span(parts[rank])
        mates = doors.mates(rank)
        kept = [other for other in doors.kept(rank) if other != rank]
        handles = [
            handle
            for other in [*kept, *mates]
            for handle in script.recv(other, tags[other], OUT.span(parts[other]))
        ]
        for peer in [*(doors.door(members, rank) for members in doors.others(rank)), *mates]:
            handles += script.send(peer, tags[rank], own)
        script.copy(OUT.span(parts[rank]), own)
        script.wait(handles)
        # Not begun before the wait: a door hands on what it has received.
        handed = [
            handle
            for mate in mates
            for other in doors.kept(mate)
            if other != mate
            for handle in script.recv(mate, tags[other], OUT.span(parts[other]))
        ]
        for mate in mates:
            for other in kept:
                handed += script.send(mate, tags[other], OUT.span(parts[other]))
        script.wait(handed)
