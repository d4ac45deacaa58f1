"""single: flights become figures, spans and rows of the journal; each second is counted once."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from headway.comm.lanes.buckets import BucketTiming
from headway.data import Cursor
from headway.report import read_history
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.step.record import StepRecord
from headway.run.training.journal import (
    Journal,
    bucket_row,
    bucket_spans,
    exposed_inside,
    overlap,
    without_intervals,
)
from headway.run.training.run_directory import RunDirectory
from headway.timeline import Span
from support.commands import events

OFFSET = 1000.0


def flight(number=0, ready=1.0, sent=1.1, received=1.5, needed=0.0, waited=0.0, applied=0.0):
    return BucketTiming(
        bucket=number, parameters=("a.weight", "a.bias"), num_bytes=2**20, wire_bytes=2**19,
        ready=ready, sent=sent, received=received, needed=needed, waited=waited, applied=applied,
    )  # fmt: skip


def work(kind, start, end):
    return Span(
        rank=0, lane="compute", kind=kind, label=kind, start=start + OFFSET, end=end + OFFSET
    )


def test_overlap_is_the_hidden_part_of_the_time_in_flight():
    flights = [flight(0, sent=1.0, received=2.0), flight(1, sent=1.5, received=3.0)]
    assert overlap(flights) == 1.0
    flights[1].needed, flights[1].waited = 2.5, 0.5
    assert overlap(flights) == 0.75
    assert overlap([]) is None
    assert overlap([flight(sent=0.0, received=0.0)]) is None


def test_waits_are_cut_out_of_the_work_that_they_interrupt():
    spans = [work("forward", 0.0, 1.0), work("backward", 1.0, 2.0), work("update", 2.0, 2.0)]
    still = [(0.4 + OFFSET, 0.5 + OFFSET), (0.9 + OFFSET, 1.2 + OFFSET)]
    pieces = without_intervals(spans, still)
    shape = [(s.kind, round(s.start - OFFSET, 6), round(s.end - OFFSET, 6)) for s in pieces]
    assert shape == [
        ("forward", 0.0, 0.4),
        ("forward", 0.5, 0.9),
        ("backward", 1.2, 2.0),
        ("update", 2.0, 2.0),
    ]
    assert without_intervals(spans, []) == spans
    # A wait that covers a span leaves nothing of it.
    assert without_intervals([work("wait", 0.1, 0.2)], [(OFFSET, OFFSET + 1)]) == []


def test_exposed_seconds_inside_work_are_counted_once():
    flights = [flight(0, needed=0.2, waited=0.2), flight(1, needed=0.3, waited=0.2)]
    assert exposed_inside([work("forward", 0.0, 0.45)], flights, OFFSET) == pytest.approx(0.25)


def test_a_bucket_is_queued_then_on_its_way_then_waited_for():
    spans = bucket_spans(
        [flight(3, 1.0, 1.1, 1.5, needed=1.3, waited=0.2)], rank=1, node="step 4", offset=OFFSET
    )
    shape = [(s.lane, s.kind, round(s.start - OFFSET, 6), round(s.end - OFFSET, 6)) for s in spans]
    assert shape == [
        ("exchange", "exchange", 1.1, 1.5),
        ("exchange", "queued", 1.0, 1.1),
        ("compute", "wait", 1.3, 1.5),
    ]
    assert {(s.label, s.rank, s.node) for s in spans} == {("bucket 3: 1 MiB", 1, "step 4")}
    assert bucket_spans([flight(sent=0.0, received=0.0)], rank=0, node="", offset=0.0) == []


def test_moments_of_a_row_count_from_the_beginning_of_the_step():
    row = bucket_row(flight(ready=2.0, sent=2.25, received=2.5), began=1.5)
    assert (row["ready"], row["sent"], row["received"]) == (0.5, 0.75, 1.0)
    assert (row["applied"], row["needed"], row["waited"]) == (None, None, 0.0)
    assert (row["bytes"], row["wire_bytes"]) == (2**20, 2**19)
    assert row["parameters"] == ["a.weight", "a.bias"]


# -- the journal ---------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """A journal whose wall clock is `perf_counter` plus OFFSET."""
    monkeypatch.setattr("headway.run.training.journal.perf_counter", lambda: 50.0)
    monkeypatch.setattr("headway.run.training.journal.time", lambda: 50.0 + OFFSET)
    (tmp_path / "ranks").mkdir()
    with ExitStack() as stack:
        directory = RunDirectory(tmp_path)
        yield Journal(directory, World(place=LaunchEnv(ranks=2), device="cpu"), trace_every=0,
                      stack=stack)  # fmt: skip


def step(journal, number, begin, *flights, wait=0.0):
    """A step of one second: forward, backward, and a wait in the end."""
    record = StepRecord(loss=1.0, samples=4, flights=list(flights))
    record.spans = [
        work("forward", begin, begin + 0.4),
        work("backward", begin + 0.4, begin + 0.8),
        work("wait", begin + 0.8, begin + 0.8 + wait),
        work("update", begin + 0.8 + wait, begin + 1.0),
    ]
    batch = SimpleNamespace(start=Cursor(seed=0))
    journal.step(number, batch, record, seconds=1.0, waited=0.0, lr=0.1)


def test_the_exchange_of_a_step_is_told_with_it(journal, tmp_path, monkeypatch):
    monkeypatch.setattr("headway.run.training.journal.resident_bytes", lambda device: 0)
    step(journal, 1, 10.0, flight(0, 10.5, 10.6, 10.9, needed=10.8, waited=0.1), wait=0.1)
    (told_step,) = events(tmp_path, "step")
    assert told_step["exposed"] == pytest.approx(0.1)
    assert told_step["overlap"] == pytest.approx(1 - 0.1 / 0.3)
    assert told_step["wire_bytes"] == 2**19
    (exchange,) = events(tmp_path, "exchange")
    (bucket,) = exchange["buckets"]
    assert (exchange["step"], bucket["ready"], bucket["waited"]) == (1, pytest.approx(0.5), 0.1)
    history = read_history(tmp_path)
    trace = history.traces[1]
    assert trace.seconds(rank=0, kind="wait") == pytest.approx(0.1)
    assert {s.label for s in trace.spans if s.kind == "wait"} == {"bucket 0: 1 MiB"}
    assert history.rank_steps[0][0].exposed == pytest.approx(0.1)


def test_an_exchange_across_the_border_goes_with_the_step_that_made_it(
    journal, tmp_path, monkeypatch
):
    monkeypatch.setattr("headway.run.training.journal.resident_bytes", lambda device: 0)
    step(journal, 1, 10.0)
    # Made in step 1, used in the forward pass of step 2, which waited 0.1 s for it.
    crossing = flight(0, 10.7, 10.75, 11.3, needed=11.2, waited=0.1, applied=11.29)
    step(journal, 2, 11.0, crossing)
    first, second = events(tmp_path, "step")
    assert (first["exposed"], first["overlap"], first["wire_bytes"]) == (None, None, None)
    assert second["exposed"] == pytest.approx(0.1)
    (exchange,) = events(tmp_path, "exchange")
    assert exchange["step"] == 1
    assert exchange["buckets"][0]["applied"] == pytest.approx(1.29)
    history = read_history(tmp_path)
    (entry,) = [s for s in history.rank_steps[0] if s.step == 2]
    assert entry.compute == pytest.approx(0.7)
    assert entry.compute + entry.exposed + entry.update == pytest.approx(1.0)
    made = [s for s in history.traces[1].spans if s.lane == "exchange"]
    assert [s.kind for s in made] == ["queued", "exchange"]
    assert history.traces[2].seconds(rank=0, kind="forward") == pytest.approx(0.3)


def test_an_untraced_step_hands_its_exchange_to_the_traced_one_after_it(
    journal, tmp_path, monkeypatch
):
    monkeypatch.setattr("headway.run.training.journal.resident_bytes", lambda device: 0)
    journal._trace_every = 5
    step(journal, 4, 10.0)
    step(journal, 5, 11.0, flight(0, 10.7, 10.75, 11.3))
    step(journal, 6, 12.0, flight(0, 11.7, 11.75, 12.3))
    step(journal, 7, 13.0, flight(0, 12.7, 12.75, 13.3))
    assert [event["step"] for event in events(tmp_path, "exchange")] == [4, 5]
    history = read_history(tmp_path)
    assert list(history.traces) == [5]
    assert [s.node for s in history.traces[5].spans if s.kind == "exchange"] == [
        "step 4",
        "step 5",
    ]
