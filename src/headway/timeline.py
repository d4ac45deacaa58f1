"""The one trace type, for predicted and for measured steps.

A `Span` is a piece of work of one rank on one lane; a `Timeline` is a bag of spans with a common
clock (seconds). The simulator makes one, the executor makes one, the report draws either, and both
export to the Chrome trace format (opens in Perfetto).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

LANES = ("compute", "exchange", "data", "checkpoint")
KINDS = ("data", "forward", "backward", "exchange", "wait", "update", "validate", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One piece of work.

    Attributes:
        rank: Who did it.
        lane: What was occupied: one of LANES.
        kind: What was done: one of KINDS. "wait" on the compute lane is exposed communication.
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
        """The Chrome trace event format: a process per rank, a thread per lane, microseconds."""
        events: list[dict[str, object]] = []
        for rank in self.ranks:
            events.append(_named("process_name", rank, 0, f"rank {rank}"))
            events.extend(
                _named("thread_name", rank, number, lane) for number, lane in enumerate(LANES)
            )
        events.extend(
            {
                "name": span.label or span.kind,
                "cat": span.kind,
                "ph": "X",
                "pid": span.rank,
                "tid": LANES.index(span.lane),
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"node": span.node},
            }
            for span in self.spans
        )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def to_rows(self) -> list[dict[str, object]]:
        """Plain rows for JSON lines."""
        return [asdict(span) for span in self.spans]


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
