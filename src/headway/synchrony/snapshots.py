"""Snapshots: what holders have while a run goes on, for a checkpoint that nobody waits for.

A worker asks in its program, at the steps that are due, and every holder answers at once, in its
turn. So a snapshot is in the history like any other message, and changes nothing.

Of servers and of an elastic centre the first worker asks: where its process dies, the run ends. Of
models that meet each other every worker asks for its own, so that whoever leads then has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.synchrony.actors import Outgoing, Replica, Sender, Value


@dataclass(frozen=True, slots=True)
class Look:
    """A worker asks for all that a holder has; a bound does not hold it up."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The answer.

    Attributes:
        value: The parameters.
        state: Of their optimiser, as `Replica.read_state` gives it; None where it has none: then
            the worker's own goes into the checkpoint.
    """

    value: Value
    state: Value


def shown(sender: Sender, replica: Replica) -> list[Outgoing]:
    """What a holder answers."""
    return [Outgoing(sender, Seen(replica.read(), replica.read_state()))]


@dataclass
class Snapshots:
    """When one worker asks, and what it has got.

    Attributes:
        every: Steps between two snapshots; 0: it never asks.
        first: Steps that had been made when the run, or its attempt, began.
        step: After how many steps it has asked last.
        seen: The last answers, in the order of the holders; empty once they have been used.
    """

    every: int = 0
    first: int = 0
    step: int = 0
    seen: tuple[Seen, ...] = ()

    def begin(self, first: int) -> None:
        """Count steps from those that have been made before."""
        self.first = self.step = first

    def due(self, step: int) -> bool:
        """Whether to ask before a step of the program, from 0: also where it was due at one that
        others have made without this worker."""
        return self.every > 0 and (self.first + step) // self.every > self.step // self.every

    def take(self, step: int, seen: Sequence[Seen]) -> None:
        """What has been answered before a step."""
        self.step, self.seen = self.first + step, tuple(seen)
