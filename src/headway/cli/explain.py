"""`headway explain PLAN`: the bottleneck of a plan, its neighbours and alternatives.

`explain_plan` prices a plan, the plans one step away, and both on other hardware; the collectives
of a step are those that the executor carries out, and the tensors between stages come from the
captured graph at the plan's micro-batch sizes. With `--guidelines` a practitioner's questions are
answered instead. Clusters with several types of devices are handled by
`headway.cli.plan.mixed_devices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.inputs import missing_option_error, pricing_target
from headway.api.plan_request import (
    check_ranks,
    note_unknown_operators,
    parse_memory_limit,
    pricing_request,
    recipe_workload,
)
from headway.cli.plan.mixed_devices import (
    choice_lines,
    device_type_counts,
    explain_mixed,
    guideline_output,
    guidelines_mixed,
    part_line,
    relative_difference,
)
from headway.cli.terminal.console import note, say, say_json
from headway.cluster import Cluster
from headway.collective.collective_calls import (
    CollectiveCalls,
    CommunicatingStage,
    call_table_lines,
)
from headway.errors import PlanError, UsageError
from headway.graph.model_graph import ModelGraph, TensorSpec
from headway.graph.stage_boundaries import BoundaryTensor, BoundaryTensors, boundary_tensors
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import (
    NeighbourPlan,
    label_points,
    launch_seconds,
    neighbour_plans,
    peak_utilisation,
)
from headway.planner.explain.hardware_changes import (
    TWICE,
    HardwareChange,
    fastest_runnable_request,
    hardware_changes,
)
from headway.planner.explain.infeasible import MemoryFix, excess_bytes, memory_fixes
from headway.planner.explain.sources import in_data, in_lines
from headway.planner.explain.step_parts import (
    StageMemory,
    StepPart,
    fullest_stage_memory,
    step_parts,
)
from headway.planner.guidelines.layer_algorithms import Minibatch
from headway.planner.guidelines.plan_advice import AdviceRequest, advice_of, advice_of_splits
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import (
    degrees_of,
    missing_in_executor,
    point_of,
    unpriced_parts,
)
from headway.planner.search.plan_point import Point, describe_recomputation
from headway.planner.search.request import PlanRequest
from headway.planner.traffic.executor import collectives_of_plan, parts_of
from headway.plans import Plan
from headway.plans import explain as in_words
from headway.plans.layer_split import SPACE
from headway.plans.pipeline import PIPE_AXIS
from headway.units import format_bytes, format_seconds


def collectives_of_step(
    plan: Plan, engine: PlanSearch, point: Point, recipe: str | None, *, clip: bool
) -> tuple[CollectiveCalls, ...]:
    """Of the ranks that share the first samples, in order; of ranks that split layers one.

    Args:
        point: The plan, priced.
        recipe: Of the model, as for `headway train`; None: it is not known.
        clip: Whether the norm of the gradients is limited.

    Returns:
        Empty where they are not known.
    """
    if plan.group_degree > 1:
        return collectives_of_split_plan(plan, recipe, clip=clip)
    gathered = _gathered_parameters(plan, recipe)
    sizes = dict.fromkeys(plan.micro_sizes(0))
    captured = {size: parts_of(engine, point, gathered, samples=size) for size in sizes}
    return _calls_by_rank(plan, dict.fromkeys(representative_ranks(plan), captured), clip=clip)


def collectives_of_split_plan(
    plan: Plan, recipe: str | None, *, clip: bool
) -> tuple[CollectiveCalls, ...]:
    """The same of a plan that splits layers or samples, which need not have a price; empty for
    others."""
    if plan.group_degree == 1 or recipe is None:
        return ()
    try:
        found = _dry_run(plan, recipe)
    except PlanError:
        return ()
    return _calls_by_rank(plan, found, clip=clip)


def _calls_by_rank(
    plan: Plan, found: Mapping[int, Mapping[int, Sequence[CommunicatingStage]]], *, clip: bool
) -> tuple[CollectiveCalls, ...]:
    try:
        return tuple(
            collectives_of_plan(plan, parts, rank=rank, clip=clip) for rank, parts in found.items()
        )
    except PlanError:
        return ()


def representative_ranks(plan: Plan) -> list[int]:
    """The ranks."""
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
    first = {place[rank]: rank for rank in reversed(ranks)}
    found = dict(zip(first, dry_run_recipe(plan, recipe, list(first.values())), strict=True))
    return {rank: found[place[rank]] for rank in ranks}


# What goes from stage to stage of a plan: its tensors, their sizes, their protocol in a
# channel.


def stage_boundaries(plan: Plan, engine: PlanSearch, point: Point) -> BoundaryTensors:
    """The tensors that cross the borders of a plan's stages, in one micro-batch.

    Args:
        point: The plan's price, with its stages.
    """
    ranks = range(plan.data_degree)
    shares = [plan.batch.share(rank, plan.data_degree) for rank in ranks]
    sizes = {len(part) for share in shares for part in plan.batch.microbatches(share)}
    work = engine.question.work
    largest, *others = (_scale_batch(work, size) for size in sorted(sizes, reverse=True))
    starts = [engine.row[stage.start].start for stage in point.stages[1:]]
    return boundary_tensors(largest, starts, *others)


def border_lines(placement: BoundaryTensors) -> Iterator[str]:
    """The same for people; nothing where nothing crosses."""
    if placement.tensors:
        yield ""
        yield "tensors from stage to stage, of a micro-batch:"
        yield from (f"  {_tensor_line(one)}" for one in placement.tensors)


def _tensor_line(one: BoundaryTensor) -> str:
    shape = ", ".join("varies" if size is None else str(size) for size in one.shape)
    made = f"made by {one.site}" if one.site else "copied: nothing makes it as a whole there"
    return (
        f"{one.source} to {one.target}: {one.tensor} [{shape}] {one.dtype}, "
        f"{format_bytes(one.bytes)}, {one.protocol}; {made}"
    )


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


# `headway explain PLAN`: what binds a plan, its neighbours, other hardware; guidelines.


MAX_ALTERNATIVES = 4
"""Alternatives that are shown beside the fastest one."""
LAUNCH_BOUND_SHARE = 0.9
"""Where the host issues kernels for this share of the compute, it is what the step waits for."""


@dataclass(frozen=True, kw_only=True)
class PlanExplanation:
    """All that was found out about a plan.

    Attributes:
        point: The plan, priced.
        reached: Share of the devices' peak.
        issuing: Seconds of a step in which the host issues the kernels of the slowest stage.
        over: Bytes by which the fullest device is over what is allowed.
        mends: Changes with which it would fit.
        neighbours: One step away in each degree.
        alternatives: Of the frontier of as many devices.
        apart: What tells the plan, and each of these, from those of them that read alike.
        today: The fastest that today's executor can run; None: nothing fits.
        collectives: Of a step, of the ranks that share the first samples, as the executor carries
            them out; empty where they are not known.
        borders: Tensors that go from stage to stage.
    """

    point: Point
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
    borders: BoundaryTensors


def explain(
    plan: Path,
    /,
    *,
    recipe: str | None = None,
    cluster: str | None = None,
    nodes: int | None = None,
    memory: str | None = None,
    guidelines: Annotated[bool, Parameter(negative="")] = False,
    measure: Annotated[bool, Parameter(negative="")] = False,
    sources: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """What a plan does; with a recipe and a cluster: what binds it, and what would change it.

    Args:
        recipe: As for `headway train`; its model is captured, not built in memory. By default that
            of `headway plan --out`, which the plan's file names; so is the cluster.
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Of a preset; by default 1.
        memory: Of a device that may be used, as in "80 GiB"; by default all of it.
        guidelines: Answer a practitioner's questions instead: minibatch, number of devices and
            parameter servers, samples per node, groups; each with its lemma.
        measure: With --guidelines: time the ways to compute each convolution and attention on this
            machine, at minibatches up to a device's share, and choose among them.
        sources: Say also where the numbers come from: each figure's formula, and each number of
            the machine with the datasheet or measurement that it is from.
    """
    loaded = Plan.load(plan)
    subject = pricing_target(plan, loaded, recipe, cluster, nodes)
    if subject is None:
        if guidelines:
            raise missing_option_error("--recipe and --cluster")
        note("note: what binds it is known with --recipe and --cluster")
        _write(json, {"plan": loaded.hash, "words": in_words(loaded)}, [in_words(loaded)])
        return
    recipe, found = str(subject.recipe), subject.cluster  # the command line names recipes
    check_ranks(loaded.ranks, found)
    if len(device_type_counts(found)) > 1:
        if measure:
            raise UsageError(
                "--measure times this machine, the cluster has devices of several types",
                fix="Leave it out: the guidelines then choose what is computed again.",
            )
        asked = guidelines_mixed if guidelines else partial(explain_mixed, sources=sources)
        _write(json, *asked(loaded, recipe, found, memory))
        return
    engine = PlanSearch(_question(loaded, recipe, found, memory))
    for sentence in unpriced_parts(loaded):
        note(f"note: {sentence}")
    if guidelines:
        share = max(1, loaded.batch.samples // loaded.ranks)
        job = AdviceRequest(engine, loaded.ranks, min(share, degrees_of(loaded).microbatch))
        measured = _measured_minibatch(recipe, engine.question.cap, share) if measure else None
        answers, unknown = advice_of(job, measured=measured)
        answers += advice_of_splits(job)
        _write(json, *guideline_output(loaded, answers, unknown))
        return
    from headway.run.recipe.factory import load_recipe  # imports torch

    clip = load_recipe(recipe).clip is not None
    try:
        explanation = explain_plan(loaded, engine, most=found.ranks, recipe=recipe, clip=clip)
    except PlanError as error:
        calls = collectives_of_split_plan(loaded, recipe, clip=clip)
        if not calls:
            raise
        note(f"note: {str(error).splitlines()[0]}: {'; '.join(error.problems)}")
        lines = [in_words(loaded), "", *_collective_lines(calls)]
        facts = {"plan": loaded.hash, "words": in_words(loaded)}
        _write(json, facts | {"collectives": [[asdict(c) for c in one] for one in calls]}, lines)
        return
    facts = {"plan": loaded.hash, "words": in_words(loaded)} | asdict(explanation)
    origins = ["", "where the numbers come from:", *in_lines(engine.question)] if sources else []
    lines = [in_words(loaded), "", *explanation_lines(engine.question, explanation), *origins]
    _write(json, facts | {"sources": in_data(engine.question)}, lines)


def _measured_minibatch(recipe: str, memory: float, most: int) -> Minibatch:
    from headway.api.minibatch import measure_minibatch  # imports torch

    return measure_minibatch(recipe, memory=memory, most=most)


def _question(plan: Plan, recipe: str, cluster: Cluster, memory: str | None) -> PlanRequest:
    captured = recipe_workload(recipe, plan)
    note_unknown_operators(captured.work)
    return pricing_request(
        captured,
        cluster,
        devices=(plan.ranks,),
        memory=parse_memory_limit(memory),
        precision=plan.memory.precision,
    )


def explain_plan(
    plan: Plan, engine: PlanSearch, *, most: int, recipe: str | None = None, clip: bool = False
) -> PlanExplanation:
    """Price a plan, its surroundings, and both on other hardware.

    Args:
        plan: Of the model and cluster of `engine`.
        engine: With the plan's number of devices.
        recipe: Of the model, without which the collectives of some plans are not known.
        clip: Whether it limits the norm of the gradients.

    Raises:
        PlanError: The search has no price for the plan.
    """
    question, point = engine.question, point_of(plan, engine)
    today = fastest_runnable_request(question, plan.ranks)
    try:
        best = find_plans(today).best
    except PlanError:
        best = None
    alternatives = _nearest_alternatives(question, point)
    return PlanExplanation(
        point=point,
        parts=step_parts(question, point),
        holding=fullest_stage_memory(question, point),
        reached=peak_utilisation(engine, point),
        issuing=launch_seconds(engine, point),
        over=excess_bytes(engine, point),
        mends=memory_fixes(engine, point) if excess_bytes(engine, point) else (),
        neighbours=neighbour_plans(engine, point, most=most),
        alternatives=alternatives,
        apart=tuple(label_points(engine, [point, *alternatives])),
        today=best,
        changes=tuple(hardware_changes(today, lambda other: point_of(plan, other))),
        collectives=collectives_of_step(plan, engine, point, recipe, clip=clip),
        borders=stage_boundaries(plan, engine, point),
    )


def _nearest_alternatives(question: PlanRequest, point: Point) -> tuple[Point, ...]:
    """Of the frontier the fastest and those that are nearest in time, fastest first."""
    try:
        points = find_plans(replace(question, objective="frontier")).points
    except PlanError:
        return ()
    others = [p for p in points if (p.degrees, p.stages) != (point.degrees, point.stages)]
    near = sorted(others, key=lambda p: abs(p.seconds - point.seconds))[:MAX_ALTERNATIVES]
    return tuple(p for p in others if p in near or p is others[0])


def explanation_lines(question: PlanRequest, found: PlanExplanation) -> Iterator[str]:
    """The explanation for people."""
    point = found.point
    yield f"a step takes {format_seconds(point.seconds)} (predicted)"
    yield from map(part_line, found.parts)
    yield _bottleneck_line(found)
    yield (
        f"the products reach {found.reached:.1%} of the devices' peak; issuing the kernels alone "
        f"takes the host {format_seconds(found.issuing)}"
    )
    yield from _memory_lines(question, found.holding)
    yield from _memory_fix_lines(question, found)
    if any(found.collectives):
        yield ""
        yield from _collective_lines(found.collectives)
    yield from border_lines(found.borders)
    yield ""
    yield "one step away:"
    yield from (f"  {_neighbour_line(one, point)}" for one in found.neighbours)
    yield ""
    yield "on the frontier of these devices:"
    for one, said in zip(found.alternatives, found.apart[1:], strict=True):
        yield f"  {_point_line(one, point, said)}"
    if found.apart[0]:
        yield f"  (this plan: {found.apart[0]})"
    if not found.alternatives:
        yield "  nothing else"
    yield ""
    taken = partial(_point_line, point=found.point)
    yield from choice_lines(found.point, found.today, found.changes, taken, _new_choice_line)


def _collective_lines(found: Sequence[CollectiveCalls]) -> Iterator[str]:
    yield "collectives of a step as the executor carries them out, of one rank:"
    yield from call_table_lines(found, "rank of the first copy")


def _bottleneck_line(found: PlanExplanation) -> str:
    """What a step waits for most, and whether more memory would change the choice."""
    largest = found.parts[0]
    what = f"the {largest.level} links ({largest.name}, " if largest.level else f"{largest.name} ("
    if largest.name == "compute" and found.issuing > LAUNCH_BOUND_SHARE * largest.seconds:
        what = "the launches of kernels, not the products (compute, "
    text = f"what binds: {what}{largest.share:.1%} of the step); memory "
    more = any(change.better for change in found.changes if change.name == TWICE)
    if found.holding.share > 1:
        return text + "is exceeded"
    return text + ("binds, too: twice as much changes the choice" if more else "does not")


def _memory_lines(question: PlanRequest, held: StageMemory) -> Iterator[str]:
    fits = "" if held.share <= 1 else "; this does not fit"
    yield (
        f"memory: stage {held.stage} is the fullest, {format_bytes(held.bytes)} of "
        f"{format_bytes(question.cap)} ({held.share:.1%}){fits}"
    )
    categories = (
        ("weights", held.weights),
        ("gradients and optimiser", held.training),
        ("activations", held.activations),
        ("what a micro-batch needs for a moment", held.again),
        ("temporaries of the update", held.update),
    )
    for name, size in categories:
        if size:
            yield f"  {size / held.bytes:6.1%}  {format_bytes(size):>8}  {name}"


def _memory_fix_lines(question: PlanRequest, found: PlanExplanation) -> Iterator[str]:
    """How much is missing, and what would do instead."""
    if not found.over:
        return
    yield f"it needs {format_bytes(found.over)} more per device; or, the fastest first:"
    for mend in found.mends:
        yield f"  {mend.change}: {mend.slower:+.1%} time, {format_bytes(mend.point.bytes)}"
    if not found.mends:
        yield "  no single change of it would do; `headway plan` looks for other plans"


def _neighbour_line(one: NeighbourPlan, point: Point) -> str:
    if one.point is None:
        return f"{one.step}: no; {one.why}"
    return f"{one.step}: {_point_line(one.point, point)}"


def _point_line(one: Point, point: Point, said: str = "") -> str:
    lacks = f"; to run it lacks {missing_in_executor(one)}" if missing_in_executor(one) else ""
    return (
        f"{format_seconds(one.seconds)} ({relative_difference(one.seconds, point.seconds)}), "
        f"{format_bytes(one.bytes)} ({one.bytes / point.bytes - 1:+.1%}): {_point_name(one)}"
        f"{said and f' ({said})'}{lacks}"
    )


def _point_name(point: Point) -> str:
    return describe_degrees(point.degrees) + describe_recomputation(point)


def _new_choice_line(one: Point) -> str:
    return f"{_point_name(one)}, {format_seconds(one.seconds)}"


def _write(json: bool, facts: dict[str, object], lines: list[str]) -> None:
    if json:
        say_json(facts)
    else:
        say("\n".join(lines))
