"""The journal of a rank: events of the run (rank 0), and records of the rank's own steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from headway.comm.lanes.buckets import BucketTiming
from headway.data import RankBatch
from headway.run.step import bucket_timing as told
from headway.run.step.memory import resident_bytes
from headway.run.step.record import StepRecord
from headway.run.training.run_directory import EventLog, RunDirectory
from headway.timeline import Span

if TYPE_CHECKING:
    from headway.run.distributed.world import World

_ALWAYS_TRACED = 3


@dataclass(frozen=True, slots=True)
class _Begin:
    """When a step began, in `perf_counter` seconds."""

    step: int
    time: float


class Journal:
    """The event files of one rank.

    Args:
        world: Rank 0 also writes the events of the run.
        trace_every: Steps between detailed timelines; 0: only the first steps.
    """

    def __init__(
        self, directory: RunDirectory, world: World, *, trace_every: int, stack: ExitStack
    ) -> None:
        attempt = world.place.attempt
        self._world = world
        self._trace_every = trace_every
        self._before: _Begin | None = None
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
            seconds: Its duration, with the wait for data.
            waited: Seconds of it spent waiting for data.
            lr: Learning rate after it.
        """
        offset = time() - perf_counter()
        now = _Begin(step, record.spans[0].start - offset)
        inside = told.exposed_inside(
            (span for span in record.spans if span.kind in ("forward", "backward")),
            record.flights,
            offset,
        )
        exposed = record.seconds("wait") + inside
        self._own.write(
            "rank_step",
            step=step,
            seconds=seconds,
            compute=record.seconds("forward", "backward") - inside,
            exposed=exposed,
            data=waited,
            update=record.seconds("update"),
            memory_bytes=resident_bytes(self._world.device),
        )
        if self._traces(step):
            self._trace(step, record, waited, offset)
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
            exposed=exposed if record.flights or record.messages else None,
            overlap=told.overlap(record.flights, record.messages),
            wire_bytes=_wire_bytes(record) or None,
        )
        self._trace_flights(now, record.flights, offset)
        self._before = now

    def _traces(self, step: int) -> bool:
        every = self._trace_every
        return step <= _ALWAYS_TRACED or bool(every and step % every == 0)

    def _trace(self, step: int, record: StepRecord, waited: float, offset: float) -> None:
        begin = record.spans[0].start
        self.span(step, "data", "data", "read the batch", begin - waited, begin)
        still = [(start + offset, end + offset) for start, end in told.waits(record.flights)]
        compute = [span for span in record.spans if span.lane == "compute"]
        others = [span for span in record.spans if span.lane != "compute"]
        rank, node = self._world.rank, f"step {step}"
        messages = [message.span(rank, offset, node) for message in record.messages]
        self._write_spans(step, [*told.cut(compute, still), *others, *messages])

    def _trace_flights(self, now: _Begin, flights: list[BucketTiming], offset: float) -> None:
        """The exchange of this step, or of the one before where it has crossed the border.

        It goes with the step that made the gradients, if that one is traced, and else with the
        one that had to wait for them.
        """
        if not flights:
            return
        crossed = self._before is not None and flights[0].ready < now.time
        home = self._before if crossed and self._before is not None else now
        group = home.step if self._traces(home.step) else now.step
        if not self._traces(group):
            return
        made = told.spans(flights, rank=self._world.rank, node=f"step {home.step}", offset=offset)
        self._write_spans(group, made)
        self.event(
            "exchange",
            step=home.step,
            buckets=[told.row(flight, home.time) for flight in flights],
        )

    def _write_spans(self, step: int, spans: Iterable[Span]) -> None:
        for span in spans:
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


def _wire_bytes(record: StepRecord) -> int:
    """What this rank sent."""
    sent = sum(m.num_bytes for m in record.messages if not m.is_received)
    return sent + sum(flight.wire_bytes for flight in record.flights)
