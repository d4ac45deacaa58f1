"""The words for a question to which nothing fits: what is missing where, and what would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.cost.network import Network
from headway.errors import NothingFits
from headway.planner.binding import holding
from headway.planner.candidate import Point, Stage
from headway.planner.degrees import describe
from headway.planner.mixed_point import MixedStage
from headway.planner.question import Question
from headway.planner.relaxations import Relaxation, Verdict, look
from headway.planner.search import Search
from headway.units import format_bytes, format_seconds


def refusal(question: Question, wider: Network | None = None) -> NothingFits:
    """The error for a question to which nothing fits: how much is missing where, and each change
    that would do.

    Args:
        question: Asked.
        wider: As for `relaxations.look`.
    """
    engine = Search(question)
    verdict = look(engine, wider)
    problems = list(_missing(engine, verdict))
    lines = [f"  {sentence(one)}" for one in verdict.changes]
    head = (
        "Each of these would do (time of a sample against the fastest plan that memory does not "
        "limit):"
    )
    fix = "\n  ".join([head, *lines]) if lines else "No single change of the question would do."
    return NothingFits("no plan fits", problems=problems, fix=fix)


def sentence(one: Relaxation) -> str:
    """ "tensor 4: 21.3 ms a step, +6.0% a sample; data 2, tensor 4, ..." """
    point = one.point
    most = one.question.machine.network.levels[-1].width
    time = f"time unknown: the cluster's file joins no more than {most:g} devices"
    if one.slower is not None:
        time = f"{format_seconds(point.seconds)} a step, {one.slower:+.1%} a sample"
    return f"{one.change}: {time}; {describe(point.degrees)}{recomputed(point)}"


def recomputed(point: Point) -> str:
    """ ", recompute in 2 stages" where some do."""
    number = sum(stage.recompute for stage in point.stages)
    if not number:
        return ""
    return (
        ", recompute"
        if number == len(point.stages)
        else f", recompute in {number} stage{'s' * (number > 1)}"
    )


def _missing(engine: Search, verdict: Verdict) -> Iterator[str]:
    question, need = verdict.question, verdict.need
    devices = f"{_or(question.devices)} device{'s' if question.devices != (1,) else ''}"
    if need is None:
        yield f"the model cannot be split over {devices} with a batch of {question.batch}"
        return
    point = need.point
    less = "" if need.proven else "about "
    yield (
        f"{devices}: every plan needs {less}{format_bytes(need.bytes)} per device or more, "
        f"{format_bytes(need.bytes - question.cap)} more than the {format_bytes(question.cap)} "
        f"that are allowed; least with {describe(point.degrees)}{recomputed(point)}"
    )
    yield fullest(engine, point)


def fullest(engine: Search, point: Point) -> str:
    """Which ranks hold most, and what."""
    held = holding(engine.question, point)
    stage = point.stages[held.stage]
    first, last = ends(engine, stage)
    each = point.degrees.tensor * point.degrees.data
    ranks = f"rank {held.stage}" if each == 1 else f"stage {held.stage}, {each} ranks,"
    what = {
        "weights": held.weights,
        "gradients and optimiser": held.training,
        "activations": held.activations,
        "what a micro-batch needs for a moment": held.again,
        "temporaries of the update": held.update,
    }
    filled = ", ".join(f"{name} {format_bytes(size)}" for name, size in what.items() if size)
    return f"there {ranks} ({first} to {last}) is the fullest: {filled}"


def ends(engine: Search, stage: Stage | MixedStage) -> tuple[str, str]:
    """The first and the last module of a stage that have a name."""
    operators = engine.question.work.graph.operators
    start, stop = engine.row[stage.start].start, engine.row[stage.stop - 1].stop
    modules = [one.module for one in operators[start:stop] if one.module] or ["the inputs"]
    return modules[0], modules[-1]


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"
