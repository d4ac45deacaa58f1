"""Which legal plans today's executor has no mechanism for; they can be priced and played."""

from __future__ import annotations

from collections.abc import Iterator

from headway.errors import PlanError
from headway.plan.plan import Plan


def lacking(plan: Plan) -> Iterator[str]:
    """What the executor lacks, one line each; nothing: it can carry the plan out."""
    split, zero = plan.group_degree > 1, plan.memory.zero
    if plan.split.tensor and plan.split.spatial:
        yield "split.tensor and split.spatial at once"
    if plan.split.by and plan.pipe_degree > 1 and zero:
        yield f"split.by with a pipeline and memory.zero {zero}: its parts lie on one grid"
    if not plan.flushes and split:
        yield f"split with a pipeline of {plan.pipeline.schedule}, without a flush"
    if zero and not plan.flushes:
        yield (
            f"memory.zero {zero} with a pipeline of {plan.pipeline.schedule}, without a flush: "
            "several versions of the weights are whole"
        )


def check_mechanisms(plan: Plan) -> None:
    """Refuse a plan that can only be priced and played.

    Raises:
        PlanError: With everything that the executor lacks.
    """
    if problems := list(lacking(plan)):
        raise PlanError(
            "today's executor cannot carry out this plan",
            problems=[f"no mechanism yet: {problem}" for problem in problems],
            fix="Leave one of them out; `headway plan RECIPE --runnable` searches what can be run.",
        )
