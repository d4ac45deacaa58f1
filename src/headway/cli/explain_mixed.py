"""`headway explain PLAN` where the cluster has devices of several types; words that both share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from headway.cli.plan_mixed import (
    collectives_in_lines,
    describe,
    in_runs,
    mixed_question,
    stages_in_lines,
)
from headway.cli.plan_question import Wanted, memory_of, precision_in, work_of
from headway.cluster import Cluster
from headway.errors import PlanError
from headway.plan import Plan
from headway.plan import explain as in_words
from headway.planner.binding import SAME, Change, Part, parts
from headway.planner.candidate import Point
from headway.planner.guidelines import Advice
from headway.planner.mixed import MixedSearch
from headway.planner.mixed_advice import advice_of_mixed
from headway.planner.mixed_collectives import collectives_of_mixed
from headway.planner.mixed_planned import fastest_of, mixed_changes, mixed_point_of
from headway.planner.mixed_point import MixedPoint
from headway.planner.mixed_question import MixedQuestion
from headway.planner.sources import in_data, in_lines
from headway.units import format_bytes, format_seconds

Found = TypeVar("Found", Point, MixedPoint)
_PARTS = {
    "compute": "compute of the slowest stage, launches included",
    "bubble": "bubble: ranks wait while the pipeline fills and drains",
    "messages": "messages between stages",
    "exchange": "exchange of gradients that computation waits for",
    "update": "update of the parameters, and adding up of gradients",
    "data": "data: samples put together into batches",
    "host": "host: what any step takes beside its kernels",
}


def of_part(part: Part) -> str:
    """A line of the parts of a step."""
    level = f" over the {part.level} links" if part.level else ""
    beside = f"; {format_seconds(part.hidden)} more beside compute" if part.hidden else ""
    words = f"{_PARTS[part.name]}{level}{beside}"
    return f"  {part.share:6.1%}  {format_seconds(part.seconds):>8}  {words}"


def of_choice(
    point: Found,
    best: Found | None,
    changes: Sequence[Change[Found]],
    taken: Callable[[Found], str],
    changed: Callable[[Found], str],
) -> Iterator[str]:
    """What the search would take, on these devices and on others.

    Args:
        point: The plan.
        best: The search's choice; None: it finds none.
        changes: Of the hardware.
        taken: Words for the choice on these devices.
        changed: Words for another choice on other ones.
    """
    if best is None:
        yield "the search finds no plan for these devices that runs today"
    elif best.seconds < point.seconds * (1 - SAME):
        yield f"of the plans that run today the search would take {taken(best)}"
    else:
        yield "of the plans that run today none is faster"
    for change in changes:
        text = f"  with {change.name}: this plan {format_seconds(change.own)} "
        text += f"({than(change.own, point.seconds)}); "
        if change.best is None:
            text += "nothing fits"
        elif change.better:
            text += f"the choice changes to {changed(change.best)}"
        elif change.changed:
            text += "the search finds nothing faster"
        else:
            text += "the choice stays"
        yield text


def than(seconds: float, other: float) -> str:
    """By how much one time differs from another one."""
    return "equal" if abs(seconds / other - 1) < SAME else f"{seconds / other - 1:+.1%}"


def in_answers(
    plan: Plan, answers: Sequence[Advice], unknown: Sequence[str]
) -> tuple[dict[str, object], list[str]]:
    """A practitioner's questions as data, and in lines."""
    lines = [in_words(plan), "", *map(str, answers), *(f"not known: {u}" for u in unknown)]
    advice = [asdict(answer) for answer in answers]
    return {"plan": plan.hash, "advice": advice, "unknown": list(unknown)}, lines


def guidelines_mixed(
    plan: Plan, recipe: str, cluster: Cluster, memory: str | None
) -> tuple[dict[str, object], list[str]]:
    """A practitioner's questions, as `explain_mixed` is asked."""
    kinds = kinds_of_ranks(plan, cluster)
    search = MixedSearch(question_about(plan, recipe, cluster, memory))
    return in_answers(plan, *advice_of_mixed(search, mixed_point_of(plan, search, kinds)))


def explain_mixed(
    plan: Plan, recipe: str, cluster: Cluster, memory: str | None, *, sources: bool = False
) -> tuple[dict[str, object], list[str]]:
    """Price a plan, what the search would take, and both on other hardware: data, and lines.

    Args:
        plan: As many ranks as the cluster has, or fewer.
        recipe: As for `headway train`.
        cluster: With devices of several types.
        memory: Of a device that may be used.
        sources: Say in the lines, too, where the numbers of each type come from.

    Raises:
        PlanError: There is no price for the plan.
    """
    kinds = kinds_of_ranks(plan, cluster)
    question = question_about(plan, recipe, cluster, memory)
    search = MixedSearch(question)
    point, best = mixed_point_of(plan, search, kinds), fastest_of(question)
    changes = tuple(mixed_changes(plan, question, kinds, best))
    terms = parts(question.of(kinds[0]), point.slowest)
    facts: dict[str, object] = {
        "plan": plan.hash,
        "words": in_words(plan),
        "ranks": list(kinds),
        "point": asdict(point),
        "parts": [asdict(part) for part in terms],
        "collectives": [asdict(one) for one in collectives_of_mixed(search, point)],
        "today": best and asdict(best),
        "changes": [asdict(change) for change in changes],
        "sources": {kind: in_data(question.of(kind)) for kind in question.machines},
    }
    named = partial(_name, seconds=point.seconds)
    lines = [
        in_words(plan),
        "",
        f"ranks in the order of the mesh: {in_runs(kinds)}",
        f"a step takes {format_seconds(point.seconds)} (predicted)",
        *map(of_part, terms),
        *_of_types(search, point),
        *stages_in_lines(search, point),
        "",
        *collectives_in_lines(search, point),
        *of_choice(point, best, changes, named, named),
        *(_sources(question) if sources else ()),
    ]
    return facts, lines


def question_about(
    plan: Plan | None, recipe: str, cluster: Cluster, memory: str | None, ranks: int = 0
) -> MixedQuestion:
    """For the fastest plan that runs today; without a plan, for the fastest of all.

    Args:
        plan: Whose ranks and precision count.
        recipe: As for `headway train`.
        cluster: With devices of several types.
        memory: Of a device that may be used.
        ranks: Devices, without a plan.
    """
    work, batch, found = work_of(recipe, plan)
    wanted = Wanted(
        objective="fastest",
        counts=(ranks if plan is None else plan.ranks,),
        memory=memory_of(memory),
        price=None,
        force=(),
        schedules=("1f1b",),
        runnable=plan is not None,
    )
    said = found.precision if plan is None else plan.memory.precision
    return mixed_question(wanted, work, batch, cluster, found, precision_in(said))


def kinds_of_ranks(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """On which type each rank stands: as the search has written it into the plan, else in the order
    of the cluster's file.

    Raises:
        PlanError: The cluster has fewer devices of a type, or does not say what it has.
    """
    there = [kind for kind in cluster.devices_of_ranks if kind is not None]
    said = plan.prediction.device if plan.prediction else ""
    found = re.fullmatch(r"\d+ [^ ,]+(, \d+ [^ ,]+)*", said)
    kinds = there[: plan.ranks]
    if found:
        pairs = (run.split(" ") for run in said.split(", "))
        kinds = [kind for number, kind in pairs for _ in range(int(number))]
    lacking = Counter(kinds) - Counter(there)
    if len(kinds) != plan.ranks or lacking:
        raise PlanError(
            "the plan is for other devices than the cluster's",
            problems=[f"{n} x {kind} too few" for kind, n in lacking.items()]
            or [f"{plan.ranks} ranks, and {len(kinds)} of them have a known device"],
            fix="Name the cluster that it was made for, or make a plan for this one.",
        )
    return tuple(kinds)


def _sources(question: MixedQuestion) -> Iterator[str]:
    for kind in question.machines:
        yield from ("", f"where the numbers of {kind} come from:", *in_lines(question.of(kind)))


def _of_types(search: MixedSearch, point: MixedPoint) -> Iterator[str]:
    """Memory and idle time of each type."""
    for kind, _ in point.combination.amounts:
        cap, held = search.question.caps[kind], point.bytes_on(kind)
        fits = "" if held <= cap else "; this does not fit"
        yield (
            f"{kind}: {format_bytes(held)} of {format_bytes(cap)} ({held / cap:.1%}){fits}; idle "
            f"for {point.idle(kind):.1%} of the step, communication included"
        )


def _name(one: MixedPoint, seconds: float) -> str:
    on = " + ".join(f"{n} {kind}" for kind, n in one.combination.amounts)
    return f"{describe(one)} on {on}, {format_seconds(one.seconds)} ({than(one.seconds, seconds)})"
