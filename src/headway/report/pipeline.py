"""What the page says of a pipeline: one traced step as a table by time, beside its prediction.

Measured: when each action began and ended on each rank of the first pipeline. Predicted: the same
table, played with the mean durations of this very step; so what differs is neither the model nor
the machine, but waiting that the table does not explain. All of it follows from the spans.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.errors import HeadwayError
from headway.plan import Plan, explain
from headway.plan.pipeline import AXIS
from headway.report.facts import Fact, read_plan
from headway.report.lanes import shares
from headway.report.messages import LANE, action_of
from headway.report.records import RunHistory
from headway.report.schedule_picture import picture_svg
from headway.schedule import Action, Kind, PipelineSchedule, StageCosts
from headway.schedule.action import COMPUTE
from headway.schedule.lowering import lower
from headway.schedule.timing import Timing, time_schedule
from headway.timeline import Timeline
from headway.units import format_seconds

_MOST_ACTIONS = 4000
"""Of a step that is drawn; larger ones have their figures only."""
_WORK = COMPUTE | {Kind.STEP}
Done = tuple[Action, float, float]
"""An action with its start and end."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """A line of the table, as texts."""

    rank: str
    stages: str
    computing: str
    measured: str
    predicted: str


@dataclass(frozen=True, kw_only=True)
class PipelineView:
    """The section of the page.

    Attributes:
        sentence: The plan's pipeline.
        step: That was drawn.
        facts: Measured beside predicted.
        rows: Of each rank of the first pipeline.
        picture: SVG; None where it would be too large.
    """

    sentence: str
    step: int
    facts: tuple[Fact, ...]
    rows: tuple[RankRow, ...]
    picture: str | None


@dataclass(frozen=True)
class Step:
    """One step, measured or predicted; for `picture_svg`, in milliseconds.

    Attributes:
        schedule: The table.
        timing: When its actions started and ended.
        word: "measured" or "predicted".
    """

    schedule: PipelineSchedule
    timing: Timing
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


def pipeline_view(history: RunHistory, step: int | None) -> PipelineView | None:
    """The section; None where there is no pipeline, or no traced step of one.

    Args:
        history: What the run wrote down.
        step: A traced step.
    """
    plan = read_plan(history)
    if plan is None or plan.pipe_degree == 1 or step is None or step not in history.traces:
        return None
    found = compare(plan, history.traces[step])
    if found is None:
        return None
    measured, predicted = found
    actions = sum(map(len, measured.timing.order))
    return PipelineView(
        sentence=_sentence(plan),
        step=step,
        facts=tuple(_facts(history, measured, predicted)),
        rows=tuple(_row(rank, measured, predicted) for rank in range(measured.schedule.ranks)),
        picture=picture_svg(found, "ms") if actions <= _MOST_ACTIONS else None,
    )


def compare(plan: Plan, trace: Timeline) -> tuple[Step, Step] | None:
    """A traced step, and what the table predicts of it; None where the trace is not whole.

    Args:
        plan: With a pipeline.
        trace: Spans of all ranks of the first pipeline.
    """
    ranks = plan.mesh.peers(0, AXIS)
    rows = [_done(trace, rank) for rank in ranks]
    parts = len({a.microbatch for row in rows for a, _, _ in row if a.kind == Kind.FORWARD})
    try:
        schedule = plan.pipeline.make(plan.pipe_degree, parts)
    except HeadwayError:  # a ragged batch of a table that was written by hand
        return None
    done = [[a for a, _, _ in row if a.kind in COMPUTE] for row in rows]
    if not parts or [*map(list, schedule.compute)] != done:
        return None
    messages = [one for rank in ranks for one in _parsed(trace, rank, LANE)]
    skips = {(min(a.stage, a.other), max(a.stage, a.other)) for a, _, _ in messages}
    table = lower(
        replace(schedule, skips=tuple(sorted(skips - set(schedule.edges)))),
        sync=plan.pipeline.sync,
    )
    sums = [one for rank in ranks for one in _parsed(trace, rank, "exchange")]
    costs = _costs(table, rows, _transit(messages), sums)
    timing = time_schedule(table, costs)
    return Step(schedule, _timing(rows), "measured"), Step(table, timing, "predicted")


def _parsed(trace: Timeline, rank: int, lane: str) -> list[Done]:
    """The actions on a lane, in milliseconds."""
    spans = (span for span in trace.spans if span.rank == rank and span.lane == lane)
    found = [(action_of(span), 1e3 * span.start, 1e3 * span.end) for span in spans]
    return [(action, start, end) for action, start, end in found if action is not None]


def _done(trace: Timeline, rank: int) -> list[Done]:
    return sorted(_parsed(trace, rank, "compute"), key=lambda done: (done[1], done[2]))


def _timing(rows: Sequence[Sequence[Done]]) -> Timing:
    begin = min(start for row in rows for _, start, _ in row)
    end = max(end for row in rows for _, _, end in row)
    return Timing(
        order=tuple(tuple(action for action, _, _ in row) for row in rows),
        starts=tuple(tuple(start - begin for _, start, _ in row) for row in rows),
        ends=tuple(tuple(end - begin for _, _, end in row) for row in rows),
        sync_spans=(),
        makespan=end - begin,
    )


# ---- the costs of this step --------------------------------------------------------------------


def _costs(
    table: PipelineSchedule, rows: Sequence[Sequence[Done]], transit: float, sums: Iterable[Done]
) -> StageCosts:
    """Mean durations by stage; an update counts with the backwards that it follows."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, start, end in (*(done for row in rows for done in row), *sums):
        times[action.kind, action.stage].append(end - start)

    def mean(kind: Kind) -> list[float]:
        of_stages = (times[kind, stage] for stage in range(table.stages))
        return [statistics.mean(found) if found else 0.0 for found in of_stages]

    forward, inputs = mean(Kind.FORWARD), mean(Kind.INPUT_GRAD)
    weights = [w + b for w, b in zip(mean(Kind.WEIGHT_GRAD), mean(Kind.BACKWARD), strict=True)]
    for stage in range(table.stages):
        steps, backwards = times[Kind.STEP, stage], times[Kind.BACKWARD, stage]
        if steps:
            weights[stage] += sum(steps) / max(1, len(backwards))
        if stage in table.recompute:  # its forward is in what was measured
            inputs[stage] -= forward[stage]
    return StageCosts(
        forward=tuple(forward),
        input_grad=tuple(inputs),
        weight_grad=tuple(weights),
        latency=transit,
        message=(0.0,) * table.stages,
        sync=tuple(mean(Kind.SYNC)),
    )


def _transit(messages: Iterable[Done]) -> float:
    """Median time of the shorter half of the messages, from SEND to the end of RECV.

    A receiver that comes late, because it computes, makes a message seem slow.
    """
    found = sorted(end - start for action, start, end in messages if action.kind == Kind.RECV)
    return statistics.median(found[: (len(found) + 1) // 2]) if found else 0.0


# ---- words -------------------------------------------------------------------------------------


def _sentence(plan: Plan) -> str:
    return next(line for line in explain(plan).splitlines() if line.startswith("pipeline: "))


def _facts(history: RunHistory, measured: Step, predicted: Step) -> list[Fact]:
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


def _row(rank: int, measured: Step, predicted: Step) -> RankRow:
    hosted: Mapping[str, list[int]] = defaultdict(list)
    for pipe, stage in measured.schedule.hosted(rank):
        hosted[pipe].append(stage)
    return RankRow(
        rank=str(rank),
        stages="; ".join(f"{pipe}: {', '.join(map(str, s))}" for pipe, s in hosted.items()),
        computing=format_seconds(measured.busy(rank) / 1e3),
        measured=f"{measured.bubble_of(rank):.1%}",
        predicted=f"{predicted.bubble_of(rank):.1%}",
    )
