"""Which samples a rank reads, and of split ones which part.

Where a plan splits samples and the data are slabs on disk, a rank reads its own part of each sample
and never another one; a `SlabStore` has each part read once in all epochs. Other data are read
whole and cut later (`run/spatial.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch.distributed as dist

from headway.data import Loader, SlabCut, SlabSource, SlabStore, Source, as_source
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.plan.sharding import SHARD
from headway.run.memory import share_of_memory
from headway.run.world import World

RankLoader = Loader | SlabStore
NO_SHOWCASE = "left out: it would read whole samples, of which no rank has one"


def in_parts(source: Source, plan: Plan) -> bool:
    """Whether a rank reads a part of each sample only."""
    return isinstance(source, SlabSource) and bool(plan.split.spatial)


def first_readers(source: Source, plan: Plan) -> tuple[int, ...]:
    """The ranks that read the samples of rank 0, by which a model is cut."""
    return plan.mesh.peers(0, SPACE) if in_parts(source, plan) else (0,)


def source_of(examples: Any, plan: Plan, rank: int) -> Source:
    """What a rank reads: a source itself, or this rank's part of one of slabs.

    Raises:
        DataError: It is no data set, or its samples cannot be cut so.
    """
    source = as_source(examples)
    if not (isinstance(source, SlabSource) and plan.split.spatial):
        return source
    return source.parted(SlabCut(plan.split.spatial, plan.mesh.coordinate(rank).get(SPACE, 0)))


def loader_of(
    source: Source, plan: Plan, world: World, *, alone: bool = False, **options: Any
) -> RankLoader:
    """The batches of this rank; collective where parts of samples are kept in a store.

    They are read again in each epoch where processes read ahead (`workers`), and where the shares
    of a batch are uneven.

    Args:
        source: From `source_of`.
        plan: Of the run.
        world: The processes.
        alone: Other ranks do not come: no store.
        options: See `headway.data.Loader`.
    """
    again = alone or options.get("workers") or plan.batch.shares
    if isinstance(source, SlabSource) and source.cut.parts > 1 and plan.split.spatial and not again:
        options.pop("workers", None)
        return _store(source, plan, world, **options)
    rank, ranks = plan.data_rank(world.rank), plan.data_degree
    return Loader(source, plan.batch, rank=rank, ranks=ranks, **options)


def _store(source: SlabSource, plan: Plan, world: World, **options: Any) -> SlabStore:
    return SlabStore(
        source,
        plan.batch,
        group=_ranks_of_the_part(plan, world),
        memory=share_of_memory(world.place.local_ranks) if source.memory is None else source.memory,
        keep=source.keep,
        timeout=world.timeout_seconds,
        **options,
    )


def _ranks_of_the_part(plan: Plan, world: World) -> dist.ProcessGroup:
    """The ranks that read the same part, of other samples; collective.

    A group of their own: slabs pass while gradients are summed.
    """

    def place(rank: int) -> Hashable:
        axes = plan.mesh.coordinate(rank).items()
        return tuple(c for axis, c in axes if axis not in (plan.exchange.axis, SHARD))

    ranks: dict[Hashable, list[int]] = {}
    for rank in range(plan.ranks):
        ranks.setdefault(place(rank), []).append(rank)
    with world.explained("making the groups that share slabs"):
        groups: dict[Hashable, dist.ProcessGroup] = {
            key: dist.new_group(each, backend="gloo") for key, each in ranks.items()
        }
    return groups[place(world.rank)]
