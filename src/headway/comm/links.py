"""Messages of a group over connections of its own, moved by whoever waits: no thread, no copies.

What the interpreter needs of a group (`Messages`), instead of Gloo's connections: there a thread of
every group is woken for each piece that comes. Here a call hands the kernel what it takes, and a
wait sleeps in poll and moves every message of the group until its own is done; other threads that
wait sleep until theirs is, or until it is their turn. Invariant: state changes under one lock,
which is not held in poll.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from torch import Tensor

from headway.comm.link import Link, Transfer

_GRACE_SECONDS = 2.0
"""After a rank has vanished, the others may still get so far what does not depend on it."""

_SHORT_SECONDS = 5.0

_living: weakref.WeakSet[Any] = weakref.WeakSet()


class Broken(RuntimeError):
    """The connection to a rank broke.

    Attributes:
        peer: Its place in the group.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class LinkedMessages:
    """The messages of one rank of a group.

    Args:
        links: For every other rank its connections, one for each interface.
    """

    def __init__(self, links: Sequence[Sequence[Link]]) -> None:
        self._links = [list(each) for each in links]
        self._by_number = {link.number: link for each in self._links for link in each}
        self._lost: dict[Link, float] = {}
        self._state = threading.Condition(threading.Lock())
        self._polling = False
        self._asleep: list[Transfer] = []
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        everything = [link for each in self._links for link in each]
        self._end = weakref.finalize(self, _close, everything, (self._bell, self._ringer))
        _living.add(self)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        """Begin to send a tensor; it must stay as it is until that is done."""
        with self._state:
            link = self._link(peer, tag)
            transfer = Transfer(self, link, tag, tensors[0], sends=True)
            link.send(transfer)
            if self._polling and not transfer.done:
                self._ring()
        return transfer

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        """Begin to receive into a tensor."""
        with self._state:
            link = self._link(peer, tag)
            transfer = Transfer(self, link, tag, tensors[0], sends=False)
            link.receive(transfer)
            if self._polling:
                self._ring()
        return transfer

    def wait(self, transfer: Transfer, seconds: float) -> None:
        """Move messages until one is done.

        Raises:
            RuntimeError: It "timed out".
            Broken: Which rank is gone.
        """
        deadline = monotonic() + seconds
        with self._state:
            try:
                while not transfer.done:
                    self._turn(transfer, deadline)
            finally:
                self._state.notify_all()

    def close(self) -> None:
        """End all connections, once."""
        with self._state:
            if not self._end.alive:
                return
            for link in self._by_number.values():
                link.close()
            self._ring()
            self._state.wait_for(lambda: not self._polling, _SHORT_SECONDS)
            self._end()

    def forget(self) -> None:
        """What a forked process does with its copy: the other ranks must see who is gone."""
        self._end.detach()
        for link in self._by_number.values():
            link.drop()
        for end in (self._bell, self._ringer):
            end.close()

    # -- with the lock held -----------------------------------------------------------------------

    def _link(self, peer: int, tag: int) -> Link:
        links = self._links[peer]
        return links[tag % len(links)]

    def _turn(self, transfer: Transfer, deadline: float) -> None:
        """Move something, or let another thread do so."""
        limit = min(deadline, self._check(transfer))
        left = limit - monotonic()
        if left <= 0 and limit == deadline:
            raise RuntimeError("timed out")
        if self._polling:
            self._asleep.append(transfer)
            self._state.wait(max(left, 0.0))
            self._asleep.remove(transfer)
            return
        self._polling = True
        try:
            self._move(max(left, 0.0))
        finally:
            self._polling = False
        if any(other.done or other.link.ended for other in self._asleep):
            self._state.notify_all()

    def _move(self, seconds: float) -> None:
        """Sleep until something comes or may leave, and move it."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for number, link in self._by_number.items():
            if not link.ended:
                link.doze()
                poll.register(number, link.events)
        self._state.release()
        try:
            found = poll.poll(int(seconds * 1000) + 1)
        finally:
            self._state.acquire()
        for number, events in found:
            link_ = self._by_number.get(number)
            if link_ is not None:
                link_.happened(events)
            else:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)

    def _ring(self) -> None:
        """Wake the thread in poll: it shall look for something else, too."""
        with suppress(BlockingIOError):
            self._ringer.send(b"!")

    def _check(self, transfer: Transfer) -> float:
        """When a wait must be given up because another rank is gone: a time of `monotonic`.

        Raises:
            Broken: It can never be done.
        """
        now = monotonic()
        for link in self._by_number.values():
            if link.ended and not link.parted:
                self._lost.setdefault(link, now)
        first = min(self._lost, key=self._lost.__getitem__, default=None)
        late = self._lost[first] + _GRACE_SECONDS if first is not None else float("inf")
        if transfer.link.ended or now >= late:
            culprit = transfer.link if first is None else first
            raise Broken(culprit.peer, f"It {culprit.ended}.")
        return late


def _close(links: Sequence[Link], bells: Sequence[socket.socket]) -> None:
    """End it without a goodbye, if there was none."""
    for link in links:
        link.drop()
    for bell in bells:
        bell.close()


def _forget_all() -> None:
    for messages in list(_living):
        messages.forget()


os.register_at_fork(after_in_child=_forget_all)
