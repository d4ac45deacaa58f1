"""Reference of workers that do not meet in rounds: one process executes the history of their run.

A history says in which order each holder of state (a server's share, a centre, a model that others
change, a cache) has handled its messages, and nothing of what was in them. What they were, when an
answer may be given and what it holds is written here once more, from the papers and without the
programs, servers and merges of `headway.synchrony`: DistBelief (Dean et al. 2012, section 4.1),
stale synchronous parallel (Ho et al. 2013, section 3), eager pushes (Dai et al. 2015, section 3),
value bounds (Langer et al. 2020, section 3.3), rates by staleness (Zhang et al. 2016, equation 6),
DC-ASGD (Zheng et al. 2017, equation 10), EASGD and its tree (Zhang et al. 2015, equations 2.3 and
2.4; Langer et al. 2020, figure 16), AD-PSGD (Lian et al. 2018, algorithm 1), GoSGD (Blot et al.
2016, algorithm 3).

Every gradient is computed in float64 with the parameters that its worker has read by that order; a
run must equal all of it to rounding. A message that was lost, doubled or answered too early leaves
a history that no such run can have, or other numbers.
"""

from __future__ import annotations

import random
import warnings
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.data import RankBatch
from headway.errors import Diverged, NotEqual
from headway.plans import Plan, Synchrony
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.recipe import Recipe
from headway.run.step.setup import stepped_each_step
from headway.run.strategy.training_state import TrainingState
from headway.synchrony.actors import Address, Sender
from headway.synchrony.history import History, merged
from headway.units import counted
from headway.verification.recording import Recorder, VerifyJob, recipe_and_plan
from headway.verification.reference.optimizers import step_as_published
from headway.verification.worker_exchange import by_worker
from headway.verification.worker_run import (
    Model,
    WorkerGradients,
    hearing,
    prepared,
)

Replies: TypeAlias = list[tuple[Sender, Any]]
"""To whom (for a worker: what it waits for there, the oldest first) and what."""
Program: TypeAlias = Generator[Address, Any, None]
"""A worker: gives the holder whose next reply it waits for."""


def history_file(target: Path, worker: int) -> Path:
    """Where a worker's history is written, beside a recording of workers that do not meet."""
    return target.with_suffix(f".history-{worker}")


def record_history(_: LaunchEnv, job: VerifyJob, target: Path, *, ranks: int, split: Path) -> None:
    """Execute the history of a recorded run in float64; save the recording.

    Args:
        split: Of the run.

    Raises:
        NotEqual: By its rules the run cannot have had such a history.
    """
    recipe, plan = recipe_and_plan(job, ranks)
    initial, states, steps = prepared(job, recipe, plan)
    # A scheduler wraps the `step` of its optimiser, which could not be copied then.
    holding = prepared(job, replace(recipe, scheduler=None), plan)[1]
    workers = _Workers(recipe, plan, states, list(steps))
    family = _family(plan.synchrony, workers, holding)
    histories = {n: History.load(history_file(split, n)) for n in range(plan.workers)}
    _Table(merged(histories), family).play()
    recorder = Recorder(states[0])
    for step in range(workers.steps):
        loss = workers.loss(step)
        if not isfinite(loss):
            raise Diverged(
                f"the loss is {loss}",
                where=f"step {step + 1} of the reference of all workers",
                fix="Lower the learning rate, or check this batch's data.",
            )
        recorder.take(step + 1, loss, workers.numbers[step])
    ends = family.ends()
    recorder.take(workers.steps + 1, 0.0, by_worker(dict.fromkeys(range(plan.workers), ends)))
    replace(recorder.recording(), initial=initial).save(target)


# -- workers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A gradient on its way.

    Attributes:
        values: By name; parameters that no loss has used have none.
        count: Of what the mean is over; 0: there is none.
        rates: The learning rates of the worker's groups when it was computed.
    """

    values: Model
    count: float
    rates: tuple[float, ...]

    def times(self, factor: float) -> _Part:
        return replace(self, values={name: value * factor for name, value in self.values.items()})

    def plus(self, other: _Part) -> _Part:
        """The sum; rates are those of the first. One of nothing changes nothing."""
        if not other.count:
            return self
        if not self.count:
            return other
        values = dict(self.values)
        for name, value in other.values.items():
            values[name] = values[name] + value if name in values else value
        return _Part(values, self.count + other.count, self.rates)


class _Workers:
    """The models of all workers, and what they had at each step.

    Attributes:
        numbers: Of each step: kind -> name -> tensor, of all workers.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        states: Sequence[TrainingState],
        batches: Sequence[Sequence[RankBatch]],
    ) -> None:
        self.states, self._batches = states, batches
        self._gradients = WorkerGradients(recipe, [state.model for state in states])
        self._losses: list[dict[int, tuple[float, float]]] = [{} for _ in batches]
        self.numbers: list[dict[str, dict[str, Tensor]]] = [{} for _ in batches]
        self._noted = [0] * len(states)

    @property
    def count(self) -> int:
        return len(self.states)

    @property
    def steps(self) -> int:
        return len(self._batches)

    def loss(self, step: int) -> float:
        """The mean over all samples of a step."""
        parts = self._losses[step].values()
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    def read(self, worker: int) -> Model:
        return _values(self.states[worker].model)

    @torch.no_grad()
    def write(self, worker: int, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.states[worker].model.named_parameters():
            if name in values:
                parameter.copy_(values[name])

    def compute(self, worker: int, step: int) -> _Part | None:
        """The gradient of a step with the worker's model; None after the last one.

        What the worker has now is what the step before has left, and those that are left out.
        """
        state = self.states[worker]
        while self._noted[worker] < step:  # more than one where some are left out
            self._note(worker, self._noted[worker])
            self._noted[worker] += 1
        if step == self.steps:
            return None
        copies = len(self._batches[step]) // self.count
        shares = self._batches[step][worker * copies : (worker + 1) * copies]
        total, count = self._gradients.leave(worker, shares)
        self._losses[step][worker] = total, count
        values = {
            name: (p.grad.to_dense() if p.grad.is_sparse else p.grad).clone()
            for name, p in state.model.named_parameters()
            if p.grad is not None
        }
        rates = tuple(float(group["lr"]) for group in state.optimizer.param_groups)
        return _Part(values, count, rates)

    def _note(self, worker: int, step: int) -> None:
        """What a worker has after a step."""
        state = self.states[worker]
        scheduler = stepped_each_step(state.scheduler)
        if scheduler is not None:
            with warnings.catch_warnings():
                # Optimisers step where parameters are held.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                scheduler.step()
        for kind, tensors in by_worker({worker: state.tensors_by_kind()}).items():
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            self.numbers[step].setdefault(kind, {}).update(copies)

    def step(self, worker: int) -> None:
        """The worker's own optimiser, with the gradient that was computed last."""
        self.states[worker].optimizer.step()


def _values(model: nn.Module) -> Model:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class _Held:
    """Some parameters with an optimiser of their own."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._model, self._optimizer, self._names = model, optimizer, names

    def read(self) -> Model:
        values = _values(self._model)
        return {name: values[name] for name in self._names}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            if name in values:
                parameter.copy_(values[name])

    def step(self, part: _Part, rate: float = 1.0) -> None:
        """With the rates of the gradient, times `rate`."""
        for name, parameter in self._model.named_parameters():
            value = part.values.get(name) if name in self._names else None
            parameter.grad = None if value is None else value.clone()
        for group, own in zip(self._optimizer.param_groups, part.rates, strict=True):
            group["lr"] = own * rate
        self._optimizer.step()

    def copy(self) -> _Held:
        model, optimizer = deepcopy((self._model, self._optimizer))
        return _Held(model, step_as_published(optimizer), self._names)

    def state(self) -> dict[str, Tensor]:
        """The optimiser's tensors, by name."""
        held = TrainingState(self._model, self._optimizer, None)
        named = held.tensors_by_kind()["optimizer"]
        return {key: t for key, t in named.items() if key.rpartition(".")[0] in self._names}


# -- the order ---------------------------------------------------------------------------------


class _Holder(ABC):
    @abstractmethod
    def take(self, sender: Sender, message: Any) -> Replies:
        """Handle one message, and give what is answered now."""


class _Family(ABC):
    """How workers of one kind agree.

    Attributes:
        holders: Whom they talk to.
        say: Set by the table: a worker sends a message.
    """

    def __init__(self, rules: Synchrony, workers: _Workers) -> None:
        self.rules, self.workers = rules, workers
        self.holders: dict[Address, _Holder] = {}
        self.said: deque[tuple[int, Address, Any]] = deque()

    def say(self, worker: int, holder: Address, message: Any) -> None:
        self.said.append((worker, holder, message))

    @abstractmethod
    def program(self, worker: int) -> Program:
        """What a worker does."""

    @abstractmethod
    def ends(self) -> dict[str, dict[str, Tensor]]:
        """What every worker ends with, by kind."""


class _Table:
    """Lets every holder handle the messages in the order of the history."""

    def __init__(self, history: History, family: _Family) -> None:
        self._family = family
        self._orders = {holder: deque(history.senders(holder)) for holder in family.holders}
        self._unknown = [str(holder) for holder in history.logs if holder not in family.holders]
        self._mail: dict[tuple[Address, Sender], deque[Any]] = defaultdict(deque)
        self._replies: dict[tuple[int, Address], deque[Any]] = defaultdict(deque)
        self._programs = [family.program(worker) for worker in range(family.workers.count)]
        self._wants: list[Address | None] = []

    def play(self) -> None:
        for program in self._programs:
            self._wants.append(next(program, None))
            self._collect()
        while any(self._handle_next(holder) for holder in self._orders):
            pass
        self._check()

    def _collect(self) -> None:
        while self._family.said:
            worker, holder, message = self._family.said.popleft()
            self._mail[holder, worker].append(message)

    def _handle_next(self, holder: Address) -> bool:
        order = self._orders[holder]
        if not order or not self._mail[holder, order[0]]:
            return False
        sender = order.popleft()
        message = self._mail[holder, sender].popleft()
        for to, value in self._family.holders[holder].take(sender, message):
            if isinstance(to, Address):
                self._mail[to, holder].append(value)
            else:
                self._replies[to, holder].append(value)
                self._go_on(to)
        return True

    def _go_on(self, worker: int) -> None:
        while (wanted := self._wants[worker]) and self._replies[worker, wanted]:
            reply = self._replies[worker, wanted].popleft()
            try:
                self._wants[worker] = self._programs[worker].send(reply)
            except StopIteration:
                self._wants[worker] = None
            self._collect()

    def _check(self) -> None:
        """Raise where the history has messages that nobody sends, or lacks some."""
        told = [f"there is no {holder}, which has handled messages" for holder in self._unknown]
        told += [
            f"worker {worker} has not waited for {holder}, which may not answer it yet"
            for worker, holder in enumerate(self._wants)
            if holder is not None and not self._mail[holder, worker]
        ]
        told += [
            f"{holder} has not handled {counted(len(mail), 'message')} of {_named(sender)}"
            for (holder, sender), mail in self._mail.items()
            if mail
        ]
        told += [
            f"{holder} has handled {counted(count, 'message')} of {_named(sender)} that it does "
            "not send"
            for holder, order in self._orders.items()
            for sender, count in Counter(order).items()
        ]
        if told:
            raise NotEqual(
                f"the run has a history that its rules do not allow: {told[0]}",
                where=f"workers of ({self._family.rules})",
                why="\n  ".join(told[:8]),
                fix="This is a mistake of headway; please report it with the plan.",
            )


def _named(sender: Sender) -> str:
    return str(sender) if isinstance(sender, Address) else f"worker {sender}"


# -- servers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pull:
    clock: int


@dataclass(frozen=True)
class _Push:
    clock: int
    version: int
    part: _Part


@dataclass(frozen=True)
class _Shown:
    """The parameters of a share, as they were read.

    Attributes:
        version: Updates that had been made.
        clock: Pushes of the reader that had come, and `slowest` of whoever had the fewest.
    """

    values: Model
    version: int
    clock: int = 0
    slowest: int = 0


_LEAVE = "leave"


class _Servers(_Family):
    """Pull, compute, push."""

    def __init__(
        self, rules: Synchrony, workers: _Workers, holding: Sequence[TrainingState]
    ) -> None:
        super().__init__(rules, workers)
        model, optimizer = holding[0].model, holding[0].optimizer
        named = dict(model.named_parameters())
        count = {"single": 1, "colocated": workers.count}.get(rules.place, rules.servers or 1)
        self._names = _by_server(named, count)
        self._servers: list[_Server] = []
        for number, names in enumerate(self._names):
            held = _Held(model, optimizer, names).copy()
            self._servers.append(self._server(held, number))
            self.holders[Address("server", number)] = self._servers[-1]
            for worker in range(workers.count) if self._eager else ():
                cache = _Cache(worker, rules.delay_bound or 0, held.read())
                self.holders[Address("cache", worker, number)] = cache

    @property
    def _eager(self) -> bool:
        return self.rules.remedy == "eager_push"

    def _server(self, held: _Held, number: int) -> _Server:
        if self.rules.kind == "synchronous" or self.rules.read == "snapshot":
            return _ByRounds(self.rules, held, self.workers.count)
        if self.rules.value_bound is not None:
            return _ByValue(self.rules, held, self.workers.count)
        return _ByArrival(self.rules, held, self.workers.count, number)

    def program(self, worker: int) -> Program:
        return self._ahead(worker) if self.rules.read == "ahead" else self._in_turn(worker)

    def _ahead(self, worker: int) -> Program:
        """Every pull is said before the push of the step before it (Dean et al. 2012, algorithm
        7.1, whose fetch and push are threads of their own)."""
        workers = self.workers
        sources = [Address("server", n) for n in range(len(self._names))]
        for source in sources:
            self.say(worker, source, _Pull(0))
        for step in range(workers.steps + 1):
            versions = []
            for source in sources:
                shown: _Shown = yield source
                workers.write(worker, shown.values)
                versions.append(shown.version)
            for source in sources:
                self.say(worker, source, _Pull(step + 1))
            part = workers.compute(worker, step)
            if part is None:
                break
            for source, version in zip(sources, versions, strict=True):
                self.say(worker, source, _Push(step, version, part))
        for source in sources:
            yield source
        for source in sources:
            self.say(worker, source, _LEAVE)

    def _in_turn(self, worker: int) -> Program:
        rules, workers, numbers = self.rules, self.workers, range(len(self._names))
        versions: list[int] = []
        unsent: _Part | None = None
        pushes = step = 0
        while True:
            if step % rules.fetch_every == 0:
                sources = [
                    Address("cache", worker, n) if self._eager else Address("server", n)
                    for n in numbers
                ]
                for source in sources:
                    self.say(worker, source, _Pull(pushes))
                versions = []
                for source in sources:
                    shown: _Shown = yield source
                    workers.write(worker, shown.values)
                    versions.append(shown.version)
                    if rules.kind == "synchronous":  # the others may have closed steps meanwhile
                        step = pushes = max(step, shown.version)
            part = workers.compute(worker, step)
            if part is not None:
                unsent = part if unsent is None else unsent.plus(part)
                step += 1
            if unsent is not None and (part is None or step % rules.push_every == 0):
                for n in numbers:
                    self.say(worker, Address("server", n), _Push(pushes, versions[n], unsent))
                for n in numbers if rules.value_bound is not None else ():
                    yield Address("server", n)
                pushes, unsent = pushes + 1, None
            if part is None:
                for n in numbers:
                    self.say(worker, Address("server", n), _LEAVE)
                return
            if step % rules.fetch_every and part.count:
                workers.step(worker)

    def ends(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {"parameter": {}, "optimizer": {}}
        for server in self._servers:
            found["parameter"] |= server.held.read()
            found["optimizer"] |= server.held.state()
        return found


def _by_server(named: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Whole parameters, the largest first, each to the server that has least; the first of those
    that have as little."""
    sizes, found = [0] * count, [set[str]() for _ in range(count)]
    order = list(named)
    for name in sorted(order, key=lambda one: (-named[one].numel(), order.index(one))):
        at = min(range(count), key=lambda n: (sizes[n], n))
        found[at].add(name)
        sizes[at] += named[name].numel() * named[name].element_size()
    return [[name for name in order if name in names] for names in found]


class _ByArrival(_Holder):
    """Each push is applied when it comes; whoever is too far ahead of the slowest waits."""

    def __init__(self, rules: Synchrony, held: _Held, workers: int, number: int) -> None:
        self.held = held
        self._rules, self._workers, self._number = rules, workers, number
        self._clocks = Counter(dict.fromkeys(range(workers), 0))
        self._there = set(range(workers))
        self._version = 0
        self._last_read: dict[int, Model] = {}
        self._waiting: list[tuple[int, _Pull]] = []

    def take(self, sender: Sender, message: Any) -> Replies:
        assert isinstance(sender, int)
        before, found = self._slowest(), []
        match message:
            case _Pull():
                self._waiting.append((sender, message))
            case _Push():
                self._clocks[sender] += 1
                self._apply(sender, message)
            case _:
                self._there.discard(sender)
        if self._rules.remedy == "eager_push":
            found = list(self._sent_unasked(sender, before))
        return found + list(self._answered())

    def _slowest(self) -> int:
        """The fewest pushes of a worker that is still there."""
        clocks = [self._clocks[worker] for worker in self._there]
        return min(clocks) if clocks else self._version

    def _apply(self, worker: int, push: _Push) -> None:
        rules, stale = self._rules, self._version - push.version
        late = rules.on_violation == "reject" and stale > (rules.delay_bound or 0)
        if late or not push.part.count:
            return
        part = push.part.times(1 / self._workers) if rules.reduce == "mean" else push.part
        if rules.remedy == "delay_compensation":
            now, then = self.held.read(), self._last_read[worker]
            values = {
                name: g + rules.compensation * g.square() * (now[name] - then[name])
                for name, g in part.values.items()
                if name in now
            }
            part = replace(part, values=values)
        self.held.step(part, 1 / stale if rules.remedy == "staleness_rate" and stale > 1 else 1.0)
        self._version += 1

    def _shown(self, worker: int) -> _Shown:
        values = self._last_read[worker] = self.held.read()
        return _Shown(values, self._version, self._clocks[worker], self._slowest())

    def _answered(self) -> Iterator[tuple[Sender, Any]]:
        rules = self._rules
        ahead = rules.delay_bound if rules.on_violation == "wait" else None
        for item in list(self._waiting):
            worker, pull = item
            if ahead is None or pull.clock <= self._slowest() + ahead:
                self._waiting.remove(item)
                yield worker, self._shown(worker)

    def _sent_unasked(self, sender: int, before: int) -> Iterator[tuple[Sender, Any]]:
        """To whom the pusher's own push matters, and to all once the slowest has gone on."""
        for worker in sorted(self._there):
            if worker == sender or self._slowest() > before:
                yield Address("cache", worker, self._number), self._shown(worker)


class _Cache(_Holder):
    """What a server has sent to a worker unasked; read once all is in it that the bound asks for,
    and all that the reader has pushed itself."""

    def __init__(self, owner: int, bound: int, values: Model) -> None:
        self._owner, self._bound = owner, bound
        self._here = _Shown(values, 0)
        self._waiting: deque[_Pull] = deque()

    def take(self, sender: Sender, message: Any) -> Replies:
        if isinstance(message, _Shown):
            self._here = message
        else:
            self._waiting.append(message)
        found: Replies = []
        while self._waiting:
            wanted = self._waiting[0].clock
            if self._here.clock < wanted or self._here.slowest + self._bound < wanted:
                break
            self._waiting.popleft()
            found.append((self._owner, self._here))
        return found


class _ByRounds(_Holder):
    """Version v has the first v pushes of every worker, or of all but some that were late, whose
    push is then dropped (Chen et al. 2016, section 3). Who reads at clock c gets c - bound, with
    its own later pushes on top; without a bound the newest version."""

    def __init__(self, rules: Synchrony, held: _Held, workers: int) -> None:
        self.held = held
        self._rules, self._workers = rules, workers
        self._versions = [held.copy()]
        self._pushed: dict[int, dict[int, _Part]] = defaultdict(dict)
        self._waiting: list[tuple[int, int]] = []
        self._there = set(range(workers))

    def take(self, sender: Sender, message: Any) -> Replies:
        assert isinstance(sender, int)
        match message:
            case _Pull(clock=clock):
                self._waiting.append((sender, clock))
            case _Push(clock=clock, part=part):
                if clock >= self._newest:
                    self._pushed[clock][sender] = part
            case _:
                self._there.discard(sender)
        while self._is_whole(self._pushed[self._newest]):
            self._make_version(self._pushed[self._newest])
        found: Replies = []
        for item in list(self._waiting):
            worker, clock = item
            wanted = max(0, clock - (self._rules.delay_bound or 0))
            if wanted <= self._newest:
                self._waiting.remove(item)
                if not self._rules.delay_bound:
                    clock = wanted = self._newest
                found.append((worker, self._read(worker, wanted, clock)))
        return found

    @property
    def _newest(self) -> int:
        return len(self._versions) - 1

    def _is_whole(self, pushed: Mapping[int, _Part]) -> bool:
        late = [worker for worker in self._there if worker not in pushed]
        return len(pushed) > 0 and len(late) <= self._rules.backup_workers

    def _make_version(self, pushed: Mapping[int, _Part]) -> None:
        parts = [pushed[worker] for worker in sorted(pushed)]
        self._step(self.held, parts, len(parts) if self._rules.reduce == "sum" else 1.0)
        self._versions.append(self.held.copy())

    def _step(self, held: _Held, parts: Sequence[_Part], factor: float) -> None:
        total = sum(part.count for part in parts)
        summed: _Part | None = None
        for part in parts:
            if part.count:
                weighed = part.times(part.count / total * factor)
                summed = weighed if summed is None else summed.plus(weighed)
        if summed is not None:
            held.step(summed)

    def _read(self, worker: int, version: int, clock: int) -> _Shown:
        held = self._versions[version].copy()
        for step in range(version, clock):
            part = self._pushed[step][worker]
            self._step(held, [part], 1.0 if self._rules.reduce == "sum" else 1 / self._workers)
        return _Shown(held.read(), version)


class _ByValue(_Holder):
    """A push waits as long as it would move a parameter too far from what another one computes
    with; the oldest first."""

    def __init__(self, rules: Synchrony, held: _Held, workers: int) -> None:
        assert rules.value_bound is not None
        self.held = held
        self._bound = rules.value_bound
        self._share = 1.0 if rules.reduce == "sum" else 1 / workers
        self._version = 0
        self._used: dict[int, Model] = {}
        self._pushes: list[tuple[int, _Push]] = []

    def take(self, sender: Sender, message: Any) -> Replies:
        assert isinstance(sender, int)
        if isinstance(message, _Pull):
            self._used[sender] = self.held.read()
            return [(sender, _Shown(self._used[sender], self._version))]
        self._used.pop(sender, None)
        if isinstance(message, _Push):
            self._pushes.append((sender, message))
        found: Replies = []
        while (
            item := next((one for one in self._pushes if self._applies(one[1])), None)
        ) is not None:
            self._pushes.remove(item)
            found.append((item[0], None))
        return found

    def _applies(self, push: _Push) -> bool:
        """Make the update, unless it must wait."""
        if push.part.count:
            moved = self.held.copy()
            moved.step(push.part.times(self._share))
            values = moved.read()
            for used in self._used.values():
                if any(float((values[n] - used[n]).abs().max()) >= self._bound for n in values):
                    return False
            self.held = moved
        self._version += 1
        return True


_Server: TypeAlias = _ByArrival | _ByRounds | _ByValue


# -- models that meet --------------------------------------------------------------------------


class _ElasticCentre(_Family):
    """EASGD with a master: model and centre pull at each other, the gradient is of the model before
    (Zhang et al. 2015, equations 2.3 and 2.4)."""

    def __init__(self, rules: Synchrony, workers: _Workers) -> None:
        super().__init__(rules, workers)
        self._centre = _Centre(workers.read(0), rules.beta)
        self.holders[Address("centre")] = self._centre

    def program(self, worker: int) -> Program:
        rules, workers = self.rules, self.workers
        for step in range(workers.steps + 1):
            meets = (step + 1) % rules.local_steps == 0
            before = workers.read(worker)
            if meets:
                self.say(worker, Address("centre"), before)
            part = workers.compute(worker, step)
            if meets:
                centre: Model = yield Address("centre")
                pulled = {n: x - rules.alpha * (x - centre[n]) for n, x in before.items()}
                if part is not None:
                    workers.write(worker, pulled)
            if part is not None and part.count:
                workers.step(worker)

    def ends(self) -> dict[str, dict[str, Tensor]]:
        return {"parameter": self._centre.values}


class _Centre(_Holder):
    def __init__(self, values: Model, rate: float) -> None:
        self.values, self._rate = values, rate

    def take(self, sender: Sender, message: Any) -> Replies:
        before = self.values
        self.values = {n: c + self._rate * (message[n] - c) for n, c in before.items()}
        return [(sender, before)]


@dataclass(frozen=True)
class _Do:
    """A message for a model.

    Attributes:
        what: "read", "step", "put" (the worker's own), "halve", "pull", "average", "take in".
    """

    what: str
    values: Model | None = None
    part: _Part | None = None
    weight: float = 0.0


class _OwnModel(_Holder):
    """A worker's model, with its optimiser and its weight in the mean of all."""

    def __init__(self, held: _Held, weight: float, pull: float) -> None:
        self.held, self.weight, self._pull = held, weight, pull

    def take(self, sender: Sender, message: _Do) -> Replies:
        held, values = self.held, message.values or {}
        match message.what:
            case "read":
                return [(sender, held.read())]
            case "step":
                if message.part is not None and message.part.count:
                    held.step(message.part)
                return [(sender, None)]
            case "put":
                held.write(values)
                return [(sender, None)]
            case "halve":
                self.weight = self.weight / 2
                return [(sender, _Do("take in", held.read(), weight=self.weight))]
            case "pull":
                held.write({n: x - self._pull * (x - values[n]) for n, x in held.read().items()})
                return []
            case "average":
                both = {n: (x + values[n]) / 2 for n, x in held.read().items()}
                held.write(both)
                return [(sender, both)]
        whole = self.weight + message.weight
        mine, theirs = self.weight / whole, message.weight / whole
        held.write({n: mine * x + theirs * values[n] for n, x in held.read().items()})
        self.weight = whole
        return []


class _Models(_Family):
    """Each worker has a model that others change, too."""

    def __init__(
        self, rules: Synchrony, workers: _Workers, holding: Sequence[TrainingState]
    ) -> None:
        super().__init__(rules, workers)
        self._models = [
            _OwnModel(
                _Held(state.model, state.optimizer, [n for n, _ in state.model.named_parameters()]),
                1 / workers.count,
                rules.alpha,
            )
            for state in holding
        ]
        self.holders = {Address("model", worker): m for worker, m in enumerate(self._models)}

    def own(self, worker: int, message: _Do) -> Generator[Address, Any, Any]:
        """Let one's own model do something, in its turn."""
        self.say(worker, Address("model", worker), message)
        return (yield Address("model", worker))

    def ends(self) -> dict[str, dict[str, Tensor]]:
        models = [(model.held.read(), model.weight) for model in self._models]
        mean = {name: sum(w * x[name] for x, w in models) for name in models[0][0]}
        return {"parameter": mean}  # type: ignore[dict-item]


class _Tree(_Models):
    """Models go to one's parent and to one's children, at periods of their own."""

    def program(self, worker: int) -> Program:
        rules, workers = self.rules, self.workers
        below = [child for child in range(1, workers.count) if (child - 1) // 2 == worker]
        above = [(worker - 1) // 2] if worker else []
        step = 0
        while True:
            workers.write(worker, (yield from self.own(worker, _Do("read"))))
            part = workers.compute(worker, step)
            if part is None:
                return
            yield from self.own(worker, _Do("step", part=part))
            step += 1
            for period, others in ((rules.period_up, above), (rules.period_down, below)):
                if others and step % period == 0:
                    values = yield from self.own(worker, _Do("read"))
                    for other in others:
                        self.say(worker, Address("model", other), _Do("pull", values))


class _Pairs(_Models):
    """AD-PSGD: the mean with one neighbour, while a gradient is computed."""

    def program(self, worker: int) -> Program:
        workers = self.workers
        draws = _draws(worker)
        others = _asked(self.rules.place, worker, workers.count)
        step = 0
        while True:
            values = yield from self.own(worker, _Do("read"))
            partner = Address("model", draws.choice(others)) if others else None
            if partner is not None:
                self.say(worker, partner, _Do("average", values))
            workers.write(worker, values)
            part = workers.compute(worker, step)
            if partner is not None:
                both = yield partner
                yield from self.own(worker, _Do("put", both))
            if part is None:
                return
            yield from self.own(worker, _Do("step", part=part))
            step += 1


class _Gossip(_Models):
    """GoSGD: now and then half of one's weight goes to somebody."""

    def program(self, worker: int) -> Program:
        workers, place = self.workers, self.rules.place
        draws = _draws(worker)
        heard = hearing(place, workers.count)[worker]
        others = [other for other, hears in enumerate(heard) if hears and other != worker]
        step = 0
        while True:
            workers.write(worker, (yield from self.own(worker, _Do("read"))))
            part = workers.compute(worker, step)
            if part is None:
                return
            yield from self.own(worker, _Do("step", part=part))
            if others and draws.random() < self.rules.probability:
                half = yield from self.own(worker, _Do("halve"))
                self.say(worker, Address("model", draws.choice(others)), half)
            step += 1


def _draws(worker: int) -> random.Random:
    """Whom a worker meets: the one thing that is drawn, and not told by the history."""
    return random.Random(f"whom worker {worker} meets, seed 0")


def _asked(place: str, worker: int, workers: int) -> list[int]:
    """With whom a worker of AD-PSGD begins a mean: of a graph in two colours those of one colour
    ask, those of the other answer (Lian et al. 2018, section 3.2)."""
    heard = hearing(place, workers)
    near = [
        [j for j in range(workers) if j != i and (heard[i][j] or heard[j][i])]
        for i in range(workers)
    ]
    distance, reached = {0: 0}, deque([0])
    while reached:
        here = reached.popleft()
        for other in near[here]:
            if other not in distance:
                distance[other] = distance[here] + 1
                reached.append(other)
    if distance[worker] % 2 == 0:
        return []
    return [other for other in near[worker] if distance[other] % 2 == 0]


def _family(rules: Synchrony, workers: _Workers, holding: Sequence[TrainingState]) -> _Family:
    if rules.central:
        return _Servers(rules, workers, holding)
    if rules.merge == "pairwise":
        return _Pairs(rules, workers, holding)
    if rules.merge == "push_sum":
        return _Gossip(rules, workers, holding)
    if rules.place == "tree":
        return _Tree(rules, workers, holding)
    return _ElasticCentre(rules, workers)
