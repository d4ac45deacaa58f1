"""pure: the report: the history that counts, the page, the pictures, TensorBoard events."""

import html.parser
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from headway.errors import MissingExtra, UsageError
from headway.report import read_history, write_report
from headway.report.history.reader import read_json_lines
from headway.report.page import facts
from headway.report.page.machine import machine_section
from headway.report.pictures import step_timeline, training_curves
from headway.report.pictures.canvas import COLOURS, draw, plain_axes
from headway.report.pictures.machine import samples_of_pairs, values_so_far
from headway.report.trace_export import tensorboard_scalars, write_tensorboard
from headway.report.write import render_page
from headway.timeline import Span, Timeline
from support.golden import check_golden
from support.patience import patient
from support.run_directories import NASTY, loss_at, write_lines, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(a run, the files of its report), which tests only read."""
    run = write_run(tmp_path_factory.mktemp("written") / "run")
    return run, write_report(run)


def events(*rows):
    """Rows with the values that every event needs."""
    return [{"attempt": 0, "time": 1000.0 + i, **row} for i, row in enumerate(rows)]


def history_of(tmp_path, *rows):
    write_lines(tmp_path / "events.jsonl", events(*rows))
    return read_history(tmp_path)


def step(number, attempt=0, loss=1.0, **more):
    return {"event": "step", "attempt": attempt, "step": number, "loss": loss, **more}


# -- the history that counts ----------------------------------------------------------------


def test_steps_before_a_restart_are_superseded(run):
    history = read_history(run)
    assert [entry.step for entry in history.steps] == list(range(1, 121))
    assert [entry.loss for entry in history.steps] == [loss_at(n) for n in range(1, 121)]
    assert {entry.attempt for entry in history.steps[:50]} == {0}
    assert {entry.attempt for entry in history.steps[50:]} == {1}
    assert history.superseded == 7
    assert [entry.step for entry in history.validations] == [25, 50, 75, 100]
    assert [entry.step for entry in history.checkpoints] == [50, 100]
    assert history.ranks == 2
    assert history.notes == ()


def test_attempts_say_where_they_began_and_how_they_ended(run):
    history = read_history(run)
    assert [(a.attempt, a.step, a.last, a.ranks, a.reason) for a in history.attempts] == [
        (0, 0, 57, 2, ""),
        (1, 50, 120, 2, "complete"),
    ]
    assert [facts.ending(history, attempt) for attempt in history.attempts] == [
        "WorkerFailed in rank 1",
        "complete",
    ]


def test_a_resume_at_an_older_checkpoint_removes_what_came_after_it(tmp_path):
    history = history_of(
        tmp_path,
        *[step(n) for n in (1, 2, 3)],
        {"event": "checkpoint", "step": 1},
        {"event": "validation", "step": 3, "loss": 9.0},
        {"event": "checkpoint", "step": 3},
        {"event": "showcase", "step": 3, "text": "old"},
        {"event": "resume", "attempt": 1, "step": 1},
    )
    assert [entry.step for entry in history.steps] == [1]
    assert [entry.step for entry in history.checkpoints] == [1]
    assert history.validations == ()
    assert history.showcases == ()


def test_a_step_logged_again_counts_even_if_the_resume_line_was_lost(tmp_path):
    history = history_of(tmp_path, step(1), step(2, loss=5.0), step(3), step(2, attempt=1, loss=4))
    assert [(entry.step, entry.loss) for entry in history.steps] == [(1, 1.0), (2, 4.0)]
    assert [attempt.attempt for attempt in history.attempts] == [0, 1]
    assert history.attempts[1].step == 1


def test_a_run_continued_by_hand_with_the_same_attempt_number(tmp_path):
    history_of(
        tmp_path,
        {"event": "start", "step": 0, "ranks": 1},
        *[step(n) for n in (1, 2, 3)],
        {"event": "resume", "step": 1},
        {"event": "start", "step": 1, "ranks": 1},
        *[step(n, loss=2.0) for n in (2, 3)],
    )
    (tmp_path / "ranks").mkdir()

    def rows(life, steps):
        for number in steps:
            begin = 100.0 * life + number
            span = {"lane": "compute", "kind": "forward", "start": begin, "end": begin + 0.5}
            yield {"event": "rank_step", "step": number, "seconds": life, "time": begin + 0.6}
            yield {"event": "span", "step": number, "rank": 0, **span}

    write_lines(tmp_path / "ranks" / "rank-00000.jsonl", [*rows(1, (1, 2, 3)), *rows(2, (2, 3))])
    history = read_history(tmp_path)
    assert [(s.step, s.seconds) for s in history.rank_steps[0]] == [(1, 1.0), (2, 2.0), (3, 2.0)]
    assert {number: len(trace.spans) for number, trace in history.traces.items()} == {
        1: 1,
        2: 1,
        3: 1,
    }
    assert history.timeline.spans[1].start == 101.0


def test_rows_of_ranks_count_only_in_the_attempt_whose_step_counts(run):
    path = run / "ranks" / "rank-00001.jsonl"
    stale = {"event": "rank_step", "attempt": 0, "step": 60, "seconds": 99.0}
    path.write_text(path.read_text() + json.dumps(stale) + "\n")
    steps = read_history(run).rank_steps[1]
    assert [entry.step for entry in steps] == list(range(1, 121))
    assert [entry.attempt for entry in steps] == [0] * 50 + [1] * 70
    assert max(entry.seconds for entry in steps) == 0.41


def test_spans_share_a_clock_that_begins_with_the_first_span(run):
    history = read_history(run)
    assert list(history.traces) == [1, 20, 60, 100]
    assert min(span.start for span in history.timeline.spans) == 0.0
    assert history.traces[20].ranks == (0, 1)
    assert history.traces[20].seconds(rank=0, kind="wait") == pytest.approx(0.05, abs=1e-6)


def test_a_half_written_last_line_is_silence_and_a_damaged_one_a_note(run):
    path = run / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:20]) + "{not json\n" + "".join(lines[20:-1]) + lines[-1][:30])
    history = read_history(run)
    assert len(history.steps) == 120
    assert history.attempts[-1].reason == ""
    assert history.notes == ("events.jsonl: line 21 is damaged",)


def test_what_follows_a_half_line_of_a_killed_writer_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "step", "attempt": 0, "st{"event": "resume", "step": 4}\n')
    assert read_json_lines(path) == (
        [{"event": "resume", "step": 4}],
        ["events.jsonl: line 1 is damaged"],
    )


def test_entries_without_the_needed_values_are_counted_not_fatal(run):
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "loss": 1}\n{"event": "step", "step": "x"}\n[1]\n{"a": 1}\n')
        file.write('{"event": "an event of a later headway"}\n')
    with (run / "ranks" / "rank-00000.jsonl").open("a") as file:
        file.write('{"event": "span", "step": 3, "rank": 0, "lane": "nowhere", "kind": "x",')
        file.write('"start": 1, "end": 2}\n')
    history = read_history(run)
    assert len(history.steps) == 120
    assert history.notes[1:] == (
        "events.jsonl: 3 entries without the needed values",
        "rank-00000.jsonl: 1 entry without the needed values",
    )
    assert re.fullmatch(r"events.jsonl: line \d+ is damaged", history.notes[0])


def test_the_cause_comes_before_its_consequences(run):
    path = run / "failures" / "attempt-0-rank-00000.json"
    path.write_text(json.dumps({"rank": 0, "step": None, "secondary": True, "time": 1.0}))
    (run / "failures" / "attempt-1-rank-00000.json").write_text("{half")
    history = read_history(run)
    assert [(f.rank, f.step, f.secondary) for f in history.failures] == [
        (1, 57, False),
        (0, -1, True),
    ]
    assert history.notes == ("attempt-1-rank-00000.json: is not a JSON object",)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a run directory") as refused:
        read_history(tmp_path)
    assert "events.jsonl" in refused.value.why
    with pytest.raises(UsageError, match="does not exist"):
        read_history(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        write_report(tmp_path / "file")


# -- the files ------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """Collects what a browser would see: tags that load or run something, headings, text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_well_formed_and_escaped(written):
    text = written[1].html.read_text()
    page = _Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href") or a[1].startswith("on")]
    links = [value for _, name, value in page.attributes if name == "xlink:href"]
    assert all(value.startswith("#") for value in links)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    seen = "".join(page.text)
    # The same hostile text comes from a warning, a failure, a showcase and a span's label.
    assert seen.count("<script>alert('x')</script> & \"quoted\" $x_1$ {{ 7 * 7 }}") >= 4
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_hostile_names_and_reasons_stay_text(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("recipe", "environment"):
        (run / f"{name}.json").write_text(
            json.dumps({"name": NASTY, NASTY: [NASTY], "equal": NASTY})
        )
    proof = {"processes": 2, "equal": False, "first_difference": NASTY, "errors": NASTY}
    (run / "verification.json").write_text(json.dumps([proof, {"equal": NASTY}, NASTY]))
    plan = json.loads((run / "plan.json").read_text()) | {NASTY: NASTY}
    (run / "plan.json").write_text(json.dumps(plan))
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "stop", "step": 120, "reason": NASTY}) + "\n")
        file.write(json.dumps({"event": "showcase", "step": 120, "text": "\ud800\x00"}) + "\n")
    files = write_report(run)
    assert files.notes == ("verification.json: 1 entry without the needed values",)
    page = _Page(files.html.read_text())
    assert "script" not in page.tags
    assert f"from the serial run with 2 processes: {NASTY}" in page.text
    assert page.open == []


def test_the_page_states_the_headline_facts(run):
    proof = {"equal": True, "errors": {"loss": 1e-15, "gradient": 3e-13}, "tolerance": 1e-11}
    proofs = [{"processes": count, **proof} for count in (4, 1)]
    (run / "verification.json").write_text(json.dumps(proofs))
    history = read_history(run)
    found = {fact.name: fact for fact in facts.headline(history)}
    assert found["State"].value == "complete"
    assert found["Training loss"].value == f"{loss_at(120):.4g}"
    assert found["Validation loss"].value == f"{loss_at(100) + 0.15:.4g}"
    assert found["Steps"].value == "120"
    assert found["Steps"].detail == "7 680 samples, epoch 1"
    assert found["Throughput"].value == "156"
    assert found["Throughput"].detail == "19 970 tokens/s; median step 410 ms"
    assert (found["Restarts"].value, found["Restarts"].detail) == ("1", "7 steps done again")
    assert found["Last checkpoint"].value == "step 100"
    assert (found["Verification"].value, found["Verification"].tone) == ("equal", "good")
    assert found["Verification"].detail == "to the serial run, with 1, 4 processes"
    assert facts.batch_equation(history) == "64 samples = 2 ranks x 2 micro-batches x 16 samples"
    text = write_report(run).html.read_text()
    for fact in found.values():
        assert fact.value in text
    assert "64 samples = 2 ranks x 2 micro-batches x 16 samples" in text
    assert ">3e-13<" in text


def test_the_text_of_the_facts_looks_as_it_did(run):
    history = read_history(run)
    lines = [f"{f.name}: {f.value} {f.unit} ({f.detail})" for f in facts.headline(history)]
    lines += [f"{key} = {value}" for key, value in facts.rows(history.plan)]
    lines += [f"{key} = {value}" for key, value in facts.rows(history.environment)]
    check_golden("report/facts.txt", "\n".join(lines))


def test_the_timeline_file_holds_all_traced_spans(written):
    trace = json.loads(written[1].timeline.read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 4 * 2 * 10


def test_writing_twice_gives_the_same_bytes(written):
    run, _ = written
    first = {f: f.read_bytes() for f in _files(run)}
    write_report(run)
    assert {f: f.read_bytes() for f in _files(run)} == first
    names = {path.name for path in first}
    assert {"report.html", "timeline.json"} < names
    assert not [name for name in names if "partial" in name]


def _files(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["recipe.json", "plan.json", "environment.json", "events.jsonl"])
def test_every_file_alone_is_enough(run, tmp_path, name):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / name).write_bytes((run / name).read_bytes())
    files = write_report(alone)
    assert files.notes == ()
    assert _Page(files.html.read_text()).open == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[]", b"{" * 100_000, b"null\n"])
def test_damaged_files_cost_only_themselves(run, content):
    for path in _files(run):
        path.write_bytes(content)
    assert _Page(write_report(run).html.read_text()).open == []


def test_values_that_are_not_finite_are_drawn_around(tmp_path):
    losses = (1.0, 2.0, float("nan"), float("inf"), None)
    rows = [step(n, loss=loss, rate=loss, lr=loss, norm=loss) for n, loss in enumerate(losses, 1)]
    history = history_of(tmp_path, *rows)
    assert math.isnan(history.steps[4].loss)
    headline = {fact.name: fact for fact in facts.headline(history)}
    assert (headline["Training loss"].value, headline["Training loss"].tone) == ("nan", "bad")
    text = write_report(tmp_path).html.read_text()
    assert text.count("<svg") == 4


def test_a_directory_that_cannot_be_written_is_an_error_with_the_reason(run):
    (run / "timeline.json").mkdir()
    with pytest.raises(UsageError, match="cannot be written") as refused:
        write_report(run)
    assert "timeline.json" in refused.value.why


def test_without_tensorboard_the_report_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    files = write_report(run)
    assert files.tensorboard is None
    assert "pip install headway[tensorboard]" in files.notes[0]
    assert "pip install headway[tensorboard]" in files.html.read_text()


def test_writing_events_without_tensorboard_is_an_error_of_its_own(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtra, match="TensorBoard events were not written"):
        write_tensorboard(read_history(run), run / "tensorboard")


def test_tensorboard_reads_back_every_scalar(written):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    run, files = written
    (path,) = files.tensorboard.iterdir()
    assert "tfevents" in path.name
    loaded = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    assert loaded[0].file_version == "brain.Event:2"
    found = [(e.summary.value[0].tag, e.step, e.summary.value[0].simple_value) for e in loaded[1:]]
    expected = [
        (tag, number, value) for tag, number, value, _ in tensorboard_scalars(read_history(run))
    ]
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert [e[2] for e in found] == pytest.approx([e[2] for e in expected], rel=1e-6)
    assert {tag for tag, _, _ in found} == {
        "loss/train",
        "loss/validation",
        "rate/samples per second",
        "learning rate",
        "gradient norm",
        "memory/rank 0 (bytes)",
        "memory/rank 1 (bytes)",
    }


def test_a_report_never_imports_torch(run):
    code = (
        "import sys; from pathlib import Path; from headway.report import write_report; "
        "assert 'matplotlib' not in sys.modules; "
        f"write_report(Path({str(run)!r})); assert 'torch' not in sys.modules; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))


def test_the_command_names_the_files(run, capsys):
    from headway.cli.report import report

    report(run)
    assert f"report         {run / 'report.html'}" in capsys.readouterr().out


# -- the pictures ---------------------------------------------------------------------------


def test_pictures_are_xml_with_colours_of_the_page_and_without_metadata(run):
    history = read_history(run)
    svg = training_curves.loss_picture(history)
    assert svg == training_curves.loss_picture(history)
    ElementTree.fromstring(svg)
    assert "metadata" not in svg
    assert "<style" not in svg
    names = set(re.findall(r"var\(--([a-z0-9-]+), #[0-9a-f]{6}\)", svg))
    assert {"series-0", "series-1", "ink", "muted", "grid"} <= names <= set(COLOURS)
    assert not re.findall(r"(?<!, )#[0-9a-f]{6}", svg)


def test_each_metric_of_two_validations_has_a_picture(run):
    rows = [
        {"event": "validation", "step": 1, "loss": 1.0, "metrics": {"auc <&>": 0.5, "once": 1.0}},
        {"event": "validation", "step": 2, "loss": 1.0, "metrics": {"auc <&>": 0.75}},
    ]
    (name, svg), (other, none) = training_curves.metric_pictures(history_of(run, *rows))
    assert (name, other, none) == ("auc <&>", "once", None)
    ElementTree.fromstring(svg)
    assert "Validation auc &lt;&amp;&gt;" in write_report(run).html.read_text()


def test_references_of_two_pictures_in_one_page_do_not_meet():
    def ids(name):
        def paint(figure):
            plain_axes(figure).plot([1, 2], [1, 2], marker="o")

        return set(re.findall(r' id="([^"]+)"', draw(name, (200, 100), paint, alt="")))

    assert ids("a") == ids("a") != set()
    assert not ids("a") & ids("b")


def test_a_small_picture_looks_as_it_did():
    spans = [
        Span(rank=0, lane="compute", kind="forward", label="a", start=0.0, end=0.1),
        Span(rank=0, lane="compute", kind="wait", label="b", start=0.1, end=0.15),
        Span(rank=1, lane="exchange", kind="exchange", label="<c>", start=0.05, end=0.15),
    ]
    svg = step_timeline.timeline_picture(Timeline.of(spans))
    texts = re.findall(r"<(?:text|title)[^>]*>(.*?)</(?:text|title)>", svg)
    check_golden("report/timeline-texts.txt", "\n".join(texts))


def test_bars_of_the_timeline_are_as_long_as_their_spans():
    spans = [
        Span(rank=0, lane="compute", kind="forward", label="", start=5.0, end=5.3),
        Span(rank=0, lane="compute", kind="backward", label="", start=5.3, end=5.4),
    ]
    svg = step_timeline.timeline_picture(Timeline.of(spans))
    bars = re.findall(r"</title>\s*<path d=\"M ([\d.]+) [\d.]+\s+L ([\d.]+)", svg)
    (left, middle), (again, right) = [(float(a), float(b)) for a, b in bars]
    assert middle == again
    assert (middle - left) / (right - middle) == pytest.approx(3.0, rel=1e-3)


def test_the_representative_step_is_of_middle_length_and_not_the_first():
    def trace(seconds, ranks=2):
        return Timeline.of(
            Span(rank=r, lane="compute", kind="forward", label="", start=0.0, end=seconds)
            for r in range(ranks)
        )

    traces = {1: trace(9), 2: trace(1), 3: trace(5), 4: trace(6, ranks=1), 5: trace(3)}
    first = SimpleNamespace(warm_up={1}, traces=traces)
    assert step_timeline.representative_step(first) == 5
    restarted = SimpleNamespace(warm_up={2, 5}, traces=traces)
    assert step_timeline.representative_step(restarted) == 3


def test_shares_add_up_to_the_step_without_warm_up(run):
    first, second = step_timeline.shares(read_history(run))
    assert (first.rank, second.rank) == (0, 1)
    assert first.steps == 118
    assert sum(second.parts.values()) == pytest.approx(second.seconds)
    assert second.parts["exposed"] == pytest.approx(0.07)
    assert second.parts["other"] == pytest.approx(0.02)


def test_many_ranks_are_drawn_as_a_choice_and_a_range(tmp_path):
    run = write_run(tmp_path / "run", ranks=20, steps=30, restart=None, traced=(2,))
    history = read_history(run)
    assert step_timeline.chosen_ranks(range(20))[0] == 0
    assert step_timeline.chosen_ranks(range(20))[-1] == 19
    assert len(set(step_timeline.chosen_ranks(range(20)))) == step_timeline.MOST_RANKS
    assert "range of 20 ranks" in training_curves.memory_picture(history)
    assert "16 of 20 ranks" in write_report(run).html.read_text()


def test_thinning_keeps_ends_and_extremes_within_the_limit():
    points = [(n, math.sin(n / 50)) for n in range(10_000)]
    points[1234] = (1234, 40.0)
    points[777] = (777, -40.0)
    thinned = training_curves.thin(points)
    assert len(thinned) <= 500
    assert thinned == sorted(thinned)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert {points[1234], points[777]} <= set(thinned)
    assert training_curves.thin(points[:500]) == points[:500]


def test_smoothing_calms_noise_and_keeps_a_straight_line():
    line = [(n, 3.0 - 0.5 * n) for n in range(400)]
    assert [value for _, value in training_curves.smooth(line)] == pytest.approx(
        [v for _, v in line]
    )
    noise = training_curves.smooth([(n, float((-1) ** n)) for n in range(400)])
    assert [number for number, _ in noise] == list(range(400))
    assert max(abs(value) for _, value in noise[10:-10]) < 0.2


def test_a_long_run_has_small_pictures(tmp_path):
    rows = [step(n, loss=loss_at(n), rate=1.0, lr=1 / n, norm=1.0 / n) for n in range(1, 20_001)]
    history = history_of(tmp_path, *rows)
    for picture in (
        training_curves.loss_picture,
        training_curves.norm_picture,
        training_curves.rate_picture,
    ):
        assert len(picture(history)) < 60_000


def test_a_wide_range_of_losses_gets_a_logarithmic_axis(tmp_path):
    narrow = training_curves.loss_picture(
        history_of(tmp_path, *[step(n, loss=20 - n) for n in range(1, 9)])
    )
    wide = training_curves.loss_picture(
        history_of(tmp_path, *[step(n, loss=10.0 ** (2 - n)) for n in range(1, 6)])
    )
    assert ">0.001<" in wide
    assert ">10<" in wide
    assert ">14<" in narrow


# -- a support vector machine ---------------------------------------------------------------------


def machine_events(*, ended=True):
    """Two pairs of classes, the second one begun again after a restart from step 4."""
    rows = [{"event": "start", "attempt": 0, "time": 100.0, "step": 0, "ranks": 2}]

    def step(number, attempt, pair, violation, active, values, seconds):
        rows.append(
            {"event": "svm_step", "attempt": attempt, "time": 100.0 + number, "step": number,
             "pair": pair, "pairs": 2, "classes": f"{pair}, 2", "violation": violation,
             "active": active, "support": 10 * number, "values": values, "seconds": seconds,
             "remaining": 1.0}
        )  # fmt: skip

    step(1, 0, 0, 2.0, 100, 1000, 1.0)
    step(2, 0, 0, 1.0, 40, 1500, 2.0)
    rows.append({"event": "svm_prediction", "attempt": 0, "step": 3, "pays": True, "saved": 9e6,
                 "cost": 2e5, "rows": 4321.0})  # fmt: skip
    step(3, 0, 0, 0.001, 100, 2000, 3.0)
    step(4, 0, 1, 2.0, 50, 300, 1.0)
    step(5, 0, 1, 1.5, 50, 600, 2.0)
    rows.append({"event": "start", "attempt": 1, "time": 106.0, "step": 0, "ranks": 2})
    rows.append({"event": "resume", "attempt": 1, "time": 106.0, "step": 4, "ranks": 2})
    step(5, 1, 1, 1.5, 50, 100, 1.0)
    step(6, 1, 1, 0.0005, 30, 250, 2.0)
    if ended:
        pair = {"event": "svm_pair", "attempt": 1, "step": 6, "samples": 100, "violation": 0.0009,
                "objective": -5.25, "finished": True, "steps": 77, "outer": 3, "values": 2000,
                "reconstructions": 1}  # fmt: skip
        rows += [{**pair, "classes": "0, 2"}, {**pair, "classes": "1, 2"}]
        rows.append({"event": "svm_end", "attempt": 1, "step": 6, "finished": True, "support": 60,
                     "violation": 0.0009, "objective": -10.5, "values": 2250, "accuracy": 0.97,
                     "peak_bytes": 2**29, "bound_bytes": 2**30})  # fmt: skip
        rows.append({"event": "stop", "attempt": 1, "time": 107.0, "step": 6, "reason": "complete"})
    return rows


def machine_run(path, rows):
    path.mkdir()
    lines = [json.dumps(row) for row in rows]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    return read_history(path)


def test_the_history_of_a_machine_counts_each_step_once(tmp_path):
    history = machine_run(tmp_path / "run", machine_events())
    steps = history.machine.steps
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.attempt for step in steps] == [0, 0, 0, 0, 1, 1]
    assert history.superseded == 1
    assert [one.step for one in history.machine.predictions] == [3]
    # Each pair, and each attempt, counts its values from nothing.
    assert values_so_far(steps) == [1000, 1500, 2000, 2300, 2400, 2550]
    assert samples_of_pairs(steps) == {0: 100, 1: 50}
    assert len(history.machine.pairs) == 2


def test_the_section_of_a_machine(tmp_path):
    history = machine_run(tmp_path / "run", machine_events())
    section = machine_section(history)
    assert [heading for heading, _ in section.pictures] == [
        "Violation", "Active and eliminated samples", "Support vectors", "Kernel values",
    ]  # fmt: skip
    facts = {fact.name: fact.value for fact in section.facts}
    assert facts["Machine"] == "finished"
    assert facts["Dual objective"] == "-10.5"
    assert facts["Test"] == "97.000%"
    assert facts["Memory"] == "512 MiB"
    # (0 + 0.6 + 0 + 0 + 0 + 0.4) / 6
    assert facts["Eliminated"] == "16.7%"
    assert section.pairs[0] == ("0, 2", "100", "0.0009", "-5.25", "3", "77", "2,000", "1")
    assert section.predictions == (("3", "4,321", "9,000,000", "200,000", "pays"),)
    page = render_page(history)
    assert "Whether elimination pays" in page
    assert "Outer steps" in page
    assert "No step is logged yet" not in page


def test_a_machine_that_is_still_trained_has_a_page(tmp_path):
    history = machine_run(tmp_path / "run", machine_events(ended=False))
    section = machine_section(history)
    facts = {fact.name: fact.value for fact in section.facts}
    assert facts["Violation"] == "0.0005"
    assert "Machine" not in facts
    assert section.pairs == ()
    assert render_page(history).count("<svg") == 4


def test_other_runs_have_no_machine(tmp_path):
    history = machine_run(tmp_path / "run", machine_events()[:1])
    assert machine_section(history) is None
    assert "The support vector machine" not in render_page(history)
