"""pure: spans in order, their sums, and the Chrome trace form."""

from __future__ import annotations

import json

from headway.timeline import LANES, Span, Timeline


def span(rank, start, end, lane="compute", kind="forward", label="", node=""):
    return Span(rank=rank, lane=lane, kind=kind, label=label, start=start, end=end, node=node)


WORK = Timeline.of(
    [
        span(1, 0.5, 1.0, kind="backward"),
        span(0, 1.0, 1.5, kind="wait"),
        span(0, 0.0, 1.0, label="micro-batch 0", node="step 1"),
        span(0, 0.75, 1.25, lane="exchange", kind="exchange"),
    ]
)


def test_spans_are_ordered_by_rank_and_start():
    assert [(s.rank, s.start) for s in WORK.spans] == [(0, 0.0), (0, 0.75), (0, 1.0), (1, 0.5)]
    assert WORK.ranks == (0, 1)


def test_an_outer_span_comes_before_the_inner_one_that_starts_with_it():
    outer, inner = span(0, 0.0, 2.0), span(0, 0.0, 1.0)
    assert Timeline.of([inner, outer]).spans == (outer, inner)


def test_seconds_are_summed_by_rank_lane_and_kind():
    assert WORK.seconds(rank=0) == 1.5
    assert WORK.seconds(rank=0, kind="wait") == 0.5
    assert WORK.seconds(rank=0, lane="exchange") == 0.5
    assert WORK.seconds(rank=1) == 0.5
    assert WORK.seconds(rank=2) == 0


def test_chrome_trace_has_a_process_per_rank_a_thread_per_lane_and_microseconds():
    trace = json.loads(json.dumps(WORK.to_chrome()))
    named = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert [e["args"]["name"] for e in named if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    lanes = [e["args"]["name"] for e in named if e["name"] == "thread_name" and e["pid"] == 1]
    assert lanes == list(LANES)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 4
    first, exchange = events[0], events[1]
    assert (first["pid"], first["ts"], first["dur"]) == (0, 0.0, 1e6)
    assert (first["name"], first["args"]) == ("micro-batch 0", {"node": "step 1"})
    assert (exchange["name"], exchange["tid"]) == ("exchange", LANES.index("exchange"))
