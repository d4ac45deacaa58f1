"""Plan and explain on clusters with several types of devices.

Question, output and explanation for `headway.planner`'s mixed search, the counterparts of
`question`,
`output` and `headway.cli.explain`. `part_line`, `choice_lines` and `relative_difference` serve
both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from headway.api.plan_request import (
    PlanSearchOptions,
    TrainingLength,
    parse_memory_limit,
    recipe_workload,
    search_precision,
    training_length,
)
from headway.cli.plan.output import (
    COLLECTIVES_HEADING,
    cost_columns,
    cost_data,
    cost_headings,
    cost_sentence,
    device_hours_sentence,
)
from headway.cli.terminal.console import note, say, say_json
from headway.cluster import Cluster
from headway.collective.collective_calls import CollectiveCalls, call_table_lines
from headway.cost.machine_presets import machine_of
from headway.cost.network import network_of
from headway.errors import PlanError
from headway.planner.estimate.degrees import degree_labels
from headway.planner.estimate.partition import LayerUnit
from headway.planner.explain.alternatives import (
    describe_placement,
    describe_stages,
    distinguishing_labels,
)
from headway.planner.explain.hardware_changes import SAME, HardwareChange
from headway.planner.explain.infeasible import stage_end_modules
from headway.planner.explain.sources import in_data, in_lines
from headway.planner.explain.step_parts import StepPart, step_parts
from headway.planner.export.mixed_devices import (
    collectives_of_mixed,
    fastest_of,
    missing_for_mixed,
    mixed_changes,
    mixed_point_of,
    ranks_of,
    shares_of,
    to_mixed_plan,
)
from headway.planner.export.prediction import prediction_of
from headway.planner.guidelines.advice import Advice
from headway.planner.guidelines.plan_advice import advice_of_mixed
from headway.planner.search.mixed_candidate import MixedPoint
from headway.planner.search.mixed_search import MixedSearch, MixedSearchResult, search_mixed
from headway.planner.search.plan_point import Point
from headway.planner.search.request import MixedPlanRequest, resolve_force
from headway.plans import Plan
from headway.plans import explain as in_words
from headway.plans.prediction import Prediction
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.api.recipe_workload import RecipeWorkload
    from headway.report.pictures.pareto_frontier import FrontierPlot
    from headway.run.recipe.recipe import Recipe


def device_type_counts(cluster: Cluster) -> dict[str, int]:
    """Devices of each type, in the order of the cluster."""
    return dict(Counter(name for name in cluster.devices_of_ranks if name is not None))


def mixed_question(
    wanted: PlanSearchOptions, captured: RecipeWorkload, cluster: Cluster, precision: str
) -> MixedPlanRequest:
    """The question to the search.

    Args:
        captured: Whose optimizer's update counts, where the file has measured it.
        precision: As in `PlanRequest`.

    Raises:
        PlanError: Somebody's devices are not known, or something is asked for that cannot be.
    """
    from headway.api.recipe_workload import with_measured_optimizer  # imports torch

    counts, network = device_type_counts(cluster), network_of(cluster)
    force, problems = resolve_force(captured.work, wanted.force)
    if sum(counts.values()) < cluster.ranks:
        problems.append("some nodes do not say which device they have")
    if wanted.counts and wanted.counts[-1] > cluster.ranks:
        problems.append(f"--devices: {wanted.counts[-1]}, and the cluster has {cluster.ranks}")
    if set(wanted.schedules) not in ({"1f1b"}, set(RUNNABLE_SCHEDULES)):  # the defaults
        problems.append("--schedules: devices of several types are searched with 1f1b only")
    if problems:
        raise PlanError(
            "there can be no such plan",
            problems=problems,
            fix="Describe the cluster's devices; ask for what they and the model have.",
        )
    return MixedPlanRequest(
        work=captured.work,
        machines={
            kind: replace(
                with_measured_optimizer(machine_of(cluster, device=kind), cluster, captured.recipe),
                network=network,
            )
            for kind in counts
        },
        counts=counts,
        batch=captured.batch,
        devices=wanted.counts,
        memory=wanted.memory,
        objective=wanted.objective,
        prices=_prices(wanted, cluster, counts),
        tensor=wanted.tensor,
        zero=(0,) if wanted.runnable else (0, 1, 3),
        force=force,
        runnable=wanted.runnable,
        precision=precision,
        seconds=wanted.seconds,
    )


def _prices(
    wanted: PlanSearchOptions, cluster: Cluster, counts: dict[str, int]
) -> dict[str, float]:
    """Of a device of each type and hour; empty where one is not known."""
    if wanted.price is not None:
        return dict.fromkeys(counts, wanted.price.per_hour)
    prices = {kind: cluster.devices[kind].price for kind in counts}
    known = {kind: price.per_hour for kind, price in prices.items() if price is not None}
    return known if len(known) == len(counts) else {}


@dataclass(frozen=True)
class CostBasis:
    """What prices are in, and how long the recipe trains.

    Attributes:
        currency: "" where no price is known.
    """

    currency: str = ""
    amounts: TrainingLength = field(default_factory=TrainingLength)


NO_COSTS = CostBasis()


def cost_basis(wanted: PlanSearchOptions, cluster: Cluster, recipe: Recipe) -> CostBasis:
    """Nothing where the price of a type is not known."""
    if not _prices(wanted, cluster, device_type_counts(cluster)):
        return CostBasis()
    some = wanted.price or cluster.price_of([0])
    return CostBasis("" if some is None else some.currency, training_length(recipe))


def search_mixed_plans(
    question: MixedPlanRequest,
    cluster: Cluster,
    money: CostBasis,
    save: Callable[[Plan], None] | None,
    *,
    json: bool,
) -> MixedSearchResult:
    """Search, print, save the chosen plan.

    Raises:
        NothingFits: No plan is within the memory.
        PlanError: The chosen plan is to be written, and the executor cannot run it.
    """
    outcome = search_mixed(question)
    if json:
        say_json(mixed_report_data(outcome, money))
    else:
        say("\n".join(mixed_report_lines(outcome, money)))
    if save is not None:
        plan = to_mixed_plan(outcome, outcome.best)
        save(replace(plan, prediction=_mixed_prediction(outcome, cluster)))
        note(f"its ranks stand on {format_device_runs(ranks_of(outcome.best))}")
    return outcome


def mixed_frontier_plot(outcome: MixedSearchResult, *, model: str, cluster: str) -> FrontierPlot:
    """What there is to draw of an answer; allowed is what the largest device may use."""
    from headway.report.pictures.pareto_frontier import FrontierMark, FrontierPlot

    question = outcome.question
    return FrontierPlot(
        title=f"{model} on {cluster}, batch {question.batch}: {question.objective}",
        spots=tuple(
            FrontierMark(
                seconds=point.seconds,
                bytes=point.bytes,
                devices=point.devices,
                words=describe_mixed_point(point),
                chosen=number == outcome.chosen,
            )
            for number, point in enumerate(outcome.points)
        ),
        allowed=max(question.caps.values()),
    )


def _mixed_prediction(outcome: MixedSearchResult, cluster: Cluster) -> Prediction:
    """Of a step of the chosen plan, and on which type each rank stands."""
    point = outcome.best
    kind = point.stages[0].parts[0].kind
    return replace(
        prediction_of(outcome.question.of(kind), point.slowest, cluster),
        bytes=point.bytes,
        device=format_device_runs(ranks_of(point)),
    )


def mixed_report_lines(outcome: MixedSearchResult, money: CostBasis = NO_COSTS) -> Iterator[str]:
    """The frontier in lines; the chosen plan is marked."""
    priced = cost_headings(money.amounts) if outcome.question.prices else []
    notes = distinguish_mixed_points(outcome)
    head = (" ", "step", "memory", "devices", *priced, "plan", "runs today; else lacks")
    rows = [
        (
            "*" if number == outcome.chosen else " ",
            format_seconds(point.seconds),
            format_bytes(point.bytes),
            " + ".join(f"{n} {kind}" for kind, n in point.combination.amounts),
            *cost_columns(_cost_per_step(outcome, point), money.currency, money.amounts),
            f"{describe_mixed_point(point)}{said and f' ({said})'}",
            missing_for_mixed(point) or "yes",
        )
        for number, (point, said) in enumerate(zip(outcome.points, notes, strict=True))
    ]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _chosen(outcome, money)
    yield ""
    yield from mixed_collective_lines(outcome.search, outcome.best)
    yield (
        f"{outcome.considered} combinations, {outcome.opened} priced; for "
        f"{outcome.question.objective} the chosen plan is within {outcome.gap:.1%} of the best"
    )


def distinguish_mixed_points(outcome: MixedSearchResult) -> list[str]:
    """What tells the points of an answer from those that read alike."""
    row = outcome.search.engine.row
    heads = [(point.combination.amounts, describe_mixed_point(point)) for point in outcome.points]
    return distinguishing_labels(heads, [_features(row, point) for point in outcome.points])


def _features(row: Sequence[LayerUnit], point: MixedPoint) -> dict[str, str]:
    prices = [part.stage.price for stage in point.stages for part in stage.parts]
    return {
        "ranks": f"ranks on {format_device_runs(ranks_of(point))}",
        **describe_stages(row, point.stages),
        "border": describe_placement(point.border),
        "strategies": f"strategies {prices}",
    }


def _cost_per_step(outcome: MixedSearchResult, point: MixedPoint) -> float | None:
    """What a step costs; None: no price is known."""
    question = outcome.question
    return question.cost(point.combination.amounts, point.seconds) if question.prices else None


def _mixed_cost_line(outcome: MixedSearchResult, money: CostBasis) -> str:
    point = outcome.best
    each = _cost_per_step(outcome, point)
    if each is not None:
        return cost_sentence(each, money.currency, money.amounts)
    return device_hours_sentence({kind: n * point.seconds for kind, n in point.combination.amounts})


def mixed_collective_lines(search: MixedSearch, point: MixedPoint) -> Iterator[str]:
    """Of one rank; those that do the same share their lines."""
    alike: dict[CollectiveCalls, list[str]] = {}
    for one in collectives_of_mixed(search, point):
        alike.setdefault(one.calls, []).append(f"stage {one.stage} on {one.kind}")
    if not any(alike):
        return
    yield f"{COLLECTIVES_HEADING}:"
    for calls, names in alike.items():
        if len(alike) > 1:
            yield f"{', '.join(dict.fromkeys(names))}:"
        yield from call_table_lines([calls])
    yield ""


def _chosen(outcome: MixedSearchResult, money: CostBasis) -> Iterator[str]:
    point = outcome.best
    yield _mixed_cost_line(outcome, money)
    yield from mixed_stage_lines(outcome.search, point)
    if point.combination.data > 1:
        shares = Counter(
            zip(point.combination.cells.copies, shares_of(outcome, point), strict=True)
        )
        said = [
            f"{n} of {share} ({format_device_runs(kinds)})" for (kinds, share), n in shares.items()
        ]
        yield f"shares of {outcome.question.batch} samples: {', '.join(said)}"
    yield f"ranks in the order of the mesh: {format_device_runs(ranks_of(point))}"
    for kind, _ in point.combination.amounts:
        yield f"{kind} idle for {point.idle(kind):.1%} of the step, communication included"


def mixed_stage_lines(search: MixedSearch, point: MixedPoint) -> Iterator[str]:
    """What each stage costs on each type of devices."""
    for number, stage in enumerate(point.stages):
        first, last = stage_end_modules(search.engine, stage)
        yield f"stage {number}: {first} to {last}" + (", recomputed" if stage.recompute else "")
        for part in stage.parts:
            yield (
                f"  {part.copies} x {part.kind}: {format_seconds(part.stage.seconds)} per "
                f"micro-batch of {part.microbatch}, {format_bytes(part.bytes)}"
            )


def describe_mixed_point(point: MixedPoint) -> str:
    """ "data 2, pipe 4, 16 micro-batches of 3 and 2, stage by stage"."""
    combination = point.combination
    degrees = combination.degrees(1)
    words = degree_labels(degrees, " and ".join(map(str, dict.fromkeys(point.sizes))))
    if degrees.data > 1 and degrees.pipeline > 1:
        words.append("copy by copy" if combination.cells.order == "tpd" else "stage by stage")
    again = sum(stage.recompute for stage in point.stages)
    words += [f"recompute in {again} of {len(point.stages)} stages"] * bool(again)
    return ", ".join(words)


def format_device_runs(kinds: tuple[str, ...]) -> str:
    """ "4 v100, 4 p100"."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))


def mixed_report_data(outcome: MixedSearchResult, money: CostBasis = NO_COSTS) -> dict[str, object]:
    """The frontier as plain data; the same question gives the same bytes."""
    return {
        "format": "headway plan search, mixed devices",
        "version": 1,
        "chosen": outcome.chosen,
        "gap": outcome.gap,
        "considered": outcome.considered,
        "opened": outcome.opened,
        "points": [
            {
                "seconds": point.seconds,
                "bytes": point.bytes,
                "devices": dict(point.combination.amounts),
                "money": cost_data(_cost_per_step(outcome, point), money.amounts),
                "border": point.border,
                "lacks": missing_for_mixed(point),
                "combination": asdict(point.combination),
                "shares": shares_of(outcome, point),
                "ranks": ranks_of(point),
                "stages": [asdict(stage) for stage in point.stages],
            }
            for point in outcome.points
        ],
        "currency": money.currency,
        "collectives": [asdict(one) for one in collectives_of_mixed(outcome.search, outcome.best)],
        "provenance": {
            kind: dict(machine.device.source) for kind, machine in outcome.question.machines.items()
        },
    }


# `headway explain PLAN` where the cluster has devices of several types; words that both share.


AnyPoint = TypeVar("AnyPoint", Point, MixedPoint)
_PARTS = {
    "compute": "compute of the slowest stage, launches included",
    "bubble": "bubble: ranks wait while the pipeline fills and drains",
    "messages": "messages between stages",
    "exchange": "exchange of gradients that computation waits for",
    "update": "update of the parameters, and adding up of gradients",
    "data": "data: samples put together into batches",
    "host": "host: what any step takes beside its kernels",
}


def part_line(part: StepPart) -> str:
    """A line of the parts of a step."""
    level = f" over the {part.level} links" if part.level else ""
    beside = f"; {format_seconds(part.hidden)} more beside compute" if part.hidden else ""
    words = f"{_PARTS[part.name]}{level}{beside}"
    return f"  {part.share:6.1%}  {format_seconds(part.seconds):>8}  {words}"


def choice_lines(
    point: AnyPoint,
    best: AnyPoint | None,
    changes: Sequence[HardwareChange[AnyPoint]],
    taken: Callable[[AnyPoint], str],
    changed: Callable[[AnyPoint], str],
) -> Iterator[str]:
    """What the search would take, on these devices and on others.

    Args:
        best: The search's choice; None: it finds none.
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
        text += f"({relative_difference(change.own, point.seconds)}); "
        if change.best is None:
            text += "nothing fits"
        elif change.better:
            text += f"the choice changes to {changed(change.best)}"
        elif change.changed:
            text += "the search finds nothing faster"
        else:
            text += "the choice stays"
        yield text


def relative_difference(seconds: float, other: float) -> str:
    """By how much one time differs from another one."""
    return "equal" if abs(seconds / other - 1) < SAME else f"{seconds / other - 1:+.1%}"


def guideline_output(
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
    kinds = device_types_of_ranks(plan, cluster)
    search = MixedSearch(mixed_plan_question(plan, recipe, cluster, memory))
    return guideline_output(plan, *advice_of_mixed(search, mixed_point_of(plan, search, kinds)))


def explain_mixed(
    plan: Plan, recipe: str, cluster: Cluster, memory: str | None, *, sources: bool = False
) -> tuple[dict[str, object], list[str]]:
    """Price a plan, what the search would take, and both on other hardware: data, and lines.

    Args:
        plan: As many ranks as the cluster has, or fewer.
        recipe: As for `headway train`.
        memory: Of a device that may be used.
        sources: Say in the lines, too, where the numbers of each type come from.

    Raises:
        PlanError: There is no price for the plan.
    """
    kinds = device_types_of_ranks(plan, cluster)
    question = mixed_plan_question(plan, recipe, cluster, memory)
    search = MixedSearch(question)
    point, best = mixed_point_of(plan, search, kinds), fastest_of(question)
    changes = tuple(mixed_changes(plan, question, kinds, best))
    terms = step_parts(question.of(kinds[0]), point.slowest)
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
    named = partial(_mixed_point_name, seconds=point.seconds)
    lines = [
        in_words(plan),
        "",
        f"ranks in the order of the mesh: {format_device_runs(kinds)}",
        f"a step takes {format_seconds(point.seconds)} (predicted)",
        *map(part_line, terms),
        *_device_type_lines(search, point),
        *mixed_stage_lines(search, point),
        "",
        *mixed_collective_lines(search, point),
        *choice_lines(point, best, changes, named, named),
        *(_source_lines(question) if sources else ()),
    ]
    return facts, lines


def mixed_plan_question(
    plan: Plan | None, recipe: str, cluster: Cluster, memory: str | None, ranks: int = 0
) -> MixedPlanRequest:
    """For the fastest plan that runs today; without a plan, for the fastest of all.

    Args:
        recipe: As for `headway train`.
        memory: Of a device that may be used.
        ranks: Devices, without a plan.
    """
    captured = recipe_workload(recipe, plan)
    wanted = PlanSearchOptions(
        objective="fastest",
        counts=(ranks if plan is None else plan.ranks,),
        memory=parse_memory_limit(memory),
        price=None,
        force=(),
        schedules=("1f1b",),
        runnable=plan is not None,
    )
    said = captured.recipe.precision if plan is None else plan.memory.precision
    return mixed_question(wanted, captured, cluster, search_precision(said))


def device_types_of_ranks(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
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


def _source_lines(question: MixedPlanRequest) -> Iterator[str]:
    for kind in question.machines:
        yield from ("", f"where the numbers of {kind} come from:", *in_lines(question.of(kind)))


def _device_type_lines(search: MixedSearch, point: MixedPoint) -> Iterator[str]:
    """Memory and idle time of each type."""
    for kind, _ in point.combination.amounts:
        cap, held = search.question.caps[kind], point.bytes_on(kind)
        fits = "" if held <= cap else "; this does not fit"
        yield (
            f"{kind}: {format_bytes(held)} of {format_bytes(cap)} ({held / cap:.1%}){fits}; idle "
            f"for {point.idle(kind):.1%} of the step, communication included"
        )


def _mixed_point_name(one: MixedPoint, seconds: float) -> str:
    on = " + ".join(f"{n} {kind}" for kind, n in one.combination.amounts)
    change = relative_difference(one.seconds, seconds)
    return f"{describe_mixed_point(one)} on {on}, {format_seconds(one.seconds)} ({change})"
