"""Figures of a plan beside its time and memory, and the plans that are nearest to it.

Invariant: nothing is priced here; all comes from the search and its tables. Sources: R_O, Zou et
al. 2017, Lemma 1; model FLOPs utilisation, Chowdhery et al. 2022 (PaLM), section 4.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.planner.binding import neighbours, reached
from headway.planner.candidate import Point
from headway.planner.degrees import Degrees
from headway.planner.planned import candidate_of
from headway.planner.question import Question
from headway.planner.search import Outcome, Search

NEAREST = 4
"""Alternatives that are shown."""
ALIKE = 1e-3
"""A plan of whose time, memory and devices none differs by more is the same."""


@dataclass(frozen=True, kw_only=True)
class Figures:
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
class Alternative:
    """Another plan, against the chosen one.

    Attributes:
        point: The plan.
        step: What was changed, "tensor 1 -> 2"; "": a plan of the frontier.
        seconds: Its time is by this share higher.
        bytes: Its memory.
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


def figures(engine: Search, point: Point) -> Figures:
    """What else is known of a plan of this search."""
    degrees = point.degrees
    alone = Degrees(tensor=1, data=1, pipeline=1, microbatch=degrees.microbatch, microbatches=1)
    one = candidate_of(engine, alone)
    passes = one.planned((0, len(engine.row))).stages[0].seconds
    compute = passes * degrees.data * degrees.microbatches
    return Figures(
        reached=reached(engine, point),
        overhead=(point.seconds - compute / point.devices) / compute,
        money=money(engine.question, point),
    )


def money(question: Question, point: Point) -> float | None:
    """Of a step; None: no price is known."""
    if question.price is None:
        return None
    return question.cost(point.devices, point.seconds)


def nearest(outcome: Outcome, number: int = NEAREST) -> tuple[Alternative, ...]:
    """The plans of the frontier that are nearest in time; where there is but one, as with a single
    objective, the plans that are one step away in a degree. Fastest first."""
    best = outcome.best
    found = [("", point) for point in outcome.points if not _same(point, best)]
    if len(found) < number:
        most = outcome.question.devices[-1]
        around = neighbours(outcome.search, best, most=most)
        found += [(one.step, one.point) for one in around if one.point is not None]
    found.sort(key=lambda line: abs(math.log(line[1].seconds / best.seconds)))
    kept = sorted(found[:number], key=lambda line: line[1].seconds)
    return tuple(_against(outcome.question, best, step, point) for step, point in kept)


def _same(one: Point, other: Point) -> bool:
    return one.devices == other.devices and all(
        math.isclose(a, b, rel_tol=ALIKE)
        for a, b in ((one.seconds, other.seconds), (one.bytes, other.bytes))
    )


def _against(question: Question, best: Point, step: str, point: Point) -> Alternative:
    cost = point.seconds * point.devices / (best.seconds * best.devices)
    return Alternative(
        point=point,
        step=step,
        seconds=point.seconds / best.seconds - 1,
        bytes=point.bytes / best.bytes - 1,
        devices=point.devices - best.devices,
        money=cost - 1,
        free=any(how != "stage" for _, how in question.force)
        and question.tensor is not None
        and point.degrees.tensor not in question.tensor,
    )
