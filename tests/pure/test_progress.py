"""pure: what the progress display writes about the events of a run."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from headway.cli.terminal.progress import (
    JsonLinesTail,
    LineView,
    Progress,
    ProgressDisplay,
    describe_event,
)
from support.golden import check_golden

START = {
    "event": "start",
    "attempt": 0,
    "step": 0,
    "steps": 1000,
    "ranks": 2,
    "batch": "64 samples = 2 ranks x 4 micro-batches x 8 samples",
}


def step(number, *, attempt=0, seconds=0.166, loss=2.4113):
    return {
        "event": "step",
        "attempt": attempt,
        "step": number,
        "loss": loss,
        "samples": 64,
        "epoch": 0,
        "position": 0,
        "seconds": seconds,
        "rate": 64 / seconds,
        "lr": 0.001,
        "norm": None,
    }


def rank_step(number, *, seconds=0.166, exposed=0.018, memory=2**30):
    return {
        "event": "rank_step",
        "step": number,
        "seconds": seconds,
        "exposed": exposed,
        "memory_bytes": memory,
    }


VALIDATION = {"event": "validation", "step": 120, "loss": 2.1, "samples": 1000, "seconds": 1.2}
CHECKPOINT = {"event": "checkpoint", "step": 120, "bytes": 12_700_000, "held_seconds": 0.05}
COMPLETE = {"event": "stop", "attempt": 0, "step": 300, "reason": "complete"}
EVENTS = [
    START,
    step(1, seconds=2.5),
    rank_step(118),
    step(118, seconds=0.0532, loss=0.00123456),
    step(119, seconds=0.0532),
    step(120),
    VALIDATION,
    CHECKPOINT,
    {"event": "warning", "attempt": 0, "text": "norm.1 normalises each micro-batch by itself"},
    {"event": "resume", "attempt": 0, "step": 50, "checkpoint": 50},
    {"event": "resume", "attempt": 1, "step": 50, "checkpoint": 50},
    {**START, "attempt": 1, "step": 50},
    {**START, "attempt": 2},
    {"event": "showcase", "step": 300, "text": "def f(x):\n    return x"},
    COMPLETE,
    {"event": "stop", "attempt": 0, "step": 120, "reason": "SIGTERM"},
    {"event": "of the future", "step": 3},
]


def test_every_event_as_text():
    progress, lines = Progress(), []
    for event in EVENTS:
        progress = progress.after(event)
        cause = "rank 1 was killed by SIGKILL" if event.get("attempt") else ""
        lines.append(describe_event(event, progress, cause))
    assert lines[-1] is None
    check_golden("progress.txt", "\n".join(line for line in lines if line is not None))


def progress_of(seconds, waiting):
    progress = Progress().after(START)
    for number in range(1, 31):
        progress = progress.after(step(number, seconds=seconds))
        progress = progress.after(rank_step(number, seconds=seconds, exposed=waiting))
    return progress


def test_a_run_that_has_mostly_waited_is_told_of_the_search():
    stop = {"event": "stop", "reason": "complete", "step": 30}
    assert describe_event(stop, progress_of(0.3, waiting=0.24)) == (
        "complete at step 30\nranks waited for each other in 80% of a step: "
        "`headway train --plan auto` looks for a plan that waits less"
    )
    for quiet in (progress_of(0.3, waiting=0.1), progress_of(0.003, waiting=0.0024)):
        assert describe_event(stop, quiet) == "complete at step 30"


@pytest.mark.parametrize(
    ("step_seconds", "done", "eta"),
    [(0.75, 999, "1s"), (0.166, 120, "2m26s"), (10.0, 1, "2h46m"), (0.5, 1000, "0s")],
)
def test_eta_comes_from_the_recent_steps(step_seconds, done, eta):
    progress = Progress().after(START)
    slow_beginning = [step(n, seconds=100.0) for n in range(1, 5)]
    steady = [step(done, seconds=step_seconds)] * 20
    for event in [*slow_beginning, *steady]:
        progress = progress.after(event)
    assert (describe_event(steady[-1], progress) or "").endswith(f"eta {eta}")


def test_a_fault_on_order_is_told():
    progress = Progress().after(START)
    fault = {"event": "fault", "attempt": 0, "step": 7, "rank": 3, "text": "kill rank 3 at step 7"}
    assert describe_event(fault, progress) == "step 7/1000  fault: kill rank 3 at step 7"


def test_a_restart_forgets_the_speed_of_the_attempt_before():
    progress = Progress().after(START).after(step(7, seconds=100.0))
    assert progress.after({**START, "step": 5}).seconds == ()


def test_tail_waits_for_whole_lines_and_passes_over_damaged_ones(tmp_path: Path):
    file = tmp_path / "events.jsonl"
    tail = JsonLinesTail(file)
    assert tail.read() == []
    file.write_text('{"event": "a"}\n{"eve')
    assert [e["event"] for e in tail.read()] == ["a"]
    with file.open("a") as more:
        more.write('nt": "b"}\n{"torn\n[1]\n{"event": "c"}\n')
    assert [e["event"] for e in tail.read()] == ["b", "c"]
    assert JsonLinesTail(file, skip=True).read() == []
    assert len(JsonLinesTail(file).read()) == 3


def test_lines_are_few_and_the_last_step_is_among_them():
    stream, now = io.StringIO(), [0.0]
    view = LineView(stream, every=2.0, clock=lambda: now[0])
    for number in range(1, 31):
        view.step(f"step {number}", Progress())
        now[0] += 0.25
    view.important("validation")
    view.close()
    shown = stream.getvalue().splitlines()
    assert shown == [*(f"step {n}" for n in (1, 9, 17, 25)), "step 30", "validation"]


def write(directory: Path, events) -> None:
    directory.mkdir(exist_ok=True)
    with (directory / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_the_display_follows_a_run_that_begins_later(tmp_path: Path):
    stream, run = io.StringIO(), tmp_path / "run"
    causes = {1: "rank 1 was killed by SIGKILL"}
    with ProgressDisplay(run, stream=stream, cause=lambda attempt: causes[attempt]):
        write(run, [START, step(1), {"event": "step", "step": "damaged"}])
        deadline = time.monotonic() + 10
        while "loss" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        write(run, [{"event": "resume", "attempt": 1, "step": 50}, COMPLETE])
    shown = stream.getvalue()
    assert "64 samples = 2 ranks" in shown
    assert "rank 1 was killed by SIGKILL; resumed from step 50, attempt 1" in shown
    assert shown.splitlines()[-1] == "complete at step 300"


def test_what_earlier_launches_wrote_is_not_shown_again(tmp_path: Path):
    write(tmp_path, [START, step(1)])
    stream = io.StringIO()
    with ProgressDisplay(tmp_path, stream=stream):
        pass
    assert stream.getvalue() == ""


def test_checkpoints_in_quick_succession_take_one_line(tmp_path: Path):
    stream = io.StringIO()
    with ProgressDisplay(tmp_path, stream=stream):
        write(tmp_path, [START, *(CHECKPOINT | {"step": n} for n in range(9))])
    assert stream.getvalue().count("checkpoint") == 1


def test_the_live_display_shows_the_same(tmp_path: Path):
    stream = io.StringIO()
    with ProgressDisplay(tmp_path, stream=stream, live=True):
        write(tmp_path, [START, step(120), VALIDATION, COMPLETE])
    shown = stream.getvalue()
    assert "validation loss 2.1000" in shown
    assert "complete at step 300" in shown
    lines = [line for line in shown.splitlines() if "step 120/1000  loss" in line]
    assert lines
    assert all(line.rstrip().endswith("eta 2m26s") for line in lines), "one line, whole"


def test_outer_steps_of_a_machine_are_told_with_their_clock():
    row = {"event": "svm_step", "step": 41, "pair": 1, "pairs": 3, "classes": "0, 2",
           "violation": 0.0123, "active": 12345, "support": 987, "values": 3.2e8, "seconds": 2.0,
           "remaining": 65.0}  # fmt: skip
    progress = Progress().after(row)
    assert progress.done == (2.0, 67.0)
    assert describe_event(row, progress) == (
        "step 41  classes 0, 2 (2 of 3)  violation 0.0123  active 12 345  support vectors 987  "
        "160 M kernel values/s  eta 1m05s"
    )
    alone = {**row, "pairs": 1, "seconds": 0.0}
    assert describe_event(alone, progress) == (
        "step 41  violation 0.0123  active 12 345  support vectors 987  eta 1m05s"
    )
    start = {"event": "start", "attempt": 0, "step": 0, "ranks": 2, "text": "9 samples"}
    assert describe_event(start, Progress()) == "9 samples"
    told = describe_event({**start, "attempt": 1}, Progress(), "rank 1 was killed by SIGKILL")
    assert told is not None
    assert told.startswith("rank 1 was killed by SIGKILL; no checkpoint yet")
