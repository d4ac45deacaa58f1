"""What one step did, as the executor notes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.comm.flight import Flight
from headway.run.pipeline_notes import Message
from headway.timeline import Span

_KIND_OF = {
    "pipeline": "",  # its actions have spans of their own
    "forward": "forward",
    "backward": "backward",
    "arm": "forward",
    "send": "wait",
    "tally": "wait",
    "receive": "wait",
    "scale": "wait",
    "settle": "wait",
    "release": "wait",
}


@dataclass(slots=True)
class StepRecord:
    """What one step did; filled while it runs.

    Attributes:
        loss: Of the global batch; the same number on every rank.
        samples: Of the global batch.
        norm: Global norm of the gradients before clipping; None where nothing is clipped.
        votes: How many ranks asked to stop after this step.
        messages: Between the stages of a pipeline, as this rank saw them.
        spans: Seconds on the wall clock, for the timeline.
        flights: What happened to the buckets of the exchange that ended in this step (across the
            border: of the step before), in `perf_counter` seconds.
    """

    loss: float = float("nan")
    samples: int = 0
    norm: float | None = None
    votes: int = 0
    messages: list[Message] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)

    def seconds(self, *kinds: str, lane: str = "compute") -> float:
        """Total seconds of the given kinds on one lane."""
        return sum(s.seconds for s in self.spans if s.lane == lane and s.kind in kinds)

    def note(
        self, instruction: str, label: str, rank: int, times: tuple[float, float], node: str
    ) -> None:
        """An instruction was carried out; start and end in seconds on the wall clock."""
        kind = kind_of(instruction)
        if kind:
            start, end = times
            self.spans.append(
                Span(
                    rank=rank,
                    lane="compute",
                    kind=kind,
                    label=label,
                    start=start,
                    end=end,
                    node=node,
                )
            )


def kind_of(instruction: str) -> str:
    """The kind of span of an instruction; "" for one that has none.

    What is not compute or waiting belongs to the update.

    The tally is read where `scale` or `release` begins: what they take is a wait for other ranks.
    """
    return _KIND_OF.get(instruction, "update")
