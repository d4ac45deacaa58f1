"""`ChannelTransport`: what a provider of channels implements; waiting and doorbells.

A transport is one end. `words` is memory of this end that the other end writes: flags and metadata
of what arrived, credits for what left. Numbers, slots and waits are the channel's.

A wait spins for some 20 us (a put between two cores takes 1), then yields the core (`sched_yield`)
for half a millisecond, unless somebody else takes it, then sleeps until the doorbell rings, or for
an eighth of what it has waited, at most 1 ms: a long wait costs 0.5 % of a core.

A doorbell wakes the other end: whoever waits long stores 1 into its word in the other's memory,
looks once more, and sleeps on its pipe; whoever has stored a flag or a credit looks at the word,
and writes a byte into the pipe where it is 1. A processor may reorder that store and load, and two
threads of an end share the word, so a byte can be missing: a sleep therefore ends after `_LONGEST`
in any case.
"""

from __future__ import annotations

import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headway.channel.region import RegionLayout, TensorMetadata, tensor_address
from headway.errors import HeadwayError, PeerLost, Stalled

# Some 20 us: a read of a word takes 35 to 40 ns (docs/channels.md), the loop the rest.
_SPINS = 300
_YIELD_SECONDS = 0.0005
# A core that is given away for longer is wanted by others.
_CROWDED_SECONDS = 0.00005
_LONGEST_PAUSE = 0.001


@dataclass(slots=True)
class WaitBackoff:
    """One wait of at most some seconds: `pause` until what is waited for has come.

    Attributes:
        check: Raises if it can never come.
        late: The error of the deadline, from the seconds.
        sleep: Until it may have come; None: an eighth of the time waited.
    """

    seconds: float
    check: Callable[[], None]
    late: Callable[[float], Stalled]
    sleep: Callable[[], None] | None = None
    _began: float = field(default_factory=lambda: time.monotonic(), init=False)
    _crowded: bool = field(default=False, init=False)

    def pause(self) -> None:
        """Give the core away for a while; raises as `check` does, or Stalled when time is up."""
        now = time.monotonic()
        waited = now - self._began
        if waited < _YIELD_SECONDS and not self._crowded:
            os.sched_yield()
            self._crowded = time.monotonic() - now > _CROWDED_SECONDS
            return
        self.check()
        if waited > self.seconds:
            raise self.late(self.seconds)
        if self.sleep is None:
            time.sleep(min(_LONGEST_PAUSE, waited / 8))
        else:
            self.sleep()


def wait_for_word(
    words: memoryview, index: int, least: int, pauses: Callable[[], WaitBackoff]
) -> None:
    """Wait until a word is at least `least`.

    Raises:
        PeerLost: The other end is gone, and the word had not been stored before.
        Stalled: The deadline is over.
    """
    for _ in range(_SPINS):
        if words[index] >= least:
            return
    waiting = pauses()
    while words[index] < least:
        try:
            waiting.pause()
        except (PeerLost, Stalled):
            # The peer may have stored the word and ended since the test: what it sent comes first.
            if words[index] < least:
                raise


_LONGEST = 0.01  # seconds


class DoorbellPipe:
    """Of the end that sleeps; the other end opens its descriptor `write`."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        """Close the end to write to: the other process has opened it, or will not."""
        os.close(self.write)

    def __del__(self) -> None:
        os.close(self.read)


class Doorbell:
    """Both directions, at one end.

    Args:
        theirs: The descriptor `write` of its pipe.
        words: Memory of this end, which the other one writes.
        asleep: The word in both that says that its writer sleeps.

    Raises:
        OSError: The other process has ended, or this one may not see it.
    """

    def __init__(
        self,
        own: DoorbellPipe,
        pid: int,
        theirs: int,
        words: memoryview,
        out: memoryview,
        asleep: int,
    ) -> None:
        self._own, self._words, self._out, self._asleep = own, words, out, asleep
        self._write = os.open(
            f"/proc/{pid}/fd/{theirs}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )

    def ring(self) -> None:
        """Wake the other end, where its word says that it sleeps."""
        with suppress(BlockingIOError, BrokenPipeError):  # it has a byte already, or is gone
            os.write(self._write, b"\0")

    def sleep(self, index: int, least: int) -> None:
        """Until it rings, or some milliseconds; not if a word is at least `least` by now."""
        self._out[self._asleep] = 1
        # Looked at again after the announcement: a word that was stored before it rang nobody.
        if self._words[index] < least:
            poll = select.poll()  # a shared one would refuse a second thread
            poll.register(self._own.read, select.POLLIN)
            if poll.poll(1000 * _LONGEST):
                # All bytes at once: several rings since the last sleep are one reason to wake up.
                with suppress(BlockingIOError):
                    os.read(self._own.read, 4096)
        self._out[self._asleep] = 0

    def __del__(self) -> None:
        if hasattr(self, "_write"):
            os.close(self._write)


class SendBuffers:
    """Memory of this end from which tensors leave: one piece for each slot, made anew to grow."""

    def __init__(self, slots: int) -> None:
        self._made: list[Tensor | None] = [None] * slots

    def get(self, slot: int, nbytes: int) -> Tensor:
        """Bytes [nbytes]."""
        room = self._made[slot]
        if room is None or room.numel() < nbytes:
            room = self._made[slot] = torch.empty(nbytes, dtype=torch.uint8)
        return room[:nbytes]

    def start(self, slot: int, source: Tensor | None, form: TensorMetadata) -> int:
        """Where a tensor's bytes lie one after another: its own, or those of a copy in the room.

        `source` is None where the tensor has been made in the room.
        """
        if source is not None and (own := tensor_address(source)):
            return own
        room = self.get(slot, form.nbytes)
        if source is not None and form.nbytes:
            # Otherwise a source that requires a gradient would make the memory part of its graph.
            with torch.no_grad():
                form.view(room).copy_(source)
        return room.data_ptr()


_CHANNEL = " channel"


def is_channel_error(error: HeadwayError) -> bool:
    """Whether an error is that of a wait, for the rank at the other end of some channel."""
    return error.where.endswith(_CHANNEL)


class ChannelTransport(ABC):
    """One end of a channel.

    Args:
        peer: How messages name the other end: "rank 1".
        layout: Of the regions of both ends.

    Attributes:
        words: Memory of this end that the other one writes.
        acquire: To be called between a flag and its tensor; None: loads keep their order.
        bell: By which the other end wakes this one; None: it cannot.
    """

    provider: ClassVar[str]
    words: memoryview
    acquire: Callable[[], None] | None = None
    bell: Doorbell | None = None

    def __init__(self, peer: str, layout: RegionLayout, seconds: float) -> None:
        self.peer = peer
        self.layout = layout
        self.seconds = seconds

    @abstractmethod
    def room(self, slot: int, nbytes: int) -> Tensor:
        """Bytes [nbytes] in which a tensor can be made that will be put into a slot."""

    @abstractmethod
    def send(self, slot: int, number: int, source: Tensor | None, form: TensorMetadata) -> None:
        """Put a tensor, or what has been made in `room`, into a free slot, then the flag."""

    @abstractmethod
    def arrived(self, slot: int, block: Sequence[int]) -> Tensor:
        """The bytes [at least as many as needed] of what has come into a slot, where they lie."""

    @abstractmethod
    def give_back(self, slot: int, number: int) -> None:
        """Let the other end use a slot again."""

    @abstractmethod
    def check(self) -> None:
        """Raise PeerLost where the other end is gone or has closed the channel."""

    @abstractmethod
    def close(self, *, patient: bool) -> None:
        """Say goodbye, and let the memory go; what tensors still show stays.

        Args:
            patient: Wait until the other end has taken what is only in this one's memory.
        """

    @abstractmethod
    def wait(self, index: int, least: int, doing: str) -> None:
        """Wait until a word of `words` is at least `least`.

        Raises:
            PeerLost: The other end is gone.
            Stalled: It does not come in time.
        """

    def late(self, doing: str, seconds: float) -> Stalled:
        """The error of a deadline."""
        return Stalled(
            f"{self.peer} did not {doing} within {seconds:g} s",
            where=f"{self.provider}{_CHANNEL}",
            fix=f"Look for what {self.peer} does instead, or allow more time with timeout=.",
        )

    def lost(self, how: str) -> PeerLost:
        """The error of an end that is gone."""
        return PeerLost(
            f"{self.peer} {how}",
            where=f"{self.provider}{_CHANNEL}",
            fix="Its own error, or the signal that killed it, is the cause.",
        )


class PollingTransport(ChannelTransport):
    """One whose words are written without this end's doing, so that it has to look at them."""

    def wait(self, index: int, least: int, doing: str) -> None:
        wait_for_word(
            self.words,
            index,
            least,
            lambda: WaitBackoff(
                self.seconds,
                self.check,
                lambda seconds: self.late(doing, seconds),
                None if self.bell is None else partial(self.bell.sleep, index, least),
            ),
        )
