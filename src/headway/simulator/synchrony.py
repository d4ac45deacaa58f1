"""Runs of any synchrony on virtual clocks: the same programs and rules as a run of processes.

A worker computes for as long as it is told; a message takes its turn on the outgoing wire of its
sender's rank, and on the incoming wire of its receiver's, then the latency; a holder handles one
message at a time. Nothing depends on the machine that simulates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from headway.errors import PlanError
from headway.synchrony import merging, servers
from headway.synchrony.actors import Address, Compute, Gradient, Outgoing, Sender
from headway.synchrony.driving import MailRoom, WorkerSeat
from headway.synchrony.history import Died, History
from headway.synchrony.programs import AgreementRun
from headway.synchrony.waits import NO_TIME, HolderTime, split_wait

GradientFunction = Callable[[int, int, Any], Gradient]
"""From worker, step and parameters (None: those of its replica) to a gradient."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """From a step of a worker on, nothing comes through between some workers.

    Attributes:
        step: From 0.
        between: (from, to), both ways. Nobody meets all others then.
    """

    worker: int
    step: int
    between: frozenset[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class VirtualMachines:
    """How long things take.

    Attributes:
        compute: Seconds of a worker's step: (worker, step) -> seconds.
        wire: Seconds that one whole model takes on a wire between two ranks, or two nodes.
        nodes: The node of each rank; empty: each is a node. All ranks of a node share the wires
            between nodes.
        inside: As `wire`, between two ranks of one node.
        latency: Of a message, in seconds.
        update: Seconds in which a server makes an update of the whole model, or a model is merged.
        meeting: Seconds of the exchange in which all workers meet.
        slower: How many times as long the wire between two ranks takes: (from, to) -> factor.
        deaths: Worker -> the first step, from 0, that it does not make because it has died.
        cut: None: all that is sent arrives.
    """

    compute: Callable[[int, int], float]
    wire: float = 0.0
    nodes: Sequence[int] = ()
    inside: float = 0.0
    latency: float = 0.0
    update: float = 0.0
    meeting: float = 0.0
    slower: Mapping[tuple[int, int], float] = field(default_factory=dict)
    deaths: Mapping[int, int] = field(default_factory=dict)
    cut: Cut | None = None


@dataclass
class SimulatedRun:
    """What happened.

    Attributes:
        seconds: When the last worker had made its last step.
        steps: Of each worker: those that it has computed.
        waits: Of each worker: seconds by cause (`synchrony.waits`).
        traffic: Models that went from one rank to another: (from, to) -> number.
        staleness: Of each worker's pushes.
        stuck: Worker -> since when it waits in vain because of a cut, for what, and the cause.
        history: Of all holders.
        run: Programs and holders, as the run has left them.
    """

    run: AgreementRun
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)
    waits: list[dict[str, float]] = field(default_factory=list)
    traffic: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    staleness: list[list[int]] = field(default_factory=list)
    stuck: dict[int, tuple[float, Address, str]] = field(default_factory=dict)
    history: History = field(default_factory=History)


def simulate_run(
    run: AgreementRun,
    machines: VirtualMachines,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    gradient: GradientFunction | None = None,
    on_step: Callable[[float, int, int], None] | None = None,
) -> SimulatedRun:
    """Play a run.

    Args:
        steps: That each worker makes; those beyond are not computed.
        seconds: In their place: no step begins after so many.
        gradient: None: gradients of nothing, for runs whose numbers do not matter.
        on_step: Called with the time, the worker and the number of each step that is computed.

    Raises:
        PlanError: The workers wait for each other for ever.
    """
    return _Simulation(run, machines, steps, seconds, gradient or _nothing, on_step).play()


def _nothing(worker: int, step: int, value: Any) -> Gradient:
    return Gradient(value=0.0, count=0.0)


class _Simulation:
    def __init__(
        self,
        run: AgreementRun,
        machines: VirtualMachines,
        steps: int | None,
        seconds: float | None,
        gradient: GradientFunction,
        on_step: Callable[[float, int, int], None] | None,
    ) -> None:
        self._run, self._machines, self._gradient = run, machines, gradient
        self._steps, self._limit, self._on_step = steps, seconds, on_step
        self._room = MailRoom(run)
        self._seats = [
            WorkerSeat(number, program, self._post) for number, program in enumerate(run.programs)
        ]
        workers = len(self._seats)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._wires: dict[tuple[str, int], float] = defaultdict(float)
        self._busy: dict[Address, float] = defaultdict(float)
        self._since = [0.0] * workers
        self._dead: set[int] = set()
        self._is_cut = False
        self._asked: dict[tuple[int, Address], float] = {}
        self._done: dict[tuple[int, Address], tuple[float, float]] = {}
        self._shares = sum(1 for holder in run.holders if holder.kind == "server") or 1
        self.found = SimulatedRun(
            run,
            steps=[0] * workers,
            waits=[defaultdict(float) for _ in range(workers)],
            staleness=[[] for _ in range(workers)],
            history=self._room.history,
        )

    def play(self) -> SimulatedRun:
        for number in range(len(self._seats)):
            self._begin(number, self._seats[number].resume())
        while self._events:
            self._now, _, happen = heappop(self._events)
            happen()
        living = ((n, seat) for n, seat in enumerate(self._seats) if n not in self._dead)
        stuck = [number for number, seat in living if not seat.ended]
        if self._is_cut:
            self._note_stuck(stuck)
        elif stuck:
            raise PlanError(
                "workers wait for each other for ever",
                problems=[f"worker {n} waits for: {self._seats[n].waits}" for n in stuck],
                fix="This is a bug of the programs in headway.synchrony: report it.",
            )
        for holder in self._run.holders.values():
            for worker, stale in getattr(holder, "staleness", ()):
                self.found.staleness[worker].append(stale)
        return self.found

    def _note_stuck(self, workers: Sequence[int]) -> None:
        """Workers that wait for ever do so from the first missing answer on."""
        for number in workers:
            seat, since = self._seats[number], self._since[number]
            assert seat.waits is not None
            holder = seat.awaits(seat.waits)
            place, cut = self._run.places[holder], self._machines.cut
            far = cut is not None and (place, number) in cut.between
            self.found.stuck[number] = since, holder, "link" if far else seat.waits.cause
            self.found.seconds = max(self.found.seconds, since)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, happen))

    # -- workers -----------------------------------------------------------------------------

    def _begin(self, number: int, wanted: Compute | None) -> None:
        """Begin what a worker wants computed, or to wait."""
        seat = self._seats[number]
        if wanted is None:
            self._since[number] = self._now
            if seat.ended:
                self.found.seconds = max(self.found.seconds, self._now)
            return
        if wanted.step >= self._machines.deaths.get(number, wanted.step + 1):
            self._die(number)
            return
        cut = self._machines.cut
        if cut is not None and number == cut.worker and wanted.step >= cut.step:
            self._is_cut = True
        if self._is_over(wanted.step):
            self._begin(number, seat.resume(None))
            return
        result = self._gradient(number, wanted.step, wanted.value)
        ends = self._now + self._machines.compute(number, wanted.step)
        self._at(ends, lambda: self._computed(number, wanted.step, result))

    def _is_over(self, step: int) -> bool:
        if self._limit is not None and self._now >= self._limit:
            return True
        return self._steps is not None and step >= self._steps

    def _computed(self, number: int, step: int, result: Gradient) -> None:
        self.found.steps[number] += 1
        if self._on_step is not None:
            self._on_step(self._now, number, step)
        self._begin(number, self._seats[number].resume(result))

    def _die(self, number: int) -> None:
        """All holders forget a worker; its own are gone with it."""
        self._dead.add(number)
        for address, holder in self._run.holders.items():
            if self._run.places[address] != number:
                self._room.history.add(address, Died(number))
                for sent in holder.lose(number):
                    self._send_on(address, sent)

    # -- messages ----------------------------------------------------------------------------

    def _post(self, sender: Sender, to: Address, message: Any) -> None:
        source = sender if isinstance(sender, int) else self._run.places[sender]
        if isinstance(sender, int):
            self._asked[sender, to] = self._now
        self._carry(
            source, self._run.places[to], message, lambda: self._arrived(sender, to, message)
        )

    def _carry(
        self, source: int | None, target: int | None, message: Any, arrived: Callable[[], None]
    ) -> None:
        """Let a message travel: on the sender's wire in its turn, and on the receiver's in its."""
        arrived = self._unless_cut(source, target, arrived)
        if source is None or target is None or source == target:
            meeting = source is None and target is not None
            self._at(self._now + (self._machines.meeting if meeting else 0.0), arrived)
            return
        models = size(message) / self._shares
        self.found.traffic[source, target] += models
        machines = self._machines
        seconds = machines.wire
        out, into = ("out", source), ("in", target)
        if machines.nodes:
            here, there = machines.nodes[source], machines.nodes[target]
            if here == there:
                seconds = machines.inside
            else:
                out, into = ("out of node", here), ("into node", there)
        seconds *= machines.slower.get((source, target), 1.0)
        begins = max(self._now, self._wires[out])
        self._wires[out] = begins + models * seconds

        def comes() -> None:
            # A busy receiver does not keep its sender from sending to others.
            self._wires[into] = max(self._now, self._wires[into]) + models * seconds
            self._at(self._wires[into] + machines.latency, arrived)

        self._at(begins, comes)

    def _unless_cut(
        self, source: int | None, target: int | None, arrived: Callable[[], None]
    ) -> Callable[[], None]:
        cut = self._machines.cut
        if cut is None or not (source is None or target is None or (source, target) in cut.between):
            return arrived

        def comes() -> None:
            if not self._is_cut:
                arrived()

        return comes

    def _arrived(self, sender: Sender, to: Address, message: Any) -> None:
        begins = max(self._now, self._busy[to])
        work = self._machines.update / self._shares if changes(message) else 0.0
        self._busy[to] = begins + work
        if isinstance(sender, int):
            self._done[sender, to] = (begins + work - self._now, begins + work)
        self._at(begins + work, lambda: self._handled(sender, to, message))

    def _handled(self, sender: Sender, to: Address, message: Any) -> None:
        if sender in self._dead:
            return
        if self._run.places[to] in self._dead:
            self._come_to_nothing(sender, to, message)
            return
        self._room.put(sender, to, message)
        for sent in self._room.handle(sender, to):
            self._send_on(to, sent)

    def _come_to_nothing(self, sender: Sender, to: Address, message: Any) -> None:
        """To the model of a dead worker: of a pair one's own stays, gossip comes back."""
        if isinstance(sender, int) and isinstance(message, merging.Pair):
            self._answered(sender, to, message.model, NO_TIME)
        elif isinstance(sender, int) and isinstance(message, merging.Gossip):
            self._post(sender, Address("model", sender), message)

    def _send_on(self, holder: Address, sent: Outgoing) -> None:
        if isinstance(sent.to, Address):
            self._post(holder, sent.to, sent.value)
            return
        worker, place = sent.to, self._run.places[holder]
        busy, done = self._done.get((worker, holder), (0.0, self._now))
        spent = HolderTime(busy, max(0.0, self._now - done))
        self._carry(
            place, worker, sent.value, lambda: self._answered(worker, holder, sent.value, spent)
        )

    def _answered(self, worker: int, holder: Address, value: Any, spent: HolderTime) -> None:
        if worker in self._dead:
            return
        seat = self._seats[worker]
        waits = seat.waits
        if seat.answer(holder, value):
            assert waits is not None
            waited = self._now - self._since[worker]
            split = {waits.cause: waited}
            if (place := self._run.places[holder]) is not None:
                whole = 0.0 if place == worker else self._now - self._asked[worker, holder]
                split = split_wait(waits.cause, waited, whole, spent)
            for cause, seconds in split.items():
                if seconds:
                    self.found.waits[worker][cause] += seconds
            self._begin(worker, seat.go_on())


def size(message: Any) -> int:
    """How many shares of a model a message or an answer carries."""
    match message:
        case servers.Pull() | merging.Read() | merging.Halve() | None | int():
            return 0
    return 1


def changes(message: Any) -> bool:
    """Whether a message lets its holder compute with a whole share of the model."""
    return isinstance(
        message,
        servers.Push | merging.Update | merging.Pull | merging.Pair | merging.Gossip,
    )


class StillReplica:
    """A replica of nothing, for runs whose numbers do not matter.

    Args:
        shares: Of a worker of so many servers; 0: one value.
    """

    def __init__(self, shares: int = 0) -> None:
        self._value: Any = (0.0,) * shares if shares else 0.0

    def read(self) -> Any:
        return self._value

    def write(self, value: Any) -> None: ...

    def step(self, gradient: Any, rate: float = 1.0) -> None: ...

    def clone(self) -> StillReplica:
        return self

    def read_state(self) -> None:
        return None

    def write_state(self, state: Any) -> None: ...


class DriftingReplica(StillReplica):
    """A replica of one number, which every step moves: for rules that look at values."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self._value = value

    def step(self, gradient: Any, rate: float = 1.0) -> None:
        self._value += rate * gradient

    def clone(self) -> DriftingReplica:
        return DriftingReplica(self._value)
