"""Programs of workers and holders of state: how every way to agree is written down, once.

A *holder* has state that others ask to read or to change (a server's share of the parameters, the
centre of an elastic run, a worker's own model in a gossip run). It handles one message at a time. A
*worker* is a program, a generator that yields what it wants done. Nothing else decides what a run
computes: given the order in which each holder has handled its messages, the run can be repeated bit
by bit. So the same programs and holders are driven by virtual clocks (`simulator.synchrony`), by
processes (`run`), and by a recorded order (`replay`).

Values are whatever adds and multiplies: numbers in a simulation, flat tensors in a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = Any
"""Parameters or gradients: a number, an array, a flat tensor."""


class Replica(Protocol):
    """Parameters with their optimiser."""

    def read(self) -> Value:
        """The parameters; a copy that later steps do not change."""
        ...

    def write(self, value: Value) -> None:
        """Replace the parameters; the optimiser keeps its state."""
        ...

    def step(self, gradient: Value, rate: float = 1.0) -> None:
        """A step of the optimiser, its learning rates times `rate`."""
        ...

    def clone(self) -> Replica:
        """A copy of parameters and optimiser."""
        ...

    def read_state(self) -> Value:
        """The optimiser's state: of a worker's own what can be averaged, of a holder's all of it.

        None where there is none; a copy where a holder answers with it.
        """
        ...

    def write_state(self, state: Value) -> None:
        """Replace the optimiser's state; None: as before the first step."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Of a holder: "server" 0 holds the first share of the parameters, "model" 2 is worker 2's.

    Attributes:
        kind: "server", "centre", "model", "cache" (of one worker, for one share), or "meeting".
        share: Of the parameters, where there are several.
    """

    kind: str
    number: int = 0
    share: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (f" share {self.share}" if self.share else "")


Sender: TypeAlias = "int | Address"
"""A worker by its number, or a holder."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a holder sends: an answer to a worker's message, or a message to another holder.

    Attributes:
        to: A worker, whose oldest unanswered message to this holder it answers; or a holder.
        value: Of the answer, or the message.
    """

    to: Sender
    value: Any


class Holder(ABC):
    """State that changes by messages only, one at a time."""

    @abstractmethod
    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        """Take a message, and give what is to be sent now.

        A message that wants an answer gets exactly one, now or when a later one allows it.
        """

    def lose(self, worker: int) -> Sequence[Outgoing]:
        """A worker has died: forget what waits of it, wait for it no more; what is sent now."""
        return ()

    def join(self, worker: int, step: int) -> Sequence[Outgoing]:
        """A worker has come back, and begins with a step; what is sent now."""
        return ()

    def missing(self) -> Sequence[int]:
        """The workers without whose next message somebody is not answered."""
        return ()


# -- what a worker wants done ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message and go on; gives a ticket if it `wants` an answer, else None."""

    to: Address
    message: Any
    wants: bool = True


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the answers to some tickets; gives them in that order.

    Attributes:
        cause: What is waited for where a holder holds the answer back: see `waits`.
    """

    tickets: tuple[int, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a gradient of this worker's batch of a step; gives a `Gradient`, or None after the
    last one: the program then sends what it still has, and ends.

    Attributes:
        step: From 0; steps are skipped where others have made them without this worker.
        value: The parameters to compute it with; None: those of the worker's replica.
    """

    step: int
    value: Value = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of the mean loss of a worker's batch.

    Attributes:
        count: Of what the mean is over: samples, tokens. 0: the worker had none.
    """

    value: Value
    count: float = 1.0


Effect: TypeAlias = Post | Await | Compute
WorkerProgram: TypeAlias = Generator[Effect, Any, None]
