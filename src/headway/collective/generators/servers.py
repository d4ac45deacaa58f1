"""Parameter-server programs: shards of the buffer live on some ranks; push, sum there, pull.

A server is a star-shaped tree with the server as its root, so that push, sum and pull of different
chunks overlap (Li et al. 2014; with all ranks as servers each byte is sent and received once by
everybody, as in BytePS, Jiang et al. 2020, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.collective.generators.shapes import star
from headway.collective.generators.trees import trees
from headway.collective.generators.writing import refuse
from headway.collective.program import CollectiveProgram
from headway.collective.task import Collective


def servers(
    collective: Collective, ranks: Sequence[int] | None = None, *, chunk: int | None = None
) -> CollectiveProgram:
    """Shards of even size on these ranks.

    Args:
        collective: all_reduce.
        ranks: Of the servers; None: all.
        chunk: Elements of a message; None: one 16th of a shard.

    Raises:
        PlanError: Another operation.
        ValueError: A server twice, or no server.
    """
    refuse(collective, "servers", ("all_reduce",))
    chosen = list(range(collective.ranks) if ranks is None else ranks)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"servers on the ranks {chosen}")
    stars = [(star(collective.ranks, rank), 1.0) for rank in chosen]
    return trees(collective, stars, chunk=chunk, name="servers")
