"""`headway explain PLAN`: the bottleneck of a plan, its neighbours and alternatives, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.explanation import (
    PlanExplanation,
    TablesExplanation,
    collectives_of_split_plan,
    explain_plan,
    explain_tables,
    plan_guidelines,
    plan_tables_of,
    pricing_search,
)
from headway.api.inputs import missing_option_error, pricing_target
from headway.api.plan_request import device_types_of_ranks
from headway.cli.plan.output import collective_lines, sources_data, stage_lines
from headway.cli.terminal.console import note, say, say_json, table_lines
from headway.collective.collective_calls import call_table_lines
from headway.errors import PlanError, UsageError
from headway.graph.stage_boundaries import BoundaryTensor, BoundaryTensors
from headway.planner.explain.alternatives import NeighbourPlan
from headway.planner.explain.hardware_changes import SAME, TWICE
from headway.planner.explain.sources import in_lines
from headway.planner.explain.step_parts import StepPart
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_conversion import missing_in_executor, unpriced_parts
from headway.planner.search.plan_point import (
    Point,
    describe_devices,
    describe_point,
    format_device_runs,
)
from headway.plans import Plan
from headway.plans import explain as in_words
from headway.units import format_bytes, format_seconds

LAUNCH_BOUND_SHARE = 0.9
"""Where the host issues kernels for this share of the compute, it is what the step waits for."""
EXECUTOR_COLLECTIVES = "collectives of a step as the executor carries them out, of one rank:"
PART_WORDS = {
    "compute": "compute of the slowest stage, launches included",
    "bubble": "bubble: ranks wait while the pipeline fills and drains",
    "messages": "messages between stages",
    "exchange": "exchange of gradients that computation waits for",
    "update": "optimiser step and accumulation of gradients",
    "data": "data: collating samples into batches",
    "host": "host: per-step overhead beside kernels",
}


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
    """Describe a plan; with a recipe and a cluster also its bottleneck, and what would change it.

    Args:
        recipe: As for `headway train`; its model is captured, not allocated. By default the recipe
            and the cluster that `headway plan --out` recorded in the plan.
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Number of nodes of a preset; by default 1.
        memory: Memory of a device that may be used, as in "80 GiB"; by default all of it.
        guidelines: Answer a practitioner's questions instead: minibatch, number of devices and
            parameter servers, samples per node, groups; each with its lemma.
        measure: With --guidelines: time the ways to compute each convolution and attention on this
            machine, at minibatches up to a device's share, and choose among them.
        sources: Also list each figure's formula, and the datasheet or measurement behind each
            number of the machine.
    """
    loaded = Plan.load(plan)
    subject = pricing_target(plan, loaded, recipe, cluster, nodes)
    facts: dict[str, object] = {"plan": loaded.hash, "words": in_words(loaded)}
    if subject is None:
        if guidelines:
            raise missing_option_error("--recipe and --cluster")
        note("note: give --recipe and --cluster to see what binds this plan")
        _write(json, facts, [in_words(loaded)])
        return
    recipe = str(subject.recipe)
    tables = plan_tables_of(loaded, subject)
    engine = pricing_search(loaded, subject, memory, tables)
    kinds = device_types_of_ranks(loaded, subject.cluster)
    for sentence in unpriced_parts(loaded, unlike=bool(kinds)):
        note(f"note: {sentence}")
    if guidelines or measure:
        if tables is not None:
            raise UsageError(
                "--guidelines know no split tables", fix="Explain the plan without --guidelines."
            )
        if not guidelines:
            raise UsageError("--measure needs --guidelines", fix="Add it, or leave --measure out.")
        answers, unknown = plan_guidelines(
            loaded, engine, kinds=kinds, measured_recipe=recipe if measure else None
        )
        advice = [asdict(answer) for answer in answers]
        lines = [in_words(loaded), "", *map(str, answers), *(f"not known: {u}" for u in unknown)]
        _write(json, {"plan": loaded.hash, "advice": advice, "unknown": list(unknown)}, lines)
        return
    try:
        explanation = explain_plan(
            loaded if tables is None else tables.rest,
            engine,
            most=subject.cluster.ranks,
            kinds=kinds,
            recipe=recipe,
        )
    except PlanError as error:
        # Plans that split layers may have no price; their collectives are known all the same.
        calls = collectives_of_split_plan(loaded, recipe)
        if not calls:
            raise
        note(f"note: {str(error).splitlines()[0]}: {'; '.join(error.problems)}")
        lines = [in_words(loaded), "", EXECUTOR_COLLECTIVES]
        lines += call_table_lines(calls, "rank of the first copy")
        _write(json, facts | {"collectives": [[asdict(c) for c in one] for one in calls]}, lines)
        return
    lines = [in_words(loaded), ""]
    if tables is not None:
        told = explain_tables(tables, engine, kinds)
        facts |= {"tables": asdict(told)}
        lines += [*tables_lines(told), "", "the other layers, by themselves:"]
    lines += explanation_lines(engine, explanation)
    for kind in engine.types if sources else ():
        of_kind = f" of {kind}" if kind else ""
        lines += ["", f"where the numbers{of_kind} come from:"]
        lines += in_lines(engine.question.of(kind))
    _write(json, facts | asdict(explanation) | {"sources": sources_data(engine.question)}, lines)


def explanation_lines(engine: PlanSearch, found: PlanExplanation) -> Iterator[str]:
    """The explanation for people."""
    point = found.point
    if found.ranks:
        yield f"ranks in the order of the mesh: {format_device_runs(found.ranks)}"
    yield f"a step takes {format_seconds(point.seconds)} (predicted)"
    yield from map(part_line, found.parts)
    yield _bottleneck_line(found)
    yield (
        f"the products reach {found.reached:.1%} of the devices' peak; issuing the kernels alone "
        f"takes the host {format_seconds(found.issuing)}"
    )
    yield from _memory_lines(engine, found)
    yield from _memory_fix_lines(found)
    if found.ranks:
        yield from stage_lines(engine, point)
        yield ""
        yield from collective_lines(engine, point)
    if any(found.collectives):
        yield ""
        yield EXECUTOR_COLLECTIVES
        yield from call_table_lines(found.collectives, "rank of the first copy")
    yield from border_lines(found.borders)
    if found.neighbours:
        yield ""
        yield "one step away:"
        yield from (f"  {_neighbour_line(engine, one, point)}" for one in found.neighbours)
    yield ""
    yield "on the frontier of these devices:"
    for one, said in zip(found.alternatives, found.apart[1:], strict=True):
        yield f"  {_point_line(engine, one, point, said)}"
    if found.apart[0]:
        yield f"  (this plan: {found.apart[0]})"
    if not found.alternatives:
        yield "  nothing else"
    yield ""
    yield from _choice_lines(engine, found)


def tables_lines(found: TablesExplanation) -> Iterator[str]:
    """What split tables add to a step."""
    yield (
        f"a step takes {format_seconds(found.seconds)} with its split tables (simulated): lookups "
        f"and updates of rows {format_seconds(found.lookups)}, exchanges that ranks wait for "
        f"{format_seconds(found.exposed)}"
    )
    kinds = list(dict.fromkeys(kind for row in found.sent.values() for kind in row))
    yield "bytes to other ranks in a step, of all ranks:"
    rows = [("  table", *kinds)]
    rows += [
        (f"  {name or 'samples'}", *(format_bytes(row[k]) if k in row else "" for k in kinds))
        for name, row in found.sent.items()
    ]
    yield from table_lines(rows, align=">")
    said = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in found.exchanges)
    yield f"exchanges in order, bytes of the busiest rank: {said}"


def part_line(part: StepPart) -> str:
    """A line of the parts of a step."""
    level = f" over the {part.level} links" if part.level else ""
    hidden = f"; {format_seconds(part.hidden)} more overlaps compute" if part.hidden else ""
    words = f"{PART_WORDS[part.name]}{level}{hidden}"
    return f"  {part.share:6.1%}  {format_seconds(part.seconds):>8}  {words}"


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


def _bottleneck_line(found: PlanExplanation) -> str:
    """What a step waits for most, and whether more memory would change the choice."""
    largest = found.parts[0]
    what = f"the {largest.level} links ({largest.name}, " if largest.level else f"{largest.name} ("
    if largest.name == "compute" and found.issuing > LAUNCH_BOUND_SHARE * largest.seconds:
        what = "the launches of kernels, not the products (compute, "
    text = f"what binds: {what}{largest.share:.1%} of the step); memory "
    more = any(change.better for change in found.changes if change.name.endswith(TWICE))
    if found.holding.share > 1:
        return text + "is exceeded"
    return text + ("binds, too: twice as much changes the choice" if more else "does not")


def _memory_lines(engine: PlanSearch, found: PlanExplanation) -> Iterator[str]:
    question, point, held = engine.question, found.point, found.holding
    size = format_bytes(held.bytes)
    for kind, _ in point.amounts:
        own, cap = point.bytes_on(kind), question.caps[kind]
        yield (
            f"{kind}: {format_bytes(own)} of {format_bytes(cap)} ({own / cap:.1%})"
            f"{'' if own <= cap else '; this does not fit'}; idle for {point.idle(kind):.1%} of "
            "the step, communication included"
        )
    if not point.amounts:
        fits = "" if held.share <= 1 else "; this does not fit"
        size += f" of {format_bytes(question.cap)} ({held.share:.1%}){fits}"
    yield f"memory: stage {held.stage} is the fullest, {size}"
    categories = {
        "weights": held.weights,
        "gradients and optimiser": held.training,
        "activations": held.activations,
        "transient memory of a micro-batch": held.again,
        "temporaries of the update": held.update,
    }
    for name, share in categories.items():
        if share:
            yield f"  {share / held.bytes:6.1%}  {format_bytes(share):>8}  {name}"


def _memory_fix_lines(found: PlanExplanation) -> Iterator[str]:
    """How much is missing, and what would help instead."""
    if not found.over:
        return
    yield f"it needs {format_bytes(found.over)} more per device; or, the fastest first:"
    for mend in found.mends:
        yield f"  {mend.change}: {mend.slower:+.1%} time, {format_bytes(mend.point.bytes)}"
    if not found.mends:
        yield "  no single change of this plan is known to help; `headway plan` looks for others"


def _neighbour_line(engine: PlanSearch, one: NeighbourPlan, point: Point) -> str:
    if one.point is None:
        return f"{one.step}: no; {one.why}"
    return f"{one.step}: {_point_line(engine, one.point, point)}"


def _point_line(engine: PlanSearch, one: Point, point: Point, said: str = "") -> str:
    lacks = missing_in_executor(engine, one)
    return (
        f"{format_seconds(one.seconds)} ({relative_difference(one.seconds, point.seconds)}), "
        f"{format_bytes(one.bytes)} ({one.bytes / point.bytes - 1:+.1%}): {_point_name(one)}"
        f"{said and f' ({said})'}" + (f"; the executor lacks {lacks}" if lacks else "")
    )


def _point_name(point: Point) -> str:
    on = f" on {describe_devices(point)}" if point.amounts else ""
    return f"{describe_point(point)}{on}"


def _choice_lines(engine: PlanSearch, found: PlanExplanation) -> Iterator[str]:
    """What the search would take, on these devices and on others."""
    point, best = found.point, found.today
    if best is None:
        yield "the search finds no plan for these devices that the executor can run"
    elif best.seconds < point.seconds * (1 - SAME):
        yield f"among the executable plans the search would take {_point_line(engine, best, point)}"
    else:
        yield "no executable plan is faster"
    for change in found.changes:
        text = f"  with {change.name}: this plan {format_seconds(change.own)} "
        text += f"({relative_difference(change.own, point.seconds)}); "
        if change.best is None:
            text += "nothing fits"
        elif change.better:
            seconds = format_seconds(change.best.seconds)
            text += f"the choice changes to {_point_name(change.best)}, {seconds}"
        elif change.changed:
            text += "the search finds nothing faster"
        else:
            text += "the choice stays"
        yield text


def relative_difference(seconds: float, other: float) -> str:
    """By how much one time differs from another one."""
    return "equal" if abs(seconds / other - 1) < SAME else f"{seconds / other - 1:+.1%}"


def _write(json: bool, facts: dict[str, object], lines: list[str]) -> None:
    if json:
        say_json(facts)
    else:
        say("\n".join(lines))
