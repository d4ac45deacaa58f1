"""Workers that do not meet in rounds, as processes: servers, elastic centres, pairs, gossip.

The programs and holders are those of `headway.synchrony.programs`. Each rank is a worker (or leads
one: `worker_group`), and some ranks have holders: a server's share of the parameters, the centre,
the worker's own model. A thread of the rank handles what other workers send to its holders, one
message at a time, and notes in which order (`History`): given that, everything else follows, and
the run can be repeated bit by bit. Messages go over one-sided channels, two to each other rank: for
what this worker asks there, and for what is asked here.

A run that repeats a history lets each holder handle its messages in the recorded order.

A process that dies is noticed by its channels. Holders note it, wait for it no more, and drop what
it has sent; a run whose servers or centre it had ends. The models of pairs and gossip die with
their workers: so does their weight in the mean, which stays a mean of the others. A worker may come
back in a new process (`rejoin`), with a new life: its program begins with a later step, and with
what servers, the centre or another worker have. In a replay the processes of dead workers live:
each stops where a holder no longer answers it, and from there on only handles what its own holders
have handled, until its next life begins.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.channel.channel import Channel, wait_any
from headway.errors import HeadwayError, PeerLost, RunError, Stalled
from headway.plans import Plan
from headway.run.distributed.launch_env import NoPeersLeft
from headway.run.step.record import AgreementRecord
from headway.run.synchrony.agreement_recorder import AgreementRecorder
from headway.run.synchrony.bundle import Bundle
from headway.run.synchrony.local_holders import LocalHolders, Request
from headway.run.synchrony.messages import MessageLink, MessageReader
from headway.run.synchrony.rejoin import (
    Handshake,
    JoinRequest,
    call,
    calls_for,
    note_presence,
    one_at_a_time,
    open_channels,
)
from headway.run.synchrony.replica import (
    InitialShare,
    ModelReplica,
    SharedReplica,
    ShareReplica,
    StateRows,
    balanced_shares,
    gradient_of,
)
from headway.run.synchrony.rounds import WorkerPlace
from headway.synchrony.actors import Address, Compute, Gradient, Outgoing, Sender
from headway.synchrony.driving import WorkerSeat
from headway.synchrony.history import History, Joined, Resumed, Undone
from headway.synchrony.merging import Gossip, Halve, Model, Pair, Read, mixed
from headway.synchrony.programs import AgreementRun, make_run, server_places
from headway.synchrony.snapshots import Snapshots
from headway.synchrony.waits import NO_TIME, HolderTime, split_wait

if TYPE_CHECKING:
    from headway.run.distributed.world import World


FOR_EVER = 1e9
"""Seconds; a death is noticed at once."""
_TICK_SECONDS = 0.5
_CALL_SECONDS = 0.1
"""How often to look for one that comes back, while somebody is gone."""
_LENIENCE = 1.25
"""Of a worker beside a holder, which knows better who is missing."""


@dataclass(frozen=True)
class Farewell:
    """The worker of a rank has ended; with `last`, its holders have nothing more to send, either.

    Holders refresh caches until the last worker has ended, hence two.
    """

    last: bool


@dataclass(frozen=True)
class Answer:
    """What a holder of the sending rank answers the receiving rank's worker.

    Attributes:
        life: Of the worker; in a replay one may come that was for an earlier one.
        number: Of the message, where a model answers it at once.
        spent: When it was answered.
    """

    holder: Address
    value: Any
    life: int = 0
    number: int = -1
    spent: HolderTime = NO_TIME


@dataclass(frozen=True)
class Over:
    """In a replay: for a holder of the sending rank a life of the receiving worker is over, and
    those before."""

    holder: Address
    life: int


@dataclass(frozen=True)
class Last:
    """What a holder ends with: for the model that all end with.

    Attributes:
        state: Of the optimiser: parameter, name and value.
    """

    holder: Address
    value: Bundle
    weight: float = 1.0
    state: StateRows = ()


class _LifeOver(Exception):
    """The life of this worker was over here, in the run that is repeated."""


class _Parts:
    """What a run is made of on this rank: its worker's program, its holders, its gradients."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        named: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        snapshots: Snapshots,
        joined: Joined | None = None,
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
        self.run: AgreementRun = make_run(
            rules, replicas, self.shares, seed=0, snapshots=snapshots, joined=joined
        )
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
        over: This worker has died here, in the run that is repeated: it makes no more steps.
        gone: The workers that have died and not come back, as far as this rank knows.
        remarks: What has happened to others, for whoever follows the run; to be taken away.
        snapshots: When this rank's worker asks for what a checkpoint has to hold.
    """

    def __init__(
        self,
        plan: Plan,
        place: WorkerPlace,
        world: World,
        named: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        history: History | None = None,
        *,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.met = True
        self.over = False
        self.gone: set[int] = set()
        self.remarks: list[str] = []
        self._plan, self._place, self._world = plan, place, world
        # One worker alone has met the others, and may save, after every step.
        self.snapshots = Snapshots(every=int(plan.workers == 1))
        self._parts = _Parts(plan, place.worker, named, optimizer, self.snapshots)
        self._replayed: History | None = None
        self._undone: set[tuple[int, int]] = set()
        self._recorder = AgreementRecorder()
        self._stale_seen: dict[Address, int] = {}
        self._holders = self._new_holders(history or History())
        self._steps = 0
        self._finished = False
        self._wanted: Compute | None = None
        self._seat: WorkerSeat | None = None
        self._holding = threading.RLock()
        self._local: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._error: HeadwayError | None = None
        self._present = set(range(plan.workers))
        self._life = 0
        self._lives: dict[int, int] = defaultdict(int)
        self._buffers = buffers or {}
        self._initial: list[Tensor] = []
        self._numbers: dict[tuple[Sender, Address], int] = defaultdict(int)
        self._sent: dict[Address, _Sent] = {}
        self._asked_at: dict[Address, float] = {}
        self._seen: dict[int, float] = {}
        self._looked = monotonic()
        self._ended_at: set[Address] = set()
        self._asking: dict[int, MessageReader] = {}
        self._asked: dict[int, MessageReader] = {}
        self._links: dict[tuple[str, int], MessageLink] = {}

    def _new_holders(self, history: History) -> LocalHolders:
        return LocalHolders(
            self._parts.holders,
            self._place.worker,
            history,
            self._send_on,
            self._tell_over,
            self._recorder,
        )

    @property
    def inside(self) -> dist.ProcessGroup | None:
        """The group of this worker's ranks; None: it is the only one."""
        return self._place.inside

    @property
    def worker(self) -> int:
        """Its number."""
        return self._place.worker

    @property
    def first(self) -> bool:
        """Whether this rank leads its worker: it is the only one."""
        return True

    @property
    def wanted_step(self) -> int | None:
        """The step, from 0, whose gradients the program waits for; None: it has ended."""
        return None if self._wanted is None else self.snapshots.first + self._wanted.step

    @property
    def history(self) -> History:
        """In which order the holders of this rank have handled their messages."""
        return self._holders.history

    @property
    def leads(self) -> bool:
        """Whether this is the first of the workers that are left.

        Those with fewer lives come first: the one that took over from a worker that has died may
        be writing a checkpoint when that worker comes back.
        """
        left = set(range(self._plan.workers)) - self.gone
        return self._place.worker == min(left, key=lambda worker: (self._lives_of(worker), worker))

    def _lives_of(self, worker: int) -> int:
        """How often a worker has come back, as far as is known; in a replay, will have."""
        if self._replayed is not None:
            return len(self._replayed.lives(worker))
        return self._life if worker == self._place.worker else self._lives[worker]

    @property
    def saves(self) -> bool:
        """Whether this rank saves the checkpoint at the end."""
        return self.leads

    @property
    def needed(self) -> bool:
        """Whether this rank has a server or the centre, without which nobody goes on."""
        return any(address.kind in _NEEDED for address in self._parts.holders)

    # -- the strategy's calls ------------------------------------------------------------------

    def repeat(self, history: History) -> None:
        """Let holders handle their messages in a recorded order; before the first step."""
        self._replayed = history
        self._undone = history.undone(self._place.worker)
        self.gone = history.dead()

    def continue_history(self, history: History, began: int) -> None:
        """This process is a new life of its worker.

        Args:
            history: What the lives before have noted.
            began: The steps that had been made when this attempt began.
        """
        self._holders = self._new_holders(history)
        self.snapshots.begin(began)

    def begin(self, steps_done: int) -> None:
        """Begin with the model as it is now; once.

        Raises:
            RunEnding: This process is a new life of its worker, and the others are about to end.
            NoPeersLeft: The same, and the others are gone.
        """
        if self._seat is not None:
            return
        self._steps = steps_done
        if life := self._world.place.life:
            step = steps_done - self.snapshots.first
            self._come_back(Joined(self._place.worker, life, step))
        else:
            self.snapshots.begin(steps_done)
            self._connect()
        if self._replayed is not None and self._replayed.lives(self._place.worker):
            self._initial = [tensor.detach().clone() for tensor in self._tensors]
        self._seat = WorkerSeat(self._place.worker, self._parts.program, self._post)
        if self._replayed is not None:
            with self._holding:
                self._holders.repeat(self._replayed)
        self._thread = threading.Thread(target=self._serve, name="holders", daemon=True)
        self._thread.start()
        self._drive(None)

    def step(self, count: float) -> None:
        """Give the program the gradients of this step, and go on to the next one."""
        if self.over:
            return
        self._steps += 1
        self.met = self._plan.workers == 1
        self._drive(Gradient(self._parts.gradient(), count))

    def is_closed(self, step: int) -> bool:
        """Whether the others have made a step, from 0, without this worker (backup workers)."""
        return self.wanted_step is not None and step < self.wanted_step

    def pass_over(self) -> None:
        """Leave a step out that is closed."""
        self._steps += 1

    def agreement_record(self) -> AgreementRecord:
        """What this rank has seen of the others since it was last asked."""
        fresh: list[tuple[int, int]] = []
        with self._holding:
            for address, holder in self._parts.holders.items():
                every: Sequence[tuple[int, int]] = getattr(holder, "staleness", ())
                fresh += every[self._stale_seen.get(address, 0) :]
                self._stale_seen[address] = len(every)
            return self._recorder.taken(fresh)

    def finish(self) -> None:
        """After the last step: all workers that are left end with one model; collective."""
        seat = self._seat
        if seat is None or self._finished:
            return
        self._finished = True
        if not self.over and not seat.ended:
            self._drive(None)
        self._part(Farewell(last=False))
        with self._holding:
            self._present.discard(self._place.worker)
            self._part_last()
        self._await_others()
        if self._world.place.note_folder is not None:
            # From here on the others may have what this rank ends with, and some not.
            (self._world.place.note_folder / f"ended-{self._world.rank:05d}").touch()
        self._holders.check_handled()
        self._adopt_common()
        for (_, peer), link in self._links.items():
            if not link.close(self._world.timeout_seconds):
                raise self._silent(peer, "takes nothing at the end of the run")
        if not self.gone:
            self._wait_for_all()
        self._close_channels(patient=True)
        self.met = True
        self.snapshots.seen = ()

    def _wait_for_all(self) -> None:
        if not self._world.alone:
            with self._world.explained("the end of all workers"):
                dist.barrier(group=self._place.across)

    def close(self) -> None:
        """End without the others, after an error: their channels break, no thread is left."""
        if self._seat is not None and not self.met:
            with self._holding:
                self._present.clear()
            self._close_channels(patient=False)

    def _close_channels(self, *, patient: bool) -> None:
        for reader in (*self._asking.values(), *self._asked.values()):
            reader.channel.allow(self._world.timeout_seconds if patient else 0.1)
            reader.channel.close()

    @property
    def _tensors(self) -> list[Tensor]:
        """All that a new process begins with."""
        return [*self._parts.named.values(), *self._buffers.values()]

    def vote(self, wishes: bool) -> int:
        """Nobody waits for the others' wishes: a worker stops by its own."""
        return int(wishes)

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint of this step can be made: the run has ended, or has been seen."""
        seen = self.snapshots.seen and self.snapshots.step == self._steps
        return bool(seen) or (self._finished and self.met)

    def snapshot(self) -> tuple[dict[str, Tensor], StateRows | None]:
        """Parameters, by logical name, and state of the optimiser; none where the model has them.

        Of servers as they were when this worker asked, of an elastic run the centre, with this
        worker's optimiser; else this worker's own model.
        """
        parts, found = self._parts, dict[str, Tensor]()
        rows: StateRows | None = None
        shares = parts.by_share or [list(parts.named)]
        for names, seen in zip(shares, self.snapshots.seen, strict=False):
            values = seen.value.parts([parts.named[name].data for name in names])
            found |= zip(names, values, strict=True)
            rows = seen.state if seen.state is None else (*(rows or ()), *seen.state)
        self.snapshots.seen = ()
        return found, rows

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Holders begin with the model and the optimiser's state that have been restored."""
        rank = self._place.worker
        named, optimizer = self._parts.named, self._parts.optimizer
        self._parts = _Parts(self._plan, rank, named, optimizer, self.snapshots)
        self._holders = self._new_holders(self._holders.history)

    # -- the worker ----------------------------------------------------------------------------

    def _drive(self, result: Gradient | None) -> None:
        """Go on until a gradient is wanted, or the program and all its lives have ended."""
        wanted, again = None, True
        while again:
            again = False
            try:
                wanted = self._until_gradient(result)
            except _LifeOver:
                result, again = None, self._live_again()
                self.over = not again
        self._wanted = wanted
        if wanted is not None:
            self._parts.load(wanted.value)

    def _until_gradient(self, result: Gradient | None) -> Compute | None:
        seat = self._seat
        assert seat is not None
        wanted = seat.resume(result)
        while wanted is None and not seat.ended:
            assert seat.waits is not None
            begun = monotonic()
            answer = self._answer(seat.awaits(seat.waits))
            self._note_wait(seat.waits.cause, begun, answer)
            if seat.answer(answer.holder, answer.value):
                wanted = seat.go_on()
        return wanted

    def _note_wait(self, cause: str, begun: float, answer: Answer) -> None:
        """The worker has waited for an answer until now."""
        now, far = monotonic(), self._parts.run.places[answer.holder] != self._place.worker
        whole = now - self._asked_at[answer.holder] if far else 0.0
        self._recorder.waited(split_wait(cause, now - begun, whole, answer.spent))

    def _answer(self, holder: Address) -> Answer:
        """The next answer of a holder."""
        place = self._parts.run.places[holder]
        assert place is not None
        until = monotonic() + _LENIENCE * self._world.timeout_seconds
        while True:
            self._raise()
            found = self._local_answer(holder) if place == self._place.worker else None
            if place != self._place.worker:
                if holder in self._ended_at:
                    raise _LifeOver
                found = self._undone_answer(holder, place) or self._remote_answer(place)
            if found is not None:
                return found
            if monotonic() > until and not self._end_stopped([place]):
                raise self._silent(place, f"does not answer for {holder}")

    def _local_answer(self, holder: Address) -> Answer | None:
        with suppress(queue.Empty):
            return self._local.get(timeout=_TICK_SECONDS)
        with self._holding:
            ended = self._holders.ended(holder) and self._local.empty()
        if ended and self._replayed is not None:
            raise _LifeOver
        return None

    def _remote_answer(self, place: int) -> Answer | None:
        reader = self._asking[place]
        try:
            said = received(reader)
        except PeerLost:
            if self._replayed is not None or not self._may_lose(place):
                raise
            self._note_gone(place, reader)
            return None
        match said:
            case Over(holder=holder, life=life) if life >= self._life:
                self._ended_at.add(holder)
            case Answer(holder=holder, life=life, number=number) if life == self._life:
                sent = self._sent[holder]
                stale = holder.kind == "model" and number != sent.number
                return None if stale else said
        return None

    def _undone_answer(self, holder: Address, place: int) -> Answer | None:
        """The answer of a model that is gone, or whose process stands still: to a pair the model
        that was sent, else nothing. What the other answers when it goes on comes too late."""
        sent = self._sent[holder]
        still = isinstance(sent.message, Pair) and self._replayed is None and self._is_still(place)
        if not still and not self._comes_to_nothing(place, sent):
            return None
        self._note_undone(place, sent.number)
        value = sent.message.model if isinstance(sent.message, Pair) else None
        return Answer(holder, value, self._life, sent.number)

    def _comes_to_nothing(self, worker: int, sent: _Sent) -> bool:
        """Whether a message to the model of a worker finds it dead, live or as recorded."""
        if self._replayed is not None:
            return (worker, sent.number) in self._undone
        return worker in self.gone or sent.life < self._lives[worker]

    def _note_undone(self, worker: int, number: int) -> None:
        with self._holding:
            self._holders.note(Address("model", self._place.worker), Undone(worker, number))

    def _post(self, sender: Sender, to: Address, message: Any) -> None:
        """A message of this worker to a holder anywhere."""
        with self._holding:  # one that comes back does so before it or behind it
            place = self._parts.run.places[to]
            assert place is not None
            request = self._request(sender, to, message)
            self._asked_at[to] = monotonic()
            sent = self._sent[to] = _Sent(request.number, message, self._lives[place])
            if place == self._place.worker:
                self._holders.take(request)
                return
            unanswered = to.kind == "model" and not isinstance(message, _ANSWERED)
            if unanswered and self._comes_to_nothing(place, sent):
                self._note_undone(place, sent.number)
                if isinstance(message, Gossip):  # its weight is not lost: it comes back
                    self._post(sender, Address("model", self._place.worker), message)
                return
            # To one that was gone when this one came back there is none.
            if ("asking", place) in self._links:
                self._links["asking", place].post(request)

    def _request(self, sender: Sender, to: Address, message: Any) -> Request:
        number = self._numbers[sender, to]
        self._numbers[sender, to] += 1
        return Request(to, sender, message, number, self._life)

    # -- lives ---------------------------------------------------------------------------------

    def _live_again(self) -> bool:
        """In a replay: begin the next life of this worker, if it had one."""
        assert self._replayed is not None
        worker = self._place.worker
        lives = [one for one in self._replayed.lives(worker) if one.life > self._life]
        if not lives:
            return False
        self._await_own_holders(lives[0])
        with self._holding, torch.no_grad():
            for tensor, initial in zip(self._tensors, self._initial, strict=True):
                tensor.copy_(initial)
            self._parts.optimizer.state.clear()
            while not self._local.empty():
                self._local.get()
            self._ended_at.clear()
            self._undone = self._replayed.undone(worker, lives[0].life)
            self._begin_life(lives[0])
            self._seat = WorkerSeat(worker, self._parts.program, self._post)
        return True

    def _await_own_holders(self, joined: Joined) -> None:
        """Wait until the holders here have handled all that they did before."""
        until = monotonic() + _LENIENCE * self._world.timeout_seconds
        while monotonic() < until:
            self._raise()
            with self._holding:
                if self._holders.have_ended():
                    return
            sleep(_CALL_SECONDS)
        raise RunError(
            "the run that was repeated is another one than the recorded",
            why=f"The holders of worker {joined.worker} have not got all messages that they had "
            f"handled before its life {joined.life}.",
            fix="Repeat it with the same plan, recipe and number of steps.",
        )

    def _begin_life(self, joined: Joined) -> None:
        """Program and holders of a worker that has come back."""
        parts = self._parts
        self._life = joined.life
        self.snapshots.step = self.snapshots.first + joined.step
        self._numbers.clear()
        self._parts = _Parts(
            self._plan, joined.worker, parts.named, parts.optimizer, self.snapshots, joined
        )
        self._holders.begin_anew(self._parts.holders, joined)

    def _come_back(self, joined: Joined) -> None:
        """Find the others, as a new process."""
        folder = self._world.place.note_folder
        assert folder is not None
        self._begin_life(joined)
        with one_at_a_time(folder):
            for peer in sorted(set(range(self._plan.workers)) - {joined.worker}):
                made = call(
                    folder, joined.worker, joined.life, joined.step, peer,
                    self._world.timeout_seconds,
                )  # fmt: skip
                if made is None or not self._meet(folder, made, peer):
                    self.gone.add(peer)
                    self._present.discard(peer)
                    if not self._may_lose(peer) or len(self._present) == 1:
                        raise NoPeersLeft
            note_presence(folder, joined.worker)

    def _meet(self, folder: Path, made: JoinRequest, peer: int) -> bool:
        """Connect with a worker that has answered; whether it is still there."""
        try:
            self._link(peer, *open_channels(folder, self._place.worker, made, peer))
            greeting = self._await_handshake(peer)
        except (PeerLost, Stalled):
            return False
        self._lives[peer] = greeting.life
        for sender, to, number in greeting.numbers:
            self._holders.resume(to, Resumed(sender, greeting.life, number))
        return True

    def _await_handshake(self, peer: int) -> Handshake:
        until = monotonic() + self._world.timeout_seconds
        while monotonic() < until:
            said = received(self._asked[peer])
            if isinstance(said, Handshake):
                return said
        raise self._silent(peer, "does not greet a worker that has come back")

    def _accept(self, heard: dict[int, MessageReader]) -> None:
        """Let workers in that have come back; in the thread of the holders."""
        folder = self._world.place.note_folder
        if folder is None or not self.gone:
            return
        for made in calls_for(folder, self._place.worker):
            # One whose end has not been noticed here yet is let in a little later.
            if made.worker in self.gone and made.worker not in heard:
                self._let_in(heard, folder, made)

    def _let_in(self, heard: dict[int, MessageReader], folder: Path, made: JoinRequest) -> None:
        with self._holding:
            late = not self._present
        made.accept(not late)
        if late:
            return
        try:
            channels = open_channels(folder, self._place.worker, made, made.worker)
        except (PeerLost, Stalled):
            return
        with self._holding:
            if not self._present:  # all have ended meanwhile
                for channel in channels:
                    channel.close()
                return
            self._link(made.worker, *channels)
            heard[made.worker] = self._asked[made.worker]
            self._links["asking", made.worker].post(self._handshake_for(made.worker))
            if self._place.worker not in self._present:
                self._links["asking", made.worker].post(Farewell(last=False))
            self.gone.discard(made.worker)
            self._present.add(made.worker)
            self._lives[made.worker] = made.life
            step = self.snapshots.first + made.step + 1
            self.remarks.append(f"worker {made.worker} is back, with step {step}")
            self._holders.join(Joined(made.worker, made.life, made.step))

    def _handshake_for(self, worker: int) -> Handshake:
        places = self._parts.run.places
        here = [a for a in places if places[a] == worker]
        servers = [address for address in self._parts.holders if address.kind == "server"]
        own: list[Sender] = [self._place.worker, *servers]
        numbers = tuple((s, to, self._numbers[s, to]) for to in here for s in own)
        return Handshake(self._life, numbers)

    # -- the holders ---------------------------------------------------------------------------

    def _serve(self) -> None:
        """Handle what others send until all of them have ended; the body of the thread."""
        heard = dict(self._asked)
        waits = _Waits(self._world.timeout_seconds)
        try:
            while heard or self._present:
                for reader in self._ready(heard):
                    self._hear(heard, reader)
                self._accept(heard)
                with self._holding:
                    waits.look(self._holders.missing())
        except HeadwayError as error:
            self._error = error

    def _ready(self, heard: dict[int, MessageReader]) -> list[MessageReader]:
        """Whose next part has come, after a while at most; drops those that are gone."""
        channels = [reader.channel for reader in heard.values()]
        seconds = _CALL_SECONDS if self.gone or not channels else _TICK_SECONDS
        if not channels:
            sleep(seconds)
            return []
        try:
            self._see(channels, self._looked)  # it came while this rank was busy
            first = wait_any(channels, timeout=seconds)
            self._looked = monotonic()
            self._see(channels, self._looked)
            return [heard[self._worker_of(first)]]
        except Stalled:
            return []
        except PeerLost as error:
            for peer, reader in list(heard.items()):
                try:
                    reader.channel.ready()
                except PeerLost:
                    self._lose(heard, peer, error)
            return []

    def _see(self, channels: Sequence[Channel], since: float) -> None:
        """Note what has come: it waits for this rank."""
        for channel in channels:
            with suppress(PeerLost):
                if channel.ready():
                    self._seen.setdefault(self._worker_of(channel), since)

    def _worker_of(self, channel: Channel) -> int:
        return self._place.peers.index(channel.peer)

    def _hear(self, heard: dict[int, MessageReader], reader: MessageReader) -> None:
        peer = self._worker_of(reader.channel)
        since = self._seen.pop(peer, None)
        try:
            found = reader.take()
        except PeerLost as error:
            self._lose(heard, peer, error)
            return
        with self._holding:
            match found:
                case (Request() as request,):
                    self._holders.take(request, since)
                case (Farewell(last=True),):
                    del heard[peer]
                case (Farewell(),):
                    self._present.discard(peer)
                    self._part_last()

    def _lose(self, heard: dict[int, MessageReader], peer: int, error: PeerLost) -> None:
        """The process of another worker has died."""
        del heard[peer]
        if self._replayed is not None or not self._may_lose(peer):
            raise error
        with self._holding:
            self.gone.add(peer)
            self.remarks.append(f"worker {peer} has died: the others go on")
            self._holders.lose(peer)
            self._present.discard(peer)
            self._part_last()

    def _may_lose(self, peer: int) -> bool:
        """Whether this rank goes on without another."""
        places = self._parts.run.places.items()
        return self._plan.survives and not any(p == peer and a.kind in _NEEDED for a, p in places)

    def _note_gone(self, peer: int, reader: MessageReader) -> None:
        """The worker has seen the death of a process; the thread of the holders will, too."""
        with self._holding:
            if self._asking[peer] is reader:  # else it has come back since
                self.gone.add(peer)

    def _part(self, farewell: Farewell) -> None:
        for (kind, _), link in self._links.items():
            if kind == "asking":
                link.post(farewell)

    def _part_last(self) -> None:
        """Once all workers have ended; what holders have sent until now has been posted before."""
        if not self._present:
            self._part(Farewell(last=True))

    def _tell_over(self, holder: Address, worker: int, life: int) -> None:
        if worker != self._place.worker:
            self._links["asked", worker].post(Over(holder, life))

    def _send_on(self, holder: Address, sent: Outgoing, life: int, number: int) -> None:
        if isinstance(sent.to, Address):
            place = self._parts.run.places[sent.to]
            assert place is not None
            request = self._request(holder, sent.to, sent.value)
            if place == self._place.worker:
                self._holders.take(request)
            else:
                self._links["asking", place].post(request)
            return
        spent = self._holders.spent(holder, sent.to)
        answer = Answer(holder, sent.value, life, number, spent)
        if sent.to == self._place.worker:
            self._local.put(answer)
        else:
            self._links["asked", sent.to].post(answer)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _silent(self, place: int, what: str) -> Stalled:
        return Stalled(
            f"rank {self._place.peers[place]} {what}",
            where=f"rank {self._world.rank}, after step {self._steps}",
            why=f"Nothing came for {self._world.timeout_seconds:g} s.",
            fix="Look for what that process does instead, or allow more time (--timeout).",
        )

    # -- connections ---------------------------------------------------------------------------

    def _connect(self) -> None:
        """Two channels to each other rank; collective."""
        for peer in range(self._plan.workers):
            if peer != self._place.worker:
                seconds = self._world.timeout_seconds
                rank = self._place.peers[peer]
                channels = [Channel(rank, slots=4, timeout=seconds) for _ in range(2)]
                self._link(peer, *channels)

    def _link(self, peer: int, first: Channel, second: Channel) -> None:
        """Use two new channels to another rank: one for what is asked there, one for here."""
        for channel in (first, second):
            # Nobody need ask anything for a long time; a death is noticed at once.
            channel.allow(FOR_EVER)
        if self._place.worker > peer:
            first, second = second, first
        self._asking[peer], self._asked[peer] = MessageReader(first), MessageReader(second)
        for kind, channel in (("asking", first), ("asked", second)):
            if (before := self._links.get((kind, peer))) is not None:
                before.close(0)
            self._links[kind, peer] = MessageLink(channel)

    # -- the end -------------------------------------------------------------------------------

    def _await_others(self) -> None:
        """Wait for the ends of the others; one that stands still for too long is ended."""
        since = monotonic()
        while self._thread.is_alive():
            self._thread.join(_TICK_SECONDS)
            self._raise()
            if monotonic() - since > self._world.timeout_seconds:
                since = monotonic()
                self._end_stopped(self._present - {self._place.worker})
        self._raise()

    def _end_stopped(self, workers: Iterable[int]) -> bool:
        """End processes that stand still (SIGSTOP); whether there was one. On one machine only."""
        ended = False
        for worker in sorted(workers):
            if self._is_still(worker):
                with suppress(OSError):
                    os.kill(self._process_of(worker), signal.SIGKILL)
                    ended = True
        return ended

    def _is_still(self, worker: int) -> bool:
        """Whether a process on this machine stands still."""
        with suppress(OSError, ValueError):
            status = Path(f"/proc/{self._process_of(worker)}/stat").read_text()
            return status.rpartition(")")[2].split()[0] in "Tt"
        return False

    def _process_of(self, worker: int) -> int:
        folder = self._world.place.note_folder
        if folder is None:
            raise ValueError("this rank knows no process but its own")
        return int((folder / f"pid-{self._place.peers[worker]:05d}").read_text())

    def _adopt_common(self) -> None:
        """Give every worker the model that the run ends with."""
        parts, rules = self._parts, self._plan.synchrony
        found = {address: self._last(address) for address in parts.holders if _ends(address)}
        for (kind, _), link in self._links.items():
            if kind == "asked":
                for last in found.values() if self._place.worker not in self.gone else ():
                    link.post(last)
                link.post(Farewell(last=True))
        left_out = self.history.dead()
        for peer in self._asking:
            for last in self._rest(peer):
                if peer not in left_out:
                    found[last.holder] = last
        lasts = [found[address] for address in parts.run.holders if address in found]
        if not parts.shares:
            total = sum(last.weight for last in lasts)
            parts.load(
                mixed(
                    {n: last.weight / total for n, last in enumerate(lasts)},
                    {n: last.value for n, last in enumerate(lasts)},
                )
            )
            return
        for last in lasts:
            names = parts.by_share[last.holder.number] if rules.central else list(parts.named)
            last.value.copy_to([parts.named[name].data for name in names])
            for name, key, value in last.state:
                parts.optimizer.state[parts.named[name]][key] = value

    def _last(self, address: Address) -> Last:
        holder: Any = self._parts.holders[address]
        weight = holder.weight if isinstance(holder, Model) else 1.0
        state = holder.replica.read_state() if self._parts.rules.central else ()
        return Last(address, holder.replica.read(), weight, state or ())

    def _rest(self, peer: int) -> list[Last]:
        """All that another rank still says, and what its holders end with."""
        found: list[Last] = []
        until = monotonic() + self._world.timeout_seconds
        while monotonic() < until:
            try:
                said = received(self._asking[peer])
            except PeerLost:
                if self._replayed is not None or not self._may_lose(peer):
                    raise
                self.gone.add(peer)
                return found
            if isinstance(said, Farewell):
                return found
            if isinstance(said, Last):
                found.append(said)
        raise self._silent(peer, "does not send what it ends with")


_NEEDED = ("server", "centre")
_ANSWERED = (Pair, Read, Halve)
"""Messages to another's model that want an answer."""


@dataclass(frozen=True)
class _Sent:
    """The last message to a holder.

    Attributes:
        life: Of the worker that the holder lives with, as far as was known.
    """

    number: int
    message: Any
    life: int


def _ends(address: Address) -> bool:
    """Whether a holder has a part of what the run ends with."""
    return address.kind != "cache"


class _Waits:
    """How long holders have let somebody wait for other workers.

    Args:
        limit: Seconds.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since: dict[int, float] = {}

    def look(self, missing: Sequence[int]) -> None:
        """Note for whom others wait now.

        Raises:
            Stalled: For too long; names them.
        """
        now = monotonic()
        self._since = {worker: self._since.get(worker, now) for worker in missing}
        late = [worker for worker, since in self._since.items() if now - since > self._limit]
        if late:
            raise Stalled(
                f"the others wait for {' and '.join(f'worker {w}' for w in late)}",
                why=f"Nothing has come from there for {self._limit:g} s, and the delay bound does "
                "not let the others go on.",
                fix="Look for what it does instead (a stopped process, slow data), or allow more "
                "time (--timeout).",
            )


def received(reader: MessageReader) -> Any:
    """The next message, or None where it is not whole after a while.

    Raises:
        PeerLost: The other end is gone, and has left nothing more.
    """
    try:
        wait_any([reader.channel], timeout=_TICK_SECONDS)
    except Stalled:
        return None
    found = reader.take()
    return None if found is None else found[0]
