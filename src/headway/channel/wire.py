"""What a provider of channels does: put words and bytes into the memory of the other end.

A `Wire` is one end. `words` is memory of this end that the other one writes: flags and blocks of
what came, credits for what left. Everything else, numbers, slots, waits, is the channel's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headway.channel.bell import Bell
from headway.channel.copying import address_of
from headway.channel.patience import Pauses, await_word
from headway.channel.region import Form, Layout
from headway.errors import PeerLost, Stalled


class Rooms:
    """Memory of this end from which tensors leave: one piece for each slot, made anew to grow."""

    def __init__(self, slots: int) -> None:
        self._made: list[Tensor | None] = [None] * slots

    def get(self, slot: int, nbytes: int) -> Tensor:
        """Bytes [nbytes]."""
        room = self._made[slot]
        if room is None or room.numel() < nbytes:
            room = self._made[slot] = torch.empty(nbytes, dtype=torch.uint8)
        return room[:nbytes]

    def start(self, slot: int, source: Tensor | None, form: Form) -> int:
        """Where a tensor's bytes lie one after another: its own, or those of a copy in the room.

        Args:
            slot: It goes into.
            source: The tensor; None: it has been made in the room.
            form: Of it.
        """
        if source is not None and (own := address_of(source)):
            return own
        room = self.get(slot, form.nbytes)
        if source is not None and form.nbytes:
            with torch.no_grad():
                form.view(room).copy_(source)
        return room.data_ptr()


class Wire(ABC):
    """One end of a channel.

    Args:
        peer: How messages name the other end: "rank 1".
        layout: Of the regions of both ends.
        seconds: That a wait may take.

    Attributes:
        words: Memory of this end that the other one writes.
        acquire: To be called between a flag and its tensor; None: loads keep their order.
        bell: By which the other end wakes this one; None: it cannot.
    """

    provider: ClassVar[str]
    words: memoryview
    acquire: Callable[[], None] | None = None
    bell: Bell | None = None

    def __init__(self, peer: str, layout: Layout, seconds: float) -> None:
        self.peer = peer
        self.layout = layout
        self.seconds = seconds

    @abstractmethod
    def room(self, slot: int, nbytes: int) -> Tensor:
        """Bytes [nbytes] in which a tensor can be made that will be put into a slot."""

    @abstractmethod
    def send(self, slot: int, number: int, source: Tensor | None, form: Form) -> None:
        """Put a tensor, or what has been made in `room`, into a free slot, then the flag."""

    @abstractmethod
    def arrived(self, slot: int, block: Sequence[int]) -> Tensor:
        """The bytes [at least as many as needed] of what has come into a slot, where they lie."""

    @abstractmethod
    def give_back(self, slot: int, number: int) -> None:
        """Let the other end use a slot again."""

    @abstractmethod
    def check(self) -> None:
        """See whether the other end is still there.

        Raises:
            PeerLost: It is not, or has closed its end.
        """

    @abstractmethod
    def close(self, *, patient: bool) -> None:
        """Say goodbye, and let the memory go; what tensors still show stays.

        Args:
            patient: Wait for an end that has not yet taken what needs this one.
        """

    def wait(self, index: int, least: int, doing: str) -> None:
        """Wait until a word of `words` is at least `least`.

        Raises:
            PeerLost: The other end is gone.
            Stalled: It does not come in time.
        """
        await_word(
            self.words,
            index,
            least,
            lambda: Pauses(
                self.seconds,
                self.check,
                lambda seconds: self.late(doing, seconds),
                None if self.bell is None else partial(self.bell.sleep, index, least),
            ),
        )

    def late(self, doing: str, seconds: float) -> Stalled:
        """The error of a deadline."""
        return Stalled(
            f"{self.peer} did not {doing} within {seconds:g} s",
            where=f"{self.provider} channel",
            fix=f"Look for what {self.peer} does instead, or allow more time with timeout=.",
        )

    def lost(self, how: str) -> PeerLost:
        """The error of an end that is gone."""
        return PeerLost(
            f"{self.peer} {how}",
            where=f"{self.provider} channel",
            fix="Its own error, or the signal that killed it, is the cause.",
        )
