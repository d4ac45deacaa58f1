"""Wakes the other end of a channel when it sleeps: a pipe without a name, and a word that says so.

Whoever waits long stores 1 into its word in the other's memory, looks once more, and sleeps on its
pipe; whoever has stored a flag or a credit looks at the word, and writes a byte into the pipe where
it is 1. A processor may do store and look the other way round, and two threads of an end share the
word: then a byte is missing. Invariant: a sleep ends after `_LONGEST`, whether it was rung or not.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

_LONGEST = 0.01
"""Seconds."""


class Pipe:
    """Of the end that sleeps.

    Attributes:
        read: Descriptor of this end.
        write: That which the other end opens, until `close`.
    """

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        """The other end has opened it, or will not."""
        os.close(self.write)

    def __del__(self) -> None:
        os.close(self.read)


class Bell:
    """Both directions, at one end.

    Args:
        own: Of this end.
        pid: Of the other process.
        theirs: The descriptor `write` of its pipe.
        words: Memory of this end, which the other one writes.
        out: That of the other end.
        asleep: The word in both that says that its writer sleeps.

    Raises:
        OSError: The other process has ended, or this one may not see it.
    """

    def __init__(
        self, own: Pipe, pid: int, theirs: int, words: memoryview, out: memoryview, asleep: int
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
        if self._words[index] < least:
            poll = select.poll()  # one for all would refuse a second thread
            poll.register(self._own.read, select.POLLIN)
            if poll.poll(1000 * _LONGEST):
                with suppress(BlockingIOError):
                    os.read(self._own.read, 4096)
        self._out[self._asleep] = 0

    def __del__(self) -> None:
        if hasattr(self, "_write"):
            os.close(self._write)
