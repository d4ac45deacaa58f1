"""TensorBoard events of a run: losses, rates, norm, exposed communication, memory per rank.

Written with the record writer of the `tensorboard` package, into one file that is replaced as a
whole; torch's SummaryWriter would cost the import of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from headway.errors import MissingExtra
from headway.report.records import RunHistory

FILE = "events.out.tfevents.0000000000.headway"

Scalar = tuple[str, int, float, float]
"""Tag, step, value, unix seconds."""


def scalars(history: RunHistory) -> Iterator[Scalar]:
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
        head = Event(wall_time=_wall(began), file_version="brain.Event:2")
        writer.write(head.SerializeToString())
        for tag, step, value, time in scalars(history):
            entry = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            event = Event(wall_time=_wall(time), step=step, summary=entry)
            writer.write(event.SerializeToString())
        writer.flush()
    partial.replace(directory / FILE)
    return directory


def _wall(time: float) -> float:
    return time if math.isfinite(time) else 0.0
