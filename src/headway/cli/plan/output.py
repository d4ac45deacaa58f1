"""Output of `headway plan` as text and JSON.

The frontier, the chosen plan with its cost, the nearest alternatives, the collectives of a step,
and where the numbers come from. `VERSION` of the JSON increases when a key changes its meaning or
is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from headway.api.plan_request import TrainingLength
from headway.collective.collective_calls import call_table_lines
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.explain.alternatives import (
    AlternativePlan,
    label_points,
    nearest_plans,
    operator_choices,
    plan_figures,
    step_price,
)
from headway.planner.explain.infeasible import stage_end_modules
from headway.planner.explain.sources import in_data, kinds, machine_numbers
from headway.planner.explain.step_parts import fullest_stage_memory, step_parts
from headway.planner.search.branch_and_bound import SearchResult
from headway.planner.search.plan_conversion import missing_in_executor
from headway.planner.search.plan_point import Point, describe_recomputation
from headway.planner.traffic.estimate import collectives_of
from headway.units import format_bytes, format_number, format_seconds

FORMAT = "headway plan search"
VERSION = 1
"""Of the JSON: higher when a key changes its meaning or goes."""
THOUSAND = 1000
COLLECTIVES_HEADING = "collectives of a step as the search prices them, of one rank"
"""A plan's own buckets, as the executor fills them, are in `headway explain`."""
MAX_COLLECTIVE_ROWS = 12
"""Of collectives that are shown."""
MIN_MEMORY_SAVING = 0.01
"""Of the memory: a plan that is slower and saves less has no row; --json has all."""


@dataclass(frozen=True, kw_only=True)
class PlanSearchReport:
    """What was found, and what it was asked for.

    Attributes:
        currency: Of the price; "" where none is known.
    """

    outcome: SearchResult
    recipe: str
    cluster: str
    currency: str
    amounts: TrainingLength


def format_money(value: float, currency: str) -> str:
    """ "12,300 USD", "3.21 USD", "0.00412 USD"."""
    if abs(value) >= 1000:
        return f"{value:,.0f} {currency}"
    return f"{value:.2f} {currency}" if abs(value) >= 1 else f"{value:.3g} {currency}"


# -- words ----------------------------------------------------------------------------------------


def report_lines(answer: PlanSearchReport) -> Iterator[str]:
    """All for people; the chosen plan is marked."""
    outcome = answer.outcome
    question = outcome.question
    yield from _table(answer)
    if question.objective != "frontier":
        words = "plans that were met while looking for the best one"
        yield f"({words}; --objective frontier looks for all that nothing beats)"
    yield ""
    yield from _chosen(answer)
    yield ""
    yield from _alternatives(answer)
    yield ""
    yield from _collectives(outcome)
    bound = ""
    if outcome.unexplored < 1.0:
        bound = f", its time within {outcome.unexplored:.1%} of what nothing can beat"
    yield (
        f"{outcome.considered} combinations of degrees, {outcome.opened} solved; "
        f"for {question.objective} the chosen plan is within {outcome.gap:.1%} of the best{bound}"
    )
    own = tuple(machine_numbers(question))
    device = kinds([one for one in own if one.name.startswith("device.")])
    links = kinds([one for one in own if one.name.startswith("links.")])
    yield f"numbers of {question.machine.device.name}: {device}; of the links: {links}"
    yield "(--json lists each number with its source, and each figure with its formula)"


def _table(answer: PlanSearchReport) -> Iterator[str]:
    outcome = answer.outcome
    priced = outcome.question.price is not None
    money_heads = cost_headings(answer.amounts) if priced else []
    head = [" ", "step", "memory", "devices", *money_heads, "plan", "runs today; else lacks"]
    rows = [head]
    places = sorted(_worth_showing(outcome.points) | {outcome.chosen})
    points = [outcome.points[number] for number in places]
    notes = label_points(outcome.search, points)
    for number, point, said in zip(places, points, notes, strict=True):
        rows.append(
            [
                "*" if number == outcome.chosen else " ",
                format_seconds(point.seconds),
                format_bytes(point.bytes),
                str(point.devices),
                *cost_columns(step_price(outcome.question, point), answer.currency, answer.amounts),
                f"{describe_degrees(point.degrees)}{describe_recomputation(point)}"
                f"{said and f' ({said})'}",
                missing_in_executor(point) or "yes",
            ]
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _worth_showing(points: Sequence[Point]) -> set[int]:
    """Numbers of those, fastest first, that save `MIN_MEMORY_SAVING` of the memory of each shown
    before.
    """
    shown: list[int] = []
    for number, point in enumerate(points):
        others = [points[n] for n in shown if points[n].devices <= point.devices]
        if all(point.bytes < other.bytes * (1 - MIN_MEMORY_SAVING) for other in others):
            shown.append(number)
    return set(shown)


def cost_headings(amounts: TrainingLength) -> list[str]:
    """Heads of the columns."""
    return ["a step", "1,000 steps", *(["whole run"] if amounts.stop else [])]


def cost_columns(each: float | None, currency: str, amounts: TrainingLength) -> list[str]:
    """Of a plan of which a step costs so much; nothing where no price is known."""
    if each is None:
        return []
    counts = [1, THOUSAND, *([amounts.stop] if amounts.stop else [])]
    return [format_money(count * each, currency) for count in counts]


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


def _chosen(answer: PlanSearchReport) -> Iterator[str]:
    """The chosen plan: its figures, its stages, and what its operators do."""
    outcome = answer.outcome
    point = outcome.best
    known = plan_figures(outcome.search, point)
    yield (
        f"chosen for {outcome.question.objective}: {describe_degrees(point.degrees)}"
        f"{describe_recomputation(point)}; "
        f"the products reach {known.reached:.1%} of the peak (MFU), R_O {known.overhead:.3g}"
    )
    yield _cost_line(answer, known.money)
    for number, stage in enumerate(point.stages):
        first, last = stage_end_modules(outcome.search, stage)
        again = f", computed again {format_bytes(stage.transient)}" if stage.recompute else ""
        yield (
            f"stage {number}: {first} to {last}, {format_seconds(stage.seconds)} per micro-batch; "
            f"state {format_bytes(stage.state)}, activations {format_bytes(stage.kept)}{again}"
        )
    if point.degrees.tensor > 1:
        ways: dict[str, list[str]] = {}
        for choice in operator_choices(outcome.search, point):
            if choice.parameters:
                ways.setdefault(choice.how, []).append(choice.module or "(model)")
        if not any(how.startswith("split") for how in ways):
            yield (
                f"the tensor axis splits no parameters: each group of {point.degrees.tensor} "
                "devices does little more than one would; ask for fewer with --devices"
            )
        for how, modules in ways.items():
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            yield f"{how}: {', '.join(modules[:3])}{more}"


def _cost_line(answer: PlanSearchReport, each: float | None) -> str:
    point = answer.outcome.best
    if each is not None:
        return cost_sentence(each, answer.currency, answer.amounts)
    hours = {answer.outcome.question.machine.device.name: point.devices * point.seconds}
    return device_hours_sentence(hours)


def cost_sentence(each: float, currency: str, amounts: TrainingLength) -> str:
    """What a plan costs of which a step costs so much."""
    text = f"money: 1,000 steps cost {format_money(THOUSAND * each, currency)}"
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
        f"money: 1,000 steps take {said}, whose price is not known: give it "
        f'with --price "2.5 USD/h", or as price below {where} of a cluster.toml'
    )


def _alternatives(answer: PlanSearchReport) -> Iterator[str]:
    found, outcome = nearest_plans(answer.outcome), answer.outcome
    if not found:
        yield "no alternatives: no other plan is on the frontier or one step away"
        return
    yield "nearest alternatives, against the chosen plan:"
    _, *notes = label_points(outcome.search, [outcome.best, *(one.point for one in found)])
    for one, said in zip(found, notes, strict=True):
        yield f"  {_alternative_line(one, said)}"


def _alternative_line(one: AlternativePlan, said: str) -> str:
    devices = f"{one.devices:+d} devices" if one.devices else "as many devices"
    lacks = missing_in_executor(one.point)
    step = f"{one.step}: " if one.step else ""
    return (
        f"time {one.seconds:+.1%}, memory {one.bytes:+.1%}, {devices}, money {one.money:+.1%}: "
        f"{step}{describe_degrees(one.point.degrees)}{describe_recomputation(one.point)}"
        f"{said and f' ({said})'}"
        + (f"; to run it lacks {lacks}" if lacks else "")
        + ("; without what is forced" if one.free else "")
    )


def _collectives(outcome: SearchResult) -> Iterator[str]:
    rows = list(call_table_lines(collectives_of(outcome.search, outcome.best)))
    if not rows:
        return
    yield f"{COLLECTIVES_HEADING}; `headway explain PLAN` has the executor's:"
    yield from islice(rows, MAX_COLLECTIVE_ROWS)
    if len(rows) > MAX_COLLECTIVE_ROWS:
        yield f"  and {len(rows) - MAX_COLLECTIVE_ROWS} more lines (--json)"
    yield ""


# -- data -----------------------------------------------------------------------------------------


def report_data(answer: PlanSearchReport) -> dict[str, object]:
    """All as plain data; the same question gives the same bytes."""
    outcome = answer.outcome
    question = outcome.question
    return {
        "format": FORMAT,
        "version": VERSION,
        "question": {
            "recipe": answer.recipe,
            "cluster": answer.cluster,
            "batch": question.batch,
            "devices": list(question.devices),
            "memory": question.cap,
            "objective": question.objective,
            "price": question.price,
            "currency": answer.currency,
            "tensor": question.tensor,
            "zero": list(question.zero),
            "schedules": list(question.schedules),
            "force": [list(pair) for pair in question.force],
            "steps": asdict(answer.amounts),
        },
        "chosen": outcome.chosen,
        "bound": outcome.bound,
        "gap": outcome.gap,
        "floor": outcome.floor,
        "unexplored": outcome.unexplored,
        "considered": outcome.considered,
        "opened": outcome.opened,
        "points": [_point(answer, point) for point in outcome.points],
        "choices": [asdict(choice) for choice in operator_choices(outcome.search, outcome.best)],
        "collectives": [
            [asdict(call) for call in calls]
            for calls in collectives_of(outcome.search, outcome.best)
        ],
        "alternatives": [asdict(one) for one in nearest_plans(outcome)],
        "sources": in_data(question),
    }


def _point(answer: PlanSearchReport, point: Point) -> dict[str, object]:
    outcome = answer.outcome
    known = plan_figures(outcome.search, point)
    return {
        "seconds": point.seconds,
        "bytes": point.bytes,
        "devices": point.devices,
        "mfu": known.reached,
        "overhead": known.overhead,
        "money": cost_data(known.money, answer.amounts),
        "border": point.border,
        "lacks": missing_in_executor(point),
        "degrees": asdict(point.degrees),
        "parts": [asdict(part) for part in step_parts(outcome.question, point)],
        "holding": asdict(fullest_stage_memory(outcome.question, point)),
        "stages": [asdict(stage) for stage in point.stages],
    }
