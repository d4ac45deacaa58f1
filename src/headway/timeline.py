"""The one trace type, for predicted and for measured steps.

A `Span` is a piece of work of one rank on one lane; a `Timeline` is a bag of spans with a common
clock (seconds). The simulator makes one, the executor makes one, the report draws either, and both
export to the Chrome trace format (opens in Perfetto).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LANES = ("compute", "exchange", "messages", "data", "checkpoint")
SHARED_LANES = ("exchange", "messages")
"""On these several things happen at the same time."""
KINDS = (
    "data",
    "lookups",
    "forward",
    "backward",
    "queued",
    "exchange",
    "wait",
    "update",
    "validate",
    "checkpoint",
)
_MOMENT = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One piece of work.

    Attributes:
        lane: What was occupied: one of LANES.
        kind: What was done: one of KINDS. "wait" on the compute lane is exposed communication;
            "queued" on the exchange lane: ready to leave, and not on its way yet.
        label: Text for people: "micro-batch 2", "bucket 0: 4.2 MiB".
        start: Seconds on the timeline's clock.
        end: Seconds on the timeline's clock; never before `start`.
        node: The plan node that asked for it ("exchange", "step 12"), or "".
    """

    rank: int
    lane: str
    kind: str
    label: str
    start: float
    end: float
    node: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all ranks on a common clock."""

    spans: tuple[Span, ...]

    @staticmethod
    def of(spans: Iterable[Span]) -> Timeline:
        """A timeline in order of (rank, start)."""
        # Of spans that start together the longest first: `tracks` puts the others inside it.
        return Timeline(tuple(sorted(spans, key=lambda s: (s.rank, s.start, -s.end))))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    def seconds(self, *, rank: int, lane: str = "compute", kind: str | None = None) -> float:
        """Total seconds that `rank` spent on a lane, of one kind or of all."""
        return sum(
            s.seconds
            for s in self.spans
            if s.rank == rank and s.lane == lane and kind in (None, s.kind)
        )

    def to_chrome(self) -> dict[str, object]:
        """The Chrome trace event format: a process per rank, a thread per lane, microseconds.

        Viewers cannot show pieces of one thread that overlap without being nested: a lane in which
        several things happen at the same time gets more threads.
        """
        events: list[dict[str, object]] = []
        for rank in self.ranks:
            events.append(_named("process_name", rank, 0, f"rank {rank}"))
            events.extend(
                _named("thread_name", rank, number, lane) for number, lane in enumerate(LANES)
            )
        rows = {place: iter(tracks(spans)) for place, spans in self._by_lane().items()}
        named = {(rank, _thread(lane, 0)) for rank, lane in rows}
        # `tracks` answered in the order of a lane's spans, which is the order here.
        for span in self.spans:
            row = next(rows[span.rank, span.lane])
            thread = _thread(span.lane, row)
            if (span.rank, thread) not in named:
                named.add((span.rank, thread))
                name = f"{span.lane} ({row + 1})"
                events.append(_named("thread_name", span.rank, thread, name))
            events.append(
                {
                    "name": span.label or span.kind,
                    "cat": span.kind,
                    "ph": "X",
                    "pid": span.rank,
                    "tid": thread,
                    "ts": span.start * 1e6,
                    "dur": span.seconds * 1e6,
                    "args": {"node": span.node},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _by_lane(self) -> dict[tuple[int, str], list[Span]]:
        found: dict[tuple[int, str], list[Span]] = {}
        for span in self.spans:
            found.setdefault((span.rank, span.lane), []).append(span)
        return found


def tracks(spans: Sequence[Span]) -> list[int]:
    """A row for each span of one lane: in a row nothing overlaps, unless it lies within.

    What goes on with the same subject (its label) stays in its row.
    """
    rows: list[list[Span]] = []
    chosen = []
    for span in spans:
        free = [n for n, row in enumerate(rows) if _fits(span, row)]
        same = [n for n in free if rows[n] and rows[n][-1].label == span.label != ""]
        number = (same or free or [len(rows)])[0]
        if number == len(rows):
            rows.append([])
        rows[number].append(span)
        chosen.append(number)
    return chosen


def _fits(span: Span, row: list[Span]) -> bool:
    """Whether a span can follow in a row; forgets what has ended before it."""
    while row and row[-1].end <= span.start + _MOMENT:
        # The last one stays: its label says whose row it is.
        if len(row) == 1:
            return True
        row.pop()
    return not row or (span.lane not in SHARED_LANES and span.end <= row[-1].end + _MOMENT)


def _thread(lane: str, row: int) -> int:
    return LANES.index(lane) + row * len(LANES)


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
