"""A plan, or a point of the search, as a step for the simulator.

Seconds and bytes are those of the search's tables: of every unit both passes, the saved activations
and the parameters. The seconds of a stage add up to those that the search prices it with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.gradient_exchange import BUCKETS
from headway.planner.estimate.pipeline_time import PointStage
from headway.planner.estimate.pricing import Pricing
from headway.planner.estimate.segments import SegmentTables
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_conversion import executor_lacks, point_of
from headway.planner.search.plan_point import CopyClass, Point, uniform_class
from headway.planner.traffic.estimate import collective_seconds, collectives_of, uniform_point
from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.mesh import Axis, Mesh
from headway.plans.pipeline import PIPE_AXIS
from headway.plans.plan import SHARD_AXIS
from headway.schedule.generators.registry import make_schedule
from headway.schedule.pipeline_schedule import PipelineSchedule
from headway.simulator.ranks import RankGrid
from headway.simulator.work import StageSegment, StageWork, StepWork


def table_of(plan: Plan) -> PipelineSchedule:
    """Who does what in which order, in one pipeline of a plan: that with the largest share."""
    ranks, copies = plan.pipe_degree, range(plan.data_degree)
    share = max((plan.batch.share(copy, plan.data_degree) for copy in copies), key=len)
    parts = len(plan.batch.microbatches(share))
    if ranks == 1:
        return make_schedule("1f1b", stages=1, microbatches=parts)
    return plan.pipeline.make(ranks, parts)


def one_stage_per_rank(plan: Plan) -> Plan:
    """The plan with a stage on each rank of its pipeline, so that the search has its price."""
    table = table_of(plan)
    axes = [a for a in plan.mesh.axes if a.name != PIPE_AXIS]
    pipeline = replace(
        plan.pipeline,
        schedule="1f1b",
        table="",
        recompute="blocks" if table.recompute else False,
        recompute_stages=table.recompute,
    )
    if table.stages > 1:
        axes.append(Axis(name=PIPE_AXIS, size=table.stages))
    return replace(plan, mesh=Mesh(axes=tuple(axes)), pipeline=pipeline)


def step_of_plan(
    plan: Plan, search: PlanSearch, kinds: Sequence[str] = ()
) -> tuple[StepWork, Point | None]:
    """A step as the executor carries out the plan; and its price, where the search has one.

    Args:
        plan: A legal one; any schedule, or a table.
        search: Of its model, batch and cluster.
        kinds: The type of each rank's device, where the search has groups of devices.

    Raises:
        PlanError: The model has no such borders, or devices of several types no price for it.
    """
    table = table_of(plan)
    try:
        point, priced = point_of(plan, search, kinds), True
    except PlanError:  # a schedule without a price, or the same fault again
        if len({*kinds}) > 1:  # a stage more or less on a rank, and its type is not known
            raise
        point, priced = point_of(one_stage_per_rank(plan), search, kinds[:1]), False
    return _step(search, point, table, grid_of_plan(plan), plan), point if priced else None


def step_of_point(point: Point, search: PlanSearch) -> StepWork:
    """A step of a plan that was found."""
    again = tuple(number for number, stage in enumerate(point.stages) if stage.recompute)
    return _step(
        search, point, table_of_degrees(point.degrees, again), grid_of(point.degrees), None
    )


def table_of_degrees(degrees: Degrees, again: tuple[int, ...]) -> PipelineSchedule:
    """The table of a point whose stages with these numbers compute their blocks again."""
    table = make_schedule(
        degrees.schedule,
        stages=degrees.pipeline,
        microbatches=degrees.microbatches,
        virtual=degrees.virtual,
        pipes=degrees.pipes,
    )
    return replace(table, recompute=again, blockwise=bool(again))


def _step(
    search: PlanSearch, point: Point, table: PipelineSchedule, grid: RankGrid, plan: Plan | None
) -> StepWork:
    kinds = [kind for kind, _ in point.amounts] or [""]
    first, *others = (
        _class_stages(search, point, one) for one in point.classes or (uniform_class(point),)
    )
    variant = {copy: n for n, one in enumerate(point.classes) for copy in one.copies}
    found = StepWork(
        table=table,
        stages=first,
        others=tuple(others),
        variant=tuple(variant[copy] for copy in range(len(variant))) if others else (),
        grid=grid,
        network=search.question.machine.network,
        zero=point.degrees.zero,
        overlap=min(search.machine_of(kind).device.overlap for kind in kinds),
    )
    again = any(stage.recompute for stage in point.stages)
    return place_reductions(found, plan, executor_lacks(point.degrees, again))


def _class_stages(search: PlanSearch, point: Point, one: CopyClass) -> tuple[StageWork, ...]:
    on = {
        kind: stages_of(search, uniform_point(point, one, kind))
        for kind in dict.fromkeys(one.kinds)
    }
    return tuple(on[kind][stage] for stage, kind in enumerate(one.kinds))


def place_reductions(work: StepWork, plan: Plan | None, lacks: str) -> StepWork:
    """With the sums where the executor has them; what it cannot run sums the gradients of every
    unit as they come.

    Args:
        plan: None: of a point that was found.
        lacks: What the executor lacks for such a point.
    """
    if work.grid.pipeline == 1:
        overlap = plan is None or plan.exchange.overlap
        return replace(work, bucket=0.0) if overlap else replace(work, sync="post")
    if plan is not None:
        return replace(work, sync=plan.pipeline.sync)
    return replace(work, bucket=0.0) if lacks else work


def stages_of(search: PlanSearch, point: Point) -> tuple[StageWork, ...]:
    """All stages of a point on devices of one type."""
    inside = _collectives(search, point)
    pricing = search.candidate(point.degrees, point.kind).pricing
    return tuple(_stage(search, point, number, own, pricing) for number, own in enumerate(inside))


def grid_of_plan(plan: Plan) -> RankGrid:
    """The ranks of a plan, in the order of its mesh."""
    return RankGrid(
        tensor=plan.mesh.degree(TENSOR),
        data=plan.data_degree,
        pipeline=plan.pipe_degree,
        strides=_strides(plan),
    )


def grid_of(degrees: Degrees) -> RankGrid:
    """The ranks of a point."""
    return RankGrid(
        tensor=degrees.tensor,
        data=degrees.data,
        pipeline=degrees.pipeline,
        strides=(degrees.stride("tensor"), degrees.stride("data"), degrees.stride("pipe")),
    )


def _strides(plan: Plan) -> tuple[int, int, int]:
    """Of the tensor axis, of data and of pipe."""
    # The last axis of a mesh varies fastest.
    sizes = [axis.size for axis in reversed(plan.mesh.axes)]
    names = [axis.name for axis in reversed(plan.mesh.axes)]
    # `accumulate` ends with the number of all ranks, to which no axis belongs.
    inside = dict(zip(names, accumulate([1, *sizes], lambda a, b: a * b), strict=False))
    return (
        inside.get(TENSOR, 1),
        inside.get(SHARD_AXIS, inside[plan.exchange.axis]),
        inside.get(PIPE_AXIS, plan.ranks),
    )


def _stage(
    search: PlanSearch, point: Point, number: int, inside: tuple[float, float], pricing: Pricing
) -> StageWork:
    degrees, stage = point.degrees, point.stages[number]
    tables, again = pricing.tables, int(stage.recompute)
    units = pricing.units(stage.start, stage.stop, again, stage.price, point.border).tolist()
    held = _held([line[3] for line in units], stage.params)
    pieces = tuple(
        StageSegment(forward=line[0], backward=line[1], params=own)
        for line, own in zip(units, held, strict=True)
    )
    # The host's time falls on both passes alike, as the search prices it.
    beside = pricing.host_microbatch(len(point.stages)) / 2
    forward = math.fsum(piece.forward for piece in pieces)
    backward = math.fsum(piece.backward for piece in pieces)
    weight = min(stage.weight, backward)
    step = sum(line[2] for line in units)
    alone = degrees.pipeline == 1 and degrees.zero < 2
    return StageWork(
        forward=forward + beside,
        input_grad=backward - weight + beside,
        weight_grad=weight,
        pieces=pieces,
        leaving=tuple(_leaving(search, point, [line[3] for line in units])) if alone else (),
        collectives=inside,
        message=_message(tables, point, number),
        params=stage.params,
        step=step,
        # `after` has all three; the simulator has tasks of their own for the other two.
        update=max(0.0, stage.after - step - _gathered(search, point, stage)),
        host=pricing.reading + pricing.host,
        state=stage.state,
        kept=sum(line[4] for line in units),
        transient=stage.transient,
        gradients=stage.gradients,
        first=stage.first,
        passing=stage.passing,
    )


def _gathered(search: PlanSearch, point: Point, stage: PointStage) -> float:
    """Seconds in which ZeRO 1 and 2 gather the new weights, which `PointStage.after` has with the
    update."""
    degrees, network = point.degrees, search.question.machine.network
    if degrees.zero not in (1, 2):
        return 0.0
    return float(network.all_gather(stage.params, degrees.data, degrees.stride("data")))


def _held(params: list[float], whole: float) -> list[float]:
    """Bytes of parameters of each unit."""
    # What is tied counts where it is used first.
    twice = sum(params) - whole
    for number in reversed(range(len(params))):
        less = min(params[number], max(twice, 0.0))
        params[number] -= less
        twice -= less
    return params


def _leaving(search: PlanSearch, point: Point, held: list[float]) -> Iterator[tuple[int, float]]:
    """The buckets of a model that is not cut, as `comm` fills them."""
    shared = search.shared
    whole = np.maximum(shared.held, 1.0)
    sizes, units = shared.gradients.messages(point.bucket or BUCKETS[0], np.array(held) / whole)
    yield from zip(units.tolist(), sizes.tolist(), strict=True)


def _collectives(search: PlanSearch, point: Point) -> tuple[tuple[float, float], ...]:
    """Of each stage: seconds of the tensor axis in the passes of one micro-batch."""
    degrees = point.degrees
    if degrees.tensor == 1:
        return ((0.0, 0.0),) * len(point.stages)
    network, found = search.question.machine.network, []
    for stage, calls in zip(point.stages, collectives_of(search, point), strict=True):
        own = [call for call in calls if call.axis == "tensor"]
        ahead, back = (
            collective_seconds([call for call in own if call.phase == phase], network, degrees)
            for phase in ("forward", "backward")
        )
        m = degrees.microbatches
        # Where a stage recomputes, its forward collectives have been counted twice.
        found.append((ahead / m / (2 if stage.recompute else 1), back / m))
    return tuple(found)


def _message(tables: SegmentTables, point: Point, number: int) -> float:
    if number + 1 == len(point.stages):
        return 0.0
    return float(tables.crossing(point.border)[point.stages[number + 1].start])
