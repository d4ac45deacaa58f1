"""Which points of the frontier today's executor can run, and as which `Plan`.

Invariant: a plan that is returned is legal, and splits the model as its point says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from headway.errors import PlanError
from headway.plan import Exchange, LayerSplit, Plan, pipelined
from headway.plan.mesh import Mesh
from headway.plan.pipeline import Pipeline
from headway.plan.sharding import Zero
from headway.planner.borders import named
from headway.planner.candidate import Point
from headway.planner.degrees import Degrees
from headway.planner.overlap import BUCKETS
from headway.planner.question import Question
from headway.planner.schemes import SCHEMES
from headway.planner.search import Outcome
from headway.units import format_bytes

RUNS = tuple(dict.fromkeys(scheme.name for scheme in SCHEMES))
"""Schedules that the executor runs and the search can price."""


def runnable(question: Question, *, zero: tuple[int, ...] = (0,)) -> Question:
    """The same question about plans that today's executor can run.

    The tensor axis is left out: the executor finds out itself which layers it splits, and the price
    may be that of another split.

    Args:
        question: Any.
        zero: Degrees of ZeRO to look at.
    """
    return replace(question, tensor=(1,), zero=zero, recompute="pipeline")


def missing(point: Point) -> str:
    """What the executor lacks for a point; "" where it can run it."""
    return lacking(point.degrees, any(stage.recompute for stage in point.stages))


def lacking(degrees: Degrees, recompute: bool) -> str:
    """The same of degrees, and whether some stage recomputes."""
    return "recomputation without a pipeline" if degrees.pipeline == 1 and recompute else ""


def refuse(lacks: str) -> None:
    """Nothing where nothing is lacking.

    Raises:
        PlanError: Today's executor cannot run it.
    """
    if lacks:
        raise PlanError(
            "today's executor cannot run this point of the frontier",
            problems=[f"no mechanism yet: {lacks}"],
            fix="Take a point that is marked as runnable, or search with --runnable.",
        )


def zero_of(degrees: Degrees) -> Zero:
    """As a plan has it."""
    return cast(Zero, degrees.zero)


def _split(question: Question, tensor: int) -> LayerSplit | None:
    """Of the tensor axis; what is forced to be replicated is left whole."""
    whole = tuple(pattern for pattern, how in question.force if how == "replicate")
    return LayerSplit(tensor=(tensor,), whole=whole) if tensor > 1 else None


def to_plan(outcome: Outcome, point: Point) -> Plan:
    """The plan of a point; `missing` says what the executor lacks for it.

    Which layers a tensor axis splits, and how, is not in the plan: the executor finds that out.

    Raises:
        PlanError: It recomputes without a pipeline, which no plan can say yet.
    """
    if point.degrees.pipeline == 1 and any(stage.recompute for stage in point.stages):
        refuse(missing(point))
    degrees, row = point.degrees, outcome.search.row
    again = tuple(n for n, stage in enumerate(point.stages) if stage.recompute)
    default = Pipeline()
    pipeline = Pipeline(
        schedule=degrees.schedule,
        microbatches=degrees.microbatches,
        virtual=degrees.virtual if degrees.virtual > 1 else default.virtual,
        pipes=degrees.pipes if degrees.pipes > 1 else default.pipes,
        recompute="blocks" if again else None,
        recompute_stages=again,
        cut=tuple(named(row[stage.start], outcome.question.force) for stage in point.stages[1:]),
    )
    bucket = point.bucket if point.bucket not in (0.0, BUCKETS[0]) else None
    plan = pipelined(
        outcome.question.batch,
        processes=degrees.devices,
        stages=degrees.pipeline,
        pipeline=pipeline,
        microbatch=degrees.microbatch,
        precision="bfloat16" if outcome.question.precision == "bfloat16" else "float32",
        exchange=Exchange(bucket=format_bytes(bucket)) if bucket else None,
        zero=zero_of(degrees),
        split=_split(outcome.question, degrees.tensor),
    )
    if degrees.pipeline > 1 and degrees.data > 1 and degrees.order == "tdp":
        # The last axis of a mesh varies fastest: data inside of pipe.
        data, pipe, *rest = plan.mesh.axes
        plan = replace(plan, mesh=Mesh(axes=(pipe, data, *rest)))
        plan.check()
    return plan
