"""A plan beside others: its figures, its decisions, the nearest plans, and what tells them apart.

Two plans whose degrees read alike may differ in cuts, recomputation, placements or what is split.
They get the same label only if nothing tells them apart; what all of them have in common is left
out.

Sources: R_O, Zou et al. 2017, Lemma 1; model FLOPs utilisation, Chowdhery et al. 2022 (PaLM),
section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import dtype_of, kernel_count
from headway.planner.estimate.pipeline_time import PointStage
from headway.planner.estimate.stage_cut import LayerUnit
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult
from headway.planner.search.neighbours import DegreeStep, degree_steps
from headway.planner.search.operator_choices import operator_choices
from headway.planner.search.plan_point import Point, describe_point, format_device_runs
from headway.planner.search.request import Objective, PlanRequest
from headway.plans.tensor_layout import divisors
from headway.schedule.generators.registry import PLAIN
from headway.units import format_bytes

PlanFeatures = Mapping[str, str]
"""By aspect, in words."""


def distinguishing_labels(heads: Sequence[Hashable], features: Sequence[PlanFeatures]) -> list[str]:
    """For each plan the words that tell it from all others with the same head; "" where none has.

    Of the aspects in which they differ so many are named, the first ones first, as it takes.

    Args:
        heads: What is printed of the plans anyway.
    """
    found = []
    for head, own in zip(heads, features, strict=True):
        alike = [f for other, f in zip(heads, features, strict=True) if other == head]
        named: list[str] = []
        for name in dict.fromkeys(name for one in alike for name in one):
            # An aspect is named only if it tells more plans apart than those named already.
            if _kinds(alike, [*named, name]) > _kinds(alike, named):
                named.append(name)
        found.append(", ".join(own.get(name, f"no {name}") for name in named))
    return found


def _kinds(features: Sequence[PlanFeatures], names: Sequence[str]) -> int:
    return len({tuple(one.get(name) for name in names) for one in features})


def label_points(search: PlanSearch, points: Sequence[Point]) -> list[str]:
    """`distinguishing_labels` of points of one search, beside their degrees and number of
    recomputing stages.
    """
    heads = [(point.degrees, point.amounts, describe_point(point)) for point in points]
    features: list[PlanFeatures] = [
        _features(search, point) if heads.count(head) > 1 else {}
        for head, point in zip(heads, points, strict=True)
    ]
    return distinguishing_labels(heads, features)


def _features(search: PlanSearch, point: Point) -> PlanFeatures:
    found = describe_stages(search.row, point.stages) | {
        "border": describe_placement(point.border),
        "bucket": f"buckets of {format_bytes(point.bucket)}",
    }
    if len(point.amounts) > 1:
        prices = [stage.price for one in point.classes for stage in one.stages]
        ranks = {"ranks": f"ranks on {format_device_runs(point.rank_kinds)}"}
        return ranks | found | {"strategies": f"strategies {prices}"}
    modules: dict[str, list[str]] = {}
    for choice in (
        operator_choices(search.tables_at(point), point) if point.degrees.tensor > 1 else ()
    ):
        modules.setdefault(choice.module or choice.operator, []).append(choice.how)
    ways = {name: " and ".join(dict.fromkeys(hows)) for name, hows in modules.items()}
    return found | {f"split of {name}": f"{name} {way}" for name, way in ways.items()}


def describe_stages(row: Sequence[LayerUnit], stages: Sequence[PointStage]) -> dict[str, str]:
    """Where each stage begins, and whether it computes again."""
    found = {}
    for number, stage in enumerate(stages):
        found[f"stage {number}"] = f"stage {number} from {row[stage.start].module or 'the inputs'}"
    for number, stage in enumerate(stages):
        again = "recomputes" if stage.recompute else "does not recompute"
        found[f"recompute {number}"] = f"stage {number} {again}"
    return found


def describe_placement(border: str) -> str:
    """How tensors cross from stage to stage, in words."""
    whole = "whole tensors" if border == "R" else f"tensors split along {border[1:]}"
    return f"{whole} between stages"


NEAREST = 4
"""Alternatives that are shown."""
ALIKE = 1e-3
"""A plan of whose time, memory and devices none differs by more is the same."""


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """Of a plan.

    Attributes:
        reached: Share of the devices' peak that the products of a step reach (MFU).
        overhead: R_O = T_O / T_C: T_C the seconds of a step's passes on one device, T_O what the
            step takes beyond T_C / devices.
        money: Of a step; None: no price is known.
    """

    reached: float
    overhead: float
    money: float | None


@dataclass(frozen=True, kw_only=True)
class AlternativePlan:
    """Another plan, against the chosen one.

    Attributes:
        step: What was changed, "tensor 1 -> 2"; "": a plan of the frontier.
        seconds: Its time is by this share higher.
        devices: Its devices are so many more.
        money: Its costs are by this share higher; the price does not matter.
        free: What is forced on the tensor axis is not done, as it has no such degree.
    """

    point: Point
    step: str
    seconds: float
    bytes: float
    devices: int
    money: float
    free: bool = False


def plan_figures(engine: PlanSearch, point: Point) -> PlanFigures:
    """What else is known of a plan of this search."""
    degrees = point.degrees
    alone = Degrees(tensor=1, data=1, pipeline=1, microbatch=degrees.microbatch, microbatches=1)
    compute = 0.0  # T_C, on the devices of several types that of the fastest
    for kind in [kind for kind, _ in point.amounts] or [""]:
        one = engine.candidate(alone, kind)
        passes = one.planned((0, len(engine.row))).stages[0].seconds
        samples = engine.question.batch / degrees.microbatch
        # Copies on several types have micro-batches of several sizes: there the whole batch counts.
        own = passes * (degrees.data * degrees.microbatches if len(point.amounts) < 2 else samples)
        compute = min(compute, own) if compute else own
    return PlanFigures(
        reached=peak_utilisation(engine, point),
        overhead=(point.seconds - compute / point.devices) / compute,
        money=step_price(engine.question, point),
    )


def step_price(question: PlanRequest, point: Point) -> float | None:
    """Of a step; None: no price is known."""
    if not question.priced_devices:
        return None
    return question.cost(point.devices, point.seconds, point.amounts)


def nearest_plans(
    outcome: SearchResult, number: int = NEAREST, *, fewer: bool = False
) -> tuple[AlternativePlan, ...]:
    """The plans of the frontier that are nearest in time; where there is but one, as with a single
    objective, the plans that are one step away in a degree. Fastest first.

    Args:
        fewer: Whether plans on fewer devices than the request's numbers are shown, too.
    """
    devices = outcome.question.devices
    best = outcome.best
    found = [("", point) for point in outcome.points if not _same(point, best)]
    if len(found) < number:
        around = neighbour_plans(outcome.search, best, most=outcome.question.most)
        found += [
            (one.step, one.point)
            for one in around
            if one.point is not None and (fewer or not devices or one.point.devices in devices)
        ]
    # Half the time and twice the time are equally far.
    found.sort(key=lambda line: abs(math.log(line[1].seconds / best.seconds)))
    kept = sorted(found[:number], key=lambda line: line[1].seconds)
    return tuple(_against(outcome.question, best, step, point) for step, point in kept)


def fewer_device_counts(outcome: SearchResult) -> tuple[int, ...]:
    """Numbers of devices, the request's own included, where some plan on fewer devices meets the
    objective better than the chosen one, or as well; empty: none does.
    """
    question, best = outcome.question, outcome.best
    objective: Objective = "fastest" if question.objective == "frontier" else question.objective
    counts = {*divisors(best.devices), *(2**n for n in range(best.devices.bit_length()))}
    # What even the work alone, evenly spread, makes slower is not searched.
    work = float(outcome.search.bounds.work[0].sum()) * question.batch
    few = sorted(
        n
        for n in counts
        if n < best.devices and (work / n <= best.seconds or objective != "fastest")
    )
    named = {PLAIN.name, "all"} & {*question.schedules}
    asked = replace(
        question,
        devices=tuple(few),
        objective=objective,
        schedules=(PLAIN.name,) if named else question.schedules,
    )
    if not few or not outcome.search.related(asked).beats(best):
        return ()
    return tuple(sorted({*counts, *question.devices}))


def _same(one: Point, other: Point) -> bool:
    return (one.devices, one.amounts) == (other.devices, other.amounts) and all(
        math.isclose(a, b, rel_tol=ALIKE)
        for a, b in ((one.seconds, other.seconds), (one.bytes, other.bytes))
    )


def _against(question: PlanRequest, best: Point, step: str, point: Point) -> AlternativePlan:
    cost, own = (
        question.cost(one.devices, one.seconds, one.amounts)
        if one.amounts
        # On one type of devices the price cancels in the ratio below.
        else one.seconds * one.devices
        for one in (point, best)
    )
    return AlternativePlan(
        point=point,
        step=step,
        seconds=point.seconds / best.seconds - 1,
        bytes=point.bytes / best.bytes - 1,
        devices=point.devices - best.devices,
        money=cost / own - 1,
        free=any(how != "stage" for _, how in question.force)
        and question.tensor is not None
        and point.degrees.tensor not in question.tensor,
    )


@dataclass(frozen=True, kw_only=True)
class NeighbourPlan:
    """A plan one step away.

    Attributes:
        step: "tensor 1 -> 2".
        degrees: None where the step is impossible.
        point: The fastest plan with these degrees; None where the step is impossible.
    """

    step: str
    degrees: Degrees | None = None
    point: Point | None = None
    why: str = ""


def peak_utilisation(engine: PlanSearch, point: Point) -> float:
    """Share of the devices' peak that a step's products reach."""
    question, work = engine.question, engine.question.work
    graph = work.graph
    # The format of the largest product stands for that of all.
    largest = max(graph.operators, key=lambda operator: operator.flops.total)
    peaks = 0.0
    for kind, number in point.amounts or (("", point.devices),):
        setting = engine.tables_of(1, point.degrees.microbatch, kind).setting
        peaks += number * setting.machine.device.peak[dtype_of(setting, graph.specs(largest)[1])]
    flops = graph.flops.total * question.batch / work.samples
    return float(flops / (point.seconds * peaks))


def launch_seconds(engine: PlanSearch, point: Point) -> float:
    """Seconds of a step that the host needs to issue the kernels of the slowest stage."""
    slowest = max(point.stages, key=lambda stage: stage.seconds)
    units = engine.row[slowest.start : slowest.stop]
    operators = engine.question.work.graph.operators[units[0].start : units[-1].stop]
    # Forward, backward and, where the stage recomputes, forward again; the gradients of weights are
    # kernels of their own.
    number = sum(
        (2 + slowest.recompute) * kernel_count(o) + bool(o.flops.weight_gradient) for o in operators
    )
    kinds = [kind for kind, _ in point.amounts] or [""]
    host = max(engine.machine_of(kind).device.seconds_of_host(float(number)) for kind in kinds)
    return float(point.degrees.microbatches * point.degrees.virtual * host)


def neighbour_plans(engine: PlanSearch, point: Point, *, most: int) -> tuple[NeighbourPlan, ...]:
    """One step up and down in t, d, p and b: t and p take from d, d is of other devices. None of a
    plan on devices of several types, where a step up is a step of one of them."""
    if len(point.amounts) > 1:
        return ()
    counts = {one.kind: one.count for one in engine.question.groups}
    most = counts.get(point.kind, most)  # a step takes further devices of the same type
    steps = degree_steps(engine.question, point.degrees, units=len(engine.row), most=most)
    return tuple(_neighbour(engine, point, one) for one in steps)


def _neighbour(engine: PlanSearch, point: Point, one: DegreeStep) -> NeighbourPlan:
    degrees = one.degrees
    if degrees is None:
        return NeighbourPlan(step=one.step, why=one.why)
    if engine.allow is not None and not engine.allow(degrees):
        return NeighbourPlan(step=one.step, why="the recipe or its model excludes it")
    candidate = engine.candidate(degrees, point.kind)
    cap = engine.question.caps.get(point.kind, engine.question.cap)
    found = candidate.fastest(cap)
    if found is not None:
        return NeighbourPlan(step=one.step, degrees=degrees, point=found)
    least = candidate.fastest(float("inf"))
    need = candidate.bound()[1]
    why = "the model cannot be cut so"
    if least is not None:
        why = f"it needs at least {format_bytes(need)} per device; {format_bytes(cap)} are allowed"
        if need <= cap:
            why = f"no cut of it fits into {format_bytes(cap)} per device"
    return NeighbourPlan(step=one.step, degrees=degrees, why=why)
