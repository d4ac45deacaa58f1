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
from headway.synchrony.history import Died, Entry, Handled, History, Undone
from headway.synchrony.merging import Centre, Gossip, Model, Pair, Pull
from headway.synchrony.waits import HolderTime


@dataclass(frozen=True)
class Request:
    """A message for a holder of the receiving rank."""

    holder: Address
    sender: Sender
    message: Any


class LocalHolders:
    """Hands each message to its holder, and sends what the holder answers.

    Args:
        holders: Those of this rank.
        send: Called with a holder and what it sends.
        over: Called with a holder and a worker that is dead there: in a replay its process lives.
        recorder: Told of models that meet here.

    Attributes:
        history: In which order the holders have handled their messages.
    """

    def __init__(
        self,
        holders: Mapping[Address, Holder],
        history: History,
        send: Callable[[Address, Outgoing], None],
        over: Callable[[Address, int], None],
        recorder: AgreementRecorder,
    ) -> None:
        self.history = history
        self._holders, self._send, self._over = holders, send, over
        self._recorder = recorder
        self._turns: dict[Address, deque[Entry]] | None = None
        self._early: dict[tuple[Address, Sender], deque[Any]] = defaultdict(deque)
        self._done: dict[tuple[Address, Sender], tuple[float, float]] = {}

    def repeat(self, recorded: History) -> None:
        """Let holders handle their messages in a recorded order."""
        self._turns = {holder: deque(recorded.entries(holder)) for holder in self._holders}
        for holder in self._holders:
            self._advance(holder)

    def take(self, request: Request, since: float | None = None) -> None:
        """Let a holder handle a message: now, or in its recorded turn.

        Args:
            since: When it had come, by `monotonic`; None: now.
        """
        self._done[request.holder, request.sender] = (since or monotonic(), 0.0)
        if self._turns is None:
            self._handle(request.holder, request.sender, request.message)
            return
        self._early[request.holder, request.sender].append(request.message)
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
            self._lose(holder, worker)

    def note(self, holder: Address, entry: Entry) -> None:
        """Something that no other process has had a part in."""
        self.history.add(holder, entry)

    def ended(self, holder: Address) -> bool:
        """Whether a holder handles nothing any more: the end of its log, where one is repeated."""
        return self._turns is not None and not self._turns[holder]

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
        while turns:
            match turns[0]:
                case Handled(sender=sender):
                    early = self._early[holder, sender]
                    if not early:
                        return
                    turns.popleft()
                    self._handle(holder, sender, early.popleft())
                case Died(worker=worker):
                    turns.popleft()
                    self._lose(holder, worker)
                    self._over(holder, worker)
                case Undone():  # noted again when the worker comes to it
                    turns.popleft()

    def _handle(self, holder: Address, sender: Sender, message: Any) -> None:
        self.history.note(holder, sender)
        here = self._holders[holder]
        if isinstance(here, Centre | Model) and isinstance(message, Pull | Pair | Gossip):
            self._recorder.met(here.replica.read, message.model)
        for sent in here.handle(sender, message):
            self._send(holder, sent)
        came, _ = self._done.get((holder, sender), (monotonic(), 0.0))
        self._done[holder, sender] = (came, monotonic())

    def _lose(self, holder: Address, worker: int) -> None:
        self.history.add(holder, Died(worker))
        for sent in self._holders[holder].lose(worker):
            self._send(holder, sent)
