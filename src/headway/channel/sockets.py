"""Channels over TCP: a thread of the receiver fills the region and then stores the flag.

The same contract as shared memory, with the thread in the place of a network card that writes to
memory: the receiving program makes no call either, but the thread needs its interpreter now and
then. Credits come back on the same connection. Every message is one line of words, and behind a put
the bytes of the tensor, which are received where they stay.
"""

from __future__ import annotations

import mmap
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from headway.channel.pairing import pair
from headway.channel.region import (
    DTYPES,
    LINE_WORDS,
    METADATA_WORDS,
    MOST_DIMS,
    MemoryRegion,
    RegionLayout,
    TensorMetadata,
    memory_at,
    round_up_to_pages,
)
from headway.channel.rendezvous import (
    ChannelRendezvous,
    configure_connection,
    receive_exactly,
)
from headway.channel.transport import ChannelTransport, SendBuffers
from headway.errors import PeerLost

_PUT, _CREDIT, _BYE = 1, 2, 3
# Kind, slot, number, block, and an empty word.
_HEAD = struct.Struct(f"<{LINE_WORDS}Q")
# Bytes up to which head and tensor go in one call, hence in one packet where it can.
_SMALL = 65536
_GOODBYE_SECONDS = 5.0
_INVALID = "sent an invalid message"
# Memory is taken as the bytes arrive; a larger size could not even be asked for.
_MOST_TENSOR_BYTES = 1 << 44
_NO_METADATA = (0,) * METADATA_WORDS


class _Inbox:
    """What the thread fills: the region, and how the connection ended.

    Attributes:
        region: Flags, credits and, static, the slots.
        slots: The bytes of each slot; dynamic ones are made anew when they are too small.
        changed: Notified when a word has been stored.
        ended: How the other end went; "" while it is there.
    """

    def __init__(self, layout: RegionLayout) -> None:
        self.region = MemoryRegion(mmap.mmap(-1, layout.size), layout)
        self.slots = [self.region.slot(slot) for slot in range(layout.slots)]
        self.changed = threading.Condition()
        self.ended = ""
        self._layout = layout

    def receive(self, link: socket.socket) -> None:
        """Until the connection ends; the body of the thread."""
        how = "vanished"
        head = memoryview(bytearray(_HEAD.size))
        # `_break` shuts the connection down under this thread, which may be an error here.
        with suppress(OSError):
            while receive_exactly(link, head):
                kind, slot, number, *block = _HEAD.unpack(head)[: 3 + METADATA_WORDS]
                if kind == _BYE:
                    how = "has closed the channel"
                    link.shutdown(socket.SHUT_WR)  # the other end waits for this answer
                    break
                if kind not in (_PUT, _CREDIT) or slot >= self._layout.slots:
                    how = _INVALID
                    break
                if kind == _CREDIT:
                    self._store(self._layout.credit(slot), number)
                elif not self._is_tensor(block):
                    how = _INVALID
                    break
                elif not self._take(link, slot, number, block):
                    break
        with self.changed:
            self.ended = how
            self.changed.notify_all()

    def _is_tensor(self, block: list[int]) -> bool:
        """Whether a block describes a tensor that this process has or finds room for."""
        dtype, dims, nbytes = block[:3]
        if dtype >= len(DTYPES) or dims > MOST_DIMS:
            return False
        form = TensorMetadata.of(block)
        if self._layout.nbytes and nbytes > self._layout.nbytes:
            return False
        return form.nbytes == nbytes < _MOST_TENSOR_BYTES

    def _take(self, link: socket.socket, slot: int, number: int, block: list[int]) -> bool:
        flag, words, nbytes = self._layout.flag(slot), self.region.words, block[2]
        words[flag + 1] = number  # begun
        if self.slots[slot].numel() < nbytes:
            self.slots[slot] = torch.frombuffer(
                mmap.mmap(-1, round_up_to_pages(nbytes)), dtype=torch.uint8
            )
        if nbytes and not receive_exactly(link, memory_at(self.slots[slot].data_ptr(), nbytes)):
            return False
        for place, word in enumerate(block, flag + 2):
            words[place] = word
        self._store(flag, number)
        return True

    def _store(self, index: int, number: int) -> None:
        with self.changed:
            self.region.words[index] = number
            self.changed.notify_all()


class SocketTransport(ChannelTransport):
    """One end of a channel over a connection; a put may take `seconds` without any progress."""

    provider = "socket"

    def __init__(
        self, peer: str, layout: RegionLayout, seconds: float, link: socket.socket
    ) -> None:
        super().__init__(peer, layout, seconds)
        _prepare(link, seconds)
        self._link = link
        self._inbox = _Inbox(layout)
        self.region = self._inbox.region
        self.words = self.region.words
        self._rooms = SendBuffers(layout.slots)
        self._sending = threading.Lock()
        # The thread refers to the inbox, not to this object, which could never be collected then.
        self._thread = threading.Thread(
            target=self._inbox.receive, args=(link,), name=f"channel to {peer}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _break, link)

    def room(self, slot: int, nbytes: int) -> Tensor:
        return self._rooms.get(slot, nbytes)

    def send(self, slot: int, number: int, source: Tensor | None, form: TensorMetadata) -> None:
        nbytes = form.nbytes
        start = self._rooms.start(slot, source, form)
        head = _HEAD.pack(_PUT, slot, number, *form.block(), 0)
        data = memory_at(start, nbytes) if nbytes else memoryview(b"")
        if nbytes <= _SMALL:
            self._send(head + data)
        else:
            self._send(head, data)

    def _send(self, *parts: bytes | memoryview) -> None:
        """Send parts of one message.

        Raises:
            PeerLost: The connection has ended.
            Stalled: The other end takes nothing for too long; the channel is of no use then.
        """
        try:
            # Two threads send: one puts, one gives credits back; their messages must not mix.
            with self._sending:
                for part in parts:
                    self._link.sendall(part)
        # SO_SNDTIMEO is over: a blocking socket reports that as EAGAIN.
        except BlockingIOError as error:
            self._end()  # half a message has left: nothing after it would be understood
            raise self.late("take what was put", self.seconds) from error
        except OSError as error:
            self._thread.join(_GOODBYE_SECONDS)  # the thread notes how the connection ended
            raise self.lost(self._inbox.ended or "vanished") from error
        # An interrupt may have come in the middle of a message, too.
        except BaseException:
            self._end()
            raise

    def arrived(self, slot: int, block: Sequence[int]) -> Tensor:
        return self._inbox.slots[slot]

    def give_back(self, slot: int, number: int) -> None:
        with suppress(PeerLost):  # the wait for the next tensor raises it
            self._send(_HEAD.pack(_CREDIT, slot, number, *_NO_METADATA, 0))

    def check(self) -> None:
        if self._inbox.ended:
            raise self.lost(self._inbox.ended)

    def wait(self, index: int, least: int, doing: str) -> None:
        inbox, words = self._inbox, self.words
        with inbox.changed:
            came = inbox.changed.wait_for(
                lambda: words[index] >= least or inbox.ended, self.seconds
            )
        if words[index] >= least:
            return
        raise self.lost(inbox.ended) if came else self.late(doing, self.seconds)

    def close(self, *, patient: bool) -> None:
        with suppress(OSError):
            self._link.sendall(_HEAD.pack(_BYE, 0, 0, *_NO_METADATA, 0))
            self._link.shutdown(socket.SHUT_WR)
        # Closing a connection with unread bytes resets it, and the peer would lose what was put.
        if patient:
            self._thread.join(_GOODBYE_SECONDS)
        self._end()
        self._thread.join()


def _break(link: socket.socket) -> None:
    """Shut a connection down, which wakes whoever waits in it."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def _prepare(link: socket.socket, seconds: float) -> None:
    """No delay, a limit for sending, and an error when the other machine vanishes silently."""
    # settimeout would limit the receives of the thread, too; SO_SNDTIMEO limits only sends.
    link.settimeout(None)
    configure_connection(link)
    whole = int(seconds)
    # A microsecond more, because a limit of zero means none.
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6) + 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def open_socket_transport(
    meeting: ChannelRendezvous, layout: RegionLayout, address: str | None
) -> SocketTransport:
    """A connection with the other end; arguments and errors as of `pairing.pair`."""
    link = pair(meeting, address)
    return SocketTransport(f"rank {meeting.peer}", layout, meeting.seconds, link)
