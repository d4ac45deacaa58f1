"""Driving programs inside one process: what all drivers share, and the replay of a history.

A driver decides when messages arrive; `WorkerSeat` and `MailRoom` do the rest. `replay` lets every
holder handle its messages in a recorded order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from headway.errors import RunError
from headway.synchrony.actors import (
    Address,
    Await,
    Compute,
    Gradient,
    Outgoing,
    Post,
    Sender,
    WorkerProgram,
)
from headway.synchrony.history import History
from headway.synchrony.programs import AgreementRun

SendMessage = Callable[[Sender, Address, Any], None]
ComputeGradient = Callable[[int, Compute], "Gradient | None"]


class WorkerSeat:
    """A worker's program, as far as it has got.

    Attributes:
        waits: What it is blocked on; None: it computes, has not begun or has ended.
        ended: Its program is over.
    """

    def __init__(self, number: int, program: WorkerProgram, send: SendMessage) -> None:
        self.waits: Await | None = None
        self.ended = False
        self._number = number
        self._program = program
        self._send = send
        self._tickets = 0
        self._open: dict[Address, deque[int]] = defaultdict(deque)
        self._answers: dict[int, Any] = {}

    def resume(self, result: Any = None) -> Compute | None:
        """Go on with a result, until something is to be computed or an answer is missing."""
        self.waits = None
        while True:
            try:
                effect = self._program.send(result)
            except StopIteration:
                self.ended = True
                return None
            match effect:
                case Compute():
                    return effect
                case Post(to=to, message=message, wants=wants):
                    result = self._ticket(to) if wants else None
                    self._send(self._number, to, message)
                case Await():
                    if not self._ready(effect):
                        self.waits = effect
                        return None
                    result = self._taken(effect)

    def answer(self, holder: Address, value: Any) -> bool:
        """Take an answer; whether the program can go on: call `go_on` then."""
        self._answers[self._open[holder].popleft()] = value
        return self.waits is not None and self._ready(self.waits)

    def go_on(self) -> Compute | None:
        """Resume with the answers that were waited for."""
        assert self.waits is not None
        return self.resume(self._taken(self.waits))

    def awaits(self, effect: Await) -> Address:
        """The holder of the first answer that is missing."""
        missing = {ticket for ticket in effect.tickets if ticket not in self._answers}
        return next(holder for holder, open_ in self._open.items() if missing & set(open_))

    def _ticket(self, holder: Address) -> int:
        self._tickets += 1
        self._open[holder].append(self._tickets)
        return self._tickets

    def _ready(self, effect: Await) -> bool:
        return all(ticket in self._answers for ticket in effect.tickets)

    def _taken(self, effect: Await) -> list[Any]:
        return [self._answers.pop(ticket) for ticket in effect.tickets]


class MailRoom:
    """Messages that have come and are not handled yet, by holder and sender; notes a history."""

    def __init__(self, run: AgreementRun) -> None:
        self.history = History()
        self._holders = run.holders
        self._waiting: dict[tuple[Address, Sender], deque[Any]] = defaultdict(deque)

    def put(self, sender: Sender, to: Address, message: Any) -> None:
        self._waiting[to, sender].append(message)

    def has(self, sender: Sender, to: Address) -> bool:
        return bool(self._waiting[to, sender])

    def handle(self, sender: Sender, to: Address) -> Sequence[Outgoing]:
        """Let a holder handle the oldest message of a sender."""
        self.history.note(to, sender)
        return self._holders[to].handle(sender, self._waiting[to, sender].popleft())


class _Replay:
    def __init__(self, run: AgreementRun, history: History, compute: ComputeGradient) -> None:
        self._run, self._compute = run, compute
        self.room = MailRoom(run)
        self._seats = [
            WorkerSeat(number, program, self.room.put)
            for number, program in enumerate(run.programs)
        ]
        self._orders = {holder: deque(history.senders(holder)) for holder in run.holders}

    def play(self) -> None:
        for number in range(len(self._seats)):
            self._advance(number, None)
        moved = True
        while moved:
            moved = sum(map(self._handle_next, self._orders)) > 0
        told = [
            f"{holder} has {len(order)} messages left to handle, the next from {order[0]}"
            for holder, order in self._orders.items()
            if order
        ]
        told += [
            f"worker {number} waits for an answer that never comes"
            for number, seat in enumerate(self._seats)
            if not seat.ended
        ]
        if told:
            raise RunError(
                "this history does not fit the run",
                why="; ".join(told),
                fix="Replay it with the plan, the recipe and the number of steps of its run.",
            )

    def _advance(self, number: int, result: Any) -> None:
        seat = self._seats[number]
        wanted = seat.resume(result)
        while wanted is not None:
            wanted = seat.resume(self._compute(number, wanted))

    def _handle_next(self, holder: Address) -> bool:
        order = self._orders[holder]
        if not order or not self.room.has(order[0], holder):
            return False
        for sent in self.room.handle(order.popleft(), holder):
            if isinstance(sent.to, Address):
                self.room.put(holder, sent.to, sent.value)
            elif self._seats[sent.to].answer(holder, sent.value):
                wanted = self._seats[sent.to].go_on()
                while wanted is not None:
                    wanted = self._seats[sent.to].resume(self._compute(sent.to, wanted))
        return True


def replay(run: AgreementRun, history: History, compute: ComputeGradient) -> None:
    """Drive a run so that every holder handles its messages in a recorded order.

    Args:
        compute: The gradient of a worker; None after its last step.

    Raises:
        RunError: The history is of another run.
    """
    _Replay(run, history, compute).play()
