"""A pipeline schedule, played: the timeline of a step that was never run.

Invariant: the spans are exactly those of `schedule.timing`, so that the picture, the price and the
table agree. A bubble is a gap; a wait that the table names (RECV, WAIT) is a span of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.schedule import Action, Kind, PipelineSchedule, StageCosts
from headway.schedule.timing import Timing, time_schedule
from headway.timeline import Span, Timeline

KIND_OF: Mapping[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
    Kind.STEP: "update",
    Kind.SYNC: "exchange",
    Kind.SEND: "exchange",
    Kind.POST: "exchange",
    Kind.RECV: "wait",
    Kind.WAIT: "wait",
}
"""What a timeline calls each action; all of them occupy the compute lane."""


def play(schedule: PipelineSchedule, costs: StageCosts) -> Timeline:
    """The timeline of one step; labels are the texts of the actions.

    All-reduces are on the lane "exchange", everything else on "compute". What takes no time (SEND
    without overhead, STEP) has no span.

    Args:
        schedule: With or without messages.
        costs: Of one micro-batch of the table; seconds.

    Raises:
        PlanError: The table cannot be carried out; names where each rank stands.
    """
    return timeline_of(time_schedule(schedule, costs))


def timeline_of(timing: Timing) -> Timeline:
    """The timeline of a timed table."""
    spans = [span for rank in range(len(timing.order)) for span in _compute(timing, rank)]
    spans += [
        Span(
            rank=sync.rank,
            lane="exchange",
            kind="exchange",
            label=str(sync.action),
            start=sync.start,
            end=sync.end,
        )
        for sync in timing.sync_spans
        if sync.end > sync.start
    ]
    return Timeline.of(spans)


def _compute(timing: Timing, rank: int) -> Iterator[Span]:
    """One rank's compute lane."""
    before = 0.0
    rows = zip(timing.order[rank], timing.starts[rank], timing.ends[rank], strict=True)
    for action, start, end in rows:
        begin = before if KIND_OF[action.kind] == "wait" else start
        if end > begin:
            yield _span(action, rank, begin, end)
        before = end


def _span(action: Action, rank: int, start: float, end: float) -> Span:
    kind = KIND_OF[action.kind]
    return Span(rank=rank, lane="compute", kind=kind, label=str(action), start=start, end=end)
