"""Which hands a plan needs for its gradients."""

from __future__ import annotations

from headway.plan import Plan
from headway.plan.mechanisms import check_mechanisms
from headway.run.gradients import Gradients
from headway.run.late_gradients import LateGradients, refuse_clip
from headway.run.sharded_gradients import ShardedGradients
from headway.run.split_gradients import SplitGradients
from headway.run.stage_gradients import StageGradients


def hands_for(plan: Plan, clip: float | None) -> type[Gradients]:
    """By where gradients are summed: by stages, by parts of layers or of the state, by buckets.

    Raises:
        PlanError: There is no mechanism for the plan, or none to limit the norm with it.
    """
    check_mechanisms(plan)
    refuse_clip(plan, clip)
    if plan.pipe_degree > 1:
        return StageGradients if plan.flushes else LateGradients
    if plan.split.tensor:
        return SplitGradients
    return ShardedGradients if plan.memory.zero and plan.ranks > 1 else Gradients
