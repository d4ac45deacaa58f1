"""Which hands a plan needs for its gradients."""

from __future__ import annotations

from headway.plan import Plan
from headway.run.gradients import Gradients
from headway.run.late_gradients import LateGradients
from headway.run.sharded_gradients import ShardedGradients
from headway.run.stage_gradients import StageGradients


def hands_for(plan: Plan) -> type[Gradients]:
    """By where gradients are summed: by stages of a pipeline, by parts of the state, by buckets."""
    if plan.pipe_degree > 1:
        return StageGradients if plan.flushes else LateGradients
    return ShardedGradients if plan.memory.zero and plan.data_degree > 1 else Gradients
