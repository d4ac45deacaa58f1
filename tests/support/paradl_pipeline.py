"""ParaDL's row of a pipeline (Kahira et al. 2021, table of its cost model), which headway does not
show: its own price of a pipeline knows the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headway.planner.guidelines.layer_parallelism import ParadlJob, ParadlRow, memory_of


def pipeline(job: ParadlJob, p: int, *, begins: Sequence[int] = (), s: int = 1) -> ParadlRow:
    """comp D (p+S-1)/S (max FW_G + max BW_G) + D/B max WU_G;
    comm 2 D (p+S-2)/B max(alpha + B/S |y| delta beta), of the layers at the cuts.

    Args:
        begins: Layers with which the second and later of the p groups G_i begin.
        s: S, micro-batches.
    """
    edges = (0, *begins, len(job.layers))
    groups = [job.layers[a:b] for a, b in pairwise(edges)]
    assert len(groups) == p
    slowest = max(sum(layer.forward for layer in g) for g in groups) + max(
        sum(layer.backward for layer in g) for g in groups
    )
    sent = max((job.message(job.batch / s * g[-1].y) for g in groups[:-1]), default=0.0)
    return ParadlRow(
        computation=job.samples * (p + s - 1) / s * slowest
        + job.iterations * max(sum(layer.update for layer in g) for g in groups),
        communication=2 * job.iterations * (p + s - 2) * sent,
        memory=max(memory_of(job, g, samples=job.batch) for g in groups),
        limit=len(job.layers),
    )
