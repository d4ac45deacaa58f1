"""Which points of the frontier today's executor can run, and as which `Plan`.

Invariant: a plan that is returned is legal, and splits the model as its point says.
"""

from __future__ import annotations

from headway.errors import PlanError
from headway.plan import Plan
from headway.plan.pipeline import Pipeline
from headway.plan.plan import pipelined
from headway.planner.candidate import Point
from headway.planner.search import Outcome


def missing(point: Point) -> str:
    """What the executor lacks for a point; "" where it can run it."""
    found = []
    if point.degrees.tensor > 1:
        found.append("tensor axis")
    if point.degrees.zero:
        found.append(f"ZeRO {point.degrees.zero}")
    if point.degrees.pipeline == 1 and any(stage.recompute for stage in point.stages):
        found.append("recomputation without a pipeline")
    return ", ".join(found)


def to_plan(outcome: Outcome, point: Point) -> Plan:
    """The plan of a point.

    Raises:
        PlanError: Today's executor cannot run it.
    """
    if lacks := missing(point):
        raise PlanError(
            "today's executor cannot run this point of the frontier",
            problems=[f"no mechanism yet: {lacks}"],
            fix="Take a point that is marked as runnable, or search with --runnable.",
        )
    degrees, row = point.degrees, outcome.search.row
    again = tuple(n for n, stage in enumerate(point.stages) if stage.recompute)
    pipeline = Pipeline(
        schedule=degrees.schedule,
        microbatches=degrees.microbatches,
        recompute="blocks" if again else None,
        recompute_stages=again,
        cut=tuple(row[stage.start].module for stage in point.stages[1:]),
    )
    return pipelined(
        outcome.question.batch,
        processes=degrees.devices,
        stages=degrees.pipeline,
        pipeline=pipeline,
        microbatch=degrees.microbatch,
    )
