"""What a rank writes down while it trains: events of the run (rank 0) and of its own steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from headway.data import RankBatch
from headway.run.directory import RunDirectory
from headway.run.events import EventLog
from headway.run.memory import resident_bytes
from headway.run.record import StepRecord
from headway.run.world import World
from headway.timeline import Span

_ALWAYS_TRACED = 3


class Journal:
    """The event files of one rank.

    Args:
        directory: Of the run; it exists.
        world: Rank 0 also writes the events of the run.
        trace_every: Steps between detailed timelines; 0: only the first steps.
        stack: Closes the files.
    """

    def __init__(
        self, directory: RunDirectory, world: World, *, trace_every: int, stack: ExitStack
    ) -> None:
        attempt = world.place.attempt
        self._world = world
        self._trace_every = trace_every
        self._run: EventLog | None = None
        if world.rank == 0:
            self._run = stack.enter_context(EventLog(directory.events_file, attempt=attempt))
        self._own = stack.enter_context(EventLog(directory.rank_file(world.rank), attempt=attempt))

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the run."""
        return self._run is not None

    def event(self, name: str, **values: Any) -> None:
        """An event of the run; written by rank 0, nothing elsewhere."""
        if self._run is not None:
            self._run.write(name, **values)

    def step(
        self,
        step: int,
        batch: RankBatch,
        record: StepRecord,
        seconds: float,
        waited: float,
        lr: float,
    ) -> None:
        """A step that has been done.

        Args:
            step: Its number, from 1.
            batch: What it consumed.
            record: What the executor noted.
            seconds: Its duration, with the wait for data.
            waited: Seconds of it spent waiting for data.
            lr: Learning rate after it.
        """
        self._own.write(
            "rank_step",
            step=step,
            seconds=seconds,
            compute=record.seconds("forward", "backward"),
            exposed=record.seconds("wait"),
            data=waited,
            update=record.seconds("update"),
            memory_bytes=resident_bytes(self._world.device),
        )
        every = self._trace_every
        if step <= _ALWAYS_TRACED or (every and step % every == 0):
            self._trace(step, record, waited)
        self.event(
            "step",
            step=step,
            loss=record.loss,
            samples=record.samples,
            epoch=batch.start.epoch,
            position=batch.start.position,
            seconds=seconds,
            rate=record.samples / seconds,
            lr=lr,
            norm=record.norm,
        )

    def _trace(self, step: int, record: StepRecord, waited: float) -> None:
        begin = record.spans[0].start
        self.span(step, "data", "data", "read the batch", begin - waited, begin)
        for span in record.spans:
            self._own.write("span", step=step, **asdict(span))

    def span(self, step: int, lane: str, kind: str, label: str, start: float, end: float) -> None:
        """A piece of this rank's work, outside of the step program."""
        span = Span(
            rank=self._world.rank,
            lane=lane,
            kind=kind,
            label=label,
            start=start,
            end=end,
            node=f"step {step}",
        )
        self._own.write("span", step=step, **asdict(span))

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Warnings become events: rank 0's of the run, others' only in the file of their rank."""
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = self._show
            yield

    def _show(self, message: Warning | str, *_: Any, **__: Any) -> None:
        log = self._own if self._run is None else self._run
        log.write("warning", text=str(message))
