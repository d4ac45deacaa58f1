"""Ring programs: everything goes to the right neighbour, so that only n links are needed.

2 (n - 1) rounds for all_reduce, each rank sends 2 (n - 1) / n of the whole (Patarasuk and Yuan
2009, optimal where every rank has one link). A chain serves broadcast and reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.collective.generators import phases
from headway.collective.generators.shapes import chain
from headway.collective.generators.trees import trees
from headway.collective.generators.writing import Area, Writer, parts_of, refuse
from headway.collective.program import CollectiveProgram
from headway.collective.task import Collective, even

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


def ring(
    collective: Collective, *, chunk: int | None = None, order: Sequence[int] | None = None
) -> CollectiveProgram:
    """A ring, or for one root a chain that begins there.

    Args:
        collective: What it is for; not all_to_all.
        chunk: Elements of a message; None: as large as they come, of a chain one 16th.
        order: The ranks along the ring; None: by number.

    Raises:
        PlanError: No such program for this operation.
    """
    refuse(collective, "ring", OPS)
    ranks = list(range(collective.ranks) if order is None else order)
    if collective.root is not None:
        place = ranks.index(collective.root)
        along = ranks[place:] + ranks[:place]
        return trees(collective, [(chain(along), 1.0)], chunk=chunk, name="ring")
    writer = Writer(collective)
    if collective.op == "all_reduce":
        parts = parts_of(even(collective.elements, len(ranks)))
        phases.ring(writer, ranks, parts, chunk=chunk)
        return writer.program("ring")
    whole = parts_of(collective.shares)
    parts = [whole[rank] for rank in ranks]
    if collective.op == "all_gather":
        for script, part in zip(writer.ranks, whole, strict=True):
            script.copy(Area("out").span(part), Area("in", part[0]).span(part))
        phases.ring(writer, ranks, parts, chunk=chunk, scatter=False)
    else:
        phases.ring(writer, ranks, parts, chunk=chunk, gather=False, source=Area("in"))
    return writer.program("ring")
