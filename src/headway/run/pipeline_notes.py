"""What a step of a pipeline leaves for timeline and report: work, messages, sums of copies.

While a step runs, nothing is noted but one moment per action (`parallel.row`); everything here is
worked out afterwards, by positions that were looked up once for each table. A message is known from
both ends: the sender knows when it was handed over, the receiver since when it was asked for, when
it was there, and for how long the rank stood still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headway.collective.link import ring_factor
from headway.comm.flight import Flight
from headway.parallel import Pipeline, Team
from headway.schedule import Action, Kind, PipelineSchedule
from headway.timeline import Span
from headway.units import format_bytes

_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
    Kind.RECV: "wait",
    Kind.WAIT: "wait",
}
_UPDATES = {**_KINDS, Kind.STEP: "update"}


@dataclass(frozen=True, slots=True)
class StageSum:
    """The gradients of a stage that are summed over its copies.

    Attributes:
        parameters: Their logical names.
        num_bytes: Of the gradients.
        holders: Ranks that sum.
    """

    parameters: tuple[str, ...]
    num_bytes: int
    holders: int


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a message; times are `perf_counter` seconds.

    Attributes:
        action: SEND or RECV.
        peer: Global rank of the other end.
        num_bytes: Of the values.
        start: It was handed over; at the receiver: asked for, it may have left later.
        end: It had been handed over; at the receiver: it was there.
        waited: Seconds for which the receiver stood still.
    """

    action: Action
    peer: int
    num_bytes: int
    start: float
    end: float
    waited: float = 0.0

    @property
    def is_received(self) -> bool:
        return self.action.kind == Kind.RECV

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


class PipelineNotes:
    """Of one rank and one table.

    Args:
        pipeline: Carries it out.
        table: Its table.
        team: Its ranks.
        sums: By stage; those that are alone are left out.
        steps: STEP is an update; else the executor makes it, and STEP does nothing.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        table: PipelineSchedule,
        team: Team,
        *,
        sums: Mapping[int, StageSum],
        steps: bool,
    ) -> None:
        kinds = _UPDATES if steps else _KINDS
        self._pipeline, self._sums, self._rank = pipeline, sums, team.ranks[team.rank]
        self._row = row = table.order[team.rank]
        self._work = [(n, kinds[a.kind], str(a)) for n, a in enumerate(row) if a.kind in kinds]
        self._sends = [n for n, action in enumerate(row) if action.kind == Kind.SEND]
        self._peers = {
            n: team.ranks[table.pipe_of[action.pipe].placement[action.other]]
            for n, action in enumerate(row)
            if action.kind in (Kind.SEND, Kind.RECV)
        }
        self._receives = _pairs(row, Kind.POST, Kind.RECV, lambda a: replace(a, kind=Kind.POST))
        self._summed = [
            pair
            for pair in _pairs(row, Kind.SYNC, Kind.WAIT, lambda a: replace(a, kind=Kind.SYNC))
            if row[pair[0]].stage in sums
        ]

    def spans(self, offset: float, node: str) -> list[Span]:
        """Work and waits, on the wall clock; `offset`: that minus `perf_counter`."""
        times = self._pipeline.times
        found = [
            Span(
                rank=self._rank,
                lane="compute",
                kind=kind,
                label=label,
                start=offset + times[position],
                end=offset + times[position + 1],
                node=node,
            )
            for position, kind, label in self._work
        ]
        # At the end: until all that was sent has left.
        return [*found, replace(found[-1], kind="wait", label="messages leave",
                                start=offset + times[-2], end=offset + times[-1])]  # fmt: skip

    def messages(self) -> list[Message]:
        """What came and went, in the order of the table."""
        times = self._pipeline.times
        sent = [self._message(n, times[n], times[n + 1], 0.0) for n in self._sends]
        received = [
            self._message(n, times[asked], times[n + 1], times[n + 1] - times[n])
            for asked, n in self._receives
        ]
        return sent + received

    def _message(self, position: int, start: float, end: float, waited: float) -> Message:
        action = self._row[position]
        size = self._pipeline.message_bytes(action)
        return Message(action, self._peers[position], size, start, end, waited)

    def flights(self) -> list[Flight]:
        """The sums over the copies of stages."""
        times = self._pipeline.times
        found = []
        for begun, waited in self._summed:
            stage = self._row[begun].stage
            one = self._sums[stage]
            found.append(
                Flight(
                    bucket=stage,
                    parameters=one.parameters,
                    num_bytes=one.num_bytes,
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


def _pairs(
    row: tuple[Action, ...], first: Kind, second: Kind, before: Callable[[Action], Action]
) -> list[tuple[int, int]]:
    """Positions of what begins something and of what ends it; the latter twice without a begin."""
    begun: dict[Action, int] = {}
    found = []
    for position, action in enumerate(row):
        if action.kind == first:
            begun[action] = position
        elif action.kind == second:
            found.append((begun.get(before(action), position), position))
    return found
