"""Direct programs: everybody sends to everybody at once; the fewest rounds there can be.

reduce_scatter, all_gather and all_to_all take one round, all_reduce two; each rank sends as much as
in a ring, (n - 1) / n of the whole per round. Sizes of a part may be anything, also zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.collective.generators.phases import MESSAGES_IN_FLIGHT, gather_direct, scatter_direct
from headway.collective.generators.program_builder import (
    OUT,
    BufferArea,
    ProgramBuilder,
    RankScript,
    parts_of,
)
from headway.collective.program.program import CollectiveProgram, CollectiveTask, even_sizes


def direct(collective: CollectiveTask) -> CollectiveProgram:
    """A program for any operation."""
    writer = ProgramBuilder(collective)
    if collective.op == "all_to_all":
        _all_to_all(writer)
        return writer.program("direct")
    everyone = range(collective.ranks)
    parts = parts_of(collective.shares)
    if collective.op == "reduce_scatter":
        results = [BufferArea("out", start) for start, _ in parts]
        scatter_direct(writer, everyone, parts, source=BufferArea("in"), result=results)
    elif collective.op == "all_gather":
        sources = [BufferArea("in", start) for start, _ in parts]
        gather_direct(writer, everyone, parts, source=sources)
    elif collective.op == "all_reduce":
        parts = parts_of(even_sizes(collective.elements, collective.ranks))
        scatter_direct(writer, everyone, parts)
        gather_direct(writer, everyone, parts)
    elif collective.op == "broadcast":
        _broadcast(writer, collective.root or 0)
    else:
        _reduce(writer, collective.root or 0)
    return writer.program("direct")


def _all_to_all(writer: ProgramBuilder) -> None:
    """Pairwise, partners rotated, so that no rank is everybody's target at once."""
    table, tag = writer.collective.table, writer.tag()
    for rank, script in enumerate(writer.ranks):
        write_all_to_all(script, rank, table[rank], [row[rank] for row in table], tag)


def write_all_to_all(
    script: RankScript,
    rank: int,
    sent: Sequence[int],
    received: Sequence[int],
    tag: int = 0,
) -> None:
    """One rank's part of an all_to_all; it only needs its own row and column of the table.

    Args:
        sent: Elements for each rank, one after the other in "in".
        received: Elements of each rank, one after the other in "out".
    """
    into, of = BufferArea("out"), BufferArea("in")
    places, sources = parts_of(received), parts_of(sent)
    others = [(rank + step) % len(sent) for step in range(1, len(sent))]
    arriving = [
        handle
        for peer in reversed(others)
        for handle in script.recv(peer, tag, into.span(places[peer]))
    ]
    leaving: list[int] = []
    for peer in others:
        if len(leaving) == MESSAGES_IN_FLIGHT and sent[peer]:
            script.wait([leaving.pop(0)])
        leaving += script.send(peer, tag, of.span(sources[peer]))
    script.copy(into.span(places[rank]), of.span(sources[rank]))
    script.wait([*arriving, *leaving])


def _broadcast(writer: ProgramBuilder, root: int) -> None:
    """The root deals parts out, and the others hand them to each other (van de Geijn's way): the
    root sends the whole once, and nobody more."""
    others = [rank for rank in range(writer.collective.ranks) if rank != root]
    if not others:
        return
    parts = parts_of(even_sizes(writer.collective.elements, len(others)))
    tag = writer.tag()
    for rank, part in zip(others, parts, strict=True):
        script = writer.ranks[rank]
        script.wait(script.recv(root, tag, OUT.span(part)))
    script = writer.ranks[root]
    handles = [
        handle
        for rank, part in zip(others, parts, strict=True)
        for handle in script.send(rank, tag, OUT.span(part))
    ]
    script.wait(handles)
    gather_direct(writer, others, parts)


def _reduce(writer: ProgramBuilder, root: int) -> None:
    """Every other rank sums a part and sends it to the root, which receives the whole once."""
    n, elements = writer.collective.ranks, writer.collective.elements
    others = [rank for rank in range(n) if rank != root]
    parts = parts_of(even_sizes(elements, max(1, len(others))))
    tag, home = writer.tag(), writer.tag()
    for own, rank in enumerate(others):
        script, part = writer.ranks[rank], parts[own]
        mates = [mate for mate in others if mate != rank]
        # In scratch, because a reduce leaves the "out" of all but the root as it was.
        sums = script.room(part[1] - part[0])
        slots = [(mate, script.room(part[1] - part[0])) for mate in mates]
        arriving = [(script.recv(mate, tag, slot), slot) for mate, slot in slots]
        leaving = [
            handle
            for mate, theirs in zip(others, parts, strict=True)
            if mate != rank
            for handle in script.send(mate, tag, OUT.span(theirs))
        ]
        script.copy(sums, OUT.span(part))
        for handle, slot in arriving:
            script.wait(handle)
            script.combine(sums, slot)
        script.wait([*leaving, *script.send(root, home, sums)])
    # At the root: the sum of the others, part by part, added to its own.
    script, coming = writer.ranks[root], []
    # Not strict: a rank alone has one part, and nobody to get it from.
    for rank, part in zip(others, parts, strict=False):
        slot = script.room(part[1] - part[0])
        coming.append((script.recv(rank, home, slot), part, slot))
    for handle, part, slot in coming:
        script.wait(handle)
        script.combine(OUT.span(part), slot)
