"""Points of the search as plans for the executor, and plans as points of the search.

`to_plan` makes the `Plan` of a point, `missing_in_executor` says what the executor lacks for it.
`point_of` prices a plan that somebody has decided already with the search's own cost model; a plan
that `to_plan` has made becomes its point again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.gradient_exchange import BUCKETS
from headway.planner.estimate.stage_cut import LayerUnit, border_name, unit_of_module
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult
from headway.planner.search.candidate import PlanCandidate
from headway.planner.search.device_layout import Combination, DeviceLayout
from headway.planner.search.operator_choices import splits_parameters, unsplittable_operators
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.plans import ExchangePlan, LayerSplit, Plan, pipelined
from headway.plans.batch import largest_remainder_shares
from headway.plans.layer_split import TENSOR
from headway.plans.mesh import Mesh
from headway.plans.pipeline import PipelinePlan
from headway.plans.plan import SHARD_AXIS, Zero
from headway.schedule.generators.registry import PLAIN, RUNNABLE_SCHEDULES, schedule_option
from headway.units import format_bytes


def missing_in_executor(search: PlanSearch, point: Point) -> str:
    """What the executor lacks for a point; "" where it can run it."""
    found = [executor_lacks(point.degrees, any(stage.recompute for stage in point.stages))]
    if point.degrees.tensor > 1 and len(point.amounts) > 1:
        found.append("tensor axis on unequal devices")
    elif point.degrees.tensor > 1:
        tables = search.tables_at(point)
        kinds = unsplittable_operators(tables, point)
        found += [f"a tensor split of {kind}" for kind in kinds]
        if not kinds and not splits_parameters(tables, point):
            found.append("a layer that the tensor axis splits")
    return ", ".join(filter(None, found))


def sample_shares(batch: int, point: Point) -> tuple[int, ...]:
    """Samples of a step that each copy takes, in proportion to its micro-batches; empty where the
    request has devices of one type."""
    sizes = {copy: one.microbatch for one in point.classes for copy in one.copies}
    return largest_remainder_shares(batch, [sizes[copy] for copy in range(len(sizes))])


def executor_lacks(degrees: Degrees, recompute: bool) -> str:
    """What the executor lacks for such degrees, if some stage recomputes."""
    return "recomputation without a pipeline" if degrees.pipeline == 1 and recompute else ""


def check_executor(lacks: str) -> None:
    """Refuse a point of the frontier that the executor cannot run.

    Args:
        lacks: What it lacks for the point; "": nothing.

    Raises:
        PlanError: It lacks something.
    """
    if lacks:
        raise PlanError(
            "the executor cannot run this point of the frontier",
            problems=[f"not implemented: {lacks}"],
            fix="Take a point that is marked as runnable, or search with --runnable.",
        )


def _split(question: PlanRequest, tensor: int) -> LayerSplit | None:
    # Which layers a tensor axis splits, and how, is not in the plan: the executor finds that out.
    # Only what is forced to be replicated is named.
    whole = tuple(pattern for pattern, how in question.force if how == "replicate")
    return LayerSplit(tensor=(tensor,), whole=whole) if tensor > 1 else None


def to_plan(outcome: SearchResult, point: Point) -> Plan:
    """The plan of a point; `missing_in_executor` says what the executor lacks for it.

    Raises:
        PlanError: It recomputes without a pipeline, or a tensor axis lies on devices of several
            types: no plan can describe that.
    """
    recomputes = any(stage.recompute for stage in point.stages)
    if (point.degrees.pipeline == 1 and recomputes) or len(point.amounts) > 1:
        check_executor(missing_in_executor(outcome.search, point))
    degrees, row = point.degrees, outcome.search.row
    again = tuple(n for n, stage in enumerate(point.stages) if stage.recompute)
    default = PipelinePlan()
    pipeline = PipelinePlan(
        schedule=degrees.schedule,
        microbatches=degrees.microbatches,
        virtual=degrees.virtual if degrees.virtual > 1 else default.virtual,
        pipes=degrees.pipes if degrees.pipes > 1 else default.pipes,
        recompute="blocks" if again else None,
        recompute_stages=again,
        cut=tuple(
            border_name(row[stage.start], outcome.question.force) for stage in point.stages[1:]
        ),
    )
    bucket = point.bucket if point.bucket not in (0.0, BUCKETS[0]) else None
    shares = sample_shares(outcome.question.batch, point) if len(point.amounts) > 1 else ()
    plan = pipelined(
        outcome.question.batch,
        processes=degrees.devices,
        stages=degrees.pipeline,
        pipeline=pipeline,
        microbatch=degrees.microbatch,
        precision="bfloat16" if outcome.question.precision == "bfloat16" else "float32",
        exchange=ExchangePlan(bucket=format_bytes(bucket)) if bucket else None,
        zero=cast(Zero, degrees.zero),
        split=_split(outcome.question, degrees.tensor),
        shares=shares,
    )
    if shares:  # copies take as many micro-batches, of different sizes
        # A copy with fewer samples than micro-batches would have an empty one.
        parts = min(degrees.microbatches, *shares)
        plan = replace(plan, batch=replace(plan.batch, microbatch=None, parts=parts))
        plan.check()
    if degrees.pipeline > 1 and degrees.data > 1 and degrees.order == "tdp":
        # The last axis of a mesh varies fastest: data inside of pipe.
        data, pipe, *rest = plan.mesh.axes
        plan = replace(plan, mesh=Mesh(axes=(pipe, data, *rest)))
        plan.check()
    return plan


def degrees_of(plan: Plan) -> Degrees:
    """Its degrees, with the micro-batches of the largest share.

    Raises:
        PlanError: The search has no price for such a plan.
    """
    pipeline, several = plan.pipeline, plan.pipe_degree > 1
    problems = []
    grid = plan.split.grid
    if plan.split.spatial:
        problems.append("split.spatial")
    if plan.split.tables:
        problems.append(f"split.tables: {plan.split}; the search knows whole ones")
    if grid is not None and (grid.form != "classic" or plan.split.by):
        problems.append(f"split.tensor: {plan.split}; only 1-D, the same for all modules")
    if several and pipeline.table:
        problems.append("pipeline.table: a table of one's own")
    elif several and pipeline.schedule not in RUNNABLE_SCHEDULES:
        problems.append(f"pipeline.schedule: {pipeline.schedule}")
    elif several and pipeline.mode_of_schedule != "direct":
        problems.append(f"pipeline.mode: {pipeline.mode}")
    if problems:
        fix = (
            f"Take {' or '.join(RUNNABLE_SCHEDULES)}; "
            "`headway schedule compare` has the others' bubbles."
        )
        if plan.split.tables:
            fix = "`headway simulate` prices its step, and `headway plan` places tables."
        raise PlanError("the search has no price for this plan", problems=problems, fix=fix)
    parts = plan.batch.microbatches(max(_shares(plan), key=len))
    scheme = (
        schedule_option(pipeline.schedule, pipeline.virtual, pipeline.pipes) if several else PLAIN
    )
    names = [name for name in plan.mesh.names if name != TENSOR]
    inside = several and plan.data_degree > 1 and names[-1] == plan.exchange.axis
    return Degrees(
        tensor=plan.mesh.degree(TENSOR),
        data=plan.data_degree,
        pipeline=plan.pipe_degree,
        microbatch=len(parts[0]),
        microbatches=len(parts),
        schedule=scheme.name,
        virtual=scheme.virtual,
        pipes=scheme.pipes,
        zero=plan.memory.zero if plan.data_degree > 1 else 0,
        order="tdp" if inside else "tpd",
    )


def point_of(plan: Plan, search: PlanSearch, kinds: Sequence[str] = ()) -> Point:
    """The plan's price. A plan that names no cut gets the fastest that needs the least memory; how
    a tensor axis splits layers, and what crosses its stages, is what is fastest within the memory.

    Args:
        kinds: The type of each rank's device, where the search has groups of devices.

    Raises:
        PlanError: The search has no price for it, or the model has no such borders.
    """
    if len({*kinds}) > 1:
        return _layout_point(plan, search, kinds)
    degrees = degrees_of(plan)
    kind = kinds[0] if kinds else ""
    candidate = search.candidate(degrees, kind)
    borders = borders_of(plan, search.row, candidate)
    recompute = recomputed_of(plan, len(borders) - 1)
    bucket = plan.exchange.bucket_bytes
    buckets = BUCKETS if bucket is None else (float(bucket),)
    overlap = plan.exchange.overlap
    point = candidate.planned(borders, recompute, buckets=buckets, overlap=overlap)
    fits = point.bytes <= min(search.question.cap, candidate.limit)
    # `planned` takes the fastest strategies with whole tensors at the borders: without borders, and
    # within the memory, none is faster.
    if degrees.tensor == 1 or (degrees.pipeline == 1 and fits):
        return point
    found = _fastest_split(plan, search, degrees, kind)
    # The search may find another cut, which would not be the price of this plan.
    return found if found is not None and _same_stages(found, point) else point


def _fastest_split(plan: Plan, search: PlanSearch, degrees: Degrees, kind: str) -> Point | None:
    """What the search takes where stages must begin as the plan says; None: nothing fits."""
    cut = tuple((name, "stage") for name in plan.pipeline.cut if plan.pipe_degree > 1)
    question = search.question
    engine = PlanSearch(replace(question, force=(*question.force, *cut))) if cut else search
    return engine.candidate(degrees, kind).fastest(question.cap)


def fastest_alike(point: Point, search: PlanSearch) -> Point | None:
    """The fastest plan with the degrees, devices and sizes of micro-batches of another one, without
    a memory limit.

    Args:
        search: Of the same groups of devices, on other machines.
    """
    if len(point.amounts) < 2:
        return search.candidate(point.degrees, point.kind).fastest(float("inf"))
    kinds = {copy: one.kinds for one in point.classes for copy in one.copies}
    copies = tuple(kinds[copy] for copy in range(len(kinds)))
    layout = DeviceLayout(copies=copies, order=point.degrees.order)
    combination = Combination(degrees=point.degrees, amounts=point.amounts, layout=layout)
    sizes = {one.kinds: one.microbatch for one in point.classes}
    sharing = search.sharing(combination, tuple(sizes[own] for own, _ in layout.classes))
    return sharing.fastest(dict.fromkeys(search.types, float("inf")))


def _layout_point(plan: Plan, search: PlanSearch, kinds: Sequence[str]) -> Point:
    degrees = degrees_of(plan)
    several = degrees.pipeline > 1 and degrees.schedule != PLAIN.name
    problems = [f"pipeline.schedule: {degrees.schedule}, and only 1f1b has a price"] * several
    if degrees.tensor > 1:
        problems.append("split.tensor: which devices form a group is not known")
    if problems:
        raise PlanError("there is no price on devices of several types", problems=problems)
    copies = _copies(plan, kinds)
    used = Counter(kinds)
    largest: dict[tuple[str, ...], int] = {}
    for copy, own in enumerate(copies):
        share = plan.batch.share(copy, plan.data_degree)
        size = max(len(part) for part in plan.batch.microbatches(share))
        # Shares of a class's copies may differ by a sample: all count as the largest.
        largest[own] = max(size, largest.get(own, 0))
    layout = DeviceLayout(copies=copies, order=degrees.order)
    amounts = tuple((kind, used[kind]) for kind in search.types if used[kind])
    combination = Combination(degrees=degrees, amounts=amounts, layout=layout)
    sharing = search.sharing(combination, tuple(largest[own] for own, _ in layout.classes))
    some = sharing.of(next(iter(combination.types_of(0))))
    borders = borders_of(plan, search.row, some)
    return sharing.planned(borders, recomputed_of(plan, len(borders) - 1))


def _copies(plan: Plan, kinds: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    found = {}
    for rank, kind in enumerate(kinds):
        place = plan.mesh.coordinate(rank)
        found[place.get(plan.exchange.axis, 0), place.get("pipe", 0)] = kind
    return tuple(
        tuple(found[copy, stage] for stage in range(plan.pipe_degree))
        for copy in range(plan.data_degree)
    )


def _same_stages(one: Point, other: Point) -> bool:
    first, second = (
        [(stage.start, stage.stop, stage.recompute) for stage in point.stages]
        for point in (one, other)
    )
    return first == second


def recomputed_of(plan: Plan, stages: int) -> tuple[int, ...]:
    """Numbers of the stages that compute again in backward."""
    again = plan.pipeline.recompute_stages or tuple(range(stages))
    return again if plan.pipe_degree > 1 and plan.pipeline.recompute else ()


def borders_of(plan: Plan, row: tuple[LayerUnit, ...], candidate: PlanCandidate) -> tuple[int, ...]:
    """The first unit of each stage, and the number of units.

    Raises:
        PlanError: The model has no such borders, or too few.
    """
    if plan.pipe_degree == 1:
        return 0, len(row)
    if not plan.pipeline.cut:
        free = candidate.fastest(float("inf"))
        if free is None:
            raise PlanError(
                "the model cannot be cut into so many stages",
                problems=[
                    f"{len(row)} units for {candidate.degrees.stages} stages of "
                    f"{plan.pipeline.schedule}"
                ],
                fix="Take fewer stages, or a number of micro-batches that the schedule can have.",
            )
        return 0, *(stage.stop for stage in free.stages)
    starts = [unit_of_module(name, row) for name in plan.pipeline.cut]
    problems = [
        f"pipeline.cut: no border in front of {name}"
        for name, start in zip(plan.pipeline.cut, starts, strict=True)
        if start is None
    ]
    found = (0, *(start for start in starts if start is not None), len(row))
    if not problems and list(found) != sorted(set(found)):
        problems.append(f"pipeline.cut: {', '.join(plan.pipeline.cut)} are not in order")
    if problems:
        names = ", ".join(dict.fromkeys(unit.module for unit in row[1:] if unit.module))
        raise PlanError(
            "this model cannot be cut there",
            problems=problems,
            fix=f"The recipe may be another one. Its borders: {names}.",
        )
    return found


def unpriced_parts(plan: Plan, *, unlike: bool = False) -> Iterator[str]:
    """What of a plan the price does not count, one sentence each.

    Args:
        unlike: Devices are of several types: every share has a price of its own.
    """
    exchange = plan.exchange
    sizes = [[len(part) for part in plan.batch.microbatches(own)] for own in _shares(plan)]
    if unlike:
        if any(len({*own}) > 1 for own in sizes):
            yield "micro-batches of a share are not all alike: all count as its largest"
    elif len({tuple(own) for own in sizes}) > 1 or len({*sizes[0]}) > 1:
        yield "shares or micro-batches are not all alike: all count as the largest"
    special = exchange.compress != "none" or exchange.parts or exchange.priority or exchange.carried
    if special and plan.exchange_degree > 1:
        yield "the exchange counts as a plain sum: no compression, no priority, no program"
    if plan.split.tensor:
        between = "; so are tensors between stages, which are sent whole" * (plan.pipe_degree > 1)
        yield f"which layers the tensor axis splits, and how, is taken as what is fastest{between}"
    if plan.memory.zero and plan.mesh.degree(SHARD_AXIS) > 1:
        yield "hybrid sharding counts as sharding over all ranks that share the batch"
    if plan.pipe_degree > 1:
        if not plan.pipeline.cut:
            yield "the plan names no cut: the fastest one counts"
        if plan.pipeline.recompute in (True, "stages"):
            yield "recomputation of whole stages counts as that of blocks, which holds less"
    if plan.memory.precision == "bfloat16":
        yield "autocast to bfloat16 counts for products; activations count in 32 bits"


def _shares(plan: Plan) -> tuple[range, ...]:
    ranks = plan.data_degree
    return tuple(plan.batch.share(rank, ranks) for rank in range(ranks))
