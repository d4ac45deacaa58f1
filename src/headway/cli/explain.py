"""`headway explain PLAN`: what binds a plan, its neighbours, other hardware; guidelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.asked import subject_of, without_subject
from headway.cli.borders import in_lines as border_lines
from headway.cli.borders import placement_of
from headway.cli.console import note, say, say_json
from headway.cli.explain_calls import collectives, split_collectives
from headway.cli.explain_mixed import (
    explain_mixed,
    guidelines_mixed,
    in_answers,
    of_choice,
    of_part,
    than,
)
from headway.cli.plan_mixed import kinds_of
from headway.cli.plan_question import memory_of, work_of
from headway.cluster import Cluster
from headway.collective.calls import Calls, in_rows
from headway.cost.presets import machine_of
from headway.errors import PlanError, UsageError
from headway.graph.placement import Placement
from headway.plan import Plan
from headway.plan import explain as in_words
from headway.planner.apart import points_apart
from headway.planner.binding import (
    TWICE,
    Change,
    Holding,
    Neighbour,
    Part,
    changes,
    fastest_of_today,
    holding,
    issuing,
    neighbours,
    parts,
    reached,
)
from headway.planner.candidate import Point
from headway.planner.facts import Job, advice_of
from headway.planner.knapsack import Minibatch
from headway.planner.mended import Mend, mends, too_much
from headway.planner.planned import degrees_of, point_of, simplified
from headway.planner.refusal import recomputed
from headway.planner.runnable import missing
from headway.planner.search import Question, Search, describe, search
from headway.planner.sources import in_data, in_lines
from headway.planner.splits import advice_of_splits
from headway.units import format_bytes, format_seconds

NEAREST = 4
"""Alternatives that are shown beside the fastest one."""
LAUNCHES = 0.9
"""Where the host issues kernels for this share of the compute, it is what the step waits for."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that was found out about a plan.

    Attributes:
        point: The plan, priced.
        parts: Of a step.
        holding: Of the fullest stage.
        reached: Share of the devices' peak.
        issuing: Seconds of a step in which the host issues the kernels of the slowest stage.
        over: Bytes by which the fullest device is over what is allowed.
        mends: Changes with which it would fit.
        neighbours: One step away in each degree.
        alternatives: Of the frontier of as many devices.
        apart: What tells the plan, and each of these, from those of them that read alike.
        today: The fastest that today's executor can run; None: nothing fits.
        changes: Of hardware.
        collectives: Of a step, of the ranks that share the first samples, as the executor carries
            them out; empty where they are not known.
        borders: Tensors that go from stage to stage.
    """

    point: Point
    parts: tuple[Part, ...]
    holding: Holding
    reached: float
    issuing: float
    over: int
    mends: tuple[Mend, ...]
    neighbours: tuple[Neighbour, ...]
    alternatives: tuple[Point, ...]
    apart: tuple[str, ...]
    today: Point | None
    changes: tuple[Change[Point], ...]
    collectives: tuple[Calls, ...]
    borders: Placement


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
        plan: A plan.json.
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
        json: Print the same as JSON.
    """
    loaded = Plan.load(plan)
    subject = subject_of(plan, loaded, recipe, cluster, nodes)
    if subject is None:
        if guidelines:
            raise without_subject("--recipe and --cluster")
        note("note: what binds it is known with --recipe and --cluster")
        _write(json, {"plan": loaded.hash, "words": in_words(loaded)}, [in_words(loaded)])
        return
    recipe, found = subject.recipe, subject.cluster
    if loaded.ranks > found.ranks:
        raise PlanError(
            f"the plan has {loaded.ranks} ranks, the cluster {found.ranks}",
            problems=[f"{loaded.ranks - found.ranks} ranks have no device"],
            fix="Take a larger cluster (--nodes with a preset), or another plan.",
        )
    if len(kinds_of(found)) > 1:
        if measure:
            raise UsageError(
                "--measure times this machine, the cluster has devices of several types",
                fix="Leave it out: the guidelines then choose what is computed again.",
            )
        asked = guidelines_mixed if guidelines else partial(explain_mixed, sources=sources)
        _write(json, *asked(loaded, recipe, found, memory))
        return
    engine = Search(_question(loaded, recipe, found, memory))
    for sentence in simplified(loaded):
        note(f"note: {sentence}")
    if guidelines:
        share = max(1, loaded.batch.samples // loaded.ranks)
        job = Job(engine, loaded.ranks, min(share, degrees_of(loaded).microbatch))
        measured = _measured(recipe, engine.question.cap, share) if measure else None
        answers, unknown = advice_of(job, measured=measured)
        answers += advice_of_splits(job)
        _write(json, *in_answers(loaded, answers, unknown))
        return
    from headway.run.recipe_file import load_recipe  # imports torch

    clip = load_recipe(recipe).clip is not None
    try:
        explanation = look(loaded, engine, most=found.ranks, recipe=recipe, clip=clip)
    except PlanError as error:
        calls = split_collectives(loaded, recipe, clip=clip)
        if not calls:
            raise
        note(f"note: {str(error).splitlines()[0]}: {'; '.join(error.problems)}")
        lines = [in_words(loaded), "", *_of_collectives(calls)]
        facts = {"plan": loaded.hash, "words": in_words(loaded)}
        _write(json, facts | {"collectives": [[asdict(c) for c in one] for one in calls]}, lines)
        return
    facts = {"plan": loaded.hash, "words": in_words(loaded)} | asdict(explanation)
    origins = ["", "where the numbers come from:", *in_lines(engine.question)] if sources else []
    lines = [in_words(loaded), "", *sentences(engine.question, explanation), *origins]
    _write(json, facts | {"sources": in_data(engine.question)}, lines)


def _measured(recipe: str, memory: float, most: int) -> Minibatch:
    from headway.cli.layer_algorithms import choose_algorithms  # imports torch

    return choose_algorithms(recipe, memory=memory, most=most).minibatch


def _question(plan: Plan, recipe: str, cluster: Cluster, memory: str | None) -> Question:
    from headway.cli.optimizer_cost import with_optimizer  # imports torch

    work, batch, found = work_of(recipe, plan)
    if work.graph.unknown:
        note(f"only replicated, as no rule is known: {', '.join(work.graph.unknown)}")
    return Question(
        work=work,
        machine=with_optimizer(machine_of(cluster), cluster, found),
        devices=(plan.ranks,),
        batch=batch,
        memory=memory_of(memory),
        precision=plan.memory.precision,
    )


def look(
    plan: Plan, engine: Search, *, most: int, recipe: str | None = None, clip: bool = False
) -> Explanation:
    """Price a plan, its surroundings, and both on other hardware.

    Args:
        plan: Of the model and cluster of `engine`.
        engine: With the plan's number of devices.
        most: Devices that the cluster has.
        recipe: Of the model, without which the collectives of some plans are not known.
        clip: Whether it limits the norm of the gradients.

    Raises:
        PlanError: The search has no price for the plan.
    """
    question, point = engine.question, point_of(plan, engine)
    today = fastest_of_today(question, plan.ranks)
    try:
        best = search(today).best
    except PlanError:
        best = None
    alternatives = _nearest(question, point)
    return Explanation(
        point=point,
        parts=parts(question, point),
        holding=holding(question, point),
        reached=reached(engine, point),
        issuing=issuing(engine, point),
        over=too_much(engine, point),
        mends=mends(engine, point) if too_much(engine, point) else (),
        neighbours=neighbours(engine, point, most=most),
        alternatives=alternatives,
        apart=tuple(points_apart(engine, [point, *alternatives])),
        today=best,
        changes=tuple(changes(today, lambda other: point_of(plan, other))),
        collectives=collectives(plan, engine, point, recipe, clip=clip),
        borders=placement_of(plan, engine, point),
    )


def _nearest(question: Question, point: Point) -> tuple[Point, ...]:
    """Of the frontier the fastest and those that are nearest in time, fastest first."""
    try:
        points = search(replace(question, objective="frontier")).points
    except PlanError:
        return ()
    others = [p for p in points if (p.degrees, p.stages) != (point.degrees, point.stages)]
    near = sorted(others, key=lambda p: abs(p.seconds - point.seconds))[:NEAREST]
    return tuple(p for p in others if p in near or p is others[0])


def sentences(question: Question, found: Explanation) -> Iterator[str]:
    """The explanation for people."""
    point = found.point
    yield f"a step takes {format_seconds(point.seconds)} (predicted)"
    yield from map(of_part, found.parts)
    yield _of_binding(found)
    yield (
        f"the products reach {found.reached:.1%} of the devices' peak; issuing the kernels alone "
        f"takes the host {format_seconds(found.issuing)}"
    )
    yield from _of_memory(question, found.holding)
    yield from _of_mends(question, found)
    if any(found.collectives):
        yield ""
        yield from _of_collectives(found.collectives)
    yield from border_lines(found.borders)
    yield ""
    yield "one step away:"
    yield from (f"  {_of_neighbour(one, point)}" for one in found.neighbours)
    yield ""
    yield "on the frontier of these devices:"
    for one, said in zip(found.alternatives, found.apart[1:], strict=True):
        yield f"  {_of_point(one, point, said)}"
    if found.apart[0]:
        yield f"  (this plan: {found.apart[0]})"
    if not found.alternatives:
        yield "  nothing else"
    yield ""
    taken = partial(_of_point, point=found.point)
    yield from of_choice(found.point, found.today, found.changes, taken, _changed)


def _of_collectives(found: Sequence[Calls]) -> Iterator[str]:
    yield "collectives of a step as the executor carries them out, of one rank:"
    yield from in_rows(found, "rank of the first copy")


def _of_binding(found: Explanation) -> str:
    """What a step waits for most, and whether more memory would change the choice."""
    largest = found.parts[0]
    what = f"the {largest.level} links ({largest.name}, " if largest.level else f"{largest.name} ("
    if largest.name == "compute" and found.issuing > LAUNCHES * largest.seconds:
        what = "the launches of kernels, not the products (compute, "
    text = f"what binds: {what}{largest.share:.1%} of the step); memory "
    more = any(change.better for change in found.changes if change.name == TWICE)
    if found.holding.share > 1:
        return text + "is exceeded"
    return text + ("binds, too: twice as much changes the choice" if more else "does not")


def _of_memory(question: Question, held: Holding) -> Iterator[str]:
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


def _of_mends(question: Question, found: Explanation) -> Iterator[str]:
    """How much is missing, and what would do instead."""
    if not found.over:
        return
    yield f"it needs {format_bytes(found.over)} more per device; or, the fastest first:"
    for mend in found.mends:
        yield f"  {mend.change}: {mend.slower:+.1%} time, {format_bytes(mend.point.bytes)}"
    if not found.mends:
        yield "  no single change of it would do; `headway plan` looks for other plans"


def _of_neighbour(one: Neighbour, point: Point) -> str:
    if one.point is None:
        return f"{one.step}: no; {one.why}"
    return f"{one.step}: {_of_point(one.point, point)}"


def _of_point(one: Point, point: Point, said: str = "") -> str:
    lacks = f"; to run it lacks {missing(one)}" if missing(one) else ""
    return (
        f"{format_seconds(one.seconds)} ({than(one.seconds, point.seconds)}), "
        f"{format_bytes(one.bytes)} ({one.bytes / point.bytes - 1:+.1%}): {_name(one)}"
        f"{said and f' ({said})'}{lacks}"
    )


def _name(point: Point) -> str:
    return describe(point.degrees) + recomputed(point)


def _changed(one: Point) -> str:
    return f"{_name(one)}, {format_seconds(one.seconds)}"


def _write(json: bool, facts: dict[str, object], lines: list[str]) -> None:
    if json:
        say_json(facts)
    else:
        say("\n".join(lines))
