"""Points on devices of several types as plans that the executor obeys, and who stands where.

Invariant: a plan that is returned is legal; rank r of it stands on a device of type `ranks_of[r]`.
"""

from __future__ import annotations

from headway.plan import Axis, BatchSplit, Mesh, Pipeline, Plan
from headway.plan.batch import apportion
from headway.plan.plan import MemoryPolicy
from headway.planner.borders import named
from headway.planner.mixed import MixedOutcome
from headway.planner.mixed_point import MixedPoint
from headway.planner.runnable import lacking, refuse, zero_of


def shares_of(outcome: MixedOutcome, point: MixedPoint) -> tuple[int, ...]:
    """Samples of a step that each copy takes, in proportion to its micro-batches."""
    cells = point.combination.cells
    sizes = {kinds: size for (kinds, _), size in zip(cells.classes, point.sizes, strict=True)}
    return apportion(outcome.question.batch, [sizes[kinds] for kinds in cells.copies])


def ranks_of(point: MixedPoint) -> tuple[str, ...]:
    """The type of each rank's device, in the order of the plan's mesh (of `to_plan`)."""
    combination = point.combination
    t, d, p = combination.tensor, combination.data, combination.pipeline
    copies = combination.cells.copies
    if combination.cells.order == "tpd":
        return tuple(copies[c][s] for c in range(d) for s in range(p) for _ in range(t))
    return tuple(copies[c][s] for s in range(p) for c in range(d) for _ in range(t))


def missing(point: MixedPoint) -> str:
    """What the executor lacks for a point; "" where it can run it."""
    degrees = point.combination.degrees(1)
    found = [lacking(degrees, any(stage.recompute for stage in point.stages))]
    if degrees.tensor > 1:
        found.append("tensor axis on unequal devices")
    if degrees.zero:
        found.append(f"ZeRO {degrees.zero} on unequal devices")
    return ", ".join(filter(None, found))


def to_plan(outcome: MixedOutcome, point: MixedPoint) -> Plan:
    """The plan of a point.

    Raises:
        PlanError: Today's executor cannot run it.
    """
    refuse(missing(point))
    combination, row = point.combination, outcome.search.engine.row
    again = tuple(n for n, stage in enumerate(point.stages) if stage.recompute)
    axes = [Axis(name="data", size=combination.data)]
    if combination.pipeline > 1:
        axes.append(Axis(name="pipe", size=combination.pipeline))
    if combination.cells.order == "tdp":
        axes.reverse()  # the last axis of a mesh varies fastest
    shares = shares_of(outcome, point)
    plan = Plan(
        mesh=Mesh(axes=tuple(axes)),
        batch=BatchSplit(
            samples=outcome.question.batch,
            parts=min(combination.microbatches, *shares),
            shares=shares if len(set(shares)) > 1 else (),
        ),
        pipeline=Pipeline(
            microbatches=combination.microbatches if combination.pipeline > 1 else None,
            recompute="blocks" if again else None,
            recompute_stages=again,
            cut=tuple(
                named(row[stage.start], outcome.question.force) for stage in point.stages[1:]
            ),
        ),
        memory=MemoryPolicy(
            precision="bfloat16" if outcome.question.precision == "bfloat16" else "float32",
            zero=zero_of(combination.degrees(1)),
        ),
    )
    plan.check()
    return plan
