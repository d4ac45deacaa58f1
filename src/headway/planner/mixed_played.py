"""A plan on devices of several types, or a point of their search, as a step for the simulator.

Every class of copies has the seconds of its own devices and its own micro-batches; the search says
what a step takes if all copies were as slow as the slowest. Invariant: on equal devices the step is
that of `played`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.plan import Plan
from headway.planner.mixed import MixedSearch
from headway.planner.mixed_collectives import alike
from headway.planner.mixed_planned import mixed_point_of
from headway.planner.mixed_point import MixedPoint
from headway.planner.played import (
    as_carried_out,
    grid_of,
    grid_of_plan,
    stages_of,
    table_of,
    table_of_degrees,
)
from headway.planner.runnable import lacking
from headway.schedule import PipelineSchedule
from headway.simulator.ranks import Grid
from headway.simulator.work import StageWork, StepWork


def step_of_mixed_plan(
    plan: Plan, search: MixedSearch, kinds: Sequence[str]
) -> tuple[StepWork, MixedPoint]:
    """A step as today's executor carries out the plan, and its price.

    Args:
        plan: A legal one.
        search: Of its model, batch and cluster.
        kinds: The type of each rank's device.

    Raises:
        PlanError: The search has no price for it, or the model has no such borders.
    """
    point = mixed_point_of(plan, search, kinds)
    work = _step(search, point, table_of(plan), grid_of_plan(plan))
    return as_carried_out(work, plan, ""), point


def step_of_mixed_point(point: MixedPoint, search: MixedSearch) -> StepWork:
    """A step of a plan that was found, as `played.step_of_point` makes it."""
    degrees = point.combination.degrees(1)
    again = tuple(number for number, stage in enumerate(point.stages) if stage.recompute)
    work = _step(search, point, table_of_degrees(degrees, again), grid_of(degrees))
    return as_carried_out(work, None, lacking(degrees, bool(again)))


def _step(search: MixedSearch, point: MixedPoint, table: PipelineSchedule, grid: Grid) -> StepWork:
    machines, cells = search.question.machines, point.combination.cells
    first, *others = (_class(search, point, number) for number in range(len(cells.classes)))
    numbers = {kinds: number for number, (kinds, _) in enumerate(cells.classes)}
    return StepWork(
        table=table,
        stages=first,
        others=tuple(others),
        variant=tuple(numbers[kinds] for kinds in cells.copies),
        grid=grid,
        network=next(iter(machines.values())).network,
        zero=point.combination.zero,
        overlap=min(machines[kind].device.overlap for kind in set().union(*numbers)),
    )


def _class(search: MixedSearch, point: MixedPoint, number: int) -> tuple[StageWork, ...]:
    """The stages of a class of copies, each on its own device."""
    kinds, _ = point.combination.cells.classes[number]
    on = {
        kind: stages_of(search.engines[kind], alike(point, number, kind))
        for kind in dict.fromkeys(kinds)
    }
    return tuple(on[kind][stage] for stage, kind in enumerate(kinds))
