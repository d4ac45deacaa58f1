"""Workers that do not meet in rounds, as processes: servers, elastic centres, pairs, gossip.

The programs and holders are those of `headway.synchrony.programs`. Each rank is a worker, and some
ranks have holders: a server's share of the parameters, the centre, the worker's own model. A thread
of the rank handles what other workers send to its holders, one message at a time, and notes in
which order (`History`): given that, everything else follows, and the run can be repeated bit by
bit. Messages go over one-sided channels, two to each other rank: for what this worker asks there,
and for what is asked here.

A run that repeats a history lets each holder handle its messages in the recorded order.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.channel.channel import Channel, wait_any
from headway.channel.facts import broadcast_facts
from headway.errors import HeadwayError, RunError
from headway.plans import Plan
from headway.run.synchrony.bundle import Bundle
from headway.run.synchrony.messages import MessageLink, get_message
from headway.run.synchrony.replica import (
    InitialShare,
    ModelReplica,
    SharedReplica,
    ShareReplica,
    balanced_shares,
    gradient_of,
)
from headway.run.synchrony.rounds import WorkerPlace
from headway.synchrony.actors import Address, Await, Compute, Gradient, Outgoing, Sender
from headway.synchrony.driving import WorkerSeat
from headway.synchrony.history import History
from headway.synchrony.merging import Model
from headway.synchrony.programs import AgreementRun, make_run, server_places

if TYPE_CHECKING:
    from headway.run.distributed.world import World


_FOR_EVER = 1e9


@dataclass(frozen=True)
class Request:
    """A message for a holder of the receiving rank."""

    holder: Address
    sender: Sender
    message: Any


@dataclass(frozen=True)
class Farewell:
    """The worker of a rank has ended; with `last`, its holders have nothing more to send, either.

    Holders refresh caches until the last worker has ended, hence two.
    """

    last: bool


@dataclass(frozen=True)
class Answer:
    """What a holder of the sending rank answers the receiving rank's worker."""

    holder: Address
    value: Any


class _Parts:
    """What a run is made of on this rank: its worker's program, its holders, its gradients."""

    def __init__(
        self, plan: Plan, worker: int, named: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> None:
        rules = self.rules = plan.synchrony
        self.named, self.optimizer = named, optimizer
        self.by_share: list[list[str]] = []
        self.shares: list[SharedReplica | InitialShare] = []
        own: Any = ModelReplica(named, optimizer)
        if rules.central:
            self.by_share = balanced_shares(named, len(server_places(rules, plan.workers)))
            own = ShareReplica(named, optimizer, self.by_share)
            parts = [{name: named[name] for name in names} for names in self.by_share]
            # Of shares that live elsewhere only what they begin with is known, and needed.
            self.shares = [
                SharedReplica(part, optimizer) if place == worker else InitialShare(part)
                for part, place in zip(parts, server_places(rules, plan.workers), strict=True)
            ]
        elif rules.merge == "elastic" and rules.place == "master":
            self.shares = [SharedReplica(named, None) if worker == 0 else InitialShare(named)]
        else:
            own = SharedReplica(named, optimizer)
        self.replica = own
        # Holders of other ranks, and programs of other workers, are made and never used.
        replicas = [own] * plan.workers
        self.run: AgreementRun = make_run(rules, replicas, self.shares, seed=0)
        self.program = self.run.programs[worker]
        self.holders = {a: h for a, h in self.run.holders.items() if self.run.places[a] == worker}

    def load(self, value: Any) -> None:
        """Put the parameters to compute with into the model."""
        if isinstance(value, Bundle):
            value.copy_to([p.data for p in self.named.values()])

    def gradient(self) -> Any:
        """What backward has left in the model, as the program wants it."""
        if isinstance(self.replica, ShareReplica):
            return self.replica.gradient()
        if isinstance(self.replica, SharedReplica):
            return gradient_of(self.named, self.optimizer)
        return None


class FreeRun:
    """This rank's worker, and the holders that live here.

    Attributes:
        met: Whether all workers have the same model now.
        history: In which order the holders of this rank have handled their messages.
    """

    def __init__(
        self,
        plan: Plan,
        place: WorkerPlace,
        world: World,
        named: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
    ) -> None:
        self.met = True
        self.history = History()
        self._plan, self._place, self._world = plan, place, world
        self._parts = _Parts(plan, place.worker, named, optimizer)
        self._replayed: History | None = None
        self._steps = 0
        self._seat: WorkerSeat | None = None
        self._wanted: Compute | None = None
        self._holding = threading.Lock()
        self._local: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._open: dict[int, Address] = {}
        self._error: HeadwayError | None = None
        self._present = set(range(plan.workers))
        self._orders: dict[Address, deque[Sender]] = {}
        self._early: dict[tuple[Address, Sender], deque[Any]] = {}
        self._asking: dict[int, Channel] = {}
        self._asked: dict[int, Channel] = {}
        self._links: dict[tuple[str, int], MessageLink] = {}

    @property
    def inside(self) -> dist.ProcessGroup | None:
        """The group of this worker's ranks; None: it is the only one."""
        return self._place.inside

    # -- the strategy's calls ------------------------------------------------------------------

    def repeat(self, history: History) -> None:
        """Let holders handle their messages in a recorded order; before the first step."""
        self._replayed = history

    def begin(self, steps_done: int) -> None:
        """Begin with the model as it is now; once."""
        if self._seat is not None:
            return
        self._steps = steps_done
        self._connect()
        if self._replayed is not None:
            self._orders = {h: deque(self._replayed.senders(h)) for h in self._parts.holders}
        self._seat = WorkerSeat(self._place.worker, self._parts.program, self._post)
        self._thread = threading.Thread(target=self._serve, name="holders", daemon=True)
        self._thread.start()
        self._drive(self._seat.resume())

    def step(self, count: float) -> None:
        """Give the program the gradients of this step, and go on to the next one."""
        seat = self._seat
        assert seat is not None
        self._steps += 1
        self.met = self._plan.workers == 1
        self._drive(seat.resume(Gradient(self._parts.gradient(), count)))

    def is_closed(self, step: int) -> bool:
        """Whether the others have made a step, from 0, without this worker (backup workers)."""
        return self._wanted is not None and step < self._wanted.step

    def pass_over(self) -> None:
        """Leave a step out that is closed."""
        self._steps += 1

    def finish(self) -> None:
        """After the last step: all workers end with one model; collective."""
        seat = self._seat
        if seat is None or seat.ended:
            return
        self._drive(seat.resume(None))
        self._part(Farewell(last=False))
        with self._holding:
            self._present.discard(self._place.worker)
            self._part_last()
        self._thread.join()
        self._raise()
        _check_handled(self._orders)
        for link in self._links.values():
            link.close()
        self._adopt_common()
        self._adopt_state()
        self._world.barrier("the end of all workers")
        for channel in (*self._asking.values(), *self._asked.values()):
            channel.close()
        self.met = True

    def close(self) -> None:
        """End without the others, after an error: their channels break, no thread is left."""
        if self._seat is not None and not self.met:
            for channel in (*self._asking.values(), *self._asked.values()):
                channel.close()

    def vote(self, wishes: bool) -> int:
        """Nobody waits for the others' wishes: a worker stops by its own."""
        return int(wishes)

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Holders begin with the model and the optimiser's state that have been restored."""
        rank = self._place.worker
        named, optimizer = self._parts.named, self._parts.optimizer
        self._parts = _Parts(self._plan, rank, named, optimizer)

    # -- the worker ----------------------------------------------------------------------------

    def _drive(self, wanted: Compute | None) -> None:
        """Go on until a gradient is wanted, or the program has ended."""
        seat = self._seat
        assert seat is not None
        while wanted is None and not seat.ended:
            assert seat.waits is not None
            answer = self._answer(seat.waits)
            if seat.answer(answer.holder, answer.value):
                wanted = seat.go_on()
        self._wanted = wanted
        if wanted is not None:
            self._parts.load(wanted.value)

    def _answer(self, waits: Await) -> Answer:
        """The next answer to what is waited for."""
        self._raise()
        holder = self._seat.awaits(waits) if self._seat else None
        assert holder is not None
        place = self._parts.run.places[holder]
        if place == self._place.worker:
            while True:
                try:
                    return self._local.get(timeout=1.0)
                except queue.Empty:
                    self._raise()
        assert place is not None
        found = get_message(self._asking[place])
        assert isinstance(found, Answer)
        return found

    def _post(self, sender: Sender, to: Address, message: Any) -> None:
        """A message of this worker, or of a holder here, to a holder anywhere."""
        place = self._parts.run.places[to]
        assert place is not None
        if place == self._place.worker:
            with self._holding:
                self._take(to, sender, message)
        else:
            self._links["asking", place].post(Request(to, sender, message))

    # -- the holders ---------------------------------------------------------------------------

    def _serve(self) -> None:
        """Handle what others send until all of them have ended; the body of the thread."""
        heard = dict(self._asked)
        try:
            while heard:
                # Nobody need ask anything for a long time; the heartbeat notices who is gone.
                channel = wait_any(list(heard.values()), timeout=_FOR_EVER)
                said = get_message(channel)
                with self._holding:
                    match said:
                        case Request(holder=holder, sender=sender, message=message):
                            self._take(holder, sender, message)
                        case Farewell(last=True):
                            del heard[channel.peer]
                        case Farewell():
                            self._present.discard(channel.peer)
                            self._part_last()
        except HeadwayError as error:
            self._error = error

    def _part(self, farewell: Farewell) -> None:
        for (kind, _), link in self._links.items():
            if kind == "asking":
                link.post(farewell)

    def _part_last(self) -> None:
        """Once all workers have ended; what holders have sent until now has been posted before."""
        if not self._present:
            self._part(Farewell(last=True))

    def _take(self, to: Address, sender: Sender, message: Any) -> None:
        """Let a holder of this rank handle a message: now, or in its recorded turn."""
        if self._replayed is None:
            self._handle(to, sender, message)
            return
        self._early.setdefault((to, sender), deque()).append(message)
        order = self._orders[to]
        while order and self._early.get((to, order[0])):
            turn = order.popleft()
            self._handle(to, turn, self._early[to, turn].popleft())

    def _handle(self, to: Address, sender: Sender, message: Any) -> None:
        self.history.note(to, sender)
        for sent in self._parts.holders[to].handle(sender, message):
            self._send_on(to, sent)

    def _send_on(self, holder: Address, sent: Outgoing) -> None:
        if isinstance(sent.to, Address):
            place = self._parts.run.places[sent.to]
            assert place is not None
            if place == self._place.worker:
                self._take(sent.to, holder, sent.value)
            else:
                self._links["asking", place].post(Request(sent.to, holder, sent.value))
        elif sent.to == self._place.worker:
            self._local.put(Answer(holder, sent.value))
        else:
            self._links["asked", sent.to].post(Answer(holder, sent.value))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- connections ---------------------------------------------------------------------------

    def _connect(self) -> None:
        """Two channels to each other rank; collective."""
        rank = self._place.worker
        for peer in range(self._plan.workers):
            if peer == rank:
                continue
            first, second = (
                (self._asking, self._asked) if rank < peer else (self._asked, self._asking)
            )
            timeout = self._world.timeout_seconds
            first[peer] = Channel(peer, slots=4, timeout=timeout)
            second[peer] = Channel(peer, slots=4, timeout=timeout)
            self._links["asking", peer] = MessageLink(self._asking[peer])
            self._links["asked", peer] = MessageLink(self._asked[peer])

    def _adopt_common(self) -> None:
        """Give every worker the model that the run ends with; collective."""
        parts, rules = self._parts, self._plan.synchrony
        if parts.shares:
            kind = "server" if rules.central else "centre"
            names = parts.by_share or [list(parts.named)]
            for number, share in enumerate(names):
                address = Address(kind, number)
                holder: Any = parts.holders.get(address)
                place = parts.run.places[address]
                assert place is not None
                own = [parts.named[name].data for name in share]
                if holder is not None:
                    holder.replica.read().copy_to(own)
                for tensor in own:
                    dist.broadcast(tensor, place)
            return
        holder = parts.holders[Address("model", self._place.worker)]
        assert isinstance(holder, Model)
        weight = holder.weight if rules.merge == "push_sum" else 1 / self._plan.workers
        total = holder.replica.read() * weight
        for tensor in total.flat:
            dist.all_reduce(tensor)
        parts.load(total)

    def _adopt_state(self) -> None:
        """Give every worker's optimiser the state of the servers' ones; collective."""
        parts = self._parts
        if not parts.rules.central:
            return
        optimizer = parts.optimizer
        for number, names in enumerate(parts.by_share):
            address = Address("server", number)
            place = parts.run.places[address]
            assert place is not None
            holder: Any = parts.holders.get(address)
            own = {} if holder is None else holder.replica.optimizer_state()
            forms = {
                name: {
                    key: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v
                    for key, v in state.items()
                }
                for name, state in own.items()
            }
            told = broadcast_facts(forms, place)
            for name in names:
                state = {}
                for key, form in told.get(name, {}).items():
                    if isinstance(form, tuple):
                        shape, dtype = form
                        mine = own.get(name, {}).get(key)
                        tensor = torch.empty(shape, dtype=dtype) if mine is None else mine
                        dist.broadcast(tensor, place)
                        state[key] = tensor
                    else:
                        state[key] = form
                if state:
                    optimizer.state[parts.named[name]] = state


def _check_handled(orders: Mapping[Address, Sequence[Sender]]) -> None:
    """Refuse a replay that has left messages of its history out.

    Raises:
        RunError: The run was another one.
    """
    left = {str(holder): len(order) for holder, order in orders.items() if order}
    if left:
        raise RunError(
            "the run that was repeated is another one than the recorded",
            why=f"Messages of the history that never came: {left}.",
            fix="Repeat it with the same plan, recipe and number of steps.",
        )
