"""Parameter servers: when a worker may read, what a push does, what staleness is answered with.

Sources: DistBelief (Dean et al. 2012, section 4.1) for asynchronous pushes; stale synchronous
parallel (Ho et al. 2013, section 3) for delay bounds, eager pushes after Petuum (Dai et al. 2015,
section 3); value bounds after Langer et al. 2020, section 3.3; backup workers (Chen et al. 2016,
section 3); DC-ASGD (Zheng et al. 2017, equation 10); rates divided by the staleness (Zhang et al.
2016, equation 6).

A server holds a share of the parameters, and their optimiser. The *clock* of a worker is the number
of its pushes that this server has got; the *version* of the parameters the number of updates made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headway.plans.synchrony import Synchrony
from headway.synchrony.actors import Address, Gradient, Holder, Outgoing, Replica, Sender, Value
from headway.synchrony.snapshots import Look, shown


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker asks for the parameters, to begin its step number `clock` (from 0)."""

    clock: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """The answer.

    Attributes:
        clock: The step to go on with: a later one where others have closed the step without this
            worker (backup workers).
        slowest: The pushes that each worker had made, at least, when they were read.
    """

    value: Value
    version: int
    clock: int
    slowest: int = 0


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient of step `clock`, computed with the parameters of `version`."""

    clock: int
    version: int
    gradient: Gradient


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker pushes nothing any more: nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Parameters that a server sends to the cache of a worker without being asked."""

    parameters: Parameters


def may_start(clock: int, clocks: Sequence[int], bound: int | None) -> bool:
    """Whether a worker may begin step `clock`: it is at most `bound` steps ahead of the slowest.

    Args:
        clocks: Pushes of all workers that take part.
        bound: None: it may always.
    """
    return bound is None or clock - min(clocks) <= bound


def compensated(gradient: Value, now: Value, backup: Value, factor: float) -> Value:
    """DC-ASGD: g + lambda * g * g * (x_now - x_backup), elementwise (Zheng et al. 2017, eq. 10)."""
    return gradient + factor * gradient * gradient * (now - backup)


def mean_gradient(parts: Sequence[Gradient]) -> Value:
    """The gradient of the mean over all that the parts are means over, added in their order.

    Returns:
        None where no part has anything.
    """
    total = sum(part.count for part in parts)
    found: Value = None
    for part in parts:
        if part.count:
            share = part.value * (part.count / total)
            found = share if found is None else found + share
    return found


Asked = TypeVar("Asked")


def without(waiting: Iterable[tuple[int, Asked]], worker: int) -> deque[tuple[int, Asked]]:
    """What waits, but nothing of one worker."""
    return deque(item for item in waiting if item[0] != worker)


class RoundServer(Holder):
    """Steps are closed as a whole: synchronous servers, backup workers, snapshot reads.

    The pushes of a step are kept until the step closes: when all workers have pushed it, or all but
    `backup_workers`. Version v is the state after v closed steps. A pull at clock c gets version
    c - delay_bound, with the worker's own later pushes applied to a copy (it reads its own writes),
    whoever else has pushed by then: what a run computes does not depend on who was faster.

    Attributes:
        dropped: Pushes that came after their step had closed.
    """

    def __init__(self, synchrony: Synchrony, replica: Replica, workers: int) -> None:
        self.replica = replica
        self.version = 0
        self.dropped = 0
        self._workers = workers
        self._bound = synchrony.delay_bound or 0
        self._backups = synchrony.backup_workers
        self._present = set(range(workers))
        self._since = [0] * workers
        self._sum = synchrony.reduce == "sum"
        self._pushed: dict[int, dict[int, Gradient]] = {}
        self._clocks = [0] * workers
        self._copies: dict[int, Replica] = {}
        self._waiting: deque[tuple[int, Pull]] = deque()

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        match message:
            case Look():
                return shown(sender, self.replica)
            case Pull():
                self._waiting.append((sender, message))
            case Push(clock=clock, gradient=gradient):
                self._clocks[sender] = max(self._clocks[sender], clock + 1)
                if clock < self.version:
                    self.dropped += 1
                else:
                    self._pushed.setdefault(clock, {})[sender] = gradient
            case Leave():
                self._present.discard(sender)
        return self._go_on()

    def lose(self, worker: int) -> Sequence[Outgoing]:
        self._waiting = without(self._waiting, worker)
        self._present.discard(worker)
        return self._go_on()

    def join(self, worker: int, step: int) -> Sequence[Outgoing]:
        self._present.add(worker)
        self._since[worker] = self._clocks[worker] = step
        return self._go_on()

    def missing(self) -> Sequence[int]:
        pushed = self._pushed.get(self.version, {})
        return sorted(self._expected - set(pushed)) if self._waiting else ()

    @property
    def _expected(self) -> set[int]:
        """Who pushes the oldest open step, or has done it."""
        return {worker for worker in self._present if self._since[worker] <= self.version}

    def _go_on(self) -> Sequence[Outgoing]:
        while self._is_complete():
            self._close()
        return list(self._answers())

    def _is_complete(self) -> bool:
        """Whether the oldest open step has the pushes of all that are still there, or enough."""
        pushed, expected = self._pushed.get(self.version, {}), self._expected
        missing = sum(worker not in pushed for worker in expected)
        # A step that only workers have left out which have come back since is closed empty.
        made = bool(pushed) or (not expected and bool(self._present))
        return made and missing <= self._backups

    def _close(self) -> None:
        """Make the update of the oldest open step."""
        if self._bound:
            self._copies[self.version] = self.replica.clone()
        parts = self._pushed.get(self.version, {})
        self._apply(self.replica, [parts[worker] for worker in sorted(parts)])
        self.version += 1
        # A worker asks for the version `bound` steps before its clock, and never for an older one.
        clocks = [self._clocks[worker] for worker in self._present]
        oldest = min(clocks, default=self.version) - self._bound
        for version in [v for v in self._copies if v < oldest]:
            del self._copies[version]
        for clock in [c for c in self._pushed if c < min(oldest, self.version)]:
            del self._pushed[clock]

    def _apply(self, replica: Replica, parts: Sequence[Gradient], share: float = 1.0) -> None:
        gradient = mean_gradient(parts)
        if gradient is not None:
            factor = share * (len(parts) if self._sum else 1.0)
            replica.step(gradient if factor == 1.0 else gradient * factor)

    def _answers(self) -> Iterator[Outgoing]:
        waiting, self._waiting = self._waiting, deque()
        for worker, pull in waiting:
            # The others may have closed this worker's step without it.
            clock = max(pull.clock, self.version) if not self._bound else pull.clock
            wanted = max(0, clock - self._bound)
            if wanted > self.version:
                self._waiting.append((worker, pull))
                continue
            value = self._read(worker, wanted, clock)
            yield Outgoing(worker, Parameters(value, wanted, clock, wanted))

    def _read(self, worker: int, version: int, clock: int) -> Value:
        """The state of a version, and this worker's own pushes between it and a clock."""
        # One that has come back has not made those before.
        pushed = [self._pushed.get(c, {}) for c in range(version, clock)]
        own = [of_step[worker] for of_step in pushed if worker in of_step]
        replica = self._copies.get(version, self.replica)
        if own:
            replica = replica.clone()
            for gradient in own:
                self._apply(replica, [gradient], 1.0 if self._sum else 1 / self._workers)
        return replica.read()


class StreamServer(Holder):
    """Each push is applied when it comes: asynchronous servers, and bounds on what may be read.

    Attributes:
        staleness: Of every push, in the order of their arrival: its worker, and the updates made
            between the version that it was computed with and its own.
        rejected: Pushes that were too stale.
    """

    def __init__(
        self, synchrony: Synchrony, replica: Replica, workers: int, share: int = 0
    ) -> None:
        self.replica = replica
        self.version = 0
        self.staleness: list[tuple[int, int]] = []
        self.rejected = 0
        self._share = share
        self._rules = synchrony
        self._workers = workers
        self._clocks = dict.fromkeys(range(workers), 0)
        self._waiting: deque[tuple[int, Pull]] = deque()
        self._backups: dict[int, Value] = {}

    @property
    def _bound(self) -> int | None:
        rules = self._rules
        return rules.delay_bound if rules.on_violation == "wait" else None

    @property
    def _eager(self) -> bool:
        return self._rules.remedy == "eager_push"

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        slowest = self._slowest
        match message:
            case Look():
                return shown(sender, self.replica)
            case Pull():
                self._waiting.append((sender, message))
            case Push():
                self._take(sender, message)
            case Leave():
                self._clocks.pop(sender, None)
        found = list(self._answers())
        return found if isinstance(message, Pull) else [*self._refreshed(sender, slowest), *found]

    def lose(self, worker: int) -> Sequence[Outgoing]:
        slowest = self._slowest
        self._waiting = without(self._waiting, worker)
        self._clocks.pop(worker, None)
        self._backups.pop(worker, None)
        return [*self._refreshed(worker, slowest), *self._answers()]

    def join(self, worker: int, step: int) -> Sequence[Outgoing]:
        slowest = self._slowest
        self._clocks[worker] = step // self._rules.push_every
        return list(self._refreshed(worker, slowest))

    def missing(self) -> Sequence[int]:
        behind = [worker for worker, clock in self._clocks.items() if clock == self._slowest]
        return behind if self._waiting else ()

    @property
    def _slowest(self) -> int:
        return min(self._clocks.values(), default=self.version)

    def _take(self, worker: int, push: Push) -> None:
        self._clocks[worker] = push.clock + 1
        staleness = self.version - push.version
        self.staleness.append((worker, staleness))
        rules = self._rules
        if rules.on_violation == "reject" and staleness > (rules.delay_bound or 0):
            self.rejected += 1
            return
        gradient = push.gradient.value
        if not push.gradient.count:
            return
        if rules.reduce == "mean":
            gradient = gradient * (1 / self._workers)
        if rules.remedy == "delay_compensation":
            gradient = compensated(
                gradient, self.replica.read(), self._backups[worker], rules.compensation
            )
        rate = 1 / max(1, staleness) if rules.remedy == "staleness_rate" else 1.0
        self.replica.step(gradient, rate)
        self.version += 1

    def _answers(self) -> Iterator[Outgoing]:
        waiting, self._waiting = self._waiting, deque()
        for worker, pull in waiting:
            if may_start(pull.clock, [*self._clocks.values()], self._bound):
                yield Outgoing(worker, self._read(worker, pull.clock))
            else:
                self._waiting.append((worker, pull))

    def _read(self, worker: int, clock: int) -> Parameters:
        value = self.replica.read()
        if self._rules.remedy == "delay_compensation":
            self._backups[worker] = value
        return Parameters(value, self.version, clock, self._slowest)

    def _refreshed(self, pusher: int, before: int) -> Iterator[Outgoing]:
        """To the cache of whoever has pushed, and to all when the slowest has advanced."""
        if not self._eager:
            return
        everybody = self._slowest > before
        for worker in self._clocks:
            if everybody or worker == pusher:
                parameters = self._read(worker, self._clocks[worker])
                yield Outgoing(Address("cache", worker, self._share), Refresh(parameters))


class ValueBoundServer(Holder):
    """A push waits if it would take the parameters too far from what another worker computes with.

    The update of a push is made at once if no parameter is then `value_bound` or more away from
    what it is in any version in use (published: the oldest one, from which later ones may have
    turned back); else the push waits, and so does its worker, until that version is no longer in
    use. A worker whose push waits uses no version, so that not all of them can wait.
    """

    def __init__(self, synchrony: Synchrony, replica: Replica, workers: int) -> None:
        assert synchrony.value_bound is not None
        self.replica = replica
        self.version = 0
        self.staleness: list[tuple[int, int]] = []
        self._limit = synchrony.value_bound
        self._scale = 1.0 if synchrony.reduce == "sum" else 1 / workers
        self._in_use: dict[int, Value] = {}
        self._pushes: deque[tuple[int, Push]] = deque()

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        if isinstance(message, Look):
            return shown(sender, self.replica)
        if isinstance(message, Pull):
            value = self._in_use[sender] = self.replica.read()
            return [Outgoing(sender, Parameters(value, self.version, message.clock))]
        self._in_use.pop(sender, None)
        if isinstance(message, Push):
            self._pushes.append((sender, message))
        return list(self._applied())

    def lose(self, worker: int) -> Sequence[Outgoing]:
        self._in_use.pop(worker, None)
        self._pushes = without(self._pushes, worker)
        return list(self._applied())

    def missing(self) -> Sequence[int]:
        return sorted(self._in_use) if self._pushes else ()

    def _applied(self) -> Iterator[Outgoing]:
        """Make the updates that may be made now, the oldest push first."""
        again = True
        while again:
            again = False
            for item in list(self._pushes):
                worker, push = item
                if self._try(push):
                    self._pushes.remove(item)
                    self.staleness.append((worker, self.version - 1 - push.version))
                    yield Outgoing(worker, self.version)
                    again = True
                    break

    def _try(self, push: Push) -> bool:
        """Make an update unless it goes too far; whether it was made."""
        if not push.gradient.count:
            self.version += 1
            return True
        candidate = self.replica.clone()
        candidate.step(push.gradient.value * self._scale)
        value = candidate.read()
        if any(largest(value - used) >= self._limit for used in self._in_use.values()):
            return False
        self.replica = candidate
        self.version += 1
        return True


def largest(value: Value) -> float:
    """The largest entry, without its sign."""
    size = abs(value)
    return float(size.max()) if hasattr(size, "max") else float(size)


@dataclass
class Cache(Holder):
    """A worker's copy of what one server has sent to it unasked (eager push).

    A pull at clock c is answered once the copy holds all pushes of all workers up to step
    c - bound - 1, and all of its own.
    """

    bound: int
    start: Parameters
    _waiting: deque[tuple[int, Pull]] = field(default_factory=deque)

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        if isinstance(message, Refresh):
            self.start = message.parameters
        else:
            assert isinstance(sender, int)
            self._waiting.append((sender, message))
        found = []
        while self._waiting and self._fresh(self._waiting[0][1]):
            worker, _ = self._waiting.popleft()
            found.append(Outgoing(worker, self.start))
        return found

    def _fresh(self, pull: Pull) -> bool:
        return self.start.clock >= pull.clock and self.start.slowest >= pull.clock - self.bound


def make_server(
    synchrony: Synchrony, replica: Replica, workers: int, share: int = 0
) -> RoundServer | ValueBoundServer | StreamServer:
    """The holder of a share of the parameters, as a plan says."""
    if synchrony.kind == "synchronous" or synchrony.read == "snapshot":
        return RoundServer(synchrony, replica, workers)
    if synchrony.value_bound is not None:
        return ValueBoundServer(synchrony, replica, workers)
    return StreamServer(synchrony, replica, workers, share)
