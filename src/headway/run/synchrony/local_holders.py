"""The holders of one rank: their messages, handled one at a time, and their history.

Live, a message is handled when it comes; a run that repeats a history handles each in its turn.
What is noted of a message is on its way to the disk before anybody sees an effect of it. All calls
are made under one lock (`FreeRun`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from headway.errors import RunError
from headway.run.synchrony.agreement_recorder import AgreementRecorder
from headway.synchrony.actors import Address, Holder, Outgoing, Sender
from headway.synchrony.history import Died, Entry, Handled, History, Joined, Resumed, Undone
from headway.synchrony.merging import Centre, Gossip, Model, Pair, Pull
from headway.synchrony.waits import HolderTime


@dataclass(frozen=True)
class Request:
    """A message for a holder of the receiving rank.

    Attributes:
        number: How many messages of the sender's life to this holder came before.
        life: Of the sending process, from 0.
    """

    holder: Address
    sender: Sender
    message: Any
    number: int = 0
    life: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Among all messages of the sender to this holder."""
        return self.life, self.number


class LocalHolders:
    """Hands each message to its holder, and sends what the holder answers.

    Args:
        holders: Those of this rank.
        owner: The worker of this rank.
        send: Called with a holder, what it sends, the life of the worker that this is for, and the
            number of the message that is handled.
        over: Called with a holder, a worker and a life of it that is over there, as are those
            before: in a replay its process lives.
        recorder: Told of models that meet here.

    Attributes:
        history: In which order the holders have handled their messages.
    """

    def __init__(
        self,
        holders: Mapping[Address, Holder],
        owner: int,
        history: History,
        send: Callable[[Address, Outgoing, int, int], None],
        over: Callable[[Address, int, int], None],
        recorder: AgreementRecorder,
    ) -> None:
        self.history = history
        self._holders, self._owner, self._send, self._over = holders, owner, send, over
        self._recorder = recorder
        self._turns: dict[Address, deque[Entry]] | None = None
        self._early: dict[tuple[Address, Sender], deque[Request]] = defaultdict(deque)
        # Messages that have gone to a life that is over, or that nobody has got, are not handled.
        self._first: dict[tuple[Address, Sender], tuple[int, int]] = {}
        self._lives: dict[tuple[Address, int], int] = defaultdict(int)
        self._done: dict[tuple[Address, Sender], tuple[float, float]] = {}

    def repeat(self, recorded: History) -> None:
        """Let holders handle their messages in a recorded order."""
        heard_of = recorded.lives(self._owner)
        self._turns = {
            holder: deque(
                entry
                for entry in recorded.entries(holder)
                # A life of which nobody has heard has done nothing.
                if not self._is_anew(entry) or entry in heard_of
            )
            for holder in self._holders
        }
        for holder in self._holders:
            self._advance(holder)

    def take(self, request: Request, since: float | None = None) -> None:
        """Let a holder handle a message: now, or in its recorded turn.

        Args:
            since: When it had come, by `monotonic`; None: now.
        """
        self._done[request.holder, request.sender] = (since or monotonic(), 0.0)
        if self._turns is None:
            self._handle(request)
            return
        key = request.holder, request.sender
        if request.place >= self._first.get(key, (0, 0)):
            self._early[key].append(request)
            self._advance(request.holder)

    def spent(self, holder: Address, worker: int) -> HolderTime:
        """On the last message of a worker, which is answered now."""
        came, done = self._done.get((holder, worker), (0.0, 0.0))
        now = monotonic()
        # 0: its own message is being handled.
        return HolderTime((done or now) - came, now - (done or now))

    def lose(self, worker: int) -> None:
        """A worker has died; holders that live with it are gone, too."""
        for holder in self._holders:
            self._enter(holder, Died(worker))

    def join(self, joined: Joined) -> None:
        """A worker has come back."""
        for holder in self._holders:
            self._enter(holder, joined)

    def begin_anew(self, holders: Mapping[Address, Holder], joined: Joined) -> None:
        """The worker of this rank has come back, and its holders with it."""
        self._holders = holders
        for holder in holders:
            self.history.add(holder, joined)
            self._lives[holder, self._owner] = joined.life
            self._begin_at(holder, self._owner, (joined.life, 0))
            if self._turns is not None:
                assert self._turns[holder][0] == joined
                self._turns[holder].popleft()
                self._advance(holder)

    def resume(self, holder: Address, resumed: Resumed) -> None:
        """To a holder that has come back, messages of somebody come from a number on."""
        self._enter(holder, resumed)

    def note(self, holder: Address, entry: Entry) -> None:
        """Something that no other process has had a part in."""
        self.history.add(holder, entry)

    def ended(self, holder: Address) -> bool:
        """Whether a holder handles nothing any more in this life, where a run is repeated."""
        if self._turns is None:
            return False
        turns = self._turns[holder]
        return not turns or self._is_anew(turns[0])

    def have_ended(self) -> bool:
        """Whether all that the holders had to do in this life is done, in a replay."""
        assert self._turns is not None
        return all(turns and self._is_anew(turns[0]) for turns in self._turns.values())

    def _is_anew(self, entry: Entry) -> bool:
        return isinstance(entry, Joined) and entry.worker == self._owner

    def missing(self) -> Sequence[int]:
        """Workers without whose messages others are not answered."""
        return sorted({w for holder in self._holders.values() for w in holder.missing()})

    def check_handled(self) -> None:
        """Refuse a replay that has left messages of its history out.

        Raises:
            RunError: The run was another one.
        """
        left = {str(h): len(turns) for h, turns in (self._turns or {}).items() if turns}
        if left:
            raise RunError(
                "the run that was repeated is another one than the recorded",
                why=f"Messages of the history that never came: {left}.",
                fix="Repeat it with the same plan, recipe and number of steps.",
            )

    def _advance(self, holder: Address) -> None:
        assert self._turns is not None
        turns = self._turns[holder]
        while turns and not self._is_anew(turns[0]):
            match turns[0]:
                case Handled(sender=sender):
                    early = self._early[holder, sender]
                    if not early:
                        return
                    turns.popleft()
                    self._handle(early.popleft())
                case Undone():  # noted again when the worker comes to it
                    turns.popleft()
                case entry:
                    turns.popleft()
                    self._enter(holder, entry)

    def _handle(self, request: Request) -> None:
        holder, sender, message = request.holder, request.sender, request.message
        self.history.note(holder, sender)
        here = self._holders[holder]
        if isinstance(here, Centre | Model) and isinstance(message, Pull | Pair | Gossip):
            self._recorder.met(here.replica.read, message.model)
        self._send_all(holder, here.handle(sender, message), request.number)
        came, _ = self._done.get((holder, sender), (monotonic(), 0.0))
        self._done[holder, sender] = (came, monotonic())

    def _enter(self, holder: Address, entry: Entry) -> None:
        """Note what has happened to a sender, and let the holder know."""
        self.history.add(holder, entry)
        here = self._holders[holder]
        match entry:
            case Died(worker=worker):
                self._send_all(holder, here.lose(worker))
                self._tell_over(holder, worker, self._lives[holder, worker])
            case Joined(worker=worker, life=life, step=step):
                self._tell_over(holder, worker, life - 1)
                self._lives[holder, worker] = life
                self._begin_at(holder, worker, (life, 0))
                self._send_all(holder, here.join(worker, step))
            case Resumed(sender=sender, life=life, number=number):
                if isinstance(sender, int):
                    self._lives[holder, sender] = life
                self._begin_at(holder, sender, (life, number))

    def _tell_over(self, holder: Address, worker: int, life: int) -> None:
        if self._turns is not None:
            self._over(holder, worker, life)

    def _begin_at(self, holder: Address, sender: Sender, place: tuple[int, int]) -> None:
        self._first[holder, sender] = place
        early = self._early[holder, sender]
        while early and early[0].place < place:
            early.popleft()

    def _send_all(self, holder: Address, found: Sequence[Outgoing], number: int = -1) -> None:
        for sent in found:
            life = self._lives[holder, sent.to] if isinstance(sent.to, int) else 0
            self._send(holder, sent, life, number)
