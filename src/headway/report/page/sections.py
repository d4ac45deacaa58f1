"""Sections of the page that only some runs have: exchange, pipeline, prediction.

Each `..._section` returns None where the run has nothing to show. Exchange: rank 0's figures and a
table of buckets. Pipeline: one traced step beside the same schedule table timed with the mean
durations of that step, so that the difference is waiting that the table does not explain.
Prediction: parts and timeline of a step as the plan file predicts them, above the means of the rank
that computes longest.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.errors import HeadwayError
from headway.plans import Plan, explain
from headway.plans.pipeline import PIPE_AXIS
from headway.plans.prediction import Prediction
from headway.report.history.reader import MESSAGE_LANE, action_of
from headway.report.history.records import LoggedBucket, LoggedExchange, RunHistory
from headway.report.page.facts import ABSENT, Fact, read_plan
from headway.report.pictures.canvas import colour, draw, plain_axes
from headway.report.pictures.pipeline_schedule import schedule_svg
from headway.report.pictures.step_timeline import (
    Shares,
    bar_of_time,
    kinds_legend,
    shares,
    span_bar,
)
from headway.report.pictures.training_curves import exposed_picture
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import COMPUTE_KINDS, Action, ActionKind, PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import ScheduleTiming, time_schedule
from headway.timeline import KINDS, Span, Timeline
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_BUCKETS = 60
"""Most buckets in the table of the page; events.jsonl has all of them."""
_NAMES = 2


TableRow = tuple[str, ...]
"""The cells of a line, in the order in which the template names them."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSection:
    """The section of the page.

    Attributes:
        sentence: The plan's exchange; "" where the plan cannot be read.
        step: Of the table; 0 without one.
        rows: The buckets of that step, in order of their number.
        applies: The optimiser works bucket by bucket.
        exposed: SVG: the exposed seconds of every step; None where the run does not tell.
    """

    sentence: str
    facts: tuple[Fact, ...]
    step: int
    rows: tuple[TableRow, ...]
    omitted: int
    applies: bool
    exposed: str | None


def exchange_section(history: RunHistory, step: int | None = None) -> ExchangeSection | None:
    """The section; None where there was no exchange."""
    facts = tuple(exchange_figures(history))
    traced = _chosen(history.exchanges, step)
    if not facts and traced is None:
        return None
    buckets = () if traced is None else traced.buckets
    return ExchangeSection(
        sentence=_plan_line(read_plan(history), "exchange"),
        facts=facts,
        step=0 if traced is None else traced.step,
        rows=tuple(_bucket_row(bucket) for bucket in buckets[:MOST_BUCKETS]),
        omitted=max(0, len(buckets) - MOST_BUCKETS),
        applies=any(math.isfinite(bucket.applied) for bucket in buckets),
        exposed=exposed_picture(history),
    )


def _plan_line(plan: Plan | None, part: str) -> str:
    """What the plan says of one of its parts; "" where it cannot be read."""
    lines = explain(plan).splitlines() if plan is not None else []
    return next((line for line in lines if line.startswith(f"{part}: ")), "")


def exchange_figures(history: RunHistory) -> list[Fact]:
    """Exposed seconds, hidden fraction and bytes of a step; what is not known is left out."""
    steps = history.settled_steps or history.steps
    exposed = [step.exposed for step in steps if math.isfinite(step.exposed)]
    hidden = [step.overlap for step in steps if math.isfinite(step.overlap)]
    wire = [step.wire_bytes for step in steps if math.isfinite(step.wire_bytes)]
    found = []
    if exposed:
        middle = statistics.median(exposed)
        seconds = [s.seconds for s in steps if math.isfinite(s.exposed) and s.seconds > 0]
        share = 100 * middle / statistics.median(seconds) if seconds else math.nan
        detail = f"{share:.1f} % of a step" if math.isfinite(share) else "of a step"
        found.append(Fact("Exposed communication", format_seconds(middle), f"median, {detail}"))
    if hidden:
        middle = statistics.median(hidden)
        plan = read_plan(history)
        what = "messages and sums" if plan and plan.pipe_degree > 1 else "buckets"
        detail = f"of the time that {what} are on their way"
        found.append(Fact("Hidden", f"{100 * middle:.0f} %", detail))
    if wire:
        latest = _chosen(history.exchanges, None)
        gradients = sum(bucket.bytes for bucket in latest.buckets) if latest else 0
        detail = f"for {format_bytes(gradients)} of gradients" if gradients else ""
        sent = format_bytes(statistics.median(wire))
        found.append(Fact("Sent per step and rank", sent, detail))
    return found


def _chosen(exchanges: Sequence[LoggedExchange], step: int | None) -> LoggedExchange | None:
    """The exchange of a step, else the last one."""
    same = [exchange for exchange in exchanges if exchange.step == step] or exchanges
    return same[-1] if same else None


def _bucket_row(bucket: LoggedBucket) -> TableRow:
    moments = (bucket.ready, bucket.sent, bucket.received, bucket.applied, bucket.needed)
    return (
        str(bucket.bucket),
        _names(bucket.parameters),
        format_bytes(bucket.bytes),
        format_bytes(bucket.wire_bytes),
        *map(_moment, moments),
        format_seconds(bucket.waited) if bucket.waited > 0 else "0",
    )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    rest = len(names) - _NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _moment(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else ABSENT


# What the page says of a pipeline: one traced step as a table by time, beside its prediction.


_MOST_ACTIONS = 4000
"""Of a step that is drawn; larger ones have their figures only."""
_WORK = COMPUTE_KINDS | {ActionKind.STEP}
TimedAction = tuple[Action, float, float]
"""An action with its start and end."""


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """The section of the page.

    Attributes:
        rows: Of each rank of the first pipeline.
        picture: SVG; None where it would be too large.
    """

    sentence: str
    step: int
    facts: tuple[Fact, ...]
    rows: tuple[TableRow, ...]
    picture: str | None


@dataclass(frozen=True)
class PipelineStep:
    """One step, measured or predicted; for `schedule_svg`, in milliseconds.

    Attributes:
        word: "measured" or "predicted".
    """

    schedule: PipelineSchedule
    timing: ScheduleTiming
    word: str

    @property
    def bubble(self) -> float:
        """1 - (time of all F, B, I, W and STEP) / (ranks * makespan)."""
        return statistics.mean(self.bubble_of(rank) for rank in range(self.schedule.ranks))

    def bubble_of(self, rank: int) -> float:
        """The same of one rank."""
        return 1.0 - self.busy(rank) / self.timing.makespan

    def busy(self, rank: int) -> float:
        """Time that a rank works; the prediction counts updates with the backwards before them."""
        timing = self.timing
        rows = zip(timing.order[rank], timing.starts[rank], timing.ends[rank], strict=True)
        return sum(end - start for action, start, end in rows if action.kind in _WORK)

    @property
    def title(self) -> str:
        return f"{self.word}\nstep {self.timing.makespan:.4g} ms, bubble {self.bubble:.1%}"


def pipeline_section(history: RunHistory, step: int | None) -> PipelineSection | None:
    """The section; None where there is no pipeline, or no traced step of one."""
    plan = read_plan(history)
    if plan is None or plan.pipe_degree == 1 or step is None or step not in history.traces:
        return None
    found = compare_with_table(plan, history.traces[step])
    if found is None:
        return None
    measured, predicted = found
    actions = sum(map(len, measured.timing.order))
    return PipelineSection(
        sentence=_plan_line(plan, "pipeline"),
        step=step,
        facts=tuple(_pipeline_facts(history, measured, predicted)),
        rows=tuple(_rank_row(rank, measured, predicted) for rank in range(measured.schedule.ranks)),
        picture=schedule_svg(found, "ms") if actions <= _MOST_ACTIONS else None,
    )


def compare_with_table(plan: Plan, trace: Timeline) -> tuple[PipelineStep, PipelineStep] | None:
    """A traced step, and what the table predicts of it; None where the trace is not whole."""
    ranks = plan.mesh.peers(0, PIPE_AXIS)
    rows = [_compute_actions(trace, rank) for rank in ranks]
    parts = len({a.microbatch for row in rows for a, _, _ in row if a.kind == ActionKind.FORWARD})
    try:
        schedule = plan.pipeline.make(plan.pipe_degree, parts)
    except HeadwayError:  # a ragged batch of a table that was written by hand
        return None
    done = [[a for a, _, _ in row if a.kind in COMPUTE_KINDS] for row in rows]
    # Spans were lost, or the run followed another table.
    if not parts or [*map(list, schedule.compute)] != done:
        return None
    messages = [one for rank in ranks for one in _parsed(trace, rank, MESSAGE_LANE)]
    # The plan names no skip connections; the messages of the step show them.
    skips = {(min(a.stage, a.other), max(a.stage, a.other)) for a, _, _ in messages}
    table = lower(
        replace(schedule, skips=tuple(sorted(skips - set(schedule.edges)))),
        sync=plan.pipeline.sync,
    )
    sums = [one for rank in ranks for one in _parsed(trace, rank, "exchange")]
    costs = _costs(table, rows, _transit(messages), sums)
    timing = time_schedule(table, costs)
    return PipelineStep(schedule, _timing(rows), "measured"), PipelineStep(
        table, timing, "predicted"
    )


def _parsed(trace: Timeline, rank: int, lane: str) -> list[TimedAction]:
    """The actions on a lane, in milliseconds."""
    spans = (span for span in trace.spans if span.rank == rank and span.lane == lane)
    found = [(action_of(span), 1e3 * span.start, 1e3 * span.end) for span in spans]
    return [(action, start, end) for action, start, end in found if action is not None]


def _compute_actions(trace: Timeline, rank: int) -> list[TimedAction]:
    return sorted(_parsed(trace, rank, "compute"), key=lambda done: (done[1], done[2]))


def _timing(rows: Sequence[Sequence[TimedAction]]) -> ScheduleTiming:
    begin = min(start for row in rows for _, start, _ in row)
    end = max(end for row in rows for _, _, end in row)
    return ScheduleTiming(
        order=tuple(tuple(action for action, _, _ in row) for row in rows),
        starts=tuple(tuple(start - begin for _, start, _ in row) for row in rows),
        ends=tuple(tuple(end - begin for _, _, end in row) for row in rows),
        sync_spans=(),
        makespan=end - begin,
    )


def _costs(
    table: PipelineSchedule,
    rows: Sequence[Sequence[TimedAction]],
    transit: float,
    sums: Iterable[TimedAction],
) -> StageCosts:
    """Mean durations by stage; an update counts with the backwards that it follows."""
    times: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for action, start, end in (*(done for row in rows for done in row), *sums):
        times[action.kind, action.stage].append(end - start)

    def mean(kind: ActionKind) -> list[float]:
        of_stages = (times[kind, stage] for stage in range(table.stages))
        return [statistics.mean(found) if found else 0.0 for found in of_stages]

    forward, inputs = mean(ActionKind.FORWARD), mean(ActionKind.INPUT_GRAD)
    # A whole backward counts as a weight gradient: its parts were not measured, only their sum
    # counts.
    weights = [
        w + b for w, b in zip(mean(ActionKind.WEIGHT_GRAD), mean(ActionKind.BACKWARD), strict=True)
    ]
    for stage in range(table.stages):
        steps, backwards = times[ActionKind.STEP, stage], times[ActionKind.BACKWARD, stage]
        if steps:
            # Spread over the backwards, because a STEP takes no time in the timing of a table.
            weights[stage] += sum(steps) / max(1, len(backwards))
        if stage in table.recompute:  # its forward is in what was measured
            inputs[stage] -= forward[stage]
    return StageCosts(
        forward=tuple(forward),
        input_grad=tuple(inputs),
        weight_grad=tuple(weights),
        latency=transit,
        # The latency above is the whole transit, the bytes included.
        message=(0.0,) * table.stages,
        sync=tuple(mean(ActionKind.SYNC)),
    )


def _transit(messages: Iterable[TimedAction]) -> float:
    """Median time of the shorter half of the messages, from SEND to the end of RECV.

    A receiver that comes late, because it computes, makes a message seem slow.
    """
    # The longer half is dominated by receivers that were still computing.
    found = sorted(end - start for action, start, end in messages if action.kind == ActionKind.RECV)
    return statistics.median(found[: (len(found) + 1) // 2]) if found else 0.0


def _pipeline_facts(
    history: RunHistory, measured: PipelineStep, predicted: PipelineStep
) -> list[Fact]:
    step, table = measured.timing.makespan, predicted.timing.makespan
    found = [
        Fact("Bubble", f"{measured.bubble:.1%}", f"predicted {predicted.bubble:.1%}"),
        Fact(
            "Through the pipeline",
            format_seconds(step / 1e3),
            f"predicted {format_seconds(table / 1e3)}, {step / table - 1:+.1%}",
        ),
    ]
    waits = [s.parts["exposed"] / (s.parts["exposed"] + s.parts["compute"])
             for s in shares(history) if s.parts["compute"] > 0]  # fmt: skip
    if waits:
        detail = "for messages and sums, of all steps, mean of the ranks"
        found.append(Fact("Waiting", f"{statistics.mean(waits):.1%}", detail))
    return found


def _rank_row(rank: int, measured: PipelineStep, predicted: PipelineStep) -> TableRow:
    hosted: Mapping[str, list[int]] = defaultdict(list)
    for pipe, stage in measured.schedule.hosted(rank):
        hosted[pipe].append(stage)
    return (
        str(rank),
        "; ".join(f"{pipe}: {', '.join(map(str, s))}" for pipe, s in hosted.items()),
        format_seconds(measured.busy(rank) / 1e3),
        f"{measured.bubble_of(rank):.1%}",
        f"{predicted.bubble_of(rank):.1%}",
    )


# What the page says of a plan's prediction: each part and the timeline of a step, above what
# the run measured.


PREDICTED_PARTS = ("compute", "wait", "update", "other")
"""Other: data, what any step takes beside its kernels, and what lies between a step's parts."""
_COLOURS = {"compute": "forward", "wait": "wait", "update": "update", "other": "other"}
_FORWARD = 1.0 / 3.0
"""Of both passes, in the timeline: B = 2 F of the performance model."""
_MOST_RANKS, _MOST_SPANS = 4, 2000
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class PredictionSection:
    """The section of the page.

    Attributes:
        bars: SVG: a bar per part, predicted above measured.
        timeline: SVG; None where no step was traced.
    """

    facts: tuple[Fact, ...]
    rows: tuple[TableRow, ...]
    bars: str
    timeline: str | None
    step: int | None


def prediction_section(history: RunHistory, step: int | None) -> PredictionSection | None:
    """The section; None where the plan has no prediction, or nothing was measured."""
    plan, found = read_plan(history), shares(history)
    if plan is None or plan.prediction is None or not found:
        return None
    slowest = max(found, key=lambda one: one.parts["compute"])
    expected, measured = predicted_parts(plan.prediction), measured_parts(slowest)
    trace = history.traces.get(step) if step is not None else None
    return PredictionSection(
        facts=tuple(_prediction_facts(history, plan.prediction, slowest)),
        rows=tuple(_part_row(part, expected[part], measured[part]) for part in PREDICTED_PARTS),
        bars=_bars(expected, measured),
        timeline=prediction_timeline(plan, trace) if trace is not None else None,
        step=step,
    )


def predicted_parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by PARTS."""
    known = prediction.compute + prediction.waiting + prediction.update
    rest = prediction.seconds - known
    return {
        "compute": prediction.compute,
        "wait": prediction.waiting,
        "update": prediction.update,
        "other": rest if rest > _ROUNDING * prediction.seconds else 0.0,
    }


def measured_parts(measured: Shares) -> dict[str, float]:
    """The same of a rank's mean step."""
    parts = measured.parts
    return {
        "compute": parts["compute"],
        "wait": parts["exposed"],
        "update": parts["update"],
        "other": parts["data"] + parts["other"],
    }


def _prediction_facts(
    history: RunHistory, prediction: Prediction, slowest: Shares
) -> Iterator[Fact]:
    seconds = [s.seconds for s in history.settled_steps if s.seconds > 0]
    middle = statistics.median(seconds or [slowest.seconds])
    yield Fact(
        "Step, median",
        format_seconds(middle),
        f"predicted {format_seconds(prediction.seconds)}, {prediction.seconds / middle - 1:+.1%}",
    )
    yield Fact("Cluster", prediction.cluster or "not said", f"headway {prediction.version}")


def _part_row(name: str, predicted: float, measured: float) -> TableRow:
    difference = f"{predicted / measured - 1:+.0%}" if measured > 0 and predicted > 0 else ""
    return name, format_seconds(predicted), format_seconds(measured), difference


def _bars(expected: Mapping[str, float], measured: Mapping[str, float]) -> str:
    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        names = []
        for number, part in enumerate(PREDICTED_PARTS):
            rows = ((expected, 3.0 * number, 1.0), (measured, 3.0 * number + 1.0, 0.55))
            for values, height, strength in rows:
                axes.barh(height, values[part], 0.86, color=colour(_COLOURS[part]), alpha=strength)
            names += [(3.0 * number, f"{part}   predicted"), (3.0 * number + 1.0, "measured")]
        axes.set_yticks([height for height, _ in names], [text for _, text in names])
        axes.invert_yaxis()
        bar_of_time(axes, 5)

    return draw("parts", (400, 235), paint, alt="Parts of a step, predicted above measured")


def prediction_timeline(plan: Plan, trace: Timeline) -> str | None:
    """Predicted above measured, for the ranks of the first pipeline or the first few."""
    ranks = (plan.mesh.peers(0, PIPE_AXIS) if plan.pipe_degree > 1 else trace.ranks)[:_MOST_RANKS]
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
                span_bar(axes, span, begin, height[span.rank] + below, 0.86)
        texts = [(height[r], f"rank {r}   predicted") for r in ranks]
        texts += [(height[r] + 1.0, "measured") for r in ranks]
        axes.set_yticks([place for place, _ in texts], [text for _, text in texts])
        axes.invert_yaxis()
        bar_of_time(axes, 9)
        drawn = {span.kind for span in (*expected, *done)}
        kinds_legend(axes, {kind: kind for kind in KINDS if kind in drawn}, len(KINDS))

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
        # Without a pipeline the only stage is all of a micro-batch: their number follows from the
        # compute.
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
    ranks = plan.mesh.peers(0, PIPE_AXIS)
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
        # The exchange is drawn behind the table, by `_ending`.
        sync=nothing,
    )
    timing = time_schedule(table, costs)
    spans = []
    for number, rank in enumerate(ranks):
        for action, start, end in timing.row(number):
            if action.kind in COMPUTE_KINDS:
                kind = "forward" if action.kind == ActionKind.FORWARD else "backward"
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
