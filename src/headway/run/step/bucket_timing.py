"""Timing of a step's buckets: overlap, journal rows, spans of the timeline.

Waits for buckets are cut out of the work that they interrupt, so that every second of the training
thread counts once: a forward pass that waits for a bucket is exposed communication, not
computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from headway.comm.lanes.buckets import BucketTiming
from headway.run.step.record import StageMessage
from headway.timeline import Span
from headway.units import format_bytes

_VISIBLE_SECONDS = 50e-6
"""Shorter pieces are neither drawn nor cut out."""

Interval = tuple[float, float]


def waits(flights: Iterable[BucketTiming]) -> list[Interval]:
    """When the training thread stood still for a bucket, in `perf_counter` seconds."""
    return [(f.needed, f.needed + f.waited) for f in flights if f.needed and f.waited > 0]


def seconds_in_flight(flights: Iterable[BucketTiming]) -> float:
    """Seconds in which at least one bucket was on its way."""
    return _length(union((f.sent, f.received) for f in flights if f.sent and f.received))


def overlap(flights: Sequence[BucketTiming], messages: Sequence[StageMessage] = ()) -> float | None:
    """The hidden fraction of the communication: 1 - exposed / in flight; None without any.

    What comes by message counts from the moment in which it was asked for: when it left is not
    known here.
    """
    received = [message for message in messages if message.is_received]
    under_way = [(f.sent, f.received) for f in flights if f.sent and f.received]
    flying = _length(union([*under_way, *((m.start, m.end) for m in received)]))
    if flying <= 0:
        return None
    still = [(m.end - m.waited, m.end) for m in received if m.waited > 0]
    exposed = _length(union([*waits(flights), *still]))
    return min(1.0, max(0.0, 1.0 - exposed / flying))


def exposed_inside(spans: Iterable[Span], flights: Iterable[BucketTiming], offset: float) -> float:
    """Seconds of waits for buckets within spans of work.

    Args:
        flights: In `perf_counter` seconds.
        offset: Wall clock minus `perf_counter`.
    """
    still = union((start + offset, end + offset) for start, end in waits(flights))
    return sum(
        max(0.0, min(end, span.end) - max(start, span.start))
        for span in spans
        for start, end in still
    )


def row(flight: BucketTiming, began: float) -> dict[str, Any]:
    """A bucket for the journal: moments in seconds since the step began, None: not yet or never.

    Args:
        flight: In `perf_counter` seconds.
        began: When the step began, in `perf_counter` seconds.
    """
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


def spans(flights: Iterable[BucketTiming], *, rank: int, node: str, offset: float) -> list[Span]:
    """A bucket's way: queued, on its way, and the wait of the training thread for it.

    Args:
        flights: In `perf_counter` seconds.
        node: "step 12".
        offset: Wall clock minus `perf_counter`.
    """
    found = []
    for flight in flights:
        name = flight.name or f"bucket {flight.bucket}"
        pieces = [("exchange", "exchange", flight.sent, flight.received)]
        if flight.ready:
            pieces.append(("exchange", "queued", flight.ready, flight.sent))
        pieces += [("compute", "wait", *wait) for wait in waits([flight])]
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


def cut(work: Iterable[Span], still: Iterable[Interval]) -> list[Span]:
    """Spans without the intervals in which nothing was done: each becomes its pieces."""
    holes = [hole for hole in union(still) if hole[1] - hole[0] > _VISIBLE_SECONDS]
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


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
