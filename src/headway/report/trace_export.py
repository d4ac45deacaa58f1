"""A run for other viewers: Chrome trace and TensorBoard events.

Perfetto and chrome://tracing silently drop events that lack a field, so a trace is checked before
it is written. TensorBoard events are written with the record writer of the `tensorboard` package,
because torch's SummaryWriter would import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import MissingExtra
from headway.report.history.records import RunHistory
from headway.timeline import Timeline

# Spans and metadata, which is all that `Timeline.to_chrome` writes.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "X": ("name", "cat", "ph", "pid", "tid", "ts", "dur"),
    "M": ("name", "ph", "pid", "tid", "args"),
}


def check_chrome_trace(trace: Mapping[str, Any]) -> list[str]:
    """Every reason why a viewer would drop an event of a Chrome trace; empty for a sound one."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is not a list"]
    return [
        f"traceEvents.{number}: {problem}"
        for number, event in enumerate(events)
        for problem in _problems(event)
    ]


def _problems(event: Any) -> list[str]:
    if not isinstance(event, Mapping):
        return ["is not an object"]
    phase = str(event.get("ph"))
    if phase not in _FIELDS:
        return [f"ph is {phase}; one of {', '.join(_FIELDS)}"]
    found = [f"{field} is missing" for field in _FIELDS[phase] if field not in event]
    found += [
        f"{field} is {event[field]!r}, not a whole number"
        for field in ("pid", "tid")
        if field in event and not isinstance(event[field], int)
    ]
    for field in ("ts", "dur"):
        value = event.get(field, 0)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            found.append(f"{field} is {value!r}, not a time in microseconds")
    return found


def chrome_trace_json(timeline: Timeline) -> str:
    """The text of timeline.json.

    Raises:
        ValueError: The timeline has an event that viewers would drop.
    """
    trace = timeline.to_chrome()
    problems = check_chrome_trace(trace)
    if problems:
        raise ValueError("not a sound Chrome trace: " + "; ".join(problems[:5]))
    # NaN is no JSON: a viewer would refuse the whole file.
    return json.dumps(trace, allow_nan=False) + "\n"


# TensorBoard events of a run: losses, rates, norm, exposed communication, memory per rank.


# The same name for every report of a run, so that the newest one replaces the others' events.
FILE = "events.out.tfevents.0000000000.headway"

Scalar = tuple[str, int, float, float]
"""Tag, step, value, unix seconds."""


def tensorboard_scalars(history: RunHistory) -> Iterator[Scalar]:
    """Every finite value of the history that TensorBoard shows, by tag and step."""
    times = {step.step: step.time for step in history.steps}
    for step in history.steps:
        for tag, value in (
            ("loss/train", step.loss),
            ("rate/samples per second", step.rate),
            ("learning rate", step.lr),
            ("gradient norm", step.norm),
            ("exchange/exposed (seconds)", step.exposed),
            ("exchange/hidden fraction", step.overlap),
        ):
            if math.isfinite(value):
                yield tag, step.step, value, step.time
    for entry in history.validations:
        if math.isfinite(entry.loss):
            yield "loss/validation", entry.step, entry.loss, entry.time
        for name, value in entry.metrics.items():
            if math.isfinite(value):
                yield f"{name}/validation", entry.step, value, entry.time
    for rank, steps in sorted(history.rank_steps.items()):
        for mine in steps:
            if math.isfinite(mine.memory_bytes):
                time = times.get(mine.step, math.nan)
                yield f"memory/rank {rank} (bytes)", mine.step, mine.memory_bytes, time


def write_tensorboard(history: RunHistory, directory: Path) -> Path:
    """Write the events into `directory`, in place of those of an earlier report.

    Returns:
        The directory, for `tensorboard --logdir`.

    Raises:
        MissingExtra: The `tensorboard` package is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise MissingExtra(
            "TensorBoard events were not written",
            why=f"The tensorboard package cannot be imported ({error}).",
            fix="pip install headway[tensorboard]",
        ) from None
    directory.mkdir(parents=True, exist_ok=True)
    began = history.attempts[0].time if history.attempts else math.nan
    partial = directory / "partial"  # TensorBoard reads every file whose name has "tfevents" in it
    with partial.open("wb") as file:
        writer = RecordWriter(file)
        # Every file of events begins with its version.
        head = Event(wall_time=_wall(began), file_version="brain.Event:2")
        writer.write(head.SerializeToString())
        for tag, step, value, time in tensorboard_scalars(history):
            entry = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            event = Event(wall_time=_wall(time), step=step, summary=entry)
            writer.write(event.SerializeToString())
        writer.flush()
    partial.replace(directory / FILE)
    return directory


def _wall(time: float) -> float:
    return time if math.isfinite(time) else 0.0
