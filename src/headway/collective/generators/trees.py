"""Programs of weighted trees: the buffer is cut by their weights, each part runs in chunks.

For all_reduce chunk i goes up to the root while chunk i - 1 comes down (Blink: Wang et al. 2020,
section 4). Where the trees come from is not known here: packings, stars of parameter servers,
chains, trees of nodes. Every event has a virtual time, its chunk plus its place on the way up and
down; each rank does its events in that order. Invariant: what an event waits for has begun on both
ends at earlier virtual times, so that no choice of trees makes ranks wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.collective.generators.shapes import Parents, children, depths
from headway.collective.generators.tree_way import Way
from headway.collective.generators.writing import Part, Writer, cut, parts_of, pieces, refuse
from headway.collective.program import CollectiveProgram
from headway.collective.task import Collective, proportional

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
CHUNKS = 16
"""Of each tree where nothing else is said: of n chunks filling the pipe costs (depth - 1) / n."""

Weighted = tuple[Parents, float]
"""A tree, as the parent of each rank (None: the root), and its weight in any unit."""


class _Placed(NamedTuple):
    parents: Parents
    part: Part


def trees(
    collective: Collective,
    weighted: Sequence[Weighted],
    *,
    chunk: int | None = None,
    name: str = "trees",
) -> CollectiveProgram:
    """A program in which every tree carries its share, all at the same time.

    Args:
        collective: What it is for; not all_to_all. For broadcast and reduce all trees have the
            collective's root; for all_gather and reduce_scatter those of one root carry its share.
        weighted: The trees.
        chunk: Elements of a chunk of the heaviest tree; lighter ones have as many, smaller chunks.
            None: one 16th.
        name: Of the program.

    Raises:
        PlanError: No such program for this operation.
        ValueError: Not trees of these ranks, not of these roots, or a weight that is not positive.
    """
    refuse(collective, name, OPS)
    writer = Writer(collective)
    placed = list(_placed(collective, weighted))
    largest = max((part[1] - part[0] for _, part in placed), default=0)
    count = CHUNKS if chunk is None else pieces(largest, chunk)
    ways: list[list[Way]] = [[] for _ in range(collective.ranks)]
    for parents, part in placed:
        number = min(count, part[1] - part[0])
        tag, below, deep = writer.tag(), children(parents), depths(parents)
        for rank, script in enumerate(writer.ranks if number else ()):
            way = Way(collective, script, rank, tag, cut(part, number))
            ways[rank].append(way.joined(parents[rank], below[rank], deep[rank], max(deep)))
    for rank, own in enumerate(ways):
        _write(writer, rank, own)
    return writer.program(name)


def _write(writer: Writer, rank: int, ways: Sequence[Way]) -> None:
    """All events of a rank, in the order of their virtual times."""
    for way in ways:
        way.begin()
    events = [event for way in ways for event in way.events()]
    for event in sorted(events, key=lambda one: one.time):  # stable: of equals the first tree
        event.act(event.chunk)
    writer.ranks[rank].wait(handle for way in ways for handle in way.rest())


def _placed(collective: Collective, weighted: Sequence[Weighted]) -> Iterator[_Placed]:
    """Which elements of the whole each tree carries."""
    for parents, weight in weighted:
        if len(parents) != collective.ranks or not weight > 0:
            raise ValueError(f"the tree {parents} of weight {weight} for {collective.ranks} ranks")
    if collective.op in ("all_gather", "reduce_scatter"):
        for rank, share in enumerate(parts_of(collective.shares)):
            rooted = [one for one in weighted if one[0][rank] is None]
            yield from _shared(share, rooted, f"rank {rank}")
        return
    root = collective.root
    if root is not None and any(parents[root] is not None for parents, _ in weighted):
        raise ValueError(f"{collective.op} from rank {root} by trees of other roots")
    yield from _shared((0, collective.elements), weighted, "the buffer")


def _shared(part: Part, weighted: Sequence[Weighted], whose: str) -> Iterator[_Placed]:
    size = part[1] - part[0]
    if not weighted and size:
        raise ValueError(f"no tree carries the part of {whose}")
    sizes = proportional(size, [weight for _, weight in weighted])
    for (parents, _), piece in zip(weighted, parts_of(sizes, part[0]), strict=True):
        yield _Placed(parents, piece)
