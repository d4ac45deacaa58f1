"""The record of one step: loss, spans for the timeline, messages and buckets.

`StepRecord` is filled while a step runs. In a pipeline nothing but one moment per action is noted
during the step; `PipelineTrace` derives spans, messages and sums of copies afterwards. A message is
known from both ends: the sender knows when it was handed over, the receiver when it was asked for,
when it arrived, and how long the rank waited for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.collective.model.link_fit import ring_factor
from headway.comm.lanes.buckets import BucketTiming
from headway.parallel.pipeline.runtime.executor import Pipeline, PipelineRanks
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule
from headway.timeline import Span
from headway.units import format_bytes

_KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "backward",
    ActionKind.WEIGHT_GRAD: "backward",
    ActionKind.RECV: "wait",
    ActionKind.WAIT: "wait",
}
_UPDATES = {**_KINDS, ActionKind.STEP: "update"}


@dataclass(frozen=True, slots=True)
class StageGradientSum:
    """The gradient sum of a stage over its copies."""

    parameters: tuple[str, ...]
    num_bytes: int
    holders: int


@dataclass(frozen=True, slots=True)
class StageMessage:
    """One end of a message; times are `perf_counter` seconds.

    Attributes:
        start: It was handed over; at the receiver: asked for, it may have left later.
        end: It had been handed over; at the receiver: it was there.
    """

    action: Action
    peer: int
    num_bytes: int
    start: float
    end: float
    waited: float = 0.0

    @property
    def is_received(self) -> bool:
        return self.action.kind == ActionKind.RECV

    def span(self, rank: int, offset: float, node: str) -> Span:
        """For the timeline, on the wall clock; `offset`: that minus `perf_counter`."""
        return Span(
            rank=rank,
            lane="messages",
            kind="exchange",
            label=f"{self.action}: {format_bytes(self.num_bytes)} "
            f"{'from' if self.is_received else 'to'} rank {self.peer}",
            start=self.start + offset,
            end=self.end + offset,
            node=node,
        )


class PipelineTrace:
    """Of one rank and one table.

    Args:
        sums: By stage; those that are alone are left out.
        steps: STEP is an update; else the executor makes it, and STEP does nothing.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        table: PipelineSchedule,
        team: PipelineRanks,
        *,
        sums: Mapping[int, StageGradientSum],
        steps: bool,
    ) -> None:
        kinds = _UPDATES if steps else _KINDS
        self._pipeline, self._sums, self._rank = pipeline, sums, team.ranks[team.rank]
        self._row = row = table.order[team.rank]
        self._work = [(n, kinds[a.kind], str(a)) for n, a in enumerate(row) if a.kind in kinds]
        self._sends = [n for n, action in enumerate(row) if action.kind == ActionKind.SEND]
        self._peers = {
            n: team.ranks[table.pipe_of[action.pipe].placement[action.other]]
            for n, action in enumerate(row)
            if action.kind in (ActionKind.SEND, ActionKind.RECV)
        }
        self._receives = _pairs(row, ActionKind.POST, ActionKind.RECV)
        syncs = _pairs(row, ActionKind.SYNC, ActionKind.WAIT)
        self._summed = [pair for pair in syncs if row[pair[0]].stage in sums]

    def spans(self, offset: float, node: str) -> list[Span]:
        """Work and waits, on the wall clock; `offset`: that minus `perf_counter`."""
        times = self._pipeline.times
        found = [
            _compute_span(self._rank, kind, label, (offset + times[n], offset + times[n + 1]), node)
            for n, kind, label in self._work
        ]
        # At the end: until all that was sent has left.
        return [*found, replace(found[-1], kind="wait", label="messages leave",
                                start=offset + times[-2], end=offset + times[-1])]  # fmt: skip

    def messages(self) -> list[StageMessage]:
        """Messages sent, then messages received, in the order of the table."""
        times = self._pipeline.times
        sent = [self._message(n, times[n], times[n + 1], 0.0) for n in self._sends]
        received = [
            self._message(n, times[asked], times[n + 1], times[n + 1] - times[n])
            for asked, n in self._receives
        ]
        return sent + received

    def _message(self, position: int, start: float, end: float, waited: float) -> StageMessage:
        action = self._row[position]
        size = self._pipeline.message_bytes(action)
        return StageMessage(action, self._peers[position], size, start, end, waited)

    def flights(self) -> list[BucketTiming]:
        """The sums over the copies of stages."""
        times = self._pipeline.times
        found = []
        for begun, waited in self._summed:
            stage = self._row[begun].stage
            one = self._sums[stage]
            found.append(
                BucketTiming(
                    bucket=stage,
                    parameters=one.parameters,
                    num_bytes=one.num_bytes,
                    # As a ring all-reduce sends it, 2 (n - 1) / n of the bytes.
                    wire_bytes=round(one.num_bytes * ring_factor(one.holders)),
                    ready=times[begun],
                    sent=times[begun + 1],
                    received=times[waited + 1],
                    needed=times[waited],
                    waited=times[waited + 1] - times[waited],
                    name=str(self._row[begun]),
                )
            )
        return found


def _compute_span(rank: int, kind: str, label: str, times: tuple[float, float], node: str) -> Span:
    start, end = times
    return Span(rank=rank, lane="compute", kind=kind, label=label, start=start, end=end, node=node)


def _pairs(row: tuple[Action, ...], first: ActionKind, second: ActionKind) -> list[tuple[int, int]]:
    """Positions of the actions that begin and end something; without a begin, the end twice."""
    begun: dict[Action, int] = {}
    found = []
    for position, action in enumerate(row):
        if action.kind == first:
            begun[action] = position
        elif action.kind == second:
            found.append((begun.get(replace(action, kind=first), position), position))
    return found


_SPAN_KIND = {
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


@dataclass(frozen=True, slots=True)
class AgreementRecord:
    """How a worker agreed with the others in a step.

    Attributes:
        waits: Seconds by what was waited for: "bound", "server", "neighbour", "meeting".
        staleness: Of the pushes that holders of this rank have handled: worker, and updates since
            the version that it was computed with.
        distance: Between two models that met here, as a share of the norm; None: none met, or it
            was not measured.
    """

    waits: Mapping[str, float]
    staleness: Sequence[tuple[int, int]] = ()
    distance: float | None = None


@dataclass(slots=True)
class StepRecord:
    """What one step did; filled while it runs.

    Attributes:
        samples: Of the global batch.
        norm: Global norm of the gradients before clipping; None where nothing is clipped.
        votes: How many ranks asked to stop after this step.
        spans: Seconds on the wall clock, for the timeline.
        flights: What happened to the buckets of the exchange that ended in this step (across the
            border: of the step before), in `perf_counter` seconds.
        agreement: Of workers that do not agree at every step: what this rank saw of the others.
    """

    loss: float = float("nan")
    samples: int = 0
    norm: float | None = None
    votes: int = 0
    messages: list[StageMessage] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[BucketTiming] = field(default_factory=list)
    agreement: AgreementRecord | None = None

    def seconds(self, *kinds: str, lane: str = "compute") -> float:
        """Total seconds of the given kinds on one lane."""
        return sum(s.seconds for s in self.spans if s.lane == lane and s.kind in kinds)

    def note(
        self, instruction: str, label: str, rank: int, times: tuple[float, float], node: str
    ) -> None:
        """An instruction was carried out; start and end in seconds on the wall clock."""
        # What neither computes nor waits belongs to the update. `scale` and `release` begin by
        # reading the step reduction: their time is a wait for other ranks.
        kind = _SPAN_KIND.get(instruction, "update")
        if kind:
            self.spans.append(_compute_span(rank, kind, label, times, node))
