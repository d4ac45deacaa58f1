"""Simulate a training step: seconds, who waited for what, memory, and the critical chain.

On every rank busy, bubble and exposed communication add up to the step. A wait is *exposed
communication* for as long as what the rank waited for was a message or a collective in flight
(queueing and latency included), and *bubble* before that: then some other rank was still
computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from headway.simulator.engine import NO_TASK, TaskTimes, run_tasks
from headway.simulator.task_graph import (
    COMMUNICATION,
    HOST,
    LOOKUPS,
    MESSAGES,
    RankStreams,
    StepTasks,
    build_step_tasks,
)
from headway.simulator.work import StepWork
from headway.timeline import Span, Timeline

COMPUTE = (HOST, LOOKUPS, "forward", "backward", "update")
KINDS = dict.fromkeys(COMMUNICATION, "wait") | {HOST: "data", LOOKUPS: "lookups"}
"""What a timeline calls communication that a compute lane feels, and what comes before a step."""
ROUNDING = 1e-12
"""Idle time below this share of a step is none."""
INSIDE = "tensor axis"
"""Kind of the collectives within stages: nothing hides them."""


@dataclass(frozen=True, kw_only=True)
class RankBreakdown:
    """Where the step of one rank that is played goes.

    Attributes:
        busy: Seconds of computation by kind, collectives of the tensor axis included.
        bubble: Seconds in which it waits for others to compute.
        exposed: Seconds in which it waits for communication, by kind.
        curve: (seconds, bytes from then on), from 0 on.
    """

    rank: int
    place: int
    count: int
    busy: Mapping[str, float]
    bubble: float
    exposed: Mapping[str, float]
    curve: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        """Most bytes that it holds at a time."""
        return max(size for _, size in self.curve)


@dataclass(frozen=True, kw_only=True)
class CriticalSegment:
    """A piece of the chain of tasks that decides the step.

    Attributes:
        kind: Of what is done; "" for what takes no time.
        seconds: From the moment the piece before it lets it go.
    """

    kind: str
    seconds: float
    number: int


@dataclass(frozen=True)
class SimulatedStep:
    """A played step.

    Attributes:
        timeline: Of these ranks; on the compute lane a wait is exposed communication.
        path: What decides the step, from its start to its end.
    """

    work: StepWork
    seconds: float
    accounts: tuple[RankBreakdown, ...]
    timeline: Timeline
    path: tuple[CriticalSegment, ...]
    tasks: int

    @property
    def ranks(self) -> int:
        """All, those included that behave alike."""
        return sum(account.count for account in self.accounts)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait for others to compute."""
        total = sum(account.count * account.bubble for account in self.accounts)
        return total / (self.ranks * self.seconds) if self.seconds else 0.0

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds by kind, the mean of all ranks."""
        found = dict.fromkeys((*COMMUNICATION, INSIDE), 0.0)
        for account in self.accounts:
            for kind, seconds in account.exposed.items():
                found[kind] += seconds * account.count / self.ranks
        return {kind: seconds for kind, seconds in found.items() if seconds}

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(account.peak for account in self.accounts)

    @cached_property
    def fullest(self) -> RankBreakdown:
        return max(self.accounts, key=lambda account: account.peak)

    @property
    def decided(self) -> dict[str, float]:
        """Seconds of the chain that decides the step, by kind."""
        found: dict[str, float] = {}
        for leg in self.path:
            found[leg.kind] = found.get(leg.kind, 0.0) + leg.seconds
        return {kind: seconds for kind, seconds in found.items() if seconds}


def simulate_training_step(work: StepWork, *, everybody: bool = False) -> SimulatedStep:
    """Play a step.

    Args:
        everybody: Play every rank, also those that behave alike.

    Raises:
        PlanError: The table cannot be executed.
    """
    built = build_step_tasks(work, everybody=everybody)
    return summarize_step(built, run_tasks(built.program))


def summarize_step(built: StepTasks, played: TaskTimes) -> SimulatedStep:
    """What a played step says."""
    rows: dict[int, list[int]] = {device.compute: [] for device in built.devices}
    for task in played.order:
        for stream in played.program.on[task]:
            if stream in rows:
                rows[stream].append(task)
    spans = list(_communication(built, played))
    accounts = []
    for device in built.devices:
        # Tasks that take no time may share a start: these stay in the order of addition.
        row = sorted(rows[device.compute], key=lambda task: (played.starts[task], task))
        waits = [wait for wait in _waits(played, row) if wait.end > wait.start]
        accounts.append(_account(built, played, device, row, waits))
        spans += _computing(played, row, device.rank)
        spans += [_span(device.rank, "compute", "wait", w.kind, w.start, w.end) for w in waits]
    return SimulatedStep(
        built.work,
        played.makespan,
        tuple(accounts),
        Timeline.of(spans),
        tuple(_path(played)),
        len(played.starts),
    )


class _Wait(NamedTuple):
    """An idle time of a rank in which communication was under way for it."""

    kind: str
    start: float
    end: float


def _waits(played: TaskTimes, row: Sequence[int]) -> Iterator[_Wait]:
    kinds, since = played.program.kind, 0.0
    for task in row:
        # `awaited`, not `cause`: the rank's own last task is nothing that it waits for.
        end, cause = played.starts[task], played.awaited[task]
        # A message may have waited for another one: each has its part of the wait, and what lies
        # before the first of them is bubble.
        while end > since and cause != NO_TASK and kinds[cause] in COMMUNICATION:
            begin = max(since, min(end, played.ready[cause]))
            yield _Wait(kinds[cause], begin, end)
            end, cause = begin, played.awaited[cause]
        since = played.ends[task]


def _account(
    built: StepTasks,
    played: TaskTimes,
    device: RankStreams,
    row: Sequence[int],
    waits: Sequence[_Wait],
) -> RankBreakdown:
    kinds = played.program.kind
    busy = dict.fromkeys(COMPUTE, 0.0)
    exposed: dict[str, float] = {}

    def add(kind: str, seconds: float) -> None:
        if seconds:
            exposed[kind] = exposed.get(kind, 0.0) + seconds

    for task in row:
        own, inside = played.ends[task] - played.starts[task], built.inside.get(task, 0.0)
        if kinds[task] in busy:
            busy[kinds[task]] += own - inside
            add(INSIDE, inside)
        else:
            add(kinds[task], own)  # a collective that computation feels
    for wait in waits:
        add(wait.kind, wait.end - wait.start)
    rest = played.makespan - math.fsum([*busy.values(), *exposed.values()])
    return RankBreakdown(
        rank=device.rank,
        place=device.place,
        count=device.count,
        busy=busy,
        bubble=rest if rest > ROUNDING * played.makespan else 0.0,
        exposed=exposed,
        curve=tuple(_curve(built, played, device, row)),
    )


def _curve(
    built: StepTasks, played: TaskTimes, device: RankStreams, row: Sequence[int]
) -> Iterator[tuple[float, float]]:
    """A rank does one thing at a time, so that the order of its tasks is that of its memory."""
    held = device.state
    yield 0.0, held
    live = 0.0
    for task in row:
        for time, change in (
            (played.starts[task], built.takes.get(task, 0.0)),
            (played.ends[task], -built.frees.get(task, 0.0)),
        ):
            if change:
                live += change
                yield time, held + live


def _computing(played: TaskTimes, row: Sequence[int], rank: int) -> Iterator[Span]:
    """The compute lane; chunks of one cell are one span as long as nothing lies between them."""
    program = played.program
    open_: Span | None = None
    for task in row:
        start, end = played.starts[task], played.ends[task]
        kind = program.kind[task]
        if end <= start:
            continue
        span = _span(rank, "compute", KINDS.get(kind, kind), program.label[task], start, end)
        if open_ and (open_.label, open_.end) == (span.label, span.start):
            open_ = replace(open_, end=end)
            continue
        if open_:
            yield open_
        open_ = span
    if open_:
        yield open_


def _communication(built: StepTasks, played: TaskTimes) -> Iterator[Span]:
    """What travels: a message on its sender's lane until it arrives, a collective on those of all
    its members that are played."""
    program = played.program
    for task, on in enumerate(program.on):
        if program.kind[task] not in COMMUNICATION:
            continue
        lane = "messages" if program.kind[task] == MESSAGES else "exchange"
        for stream in on:
            found, start, end = program.streams[stream], played.starts[task], played.done[task]
            if found.lane != "compute" and end > start:
                rank = built.devices[found.device].rank
                yield _span(rank, lane, "exchange", program.label[task], start, end)


def _span(rank: int, lane: str, kind: str, label: str, start: float, end: float) -> Span:
    return Span(rank=rank, lane=lane, kind=kind, label=label, start=start, end=end)


def _path(played: TaskTimes) -> Iterator[CriticalSegment]:
    """Tasks of one kind in a row are one piece."""
    path = played.path()
    times = [0.0, *(played.done[task] for task in path)]
    kinds = played.program.kind
    lines = [
        (kinds[task], end - start)
        # `times` has one more: the start of the step.
        for task, start, end in zip(path, times, times[1:], strict=False)
        if kinds[task] and end > start
    ]
    for kind, group in groupby(lines, key=lambda line: line[0]):
        seconds = [own for _, own in group]
        yield CriticalSegment(kind=kind, seconds=math.fsum(seconds), number=len(seconds))
