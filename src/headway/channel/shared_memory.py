"""Channels between two processes of one machine: stores into memory that both have mapped.

The memory has no name anywhere (memfd): the other process opens it through /proc/PID/fd while its
maker lives, so that nothing can be left behind, however a process ends. It cannot shrink (seals),
so that no touch can fail later. A process that has ended is noticed by its pidfd. The receiver of
a put makes no call at all; its credit is one store, too.

Static: the receiver's region holds the slots. Dynamic: the sender's memory holds the tensor, one
region for each slot, made anew when it is too small; the block says where, the receiver maps it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import select
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.channel.region import (
    SMALL_COPY_BYTES,
    CopyTarget,
    MemoryRegion,
    RegionLayout,
    RepeatedSource,
    TensorMetadata,
    copy_tensor,
    round_up_to_pages,
)
from headway.channel.rendezvous import namespace_identity
from headway.channel.transport import Doorbell, DoorbellPipe, PollingTransport
from headway.errors import PeerLost, Stalled

# After a shrink by the other process, an access here would end in SIGBUS, not in an exception.
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def unavailable_reason() -> str:
    """Why this machine cannot have such channels; "" where it can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "It needs memfd_create and pidfd_open (Linux 5.3 or newer)."
    if platform.machine() not in ("x86_64", "AMD64"):
        return (
            f"Flags are plain stores, whose order {platform.machine()} does not keep as x86-64 "
            "does; Python has no fence."
        )
    return ""


def machine() -> str:
    """The same text for processes that can see each other in /proc, on one network; "" elsewhere.

    Nodes that are emulated on one machine have networks of their own: memory would get around
    their links.
    """
    # /proc/PID/fd opens only for the same user, in the same namespace of process ids.
    identity, network = namespace_identity("pid"), namespace_identity("net")
    return f"{identity} {network} {os.geteuid()}" if identity else ""


def create_memory(nbytes: int, *, grows: bool = False) -> tuple[int, mmap.mmap]:
    """New memory of some bytes that another process can map: its descriptor and the map."""
    number = os.memfd_create("headway channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, nbytes)
    seals = sum(getattr(fcntl, name) for name in _SEALS if not (grows and name == "F_SEAL_GROW"))
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number, mmap.mmap(number, nbytes)


def map_peer_memory(pid: int, number: int, nbytes: int) -> mmap.mmap:
    """Memory of another process.

    Raises:
        OSError: It has ended, or this one may not see it.
    """
    handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Offer:
    """This end's region, before the other end has mapped it."""

    number: int
    region: MemoryRegion
    token: int
    pipe: DoorbellPipe

    @classmethod
    def make(cls, layout: RegionLayout) -> Offer:
        number, map_ = create_memory(layout.size)
        region = MemoryRegion(map_, layout)
        token = int.from_bytes(os.urandom(7))
        region.words[layout.token] = token
        return cls(number, region, token, DoorbellPipe())

    def message(self) -> dict[str, Any]:
        """What the other end must know."""
        here = {"pid": os.getpid(), "memory": self.number, "token": self.token}
        return {**here, "bell": self.pipe.write}

    def close(self) -> None:
        """Close the descriptors: the other end has opened them, or will not."""
        os.close(self.number)
        self.pipe.close()


class PeerProcess:
    """A process of this machine that is watched for its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def ended(self) -> bool:
        poll = select.poll()  # a shared one would refuse a second thread
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.close()


class SharedMemoryTransport(PollingTransport):
    """One end of a channel of one machine.

    Args:
        theirs: What `Offer.message` of the other end said.
        dynamic: Tensors lie in the sender's memory.
        credit: Puts wait until their slot is free; else a reader has to see that one has begun.

    Raises:
        OSError: The other process has ended, or this one may not see it.
    """

    provider = "shared_memory"

    def __init__(
        self,
        peer: str,
        seconds: float,
        own: Offer,
        theirs: dict[str, Any],
        *,
        dynamic: bool,
        credit: bool,
    ) -> None:
        layout = own.region.layout
        super().__init__(peer, layout, seconds)
        # Before the map: if the token then is right, this was the right process, too.
        self._process = PeerProcess(int(theirs["pid"]))
        map_ = map_peer_memory(self._process.pid, int(theirs["memory"]), layout.size)
        self._far = MemoryRegion(map_, layout)
        # The process may have ended since, and its id and descriptors belong to another one.
        if self._far.words[layout.token] != theirs["token"]:
            raise OSError("another process has its process id now")
        self.region = own.region
        self.words, self._out = own.region.words, self._far.words
        self.bell = self._bell = Doorbell(
            own.pipe, self._process.pid, int(theirs["bell"]), self.words, self._out, layout.asleep
        )
        self._asleep = layout.asleep
        self._dynamic, self._credit = dynamic, credit
        self._rooms: list[_SlotMemory | None] = [None] * layout.slots
        self._mapped: list[tuple[int, Tensor] | None] = [None] * layout.slots
        self._flags = [layout.flag(slot) for slot in range(layout.slots)]
        self._credits = [layout.credit(slot) for slot in range(layout.slots)]
        self._targets: list[CopyTarget | None] = [None] * layout.slots
        self._again = RepeatedSource()

    def room(self, slot: int, nbytes: int) -> Tensor:
        if not self._dynamic:
            return self._far.slot(slot)[:nbytes]
        room = self._rooms[slot]
        if room is None or room.bytes.numel() < nbytes:
            if room is not None:
                # The slot is free: the other end has mapped the old memory, or will never need it.
                os.close(room.number)
            # Twice the size, so that tensors that grow slowly do not need new memory each time.
            number, map_ = create_memory(
                round_up_to_pages(nbytes) if room is None else 2 * round_up_to_pages(nbytes)
            )
            made = 1 if room is None else room.made + 1
            room = _SlotMemory(number, made, torch.frombuffer(map_, dtype=torch.uint8))
            self._rooms[slot] = room
        return room.bytes[:nbytes]

    def send(self, slot: int, number: int, source: Tensor | None, form: TensorMetadata) -> None:
        flag, out = self._flags[slot], self._out
        # Before the first byte changes: the reader compares it when it releases the tensor.
        if not self._credit:
            out[flag + 1] = number  # begun
        if self._dynamic:
            self._write(slot, flag + 2, source, form)
        elif source is not None:
            target = self._targets[slot]
            if target is None:
                target = self._targets[slot] = CopyTarget(form.view(self._far.slot(slot)))
            if target.nbytes > SMALL_COPY_BYTES or not self._again.copy(source, target):
                copy_tensor(source, target.tensor, target.address, target.nbytes)
        # Last: x86-64 makes stores visible in order, so who sees the flag sees the tensor.
        out[flag] = number
        if self.words[self._asleep]:
            self._bell.ring()

    def _write(self, slot: int, index: int, source: Tensor | None, form: TensorMetadata) -> None:
        """Copy the tensor into memory of this end, and write the block that says where."""
        bytes_ = self.room(slot, form.nbytes)
        if source is not None:
            copy_tensor(source, form.view(bytes_), bytes_.data_ptr(), form.nbytes)
        room = self._rooms[slot]
        assert room is not None
        for place, word in enumerate(form.block(room.key), index):
            self._out[place] = word

    def arrived(self, slot: int, block: Sequence[int]) -> Tensor:
        if not self._dynamic:
            return self.region.slot(slot)
        known, key = self._mapped[slot], block[3]
        if known is None or known[0] != key:
            number, size = _SlotMemory.where(key)
            try:
                map_ = map_peer_memory(self._process.pid, number, size)
            except OSError:
                raise self.lost("vanished with the tensor that it had put") from None
            known = self._mapped[slot] = key, torch.frombuffer(map_, dtype=torch.uint8)
        return known[1]

    def give_back(self, slot: int, number: int) -> None:
        self._out[self._credits[slot]] = number
        if self.words[self._asleep]:
            self._bell.ring()

    def check(self) -> None:
        if self.words[self.layout.closed]:
            raise self.lost("has closed the channel")
        if self._process.ended():
            raise self.lost("vanished")

    def close(self, *, patient: bool) -> None:
        self._out[self.layout.closed] = 1
        self._bell.ring()
        with suppress(PeerLost, Stalled):
            for slot, room in enumerate(self._rooms):
                if patient and room is not None:  # the other end may still have to open it
                    sent = self._out[self._flags[slot]]
                    self.wait(self._credits[slot], sent, "take the last tensor")
        self._process.close()
        self._let_rooms_go()

    def _let_rooms_go(self) -> None:
        for room in self._rooms:
            if room is not None:
                os.close(room.number)
        self._rooms = [None] * self.layout.slots

    def __del__(self) -> None:
        # Without the wait of `close`: a finaliser must not block.
        if hasattr(self, "_rooms"):  # it had been opened
            self._out[self.layout.closed] = 1
            self._let_rooms_go()


@dataclass(frozen=True)
class _SlotMemory:
    """Memory of the sender for the tensors of one slot.

    Attributes:
        made: A counter, because the number of a descriptor is used again.
    """

    number: int
    made: int
    bytes: Tensor

    @property
    def key(self) -> int:
        """One word: 24 bits of number, 28 bits of pages, the rest of `made`."""
        return self.number | self.bytes.numel() // mmap.PAGESIZE << 24 | self.made % 4096 << 52

    @staticmethod
    def where(key: int) -> tuple[int, int]:
        """The number and the bytes of a key."""
        return key & 0xFFFFFF, (key >> 24 & 0xFFFFFFF) * mmap.PAGESIZE
