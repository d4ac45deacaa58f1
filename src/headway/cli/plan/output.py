"""Output of `headway plan` as text and JSON: the table of plans and what stands below it.

The frontier, the chosen plan with its cost, the nearest alternatives, the collectives of a step,
and where the numbers come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice

from headway.api.inputs import recipe_name
from headway.api.plan_request import TrainingLength
from headway.api.planning import PlanningResult
from headway.cli.plan.tables import tables_lines
from headway.cli.terminal.console import table_lines
from headway.cluster import Cluster
from headway.collective.collective_calls import CollectiveCalls, call_table_lines
from headway.planner.explain.alternatives import (
    AlternativePlan,
    label_points,
    nearest_plans,
    plan_figures,
    step_price,
)
from headway.planner.explain.infeasible import stage_end_modules
from headway.planner.explain.sources import in_data, kinds, machine_numbers
from headway.planner.explain.step_parts import fullest_stage_memory, step_parts
from headway.planner.guidelines.inexact import InexactPlan
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult
from headway.planner.search.operator_choices import operator_choices, splits_parameters
from headway.planner.search.plan_conversion import missing_in_executor, sample_shares
from headway.planner.search.plan_point import (
    Point,
    describe_devices,
    describe_point,
    format_device_runs,
)
from headway.planner.search.request import PlanRequest
from headway.planner.traffic.estimate import collectives_of, collectives_of_ranks
from headway.units import format_bytes, format_number, format_seconds

FORMAT = "headway plan search"
VERSION = 1
"""Of the JSON: increases when a key changes its meaning or is removed."""
THOUSAND = 1000
MAX_COLLECTIVE_ROWS = 12
"""Of collectives that are shown."""
MIN_MEMORY_SAVING = 0.01
"""Of the memory: a plan that is slower and saves less has no row; --json has all."""
OPTIMAL = 5e-4
"""A gap that prints as 0.0%."""


def format_money(value: float, currency: str) -> str:
    """ "12,300 USD", "3.21 USD", "0.00412 USD"."""
    if abs(value) >= 1000:
        return f"{value:,.0f} {currency}"
    return f"{value:.2f} {currency}" if abs(value) >= 1 else f"{value:.3g} {currency}"


def report_lines(result: PlanningResult) -> Iterator[str]:
    """All for people; the chosen plan is marked."""
    outcome = result.outcome
    question = outcome.question
    if not result.whole_fits:
        yield "no plan with whole tables fits; this is the model without its tables:"
    yield from _table(result)
    if question.objective != "frontier":
        words = "other plans found during the search"
        yield f"({words}; --objective frontier looks for all Pareto-optimal plans)"
    yield ""
    yield from _chosen(result)
    yield ""
    yield from _alternatives(outcome, fewer=result.any_devices)
    yield ""
    if result.tables is not None:
        yield from tables_lines(result)
        yield ""
    if result.inexact:
        yield from _inexact(result)
        yield ""
    rows = list(collective_lines(outcome.search, outcome.best))
    yield from islice(rows, MAX_COLLECTIVE_ROWS + 1)
    if len(rows) > MAX_COLLECTIVE_ROWS + 1:
        yield f"  and {len(rows) - MAX_COLLECTIVE_ROWS - 1} more lines (--json)"
    if rows:
        yield ""
    optimal = "Optimal among these"
    if outcome.gap >= OPTIMAL:
        optimal = f"Within {outcome.gap:.1%} of the best of these"
    bound = ""
    if outcome.floor > 0 and outcome.unexplored < 1.0:
        bound = f"; {1 + outcome.unexplored:.2f}x the theoretical lower bound of the step time"
    yield (
        f"Searched {outcome.considered:,} configurations ({outcome.opened:,} in full) for "
        f"{question.objective}: {_space(question)}. {optimal}{bound}."
    )
    for kind in outcome.search.types:
        own = tuple(machine_numbers(question.of(kind)))
        device = kinds([one for one in own if one.name.startswith("device.")])
        links = kinds([one for one in own if one.name.startswith("links.")])
        name = kind or question.machine.device.name
        yield f"sources: {name}: {device}; links: {links}"
    yield "(--json lists each number with its source, and each figure with its formula)"


def _space(question: PlanRequest) -> str:
    """Among which plans the chosen one is the best."""
    named = "all schedules" if "all" in question.schedules else ", ".join(question.schedules)
    zero = ", ".join(map(str, question.zero))
    tensor = "any tensor axis inside a node"
    if question.tensor is not None:
        tensor = f"tensor {', '.join(map(str, question.tensor))}"
    return (
        f"{named}; ZeRO {zero}; {tensor}; one strategy for equal blocks of a stage; "
        "cuts of least sum"
    )


def _table(result: PlanningResult) -> Iterator[str]:
    outcome = result.outcome
    question = outcome.question
    cost_heads = [*_counts(result.length)] if question.priced_devices else []
    rows = [[" ", "step", "memory", "devices", *cost_heads, "plan", "runs today"]]
    places = sorted(_worth_showing(outcome) | {outcome.chosen})
    points = [outcome.points[number] for number in places]
    notes = label_points(outcome.search, points)
    for number, point, said in zip(places, points, notes, strict=True):
        rows.append(
            [
                "*" if number == outcome.chosen else " ",
                format_seconds(point.seconds),
                format_bytes(point.bytes),
                describe_devices(point),
                *cost_columns(step_price(question, point), result.currency, result.length),
                f"{describe_point(point)}{said and f' ({said})'}",
                result.runs(point),
            ]
        )
    yield from table_lines(rows)


def _worth_showing(outcome: SearchResult) -> set[int]:
    """Numbers of those, fastest first, that save `MIN_MEMORY_SAVING` of the memory, or money, of
    each shown before.
    """
    points = outcome.points
    costs = [outcome.question.cost(one.devices, one.seconds, one.amounts) for one in points]
    # On devices of several types a slower plan may be cheaper; of one type it never is.
    shown: list[int] = []
    for number, point in enumerate(points):
        if all(
            point.bytes < points[n].bytes * (1 - MIN_MEMORY_SAVING)
            for n in shown
            if points[n].devices <= point.devices and costs[n] <= costs[number]
        ):
            shown.append(number)
    return set(shown)


def _counts(length: TrainingLength) -> dict[str, int]:
    """The numbers of steps of which the cost is shown, by the heading of the column."""
    counts = {"a step": 1, "1,000 steps": THOUSAND}
    return counts | ({"whole run": length.stop} if length.stop else {})


def cost_columns(each: float | None, currency: str, length: TrainingLength) -> list[str]:
    """Of a plan of which a step costs so much; nothing where no price is known."""
    if each is None:
        return []
    return [format_money(count * each, currency) for count in _counts(length).values()]


def cost_data(each: float | None, amounts: TrainingLength) -> dict[str, float | None] | None:
    """The same for programs."""
    if each is None:
        return None
    return {
        "step": each,
        "thousand_steps": THOUSAND * each,
        "epoch": amounts.epoch and amounts.epoch * each,
        "run": amounts.stop and amounts.stop * each,
    }


def _chosen(result: PlanningResult) -> Iterator[str]:
    """The chosen plan: its figures, its stages, and what its operators do."""
    outcome = result.outcome
    question, point = outcome.question, outcome.best
    known = plan_figures(outcome.search, point)
    yield (
        f"chosen for {question.objective}: {describe_point(point)}; "
        f"the products reach {known.reached:.1%} of the peak (MFU), R_O {known.overhead:.3g}"
    )
    if known.money is not None:
        yield cost_sentence(known.money, result.currency, result.length)
    else:
        amounts = point.amounts or ((question.machine.device.name, point.devices),)
        yield device_hours_sentence({kind: n * point.seconds for kind, n in amounts})
    yield from stage_lines(outcome.search, point)
    if len(point.amounts) > 1:
        yield from _layout_lines(question, point)
    elif point.degrees.tensor > 1:
        yield from _split_lines(outcome.search, point)


def stage_lines(search: PlanSearch, point: Point) -> Iterator[str]:
    """What each stage computes, takes and holds; on devices of several types on each of them."""
    for number, stage in enumerate(point.stages):
        first, last = stage_end_modules(search, stage)
        if len(point.amounts) < 2:
            again = f", recomputed {format_bytes(stage.transient)}" if stage.recompute else ""
            yield (
                f"stage {number}: {first} to {last}, {format_seconds(stage.seconds)} per "
                f"micro-batch; state {format_bytes(stage.state)}, activations "
                f"{format_bytes(stage.kept)}{again}"
            )
            continue
        yield f"stage {number}: {first} to {last}" + (", recomputed" if stage.recompute else "")
        for one in point.classes:
            own = one.stages[number]
            yield (
                f"  {len(one.copies)} x {one.kinds[number]}: {format_seconds(own.seconds)} per "
                f"micro-batch of {one.microbatch}, {format_bytes(own.bytes)}"
            )


def _layout_lines(question: PlanRequest, point: Point) -> Iterator[str]:
    """What devices of several types do: samples, ranks, idle time."""
    if point.degrees.data > 1:
        copies = {copy: one.kinds for one in point.classes for copy in one.copies}
        own = enumerate(sample_shares(question.batch, point))
        shares = Counter((copies[copy], share) for copy, share in own)
        said = [
            f"{n} of {share} ({format_device_runs(types)})" for (types, share), n in shares.items()
        ]
        yield f"shares of {question.batch} samples: {', '.join(said)}"
    yield f"ranks in the order of the mesh: {format_device_runs(point.rank_kinds)}"
    for kind, _ in point.amounts:
        yield f"{kind} idle for {point.idle(kind):.1%} of the step, communication included"


def _split_lines(search: PlanSearch, point: Point) -> Iterator[str]:
    """Which modules the tensor axis splits, and how."""
    ways: dict[str, list[str]] = {}
    for choice in operator_choices(search.tables_at(point), point):
        if choice.parameters:
            ways.setdefault(choice.how, []).append(choice.module or "(model)")
    if not splits_parameters(search.tables_at(point), point):
        yield (
            f"the tensor axis splits no parameters: each group of {point.degrees.tensor} "
            "devices does little more than one would; ask for fewer with --devices"
        )
    for how, modules in ways.items():
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        yield f"{how}: {', '.join(modules[:3])}{more}"


def cost_sentence(each: float, currency: str, amounts: TrainingLength) -> str:
    """What a plan costs of which a step costs so much."""
    text = f"cost: 1,000 steps cost {format_money(THOUSAND * each, currency)}"
    if amounts.epoch:
        cost = format_money(amounts.epoch * each, currency)
        text += f", an epoch of {amounts.epoch:,} steps {cost}"
    if amounts.stop:
        cost = format_money(amounts.stop * each, currency)
        text += f", the whole run of {amounts.stop:,} steps {cost}"
    return text


def device_hours_sentence(seconds: Mapping[str, float]) -> str:
    """Where no price is known.

    Args:
        seconds: Of devices in a step, by type.
    """
    hours = {kind: number * THOUSAND / 3600 for kind, number in seconds.items()}
    several = len(hours) > 1
    said = " and ".join(
        f"{format_number(number)} device-hours{f' of {kind}' if several else ''}"
        for kind, number in hours.items()
    )
    where = " and ".join(f"[devices.{kind}]" for kind in hours)
    return (
        f"cost: 1,000 steps take {said}, whose price is not known: give it "
        f'with --price "2.5 USD/h", or as price below {where} of a cluster.toml'
    )


def _alternatives(outcome: SearchResult, *, fewer: bool) -> Iterator[str]:
    found = nearest_plans(outcome, fewer=fewer)
    if not found:
        yield "no alternatives: no other plan is on the frontier or one step away"
        return
    yield "nearest alternatives, against the chosen plan:"
    _, *notes = label_points(outcome.search, [outcome.best, *(one.point for one in found)])
    for one, said in zip(found, notes, strict=True):
        yield f"  {_alternative_line(outcome.search, one, said)}"


def _alternative_line(search: PlanSearch, one: AlternativePlan, said: str) -> str:
    devices = f"{one.devices:+d} devices" if one.devices else "as many devices"
    on = f" on {describe_devices(one.point)}" if one.point.amounts else ""
    lacks = missing_in_executor(search, one.point)
    step = f"{one.step}: " if one.step else ""
    return (
        f"time {one.seconds:+.1%}, memory {one.bytes:+.1%}, {devices}, cost {one.money:+.1%}: "
        f"{step}{describe_point(one.point)}{on}{said and f' ({said})'}"
        + (f"; the executor lacks {lacks}" if lacks else "")
        + ("; without --force" if one.free else "")
    )


def _inexact(result: PlanningResult) -> Iterator[str]:
    """The chosen plan, and beside it those whose steps do not equal the serial run's."""
    question, best = result.outcome.question, result.chosen
    chosen = question.batch / best.seconds
    rows = [
        ["plan", "samples/s", "memory", "waits", "learning rate", "repeated", "runs today"],
        [
            "the chosen one", format_number(chosen), format_bytes(best.bytes), "", "", "by itself",
            result.runs(best),
        ],
    ]  # fmt: skip
    refused = []
    for one in result.inexact:
        if one.plan is None or one.rule is None:
            refused.append(f"  {one.name} ({one.synchrony}): {one.lacks}")
            continue
        waits = ", ".join(f"{cause} {share:.0%}" for cause, share in one.waits)
        rate = f"{format_number(one.rate)} ({one.rate / chosen:.2f}x)"
        rows.append(
            [
                one.name, rate, format_bytes(one.bytes), waits or "none", one.rule.rate,
                one.repeated, one.lacks or "yes",
            ]
        )  # fmt: skip
    yield (
        f"plans whose steps do not equal the serial run's, on {question.most} devices (a worker "
        "may need more samples to learn as much):"
    )
    yield from table_lines(rows)
    yield from refused
    yield "(learning rate: the best one as the cluster grows; --take NAME --out FILE writes one)"


def _inexact_data(one: InexactPlan) -> dict[str, object]:
    return {
        "name": one.name,
        "synchrony": {name: getattr(one.synchrony, name) for name in one.synchrony.given},
        "seconds": one.seconds,
        "samples_per_second": one.rate,
        "bytes": one.bytes,
        "exchange": one.exchange,
        "waits": dict(one.waits),
        "rule": None if one.rule is None else asdict(one.rule),
        "repeated": one.repeated,
        "hash": None if one.plan is None else one.plan.hash,
        "lacks": one.lacks,
    }


def collective_lines(search: PlanSearch, point: Point) -> Iterator[str]:
    """The collectives that the search prices, by stage; ranks that do the same share them."""
    heading = "collectives of a step as the search prices them, of one rank"
    if len(point.amounts) < 2:
        calls = collectives_of(search, point)
        if any(calls):
            yield f"{heading}; `headway explain PLAN` has the executor's:"
            yield from call_table_lines(calls)
        return
    names: dict[CollectiveCalls, list[str]] = {}
    for one in collectives_of_ranks(search, point):
        names.setdefault(one.calls, []).append(f"stage {one.stage} on {one.kind}")
    yield f"{heading}:"
    for calls_of_rank, ranks in names.items():
        yield f"{', '.join(dict.fromkeys(ranks))}:"
        yield from call_table_lines([calls_of_rank])


def report_data(result: PlanningResult) -> dict[str, object]:
    """All as plain data; the same question gives the same bytes."""
    outcome = result.outcome
    question, best = outcome.question, outcome.best
    collectives = collectives_of_ranks(outcome.search, best)
    several = len(best.amounts) > 1
    return {
        "format": FORMAT,
        "version": VERSION,
        "question": {
            "recipe": recipe_name(result.recipe),
            "cluster": cluster_name(result),
            "batch": question.batch,
            "devices": list(question.devices),
            "memory": question.cap,
            "objective": question.objective,
            "price": {one.kind: one.price for one in question.groups} or question.price,
            "currency": result.currency,
            "tensor": question.tensor,
            "zero": list(question.zero),
            "schedules": list(question.schedules),
            "force": [list(pair) for pair in question.force],
            "steps": asdict(result.length),
        },
        "chosen": outcome.chosen,
        "bound": outcome.bound,
        "gap": outcome.gap,
        "floor": outcome.floor,
        "unexplored": outcome.unexplored,
        "considered": outcome.considered,
        "opened": outcome.opened,
        "points": [_point(result, point) for point in outcome.points],
        "choices": []
        if several
        else [asdict(choice) for choice in operator_choices(outcome.search.tables_at(best), best)],
        "collectives": [[asdict(call) for call in one.calls] for one in collectives],
        "collective_ranks": [
            {"stage": one.stage, "type": one.kind, "copies": one.copies} for one in collectives
        ],
        "alternatives": [asdict(one) for one in nearest_plans(outcome, fewer=result.any_devices)],
        "sources": sources_data(question),
        "inexact": [_inexact_data(one) for one in result.inexact],
        **_tables_data(result),
    }


def _tables_data(result: PlanningResult) -> dict[str, object]:
    """The plan with tables over ranks; nothing where the model has none to place."""
    if result.tables is None:
        return {}
    placed = {"seconds": result.tables.seconds, "bytes": result.tables.bytes}
    chosen = {"chosen": result.by_tables, "whole_fits": result.whole_fits}
    return {"tables": {**chosen, **placed, "placement": asdict(result.tables.placement)}}


def cluster_name(result: PlanningResult) -> str:
    """For people: "2 x dgx-a100"."""
    if isinstance(result.cluster_input, Cluster):
        return f"a cluster of {result.cluster.ranks} devices"
    return f"{result.nodes} x " * (result.nodes is not None) + str(result.cluster_input)


def sources_data(question: PlanRequest) -> dict[str, object]:
    """Numbers and formulas; where there are several types of devices, of each."""
    if not question.groups:
        return in_data(question)
    return {one.kind: in_data(question.of(one.kind)) for one in question.groups}


def _point(result: PlanningResult, point: Point) -> dict[str, object]:
    outcome = result.outcome
    question = outcome.question
    known = plan_figures(outcome.search, point)
    found: dict[str, object] = {
        "seconds": point.seconds,
        "bytes": point.bytes,
        "devices": point.devices,
        "mfu": known.reached,
        "overhead": known.overhead,
        "money": cost_data(known.money, result.length),
        "border": point.border,
        "lacks": missing_in_executor(outcome.search, point),
        "runs": result.runs(point),
        "degrees": asdict(point.degrees),
        "parts": [asdict(part) for part in step_parts(question, point)],
        "holding": asdict(fullest_stage_memory(question, point)),
        "stages": [asdict(stage) for stage in point.stages],
    }
    if question.groups:
        found |= {
            "types": dict(point.amounts),
            "classes": [asdict(one) for one in point.classes],
            "shares": sample_shares(question.batch, point),
            "ranks": point.rank_kinds,
        }
    return found
