"""What the page says of a plan's prediction: each part and the timeline of a step, above what the
run measured.

Predicted: what the plan's file carries (`plan.prediction`), played with the plan's own table.
Measured: the means of the rank that computes longest, as the slowest decides, and the traced step
of middle duration. Both pictures have one axis of time for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import HeadwayError
from headway.plan import Plan
from headway.plan.pipeline import AXIS
from headway.plan.prediction import Prediction
from headway.report.canvas import colour, draw, legend, plain_axes
from headway.report.facts import Fact, read_plan
from headway.report.lanes import Shares, bar_of_time, shares
from headway.report.records import RunHistory
from headway.schedule import Kind, StageCosts
from headway.schedule.action import COMPUTE
from headway.schedule.lowering import lower
from headway.schedule.timing import time_schedule
from headway.timeline import KINDS, Span, Timeline
from headway.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("compute", "wait", "update", "other")
"""Other: data, what any step takes beside its kernels, and what lies between a step's parts."""
_COLOURS = {"compute": "forward", "wait": "wait", "update": "update", "other": "other"}
_FORWARD = 1.0 / 3.0
"""Of both passes, in the timeline: B = 2 F of the performance model."""
_MOST_RANKS, _MOST_SPANS = 4, 2000
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class PartRow:
    """A line of the table, as texts."""

    name: str
    predicted: str
    measured: str
    difference: str


@dataclass(frozen=True, kw_only=True)
class PredictedView:
    """The section of the page.

    Attributes:
        facts: The step, and where the prediction comes from.
        rows: The parts.
        bars: SVG: a bar per part, predicted above measured.
        timeline: SVG; None where no step was traced.
        step: That the timeline shows.
    """

    facts: tuple[Fact, ...]
    rows: tuple[PartRow, ...]
    bars: str
    timeline: str | None
    step: int | None


def predicted_view(history: RunHistory, step: int | None) -> PredictedView | None:
    """The section; None where the plan has no prediction, or nothing was measured.

    Args:
        history: What the run wrote down.
        step: A traced step.
    """
    plan, found = read_plan(history), shares(history)
    if plan is None or plan.prediction is None or not found:
        return None
    slowest = max(found, key=lambda one: one.parts["compute"])
    expected, measured = of_prediction(plan.prediction), of_shares(slowest)
    trace = history.traces.get(step) if step is not None else None
    return PredictedView(
        facts=tuple(_facts(history, plan.prediction, slowest)),
        rows=tuple(_row(part, expected[part], measured[part]) for part in PARTS),
        bars=_bars(expected, measured),
        timeline=timeline_picture(plan, trace) if trace is not None else None,
        step=step,
    )


def of_prediction(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by PARTS."""
    known = prediction.compute + prediction.waiting + prediction.update
    rest = prediction.seconds - known
    return {
        "compute": prediction.compute,
        "wait": prediction.waiting,
        "update": prediction.update,
        "other": rest if rest > _ROUNDING * prediction.seconds else 0.0,
    }


def of_shares(measured: Shares) -> dict[str, float]:
    """The same of a rank's mean step."""
    parts = measured.parts
    return {
        "compute": parts["compute"],
        "wait": parts["exposed"],
        "update": parts["update"],
        "other": parts["data"] + parts["other"],
    }


def _facts(history: RunHistory, prediction: Prediction, slowest: Shares) -> Iterator[Fact]:
    warm_up = {attempt.step + 1 for attempt in history.attempts}
    seconds = [s.seconds for s in history.steps if s.step not in warm_up and s.seconds > 0]
    middle = statistics.median(seconds or [slowest.seconds])
    yield Fact(
        "Step, median",
        format_seconds(middle),
        f"predicted {format_seconds(prediction.seconds)}, {prediction.seconds / middle - 1:+.1%}",
    )
    yield Fact("Cluster", prediction.cluster or "not said", f"headway {prediction.version}")


def _row(name: str, predicted: float, measured: float) -> PartRow:
    difference = f"{predicted / measured - 1:+.0%}" if measured > 0 and predicted > 0 else ""
    return PartRow(name, format_seconds(predicted), format_seconds(measured), difference)


def _bars(expected: Mapping[str, float], measured: Mapping[str, float]) -> str:
    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        names = []
        for number, part in enumerate(PARTS):
            rows = ((expected, 3.0 * number, 1.0), (measured, 3.0 * number + 1.0, 0.55))
            for values, height, strength in rows:
                axes.barh(height, values[part], 0.86, color=colour(_COLOURS[part]), alpha=strength)
            names += [(3.0 * number, f"{part}   predicted"), (3.0 * number + 1.0, "measured")]
        axes.set_yticks([height for height, _ in names], [text for _, text in names])
        axes.invert_yaxis()
        bar_of_time(axes, 5)

    return draw("parts", (400, 235), paint, alt="Parts of a step, predicted above measured")


# -- the timeline ----------------------------------------------------------------------------------


def timeline_picture(plan: Plan, trace: Timeline) -> str | None:
    """Predicted above measured, for the ranks of the first pipeline or the first few."""
    ranks = (plan.mesh.peers(0, AXIS) if plan.pipe_degree > 1 else trace.ranks)[:_MOST_RANKS]
    expected = [span for span in predicted_spans(plan) if span.rank in ranks]
    done = [span for span in trace.spans if span.lane == "compute" and span.rank in ranks]
    if not expected or not done or len(expected) + len(done) > _MOST_SPANS:
        return None
    began = min(span.start for span in done)
    height = {rank: 2.6 * number for number, rank in enumerate(ranks)}

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        for spans, below, begin in ((expected, 0.0, 0.0), (done, 1.0, began)):
            for span in spans:
                axes.barh(
                    height[span.rank] + below,
                    span.seconds,
                    left=span.start - begin,
                    height=0.86,
                    color=colour(span.kind if span.kind in KINDS else "other"),
                    edgecolor=colour("card"),
                    linewidth=0.4,
                )
        texts = [(height[r], f"rank {r}   predicted") for r in ranks]
        texts += [(height[r] + 1.0, "measured") for r in ranks]
        axes.set_yticks([place for place, _ in texts], [text for _, text in texts])
        axes.invert_yaxis()
        bar_of_time(axes, 9)
        for kind in KINDS:
            if any(span.kind == kind for span in (*expected, *done)):
                axes.barh(0, 0, color=colour(kind), label=kind)
        legend(axes, columns=len(KINDS))

    size = (900, 70 + 44 * len(ranks))
    return draw("predicted", size, paint, alt="One step of each rank, predicted above measured")


def predicted_spans(plan: Plan) -> list[Span]:
    """A step as the plan's prediction has it, from second 0; none where it says too little."""
    prediction = plan.prediction
    if prediction is None or not prediction.stages:
        return []
    if plan.pipe_degree > 1:
        return _of_pipeline(plan, prediction)
    spans = []
    for rank in range(min(plan.ranks, _MOST_RANKS)):
        now, count = 0.0, max(1, round(prediction.compute / prediction.stages[0]))
        for number in range(count):
            for kind, share in (("forward", _FORWARD), ("backward", 1.0 - _FORWARD)):
                end = now + share * prediction.compute / count
                spans.append(_span(rank, kind, f"micro-batch {number}", now, end))
                now = end
        spans += _ending(rank, now, prediction)
    return spans


def _of_pipeline(plan: Plan, prediction: Prediction) -> list[Span]:
    """The plan's table, played with the predicted seconds of its stages."""
    ranks = plan.mesh.peers(0, AXIS)
    try:
        table = plan.pipeline.make(plan.pipe_degree, plan.batch.parts or 1)
    except HeadwayError:
        return []
    if table.stages != len(prediction.stages):
        return []
    third = tuple(_FORWARD * seconds for seconds in prediction.stages)
    table = lower(table, sync=plan.pipeline.sync)
    nothing = (0.0,) * table.stages
    costs = StageCosts(
        forward=third,
        input_grad=third,
        weight_grad=third,
        latency=prediction.message,
        message=nothing,
        sync=nothing,
    )
    timing = time_schedule(table, costs)
    spans = []
    for number, rank in enumerate(ranks):
        rows = zip(timing.order[number], timing.starts[number], timing.ends[number], strict=True)
        for action, start, end in rows:
            if action.kind in COMPUTE:
                kind = "forward" if action.kind == Kind.FORWARD else "backward"
                spans.append(_span(rank, kind, str(action), start, end))
        spans += _ending(rank, timing.makespan, prediction)
    return spans


def _ending(rank: int, now: float, prediction: Prediction) -> Iterator[Span]:
    """The exchange of gradients, then the update."""
    landed = now + prediction.parts.get("exchange", 0.0)
    if landed > now:
        yield _span(rank, "wait", "exchange", now, landed)
    if prediction.update:
        yield _span(rank, "update", "update", landed, landed + prediction.update)


def _span(rank: int, kind: str, label: str, start: float, end: float) -> Span:
    return Span(rank=rank, lane="compute", kind=kind, label=label, start=start, end=end)
