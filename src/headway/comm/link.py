"""One connection to another rank: messages out of tensors and into tensors, without blocking.

A message is a head (kind, tag, bytes) and the bytes of the tensor. Messages of one tag come in the
order in which they were sent. What nobody has asked for yet stays in the kernel, so that a rank
cannot run far ahead; only where another message is asked for that lies behind it, is it put aside.
Invariant: a link never waits; whoever does calls `push` and `pull` when poll says so.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from torch import Tensor

from headway.channel.copying import bytes_at
from headway.channel.network import prepare

_HEAD = struct.Struct("<IIQ")
_DATA, _BYE = 0x68770001, 0x68770002
_LOW_BYTES = 64 * 1024
"""A receiver is woken when so much has come, or all that it needs: by every packet, otherwise."""
KERNEL_BYTES = 32 * 1024
"""So much the kernel of a receiver takes in any case, while nobody reads."""
_HANG_UP = getattr(select, "POLLRDHUP", 0)
_NOTHING = memoryview(bytearray())


class Waits(Protocol):
    """What waits for transfers."""

    def wait(self, transfer: Transfer, seconds: float) -> None: ...


class Transfer:
    """A message that is sent or received.

    Args:
        home: Waits for it.
        link: Over which.
        tag: Of it.
        tensor: Contiguous, on the CPU: what is sent, or where it is received; kept alive.

    Attributes:
        done: It is in the tensor, or has left it.
    """

    __slots__ = ("_home", "done", "link", "memory", "nbytes", "sends", "tag", "tensor")

    def __init__(self, home: Waits, link: Link, tag: int, tensor: Tensor, *, sends: bool) -> None:
        self._home, self.link, self.tag, self.tensor, self.sends = home, link, tag, tensor, sends
        self.nbytes = tensor.nbytes
        self.memory = bytes_at(tensor.data_ptr(), self.nbytes) if self.nbytes else _NOTHING
        self.done = False

    @property
    def travels(self) -> bool:
        """Whether it gets there although nobody in this process does anything for it."""
        return self.done or (not self.sends and self.nbytes <= KERNEL_BYTES)

    def wait(self, timeout: timedelta) -> None:
        """Return when it is done.

        Raises:
            RuntimeError: It "timed out", or the connection to a rank broke (`Broken`).
        """
        if not self.done:
            self._home.wait(self, timeout.total_seconds())


class Link:
    """One end of a connection.

    Args:
        peer: The place of the other rank in the group.
        connection: To it; nothing has been said on it.

    Attributes:
        ended: Why nothing comes any more; "" while something may.
        parted: The other end has said goodbye.
        draining: The other end sends nothing more: what it has sent is read in any case.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.ended = ""
        self.parted = False
        self.draining = False
        self._socket = connection
        connection.setblocking(False)
        prepare(connection)
        self.number = connection.fileno()
        self._leaving: deque[Transfer] = deque()
        self._out: list[memoryview] = []
        self._wanted: dict[int, deque[Transfer]] = {}
        self._early: dict[int, deque[bytearray]] = {}
        self._head = bytearray(_HEAD.size)
        self._room = memoryview(self._head)
        self._coming: tuple[int, Transfer | bytearray] | None = None
        self._low = 1

    # -- sending ----------------------------------------------------------------------------------

    def send(self, transfer: Transfer) -> None:
        """Begin; what the kernel takes is on its way at once."""
        self._leaving.append(transfer)
        if len(self._leaving) == 1:
            self._load()
            self.push()

    def _load(self) -> None:
        first = self._leaving[0]
        self._out = [memoryview(_HEAD.pack(_DATA, first.tag, first.nbytes)), first.memory]

    def push(self) -> None:
        """Hand on to the kernel what it takes."""
        try:
            while self._leaving and not self.ended:
                self._out = _rest(self._out, self._socket.sendmsg(self._out))
                if self._out:
                    return
                self._leaving.popleft().done = True
                if self._leaving:
                    self._load()
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    # -- receiving --------------------------------------------------------------------------------

    def receive(self, transfer: Transfer) -> None:
        """Begin; it may have come already."""
        early = self._early.get(transfer.tag)
        if early:
            self._settle(transfer, early.popleft())
            if not early:
                del self._early[transfer.tag]
        else:
            self._wanted.setdefault(transfer.tag, deque()).append(transfer)

    def pull(self) -> None:
        """Take from the kernel what somebody wants, or all, where the other end is at its end."""
        try:
            while (self._wanted or self._coming or self.draining) and not self.ended:
                count = self._socket.recv_into(self._room) if self._room else 0
                if self._room and not count:
                    self.ended = "has closed the group" if self.parted else "is gone"
                self._room = self._room[count:]
                if self._room:
                    return
                self._next()
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    def _next(self) -> None:
        """A head or the bytes of a message are complete."""
        if self._coming is None:
            kind, tag, nbytes = _HEAD.unpack(self._head)
            if kind == _BYE:
                self.parted = self.draining = True
            elif kind != _DATA:
                self.ended = "sends what is no message"
            else:
                self._begin(tag, nbytes)
                if self._room or self.ended:
                    return
                self._close_message()
        else:
            self._close_message()
        self._room = memoryview(self._head)

    def _begin(self, tag: int, nbytes: int) -> None:
        """Choose where the bytes of a message go."""
        transfer = self._claim(tag)
        if transfer is None:
            aside = bytearray(nbytes)
            self._coming, self._room = (tag, aside), memoryview(aside)
        elif transfer.nbytes == nbytes:
            self._coming, self._room = (tag, transfer), transfer.memory
        else:
            self.ended = _unequal(nbytes, transfer.nbytes)

    def _claim(self, tag: int) -> Transfer | None:
        """Who has asked first for a message with this tag."""
        waiting = self._wanted.get(tag)
        if not waiting:
            return None
        transfer = waiting.popleft()
        if not waiting:
            del self._wanted[tag]
        return transfer

    def _close_message(self) -> None:
        assert self._coming is not None
        (tag, what), self._coming = self._coming, None
        if isinstance(what, Transfer):
            what.done = True
        elif transfer := self._claim(tag):  # asked for while it came
            self._settle(transfer, what)
        else:
            self._early.setdefault(tag, deque()).append(what)

    def _settle(self, transfer: Transfer, came: bytearray) -> None:
        """Give a message that was put aside to whoever asks for it."""
        if len(came) == transfer.nbytes:
            transfer.memory[:] = came
            transfer.done = True
        else:
            self.ended = _unequal(len(came), transfer.nbytes)

    # -- for poll ---------------------------------------------------------------------------------

    @property
    def events(self) -> int:
        """What poll should look for."""
        wants = select.POLLIN if self._wanted or self._coming else 0
        return wants | (select.POLLOUT if self._leaving else 0) | _HANG_UP

    def happened(self, events: int) -> None:
        """Act on what poll has found."""
        if events & ~(select.POLLIN | select.POLLOUT):
            self.draining = True
        if events & select.POLLOUT:
            self.push()
        if events & ~select.POLLOUT:
            self.pull()

    def doze(self) -> None:
        """Have poll wake us not before there is something to do."""
        if self._coming is not None:
            need = len(self._room)
        elif self._wanted:
            sizes = (transfer.nbytes for waiting in self._wanted.values() for transfer in waiting)
            need = len(self._room) + min(sizes)
        else:
            return
        need = max(1, min(need, _LOW_BYTES))
        if need != self._low:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, need)
            self._low = need

    # -- the end ----------------------------------------------------------------------------------

    def _end(self, error: OSError) -> None:
        self.ended = f"is gone ({error.strerror or error})"

    def close(self) -> None:
        """Say goodbye and end it; what has been handed to the kernel still arrives."""
        if not self._leaving and not self.ended:
            with suppress(OSError):
                self._socket.send(_HEAD.pack(_BYE, 0, 0))
        self.drop()

    def drop(self) -> None:
        """End it without a word, as the death of this process would."""
        self.ended = self.ended or "was closed by this rank"
        self._socket.close()


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some bytes, the first of which are gone."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else parts


def _unequal(came: int, expected: int) -> str:
    return f"sends {came} bytes where {expected} were expected: the ranks' calls differ"
