"""A plan's price, its bottleneck, its neighbours and alternatives, and both on other hardware.

The collectives of a step are those that the executor carries out; on devices of several types those
that the search prices. The tensors between stages come from the captured graph at the plan's
micro-batch sizes. `plan_guidelines` answers a practitioner's questions instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headway.api.inputs import PricingTarget
from headway.api.plan_request import (
    check_ranks,
    note_unknown_operators,
    parse_memory_limit,
    pricing_request,
    recipe_workload,
)
from headway.api.table_pricing import SplitTablesOfPlan, split_tables_of
from headway.collective.collective_calls import CollectiveCalls, CommunicatingStage
from headway.errors import PlanError, UsageError
from headway.graph.model_graph import ModelGraph, TensorSpec
from headway.graph.stage_boundaries import BoundaryTensors, boundary_tensors
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import (
    NeighbourPlan,
    label_points,
    launch_seconds,
    neighbour_plans,
    peak_utilisation,
)
from headway.planner.explain.hardware_changes import (
    HardwareChange,
    fastest_plan,
    fastest_runnable_request,
    hardware_changes,
)
from headway.planner.explain.infeasible import MemoryFix, excess_bytes, memory_fixes
from headway.planner.explain.step_parts import (
    StageMemory,
    StepPart,
    fullest_stage_memory,
    step_parts,
)
from headway.planner.export.to_simulation import step_of_plan
from headway.planner.guidelines.advice import Advice
from headway.planner.guidelines.plan_advice import (
    AdviceRequest,
    advice_of,
    advice_of_mixed,
    advice_of_splits,
)
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import degrees_of, point_of
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.planner.traffic.estimate import EqualRanks, collectives_of_ranks
from headway.planner.traffic.executor import collectives_of_plan, parts_of
from headway.plans import Plan
from headway.plans.layer_split import SPACE
from headway.plans.pipeline import PIPE_AXIS
from headway.simulator.simulation import simulate_training_step
from headway.simulator.task_graph import TABLES

MAX_ALTERNATIVES = 4
"""Alternatives beside the fastest one."""


@dataclass(frozen=True, kw_only=True)
class PlanExplanation:
    """All that was found out about a plan.

    Attributes:
        point: The plan, priced.
        ranks: The type of each rank's device; empty where all are of one type.
        reached: Share of the devices' peak.
        issuing: Seconds of a step in which the host issues the kernels of the slowest stage.
        over: Bytes by which the fullest device is over what is allowed.
        mends: Changes with which it would fit.
        neighbours: One step away in each degree; none on devices of several types.
        alternatives: Of the frontier of as many devices.
        apart: What tells the plan, and each of these, from those of them that read alike.
        today: The fastest that the executor can run; None: nothing fits.
        collectives: Of a step, of the ranks that share the first samples, as the executor carries
            them out; empty where they are not known, and on devices of several types.
        priced_collectives: On devices of several types those that the search prices.
        borders: Tensors that go from stage to stage.
    """

    point: Point
    ranks: tuple[str, ...]
    parts: tuple[StepPart, ...]
    holding: StageMemory
    reached: float
    issuing: float
    over: int
    mends: tuple[MemoryFix, ...]
    neighbours: tuple[NeighbourPlan, ...]
    alternatives: tuple[Point, ...]
    apart: tuple[str, ...]
    today: Point | None
    changes: tuple[HardwareChange, ...]
    collectives: tuple[CollectiveCalls, ...]
    priced_collectives: tuple[EqualRanks, ...]
    borders: BoundaryTensors


@dataclass(frozen=True, kw_only=True)
class TablesExplanation:
    """The split tables of a plan in its simulated step.

    Attributes:
        seconds: Of the step.
        exposed: Seconds that a rank waits for exchanges of tables, in the mean.
        lookups: Seconds of the rank that looks up longest, updates of rows included.
        sent: Bytes of all ranks in a step, by table and kind.
        exchanges: Of all ranks, in order: kind, and bytes of the busiest rank.
    """

    seconds: float
    exposed: float
    lookups: float
    sent: dict[str, dict[str, float]]
    exchanges: tuple[tuple[str, float], ...]


def explain_tables(
    plan: SplitTablesOfPlan, engine: PlanSearch, kinds: Sequence[str] = ()
) -> TablesExplanation:
    """What split tables add to a step.

    Args:
        engine: Of the other layers.
        kinds: As for `explain_plan`.
    """
    work = plan.added(step_of_plan(plan.rest, engine, kinds)[0], engine, kinds)
    step = simulate_training_step(work)
    assert work.tables is not None
    sent: dict[str, dict[str, float]] = {}
    for (table, kind), size in plan.traffic.total.items():
        sent.setdefault(table, {})[kind] = size
    return TablesExplanation(
        seconds=step.seconds,
        exposed=step.exposed.get(TABLES, 0.0),
        lookups=max(work.tables.lookups),
        sent=sent,
        exchanges=tuple((one.kind, one.fullest) for one in work.tables.exchanges),
    )


def pricing_search(
    plan: Plan,
    target: PricingTarget,
    memory: str | int | None,
    tables: SplitTablesOfPlan | None = None,
) -> PlanSearch:
    """The search that prices a plan, with its number of devices.

    Args:
        tables: Of the plan, from `plan_tables_of`: the search is that of the other layers.

    Raises:
        PlanError: The plan is of another batch than the recipe, or has more ranks than the cluster.
    """
    check_ranks(plan.ranks, target.cluster)
    captured = recipe_workload(target.recipe, plan) if tables is None else tables.captured
    note_unknown_operators(captured.work)
    request = pricing_request(
        captured,
        target.cluster,
        devices=(plan.ranks,),
        memory=parse_memory_limit(memory),
        precision=plan.memory.precision,
    )
    return PlanSearch(request)


def plan_tables_of(plan: Plan, target: PricingTarget) -> SplitTablesOfPlan | None:
    """The split tables of a plan; None: it has none.

    Raises:
        PlanError: They have no price.
    """
    if not plan.split.tables:
        return None
    return split_tables_of(plan, recipe_workload(target.recipe, plan))


def explain_plan(
    plan: Plan,
    engine: PlanSearch,
    *,
    most: int,
    kinds: Sequence[str] = (),
    recipe: str | None = None,
) -> PlanExplanation:
    """Price a plan, its surroundings, and both on other hardware.

    Args:
        plan: Of the model and cluster of `engine`.
        engine: With the plan's number of devices.
        kinds: The type of each rank's device, where the cluster has several.
        recipe: Of the model, without which the collectives of some plans are not known.

    Raises:
        PlanError: The search has no price for the plan.
    """
    question, point = engine.question, point_of(plan, engine, kinds)
    today = fastest_runnable_request(question, plan.ranks)
    alternatives = _nearest_alternatives(question, point)
    over = excess_bytes(engine, point)
    return PlanExplanation(
        point=point,
        ranks=tuple(kinds),
        parts=step_parts(question, point),
        holding=fullest_stage_memory(question, point),
        reached=peak_utilisation(engine, point),
        issuing=launch_seconds(engine, point),
        over=over,
        mends=memory_fixes(engine, point) if over else (),
        neighbours=neighbour_plans(engine, point, most=most),
        alternatives=alternatives,
        apart=tuple(label_points(engine, [point, *alternatives])),
        today=fastest_plan(today),
        changes=tuple(hardware_changes(today, lambda other: point_of(plan, other, kinds))),
        collectives=() if kinds else collectives_of_step(plan, engine, point, recipe),
        priced_collectives=collectives_of_ranks(engine, point) if kinds else (),
        borders=stage_boundaries(plan, engine, point),
    )


def _nearest_alternatives(question: PlanRequest, point: Point) -> tuple[Point, ...]:
    """Of the frontier the fastest and those that are nearest in time, fastest first."""
    try:
        points = find_plans(replace(question, objective="frontier")).points
    except PlanError:
        return ()
    others = [
        p
        for p in points
        if (p.degrees, p.amounts, p.stages) != (point.degrees, point.amounts, point.stages)
    ]
    near = sorted(others, key=lambda p: abs(p.seconds - point.seconds))[:MAX_ALTERNATIVES]
    # In the order of the frontier; the fastest is told even where it is far away.
    return tuple(p for p in others if p in near or p is others[0])


def plan_guidelines(
    plan: Plan, engine: PlanSearch, *, kinds: Sequence[str] = (), measured_recipe: str | None = None
) -> tuple[list[Advice], list[str]]:
    """Answers to a practitioner's questions about a plan, and what is not known.

    Args:
        kinds: As for `explain_plan`.
        measured_recipe: Whose layers are to be timed on this machine; None: none.

    Raises:
        UsageError: Layers are to be timed, and the cluster has devices of several types.
    """
    if kinds:
        if measured_recipe is not None:
            raise UsageError(
                "--measure times this machine, the cluster has devices of several types",
                fix="Leave it out: the guidelines then choose what is computed again.",
            )
        return advice_of_mixed(engine, point_of(plan, engine, kinds))
    share = max(1, plan.batch.samples // plan.ranks)
    job = AdviceRequest(engine, plan.ranks, min(share, degrees_of(plan).microbatch))
    measured = None
    if measured_recipe is not None:
        from headway.api.recipe_workload import measure_minibatch  # imports torch

        measured = measure_minibatch(measured_recipe, memory=engine.question.cap, most=share)
    answers, unknown = advice_of(job, measured=measured)
    return [*answers, *advice_of_splits(job)], unknown


# The collectives of a step as the executor carries them out.


def collectives_of_step(
    plan: Plan, engine: PlanSearch, point: Point, recipe: str | None
) -> tuple[CollectiveCalls, ...]:
    """Of the ranks that share the first samples, in order; of ranks that split layers one.

    Args:
        recipe: Of the model, as for `headway train`; None: it is not known.
    """
    if plan.group_degree > 1:
        return collectives_of_split_plan(plan, recipe)
    gathered = _gathered_parameters(plan, recipe)
    # Micro-batches of one size have the same collectives.
    sizes = dict.fromkeys(plan.micro_sizes(0))
    captured = {size: parts_of(engine, point, gathered, samples=size) for size in sizes}
    return _calls_by_rank(plan, dict.fromkeys(representative_ranks(plan), captured), recipe)


def collectives_of_split_plan(plan: Plan, recipe: str | None) -> tuple[CollectiveCalls, ...]:
    """The same of a plan that splits layers or samples, which need not have a price; empty for
    others."""
    if plan.group_degree == 1 or recipe is None:
        return ()
    try:
        found = _dry_run(plan, recipe)
    except PlanError:
        return ()
    return _calls_by_rank(plan, found, recipe)


def _calls_by_rank(
    plan: Plan,
    found: Mapping[int, Mapping[int, Sequence[CommunicatingStage]]],
    recipe: str | None,
) -> tuple[CollectiveCalls, ...]:
    clip = False
    if recipe is not None:
        from headway.run.recipe.factory import load_recipe  # imports torch

        clip = load_recipe(recipe).clip is not None  # the norm takes an all-reduce of its own
    calls = partial(collectives_of_plan, plan, clip=clip)
    try:
        return tuple(calls(parts, rank=rank) for rank, parts in found.items())
    except PlanError:
        return ()


def representative_ranks(plan: Plan) -> list[int]:
    """Those at 0 of all axes but pipe and space: ranks along the others do the same."""
    known = {PIPE_AXIS, SPACE}
    places = (plan.mesh.coordinate(rank) for rank in range(plan.ranks))
    return [
        rank
        for rank, place in enumerate(places)
        if not any(number for axis, number in place.items() if axis not in known)
    ]


def _gathered_parameters(plan: Plan, recipe: str | None) -> list[list[str]] | None:
    if recipe is None or not plan.memory.zero or plan.pipe_degree > 1:
        return None
    from headway.run.measure.recipe_model import fsdp_parameter_groups  # imports torch

    return fsdp_parameter_groups(recipe)


def _dry_run(plan: Plan, recipe: str) -> Mapping[int, Mapping[int, Sequence[CommunicatingStage]]]:
    """By rank; those at one place of the split samples have the same."""
    from headway.run.measure.communication_dry_run import dry_run_recipe  # imports torch

    ranks = representative_ranks(plan)
    place = {rank: plan.mesh.coordinate(rank).get(SPACE, 0) for rank in ranks}
    # A dry run takes seconds: one rank of each place, the lowest.
    first = {place[rank]: rank for rank in reversed(ranks)}
    found = dict(zip(first, dry_run_recipe(plan, recipe, list(first.values())), strict=True))
    return {rank: found[place[rank]] for rank in ranks}


# What goes from stage to stage of a plan: its tensors, their sizes, their protocol in a channel.


def stage_boundaries(plan: Plan, engine: PlanSearch, point: Point) -> BoundaryTensors:
    """The tensors that cross the borders of a plan's stages, in one micro-batch."""
    ranks = range(plan.data_degree)
    shares = [plan.batch.share(rank, plan.data_degree) for rank in ranks]
    sizes = {len(part) for share in shares for part in plan.batch.microbatches(share)}
    work = engine.question.work
    largest, *others = (_scale_batch(work, size) for size in sorted(sizes, reverse=True))
    starts = [engine.row[stage.start].start for stage in point.stages[1:]]
    return boundary_tensors(largest, starts, *others)


def _scale_batch(work: PlanningWorkload, samples: int) -> ModelGraph:
    """The graph as a micro-batch of so many samples would be captured."""

    def scaled(tensor: str, spec: TensorSpec) -> TensorSpec:
        dim = work.batch_dims.get(tensor)
        if dim is None:
            return spec
        size = spec.shape[dim] * samples // work.samples
        return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))

    values = {tensor: scaled(tensor, spec) for tensor, spec in work.graph.values.items()}
    return replace(work.graph, values=values)
