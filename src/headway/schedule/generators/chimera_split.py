"""Chimera with its bubbles filled by its own weight gradients.

A Chimera table whose backwards are split into I and W; W runs where a rank of the plain table would
idle. Invariant: never longer than the plain table, and no more activations than its fullest rank.
Sources: Li and Hoefler, SC 2021 (the table); Qi et al. 2023 (the split).
"""

from __future__ import annotations

from headway.schedule.costs import StageCosts
from headway.schedule.generators.chimera import chimera
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.weight_gradients import fill_with_weight_gradients


def chimera_split(ranks: int, microbatches: int, *, pipes: int = 2) -> PipelineSchedule:
    """Chimera (direct) with split backwards; filled for equal stages with F = I = W.

    With two pipes and N a multiple of D the bubble is (D-2)/(6N+D-2), in D activations. For
    other costs fill a `chimera` with `fill_with_weight_gradients`.

    Args:
        ranks: D, even.
        microbatches: N of a step, at least 1.
        pipes: 2f, where f divides D/2.

    Raises:
        PlanError: As `chimera`.
    """
    plain = chimera(ranks, microbatches, pipes=pipes)
    return fill_with_weight_gradients(plain, StageCosts.of(ranks))
