"""The journal of a rank: events of the run (rank 0), and records of the rank's own steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from headway.channel.process_memory import resident_bytes
from headway.comm.lanes.buckets import BucketTiming
from headway.data import RankBatch
from headway.run.step.record import AgreementRecord, StageMessage, StepRecord
from headway.run.training.run_directory import EventLog, RunDirectory
from headway.timeline import Span
from headway.units import format_bytes

if TYPE_CHECKING:
    from headway.run.distributed.world import World

_ALWAYS_TRACED = 3


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
        self._world, self._events, self._stack = world, directory.events_file, stack
        self._trace_every = trace_every
        self._before: tuple[int, float] | None = None
        self._run: EventLog | None = None
        if world.rank == 0:
            self._run = EventLog(directory.events_file, attempt=attempt)
            stack.enter_context(closing(self._run))
        self._own = EventLog(directory.rank_file(world.rank), attempt=attempt)
        stack.enter_context(closing(self._own))

    def lead(self) -> None:
        """Write the events of the run from now on: rank 0 has died."""
        if self._run is None:
            self._run = EventLog(self._events, attempt=self._world.place.attempt)
            self._stack.enter_context(closing(self._run))

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
        """A completed step; `seconds` includes the wait for data."""
        offset = time() - perf_counter()
        # A step that the others have closed without this worker has no spans.
        began = record.spans[0].start if record.spans else time()
        now = step, began - offset
        inside = exposed_inside(
            (span for span in record.spans if span.kind in ("forward", "backward")),
            record.flights,
            offset,
        )
        # Alone, a process waits for nobody: its "exchange" is the price of doing nothing.
        exposed = record.seconds("wait") + inside if self._world.ranks > 1 else 0.0
        # Of workers that do not agree at every step the update waits for the others.
        inert = sum(record.agreement.waits.values()) if record.agreement else 0.0
        exposed += inert
        self._own.write(
            "rank_step",
            step=step,
            seconds=seconds,
            compute=record.seconds("forward", "backward") - inside,
            exposed=exposed,
            data=waited,
            update=record.seconds("update") - inert,
            memory_bytes=resident_bytes(self._world.device),
            **_agreement(batch, record, lr),
        )
        if self._traces(step) and record.spans:
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
            overlap=overlap(record.flights, record.messages),
            wire_bytes=_wire_bytes(record) or None,
        )
        self._trace_flights(now, record.flights, offset)
        self._before = now

    def last(self, step: int, seen: AgreementRecord) -> None:
        """After the last step of a worker: what holders here have still handled for others."""
        self._own.write("rank_end", step=step, staleness=list(seen.staleness))

    def _traces(self, step: int) -> bool:
        every = self._trace_every
        return step <= _ALWAYS_TRACED or bool(every and step % every == 0)

    def _trace(self, step: int, record: StepRecord, waited: float, offset: float) -> None:
        begin = record.spans[0].start
        self.span(step, "data", "data", "read the batch", begin - waited, begin)
        still = [(start + offset, end + offset) for start, end in bucket_waits(record.flights)]
        compute = [span for span in record.spans if span.lane == "compute"]
        others = [span for span in record.spans if span.lane != "compute"]
        rank, node = self._world.rank, f"step {step}"
        messages = [message.span(rank, offset, node) for message in record.messages]
        # The waits have spans of their own (`bucket_spans`), with which these must not overlap.
        self._write_spans(step, [*without_intervals(compute, still), *others, *messages])

    def _trace_flights(
        self, now: tuple[int, float], flights: list[BucketTiming], offset: float
    ) -> None:
        if not flights:
            return
        # With priority the exchange of a step ends in the next one. It is shown with the step that
        # made the gradients if that one is traced, else with the one that waited for them.
        made = now
        if self._before is not None and flights[0].ready < now[1]:
            made = self._before
        step, began = made
        group = step if self._traces(step) else now[0]
        if not self._traces(group):
            return
        spans = bucket_spans(flights, rank=self._world.rank, node=f"step {step}", offset=offset)
        self._write_spans(group, spans)
        self.event(
            "exchange",
            step=step,
            buckets=[bucket_row(flight, began) for flight in flights],
        )

    def _write_spans(self, step: int, spans: Iterable[Span]) -> None:
        for span in spans:
            self._own.write("span", step=step, **asdict(span))

    def span(self, step: int, lane: str, kind: str, label: str, start: float, end: float) -> None:
        """A piece of this rank's work outside of the step program."""
        span = Span(
            rank=self._world.rank,
            lane=lane,
            kind=kind,
            label=label,
            start=start,
            end=end,
            node=f"step {step}",
        )
        self._write_spans(step, [span])

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


def _agreement(batch: RankBatch, record: StepRecord, lr: float) -> dict[str, Any]:
    """What a worker that does not agree with the others at every step has made and seen."""
    seen = record.agreement
    if seen is None:
        return {}
    return {
        "loss": record.loss,
        "lr": lr,
        "samples": sum(len(micro.positions) for micro in batch.micros),
        "waits": {cause: round(seconds, 6) for cause, seconds in seen.waits.items()},
        "staleness": list(seen.staleness),
        "distance": seen.distance,
    }


def _wire_bytes(record: StepRecord) -> int:
    sent = sum(m.num_bytes for m in record.messages if not m.is_received)
    return sent + sum(flight.wire_bytes for flight in record.flights)


_VISIBLE_SECONDS = 50e-6
"""Shorter pieces are neither drawn nor cut out."""


Interval = tuple[float, float]


def bucket_waits(flights: Iterable[BucketTiming]) -> list[Interval]:
    """When the training thread stood still for a bucket, in `perf_counter` seconds."""
    return [(f.needed, f.needed + f.waited) for f in flights if f.needed and f.waited > 0]


def overlap(flights: Sequence[BucketTiming], messages: Sequence[StageMessage] = ()) -> float | None:
    """The hidden fraction of the communication: 1 - exposed / in flight; None without any.

    What comes by message counts from the moment in which it was asked for: when it left is not
    known here.
    """
    received = [message for message in messages if message.is_received]
    under_way = [(f.sent, f.received) for f in flights if f.sent and f.received]
    flying = _total_length(merge_intervals([*under_way, *((m.start, m.end) for m in received)]))
    if flying <= 0:
        return None
    still = [(m.end - m.waited, m.end) for m in received if m.waited > 0]
    exposed = _total_length(merge_intervals([*bucket_waits(flights), *still]))
    return min(1.0, max(0.0, 1.0 - exposed / flying))


def exposed_inside(spans: Iterable[Span], flights: Iterable[BucketTiming], offset: float) -> float:
    """Seconds of waits for buckets within spans of work.

    Args:
        offset: Wall clock minus `perf_counter`.
    """
    still = merge_intervals((start + offset, end + offset) for start, end in bucket_waits(flights))
    return sum(
        max(0.0, min(end, span.end) - max(start, span.start))
        for span in spans
        for start, end in still
    )


def bucket_row(flight: BucketTiming, began: float) -> dict[str, Any]:
    """A bucket for the journal: moments in seconds since the step began, None: not yet or never."""
    moments = ("ready", "sent", "received", "applied", "needed")
    return {
        "bucket": flight.bucket,
        "parameters": list(flight.parameters),
        "bytes": flight.num_bytes,
        "wire_bytes": flight.wire_bytes,
        **{name: getattr(flight, name) - began if getattr(flight, name) else None
           for name in moments},
        "waited": flight.waited,
    }  # fmt: skip


def bucket_spans(
    flights: Iterable[BucketTiming], *, rank: int, node: str, offset: float
) -> list[Span]:
    """A bucket's way: queued, on its way, and the wait of the training thread for it."""
    found = []
    for flight in flights:
        name = flight.name or f"bucket {flight.bucket}"
        pieces = [("exchange", "exchange", flight.sent, flight.received)]
        if flight.ready:
            pieces.append(("exchange", "queued", flight.ready, flight.sent))
        pieces += [("compute", "wait", *wait) for wait in bucket_waits([flight])]
        for lane, kind, start, end in pieces:
            visible = end - start > _VISIBLE_SECONDS or kind == "exchange"
            if not (start and end >= start and visible):
                continue
            found.append(
                Span(
                    rank=rank,
                    lane=lane,
                    kind=kind,
                    label=f"{name}: {format_bytes(flight.num_bytes)}",
                    start=start + offset,
                    end=end + offset,
                    node=node,
                )
            )
    return found


def without_intervals(work: Iterable[Span], still: Iterable[Interval]) -> list[Span]:
    """Spans without the intervals in which nothing was done: each becomes its pieces."""
    holes = [hole for hole in merge_intervals(still) if hole[1] - hole[0] > _VISIBLE_SECONDS]
    found = []
    for span in work:
        start = span.start
        for low, high in holes:
            if high <= start or low >= span.end:
                continue
            if low > start:
                found.append(replace(span, start=start, end=low))
            start = high
        if start < span.end or start == span.start:
            found.append(replace(span, start=start))
    return found


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
