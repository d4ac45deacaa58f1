"""pure: what the report says of the gradient exchange, in words, numbers and pictures."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import pytest

from headway.report import read_history, write_report
from headway.report.page.sections import MOST_BUCKETS, exchange_figures, exchange_section
from headway.report.pictures import step_timeline, training_curves
from headway.report.trace_export import check_chrome_trace, tensorboard_scalars
from headway.timeline import Span, Timeline, tracks
from support.golden import check_golden
from support.run_directories import NASTY, write_lines, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", buckets=3)


def bucket(number, ready, sent, received, rank=0, kind="exchange"):
    """The spans of one bucket."""
    label = f"bucket {number}: 4 MiB"
    facts = {"rank": rank, "lane": "exchange", "label": label, "node": "step 2"}
    return [
        Span(kind="queued", start=ready, end=sent, **facts),
        Span(kind="exchange", start=sent, end=received, **facts),
    ]


def compute(kind, start, end, rank=0):
    return Span(rank=rank, lane="compute", kind=kind, label=kind, start=start, end=end)


# -- words and numbers ---------------------------------------------------------------------------


def test_the_section_has_a_row_for_each_bucket_of_the_step_that_is_drawn(run):
    history = read_history(run)
    assert [exchange.step for exchange in history.exchanges] == [1, 20, 60, 100]
    view = exchange_section(history, 60)
    assert (view.step, len(view.rows), view.omitted, view.applies) == (60, 3, 0, False)
    assert view.rows[2] == (
        "2", "blocks.2.weight, blocks.2.bias and 1 more", "4 MiB", "4 MiB",
        "140 ms", "150 ms", "190 ms", "–", "200 ms", "30 ms",
    )  # fmt: skip
    assert view.rows[0][-1] == "0"
    assert exchange_section(history, 61).step == 100


def test_figures_are_medians_without_warm_up(run):
    found = {fact.name: (fact.value, fact.detail) for fact in exchange_figures(read_history(run))}
    assert found == {
        "Exposed communication": ("30 ms", "median, 7.3 % of a step"),
        "Hidden": ("75 %", "of the time that buckets are on their way"),
        "Sent per step and rank": ("12 MiB", "for 12 MiB of gradients"),
    }


def test_the_sentence_is_the_plans(run):
    assert exchange_section(read_history(run)).sentence.startswith("exchange: ")
    (run / "plan.json").write_text("{}")
    assert exchange_section(read_history(run)).sentence == ""


def test_a_run_without_an_exchange_has_no_section(tmp_path):
    alone = write_run(tmp_path / "run", ranks=1)
    assert exchange_section(read_history(alone)) is None
    assert "The exchange" not in write_report(alone).html.read_text()


def test_the_page_shows_sentence_curve_figures_and_table(run):
    text = write_report(run).html.read_text()
    section = text[text.index("<h2>The exchange</h2>") : text.index("<h2>Restarts and")]
    assert "Buckets of step" in section
    assert section.count("<tr>") == 1 + 3
    assert "exchange: gradients are" in section
    assert "Exposed communication over the steps" in section
    assert ">30 ms<" in section
    plain = re.sub(r"<svg.*?</svg>", "(picture)", section, flags=re.DOTALL)
    words = re.sub(r"\s*<[^>]+>\s*", "\n", plain)
    words = re.sub(r"exchange: gradients .*", "(sentence)", words)
    check_golden("report/exchange.txt", re.sub(r"\n+", "\n", words).strip())


def test_names_are_escaped_and_long_tables_end(tmp_path):
    run = write_run(tmp_path / "run", buckets=MOST_BUCKETS + 2)
    path = run / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        for entry in row.get("buckets", []):
            entry["parameters"] = [NASTY]
    write_lines(path, rows)
    text = write_report(run).html.read_text()
    assert "<script>" not in text
    assert "2 more buckets are in events.jsonl" in text
    assert text.count("&lt;script&gt;") >= MOST_BUCKETS


def test_the_exchange_of_superseded_steps_does_not_count(tmp_path):
    row = {"event": "exchange", "attempt": 0, "time": 1.0}
    made = {"bucket": 0, "bytes": 8}
    write_lines(
        tmp_path / "events.jsonl",
        [
            {"event": "step", "step": 1, "loss": 1.0},
            {**row, "step": 1, "buckets": [made]},
            {"event": "step", "step": 2, "loss": 1.0},
            {**row, "step": 2, "buckets": [{**made, "bytes": 9}]},
            {"event": "resume", "attempt": 1, "step": 1},
            {"event": "step", "attempt": 1, "step": 2, "loss": 1.0},
            {**row, "attempt": 1, "step": 2, "buckets": [{**made, "bytes": 10}]},
            {**row, "step": 3, "buckets": "none"},
            {**row, "step": 3, "buckets": [{"bytes": 1}]},
        ],
    )
    history = read_history(tmp_path)
    assert [(e.step, e.buckets[0].bytes) for e in history.exchanges] == [(1, 8), (2, 10)]
    assert history.notes == ("events.jsonl: 2 entries without the needed values",)
    again = {"event": "resume", "attempt": 2, "step": 1}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    assert [exchange.step for exchange in read_history(tmp_path).exchanges] == [1]


def test_tensorboard_has_exposed_seconds_of_every_step(run):
    rows = [row for row in tensorboard_scalars(read_history(run)) if row[0].startswith("exchange/")]
    exposed = [row for row in rows if row[0] == "exchange/exposed (seconds)"]
    assert [row[1] for row in exposed] == list(range(1, 121))
    assert {row[2] for row in exposed} == {0.03}
    assert {row[0] for row in rows} == {"exchange/exposed (seconds)", "exchange/hidden fraction"}


def test_a_run_that_does_not_tell_has_no_curve(tmp_path):
    assert training_curves.exposed_picture(read_history(write_run(tmp_path / "run"))) is None


# -- the timeline --------------------------------------------------------------------------------


def test_overlapping_spans_get_rows_and_a_bucket_stays_in_its_own():
    spans = [
        *bucket(0, 0.0, 0.1, 0.2),
        *bucket(1, 0.05, 0.3, 0.8),  # when it leaves, the first row is free, too
        *bucket(2, 0.5, 0.5, 0.9),
    ]
    ordered = list(Timeline.of(spans).spans)
    rows = {(s.label, s.kind): row for s, row in zip(ordered, tracks(ordered), strict=True)}
    assert rows["bucket 0: 4 MiB", "queued"] == rows["bucket 0: 4 MiB", "exchange"] == 0
    assert rows["bucket 1: 4 MiB", "queued"] == rows["bucket 1: 4 MiB", "exchange"] == 1
    assert rows["bucket 2: 4 MiB", "exchange"] == 0


def test_no_row_of_the_chrome_trace_has_overlapping_pieces():
    spans = [span for n in range(8) for span in bucket(n, 0.01 * n, 0.02 * n, 0.1 + 0.02 * n)]
    trace = Timeline.of([*spans, compute("forward", 0, 1), compute("wait", 0.2, 0.3)]).to_chrome()
    assert check_chrome_trace(trace) == []
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 18
    threads = {event["tid"] for event in events}
    named = {e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads <= named
    for thread in threads - {0}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(after[0] >= before[1] - 1e-6 for before, after in itertools.pairwise(own))
    assert sum(event["tid"] == 0 for event in events) == 2  # a wait within a pass is nested


def test_the_picture_begins_with_the_step_and_goes_on_over_its_border():
    """The exchange of the step before is cut at the left, that of this step ends in the next."""
    before, after = bucket(0, -0.4, -0.3, 0.1), bucket(1, 0.3, 0.35, 0.7)
    gone = bucket(2, -0.6, -0.5, -0.2)
    work = [compute("forward", 0.0, 0.2), compute("backward", 0.2, 0.4)]
    svg = step_timeline.timeline_picture(Timeline.of([*before, *after, *gone, *work]))
    titles = re.findall(r"<title>(.*?)</title>", svg)
    assert "communication: bucket 0: 4 MiB (100 ms)" in titles
    assert "communication: bucket 1: 4 MiB (350 ms)" in titles
    assert "queued for it: bucket 1: 4 MiB (50 ms)" in titles
    assert not [title for title in titles if "bucket 2" in title]


def test_many_buckets_at_the_same_time_stay_a_picture():
    spans = [span for n in range(40) for span in bucket(n, 0.0, 0.01 + 0.001 * n, 0.2)]
    svg = step_timeline.timeline_picture(Timeline.of([compute("forward", 0.0, 0.2), *spans]))
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg).group(1))
    assert height < 62 + 17 * 8 + 7
    assert svg.count("<title>communication") == 40
    assert "queued" not in svg


def test_waits_in_the_next_step_do_not_make_a_step_long():
    def trace(seconds, wait):
        return Timeline.of([compute("forward", 0, seconds), compute("wait", wait, wait + 0.1)])

    traces = {2: trace(1, 9), 3: trace(2, 2), 4: trace(3, 3)}
    assert step_timeline.representative_step(SimpleNamespace(warm_up=(), traces=traces)) == 3


def test_a_step_of_which_only_the_checkpoint_is_known_is_not_the_one_that_is_drawn():
    saved = Span(rank=0, lane="checkpoint", kind="checkpoint", label="", start=0, end=5)
    traces = {3: Timeline.of([compute("forward", 0, 9)]), 6: Timeline.of([saved])}
    assert step_timeline.representative_step(SimpleNamespace(warm_up=(), traces=traces)) == 3
    assert (
        step_timeline.representative_step(
            SimpleNamespace(warm_up=frozenset(), traces={6: traces[6]})
        )
        == 6
    )
