"""The two ends of a message, put together: it was under way from its SEND to the end of its RECV.

A receiver knows since when it had asked for a message, a sender when it handed it over; only the
spans of both say when it was under way. Clocks of several machines may differ a little: a message
never begins after its end.
"""

from __future__ import annotations

from dataclasses import replace

from headway.schedule import Action, Kind
from headway.timeline import Span, Timeline

LANE = "messages"
Ends = tuple[int, str, int, int, int]
"""Sending rank, pipe, sending stage, receiving stage, micro-batch."""


def action_of(span: Span) -> Action | None:
    """Of a label such as "d0.s1.RECV.3<0: 4 KiB from rank 0"; None where it has none."""
    try:
        return Action.parse(span.label.partition(":")[0])
    except ValueError:
        return None


def under_way(trace: Timeline) -> Timeline:
    """One step whose received messages begin where they were sent, not where they were asked for.

    Args:
        trace: Of one step.
    """
    sent: dict[Ends, float] = {}
    for span in trace.spans:
        action = action_of(span) if span.lane == LANE else None
        if action is not None and action.kind == Kind.SEND:
            ends = span.rank, action.pipe, action.stage, action.other, action.microbatch
            sent[ends] = span.start
    return Timeline.of(_from(span, sent) for span in trace.spans) if sent else trace


def _from(span: Span, sent: dict[Ends, float]) -> Span:
    action = action_of(span) if span.lane == LANE else None
    if action is None or action.kind != Kind.RECV:
        return span
    sender = span.label.rpartition("from rank ")[2]
    if not sender.isdecimal():
        return span
    ends = int(sender), action.pipe, action.other, action.stage, action.microbatch
    return replace(span, start=min(span.end, sent.get(ends, span.start)))
