"""Discrete-event engine: tasks on streams, and flows that share wires max-min fairly.

A task starts when what it waits for is done and its streams are free; a stream does one thing
at a time, first ready first served, ties in the order of addition. A task of several streams (a
collective) takes all of them at once. On a shared stream flows run side by side and divide its
rate evenly (fair sharing by virtual time, Parekh and Gallager 1993, generalised processor
sharing). The result depends on the tasks and their order alone, and costs O(E log E) for E
tasks and edges.

Flows that cross several wires share them max-min fairly, which TCP connections come near to: no
flow can get more without taking from one that has no more (Bertsekas and Gallager 1992, section
6.5.2, progressive filling). A queue per wire would let a message that waits for one wire block
all others on its way, which no network does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from headway.errors import PlanError


@dataclass(slots=True)
class _WireFlow:
    lane: int
    wires: tuple[int, ...]
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


class MaxMinSharing:
    """All flows at some moment.

    Attributes:
        rates: Of each wire, per second.
    """

    def __init__(self, rates: Mapping[int, float]) -> None:
        self.rates = rates
        self.now = 0.0
        self._flows: dict[int, _WireFlow] = {}
        self._on: dict[int, dict[int, None]] = {wire: {} for wire in rates}
        self._lanes: dict[int, deque[tuple[int, _WireFlow]]] = {}
        self._touched: dict[int, None] = {}

    @property
    def changed(self) -> bool:
        return bool(self._touched)

    def join(self, time: float, number: int, on: Sequence[int], amount: float) -> bool:
        """A flow becomes ready; whether it runs at once.

        Args:
            on: Its lane, then its wires.
        """
        self.now = time
        flow = _WireFlow(on[0], tuple(on[1:]), amount)
        waiting = self._lanes.setdefault(flow.lane, deque())
        waiting.append((number, flow))
        if len(waiting) == 1:
            self._start(number, flow)
        return len(waiting) == 1

    def ends(self, time: float, number: int, version: int) -> bool:
        """Whether this end of a flow, noted earlier, is still true."""
        flow = self._flows.get(number)
        if flow is None or flow.version != version:
            return False
        self.now = time
        return True

    def leave(self, number: int) -> int | None:
        """A flow ends; the next one of its lane, which begins."""
        flow = self._flows.pop(number)
        for wire in flow.wires:
            del self._on[wire][number]
            self._touched[wire] = None
        waiting = self._lanes[flow.lane]
        waiting.popleft()
        if not waiting:
            return None
        following, next_flow = waiting[0]
        self._start(following, next_flow)
        return following

    def solve(self) -> list[tuple[float, int, int]]:
        """Find the rates of all flows that a change reaches: (end, flow, version) of each."""
        flows = self._reached()
        self._touched.clear()
        found = []
        shares = self._filled(flows)
        for number in flows:
            flow = self._flows[number]
            flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
            flow.since, flow.rate = self.now, shares[number]
            # Ends that were noted at another rate are void.
            flow.version += 1
            found.append((self.now + flow.left / flow.rate, number, flow.version))
        return found

    def _start(self, number: int, flow: _WireFlow) -> None:
        flow.since = self.now
        self._flows[number] = flow
        for wire in flow.wires:
            self._on[wire][number] = None
            self._touched[wire] = None

    def _reached(self) -> list[int]:
        """Flows on wires that changed, on wires of those, and so on."""
        wires, seen = list(self._touched), dict.fromkeys(self._touched)
        flows: dict[int, None] = {}
        while wires:
            for number in self._on[wires.pop()]:
                if number in flows:
                    continue
                flows[number] = None
                for wire in self._flows[number].wires:
                    if wire not in seen:
                        seen[wire] = None
                        wires.append(wire)
        return sorted(flows)

    def _filled(self, flows: Sequence[int]) -> dict[int, float]:
        """Progressive filling: the wire with the least for each of its flows fixes them."""
        shares: dict[int, float] = {}
        room = {wire: self.rates[wire] for number in flows for wire in self._flows[number].wires}
        count = {wire: len(self._on[wire]) for wire in room}
        while len(shares) < len(flows):
            tightest = min(count, key=lambda wire: room[wire] / count[wire])
            # Rounding may leave a filled wire a tiny negative rest; a rate of 0 would never end.
            share = max(room[tightest] / count[tightest], 1e-12 * self.rates[tightest])
            for number in self._on[tightest]:
                if number in shares:
                    continue
                shares[number] = share
                for wire in self._flows[number].wires:
                    room[wire] -= share
                    count[wire] -= 1
                    if not count[wire]:
                        del count[wire]
            count.pop(tightest, None)
        return shares


# Discrete events: tasks on streams, played in the order in which they become ready.


NO_TASK = -1
_SHOWN = 5
_LAST = 1 << 60
"""Behind every number of a task, so that flows end before others begin at the same moment."""


@dataclass(frozen=True, slots=True)
class TaskStream:
    """What does one thing at a time, or divides itself.

    Attributes:
        name: For people: "compute", "to stage 3".
        shared: Flows run side by side, each at an even share.
        rate: Of a wire what it carries per second, for `Program.flow`; 0.0: no wire.
    """

    device: int
    lane: str
    name: str = ""
    shared: bool = False
    rate: float = 0.0


@dataclass(slots=True)
class TaskProgram:
    """Tasks and streams; columns by number of the task.

    Attributes:
        on: Streams that a task occupies; none: it takes no part of anything.
        seconds: For which it occupies them; on a shared stream: were it alone there; of a flow
            over wires: what it carries, in the unit of their rates.
        delay: Seconds from there until others can go on (latency of a message).
        kind: As in `timeline.KINDS`, or a finer word; for accounts.
    """

    streams: list[TaskStream] = field(default_factory=list)
    on: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    delay: list[float] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)

    def stream(
        self, device: int, lane: str, name: str = "", *, shared: bool = False, rate: float = 0.0
    ) -> int:
        """Add a stream; returns its number."""
        self.streams.append(TaskStream(device, lane, name, shared, rate))
        return len(self.streams) - 1

    def add(
        self,
        kind: str,
        on: Sequence[int],
        seconds: float,
        before: Sequence[int] = (),
        *,
        delay: float = 0.0,
        label: str = "",
    ) -> int:
        """Add a task; returns its number.

        `before` may name tasks that are added later: see `Program.need`.

        Raises:
            ValueError: Time that runs backwards, or a shared stream among several.
        """
        if not (seconds >= 0 and delay >= 0):
            raise ValueError(f"{label or kind}: {seconds} s, then {delay} s")
        if len(on) > 1 and any(self.streams[stream].shared for stream in on):
            raise ValueError(f"{label or kind}: a flow has one stream")
        self.on.append(tuple(on))
        self.seconds.append(seconds)
        self.delay.append(delay)
        self.before.append(tuple(before))
        self.kind.append(kind)
        self.label.append(label)
        return len(self.seconds) - 1

    def flow(
        self,
        kind: str,
        lane: int,
        wires: Sequence[int],
        amount: float,
        before: Sequence[int] = (),
        *,
        label: str = "",
    ) -> int:
        """Add a flow over wires; returns its number.

        Args:
            lane: An ordinary stream (a connection): of its flows one runs at a time.
            wires: Streams with a rate, at least one; all carry the flow at the same time.
        """
        if not wires or not all(self.streams[wire].rate > 0 for wire in wires):
            raise ValueError(f"{label or kind}: a flow crosses wires, streams with a rate")
        task = self.add(kind, (), amount, before, label=label)
        self.on[task] = (lane, *wires)
        return task

    def need(self, task: int, *before: int) -> None:
        """Let a task wait for others, too."""
        self.before[task] += before


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """When what happened; columns by number of the task, seconds from 0.

    Attributes:
        ready: All that it waits for was done.
        ends: It left them.
        awaited: Of what it waits for, the task that was done last; NONE: it waits for nothing.
        cause: The task that decided when it started: `awaited`, or the one before it on a stream
            that was not free then.
    """

    program: TaskProgram
    ready: tuple[float, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    done: tuple[float, ...]
    awaited: tuple[int, ...]
    cause: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """When everything is done."""
        return max(self.done, default=0.0)

    def path(self) -> tuple[int, ...]:
        """The tasks that decide the makespan, from first to last: each starts when the one before
        it is done, or leaves the stream that both need."""
        if not self.done:
            return ()
        task = max(range(len(self.done)), key=lambda n: (self.done[n], n))
        found = []
        while task != NO_TASK:
            found.append(task)
            task = self.cause[task]
        return tuple(reversed(found))


def run_tasks(program: TaskProgram) -> TaskTimes:
    """Play all tasks.

    Raises:
        PlanError: Tasks wait for each other; names some of them.
    """
    return _EngineRun(program).run()


@dataclass(slots=True)
class _Share:
    """Flows of a shared stream: each has received `virtual` seconds' worth since it joined 0."""

    virtual: float = 0.0
    now: float = 0.0
    version: int = 0
    flows: list[tuple[float, int]] = field(default_factory=list)

    def until(self, time: float) -> None:
        """Let time go by."""
        if self.flows:
            # Each of k flows receives 1 / k of the time. Ends in virtual time do not change when
            # others join (Parekh and Gallager 1993).
            self.virtual += (time - self.now) / len(self.flows)
        self.now = time

    def next(self) -> float:
        """When the next flow ends, if nothing changes."""
        # Rounding may put the virtual clock a little past the end of the first flow.
        return self.now + max(0.0, self.flows[0][0] - self.virtual) * len(self.flows)


class _EngineRun:
    """One run."""

    def __init__(self, program: TaskProgram) -> None:
        number = len(program.seconds)
        self.program = program
        self.ready = [0.0] * number
        self.starts = [0.0] * number
        self.ends = [0.0] * number
        self.done = [-1.0] * number
        self.awaited = [NO_TASK] * number
        self.cause = [NO_TASK] * number
        self.order: list[int] = []
        self.free = [0.0] * len(program.streams)
        self.last = [NO_TASK] * len(program.streams)
        self.shares = {n: _Share() for n, s in enumerate(program.streams) if s.shared}
        rates = {n: stream.rate for n, stream in enumerate(program.streams) if stream.rate > 0}
        self.fair = MaxMinSharing(rates)
        self.missing = [len(before) for before in program.before]
        self.after: list[list[int]] = [[] for _ in range(number)]
        for task, before in enumerate(program.before):
            for one in before:
                self.after[one].append(task)
        # The third number tells events apart: NO_TASK for a task that is ready, a stream where a
        # flow of it ends, anything below NO_TASK for a flow over wires.
        self.events = [(0.0, task, NO_TASK) for task in range(number) if not self.missing[task]]
        heapify(self.events)

    def run(self) -> TaskTimes:
        events, fair = self.events, self.fair
        while events or fair.changed:
            # All flows that join or leave at one moment are counted before rates are found anew.
            if fair.changed and (not events or events[0][0] > fair.now):
                for end, flow, version in fair.solve():
                    heappush(events, (end, flow - _LAST, -2 - version))
                continue
            time, task, stream = heappop(events)
            if stream < NO_TASK:
                self._wires(time, task + _LAST, -2 - stream)
                continue
            if stream != NO_TASK:
                self._flows(time, stream, task)
                continue
            self.order.append(task)
            on = self.program.on[task]
            if len(on) == 1 and on[0] in self.shares:
                self._join(time, task, on[0])
            elif fair.rates and len(on) > 1 and on[1] in fair.rates:
                self.cause[task] = self.awaited[task]
                if fair.join(time, task, on, self.program.seconds[task]):
                    self.starts[task] = time
            else:
                self._occupy(time, task, on)
        if len(self.order) < len(self.starts):
            raise self._stuck()
        return TaskTimes(
            self.program,
            tuple(self.ready),
            tuple(self.starts),
            tuple(self.ends),
            tuple(self.done),
            tuple(self.awaited),
            tuple(self.cause),
            tuple(self.order),
        )

    def _occupy(self, time: float, task: int, on: tuple[int, ...]) -> None:
        start = time
        self.cause[task] = self.awaited[task]
        for stream in on:
            if self.free[stream] > start:
                start = self.free[stream]
                self.cause[task] = self.last[stream]
        self.starts[task] = start
        end = start + self.program.seconds[task]
        for stream in on:
            self.free[stream] = end
            self.last[stream] = task
        self._finish(task, end)

    def _finish(self, task: int, end: float) -> None:
        self.ends[task] = end
        done = end + self.program.delay[task]
        self.done[task] = done
        for later in self.after[task]:
            self.missing[later] -= 1
            # The second test is for what is done at 0, which is no later than the initial value.
            if done > self.ready[later] or self.awaited[later] == NO_TASK:
                self.ready[later] = done
                self.awaited[later] = task
            if not self.missing[later]:
                heappush(self.events, (self.ready[later], later, NO_TASK))

    # -- shared streams ------------------------------------------------------------------------

    def _join(self, time: float, task: int, stream: int) -> None:
        share = self.shares[stream]
        share.until(time)
        self.starts[task] = time
        self.cause[task] = self.awaited[task]
        heappush(share.flows, (share.virtual + self.program.seconds[task], task))
        self._expect(stream)

    def _expect(self, stream: int) -> None:
        """Note the next end of a flow; what was noted before counts no more."""
        share = self.shares[stream]
        share.version += 1
        if share.flows:
            heappush(self.events, (share.next(), share.version - _LAST, stream))

    def _flows(self, time: float, stream: int, version: int) -> None:
        """The first flow of a stream ends, unless something has changed since it was noted."""
        share = self.shares[stream]
        if version + _LAST != share.version:
            return
        share.until(time)
        virtual, task = heappop(share.flows)
        # Rounding may leave the clock a little before the end that was noted.
        share.virtual = max(share.virtual, virtual)
        self._expect(stream)
        self._finish(task, time)

    def _wires(self, time: float, flow: int, version: int) -> None:
        """A flow over wires ends, unless its rate has changed since that was noted."""
        if not self.fair.ends(time, flow, version):
            return
        following = self.fair.leave(flow)
        if following is not None:
            self.starts[following] = time
            self.cause[following] = flow
        self._finish(flow, time)

    def _stuck(self) -> PlanError:
        rest = [task for task, missing in enumerate(self.missing) if missing]
        names = self.program.label
        problems = [
            f"{names[task] or self.program.kind[task]} waits for "
            + ", ".join(names[one] or str(one) for one in self.program.before[task])
            for task in rest[:_SHOWN]
        ]
        if len(rest) > _SHOWN:
            problems.append(f"and {len(rest) - _SHOWN} more")
        return PlanError(
            "the step cannot go on",
            problems=problems,
            fix="Follow what waits: some of it waits for itself.",
        )
