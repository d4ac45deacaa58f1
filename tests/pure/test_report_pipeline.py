"""pure: the pipeline on the page: measured beside predicted, the picture, messages under way."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from headway.plans import PipelinePlan, pipelined
from headway.report import read_history, write_report
from headway.report.history.reader import align_message_starts
from headway.report.page.sections import compare_with_table, pipeline_section
from headway.schedule.drawing import TIMELINE_KINDS
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import COMPUTE_KINDS, ActionKind
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import time_schedule
from headway.timeline import Span, Timeline
from support.golden import check_golden
from support.run_directories import write_lines, write_run

RANKS, LATENCY, SYNC = 4, 0.002, 0.004
FORWARD, BACKWARD = (0.010, 0.012, 0.008, 0.010), (0.020, 0.022, 0.018, 0.024)
PLANS = {
    "1f1b": PipelinePlan(microbatches=6),
    "zbv": PipelinePlan(schedule="zbv", microbatches=8),
    "chimera": PipelinePlan(schedule="chimera", microbatches=4),
    "pipedream": PipelinePlan(schedule="pipedream", microbatches=5),
    "recompute": PipelinePlan(schedule="chimera-doubling", microbatches=8),
}


def plan_of(name, copies=1):
    return pipelined(48, processes=RANKS * copies, stages=RANKS, pipeline=PLANS[name])


def costs_of(table):
    each = RANKS / table.stages
    forward = [each * t for t in FORWARD] * (table.stages // RANKS)
    half = [each * t / 2 for t in BACKWARD] * (table.stages // RANKS)
    return StageCosts.of(
        table.stages, forward=forward, input_grad=half, weight_grad=half, latency=LATENCY, sync=SYNC
    )


def traced(plan, *, first=0):
    """The spans that a run by these costs leaves.

    Args:
        plan: Of one pipeline, or more.
        first: Global rank of the pipeline's first.
    """
    table = lower(plan.pipeline.make(RANKS, plan.batch.parts), sync=plan.pipeline.sync)
    timing = time_schedule(table, costs_of(table))
    sums = {(sync.rank, sync.action): sync for sync in timing.sync_spans}
    for rank, row in enumerate(timing.order):
        before = 0.0
        for action, start, end in zip(row, timing.starts[rank], timing.ends[rank], strict=True):
            begin = before if TIMELINE_KINDS[action.kind] == "wait" else start
            here = {"rank": first + rank, "label": str(action), "start": begin, "end": end}
            if action.kind in COMPUTE_KINDS or TIMELINE_KINDS[action.kind] == "wait":
                yield Span(lane="compute", kind=TIMELINE_KINDS[action.kind], **here)
            if action.kind in (ActionKind.SEND, ActionKind.RECV):
                peer = first + table.pipe_of[action.pipe].placement[action.other]
                word = "to" if action.kind == ActionKind.SEND else "from"
                asked = begin if action.kind == ActionKind.SEND else max(0.0, begin - 0.05)
                label = f"{action}: 4 KiB {word} rank {peer}"
                yield Span(lane="messages", kind="exchange",
                           **{**here, "label": label, "start": asked})  # fmt: skip
            if (rank, action) in sums:
                sync = sums[rank, action]
                yield Span(rank=first + rank, lane="exchange", kind="exchange",
                           label=f"{action}: 1 MiB", start=sync.start, end=sync.end)  # fmt: skip
            before = end
        last = max(timing.ends[rank])
        yield Span(rank=first + rank, lane="compute", kind="wait", label="messages leave",
                   start=last, end=last)  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_what_a_table_explains_is_predicted_to_rounding(name):
    plan = plan_of(name)
    found = compare_with_table(plan, align_message_starts(Timeline.of(traced(plan))))
    assert found is not None
    measured, predicted = found
    ends = [max(row) for row in predicted.timing.ends]
    assert measured.timing.makespan == pytest.approx(max(ends), rel=1e-9)
    busy = [predicted.timing.busy(rank) for rank in range(RANKS)]
    assert [measured.timing.busy(rank) for rank in range(RANKS)] == pytest.approx(busy)
    if name != "chimera":  # whose last all-reduce the prediction counts in the step
        assert measured.bubble == pytest.approx(predicted.bubble)


def test_waiting_that_the_table_does_not_explain_shows():
    plan = plan_of("1f1b")

    def pause(span):
        """All ranks stand still for half a second."""
        if span.end <= 0.15:
            return span
        begun = span.kind == "wait" and span.start <= 0.15
        return replace(span, start=span.start + 0.5 * (not begun), end=span.end + 0.5)

    spans = [pause(span) for span in traced(plan)]
    measured, predicted = compare_with_table(plan, align_message_starts(Timeline.of(spans)))
    assert measured.timing.makespan == pytest.approx(predicted.timing.makespan + 500)
    assert measured.bubble > predicted.bubble + 0.2


def test_a_step_that_is_not_whole_is_not_drawn():
    plan = plan_of("1f1b")
    spans = [s for s in traced(plan) if s.label != "d0.s2.B.3"]
    assert compare_with_table(plan, Timeline.of(spans)) is None
    assert compare_with_table(plan, Timeline.of([])) is None
    changed = [replace(s, label="d0.s2.F.1" if s.label == "d0.s2.F.2" else s.label) for s in spans]
    assert compare_with_table(plan, Timeline.of(changed)) is None


def test_messages_are_under_way_from_their_sending():
    plan = plan_of("1f1b", copies=2)
    both = [*traced(plan), *(replace(s, start=s.start + 1, end=s.end + 1)
                             for s in traced(plan, first=RANKS))]  # fmt: skip
    found = align_message_starts(Timeline.of(both))
    received = [s for s in found.spans if s.lane == "messages" and ".RECV." in s.label]
    assert len(received) == 2 * 2 * 3 * 6
    assert min(s.seconds for s in received) == pytest.approx(LATENCY)
    assert {s.rank for s in received} == set(range(2 * RANKS))


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "run", ranks=RANKS, steps=4, restart=None, traced=())
    plan = plan_of("1f1b")
    plan.save(path / "plan.json")
    for rank in range(RANKS):
        spans = [span for span in traced(plan) if span.rank == rank]
        rows = [
            {
                "event": "rank_step",
                "attempt": 0,
                "step": n,
                "seconds": 0.3,
                "time": float(n),
                "compute": 0.2,
                "exposed": 0.05,
                "data": 0.0,
                "update": 0.0,
            }
            for n in (1, 2)
        ]
        rows += [{"event": "span", "attempt": 0, "step": 2, "node": "step 2", "rank": rank,
                  "lane": s.lane, "kind": s.kind, "label": s.label, "start": s.start, "end": s.end}
                 for s in spans]  # fmt: skip
        write_lines(path / "ranks" / f"rank-{rank:05d}.jsonl", rows)
    return path


def test_the_section_says_and_draws_it(run):
    view = pipeline_section(read_history(run), 2)
    assert view is not None
    assert view.facts[-1].value == "20.0%"  # 0.05 of 0.25 s
    assert view.picture is not None
    numbers = re.findall(r"<text[^>]*>(\d+)</text>", view.picture)
    assert numbers.count("3") >= 2 * 2 * RANKS  # both passes of micro-batch 3, both blocks
    facts = [f"{fact.name}: {fact.value} {fact.detail}" for fact in view.facts]
    rows = [" | ".join(row) for row in view.rows]
    check_golden("report/pipeline.txt", "\n".join([view.sentence, *facts, *rows]) + "\n")


def test_the_page_and_the_trace_have_it(run):
    files = write_report(run)
    page = files.html.read_text()
    assert "<h2>The pipeline</h2>" in page
    assert "Step 2, measured and predicted" in page
    events = json.loads(files.timeline.read_text())["traceEvents"]
    names = [e["name"] for e in events if e["ph"] == "X"]
    assert "d0.s1.RECV.0&lt;0: 4 KiB from rank 0" not in names
    assert "d0.s1.RECV.0<0: 4 KiB from rank 0" in names


def test_a_run_without_a_pipeline_has_no_section(tmp_path):
    history = read_history(write_run(tmp_path / "plain"))
    assert pipeline_section(history, 20) is None
