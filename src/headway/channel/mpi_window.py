"""Channels over MPI windows: `MPI_Put` of the tensor, then of the flag.

Windows are allocated by MPI (`Win.Allocate`): only then is a put seen by a target that makes no MPI
call, on one machine (measured with MPICH, Open MPI and Intel MPI) and where the network does RDMA.
Over plain TCP a put moves on when the target enters MPI, which every wait of a channel does. Ranks
are those of MPI's world, and `mpi4py` is an extra. Where MPI ends a job with its first dead
process, as it does unless told otherwise, there is no error to raise.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from headway.channel import shared_memory
from headway.channel.region import MemoryRegion, RegionLayout, TensorMetadata
from headway.channel.rendezvous import ChannelRendezvous
from headway.channel.transport import PollingTransport, SendBuffers
from headway.errors import MissingExtra, RunError, UsageError

_TAG = 7411
_GOODBYE_SECONDS = 5.0
# What a closed end says: whether somebody still has a tensor of its window.
_FREE, _HELD = 1, 2


class MpiTransport(PollingTransport):
    """One end of a channel in a window of two ranks.

    Args:
        peer: The rank of the other end in `pair`; `who` names it in messages.
        mpi: The module `mpi4py.MPI`.
        pid: Of the other end, if it is on this machine; otherwise None.
    """

    provider = "mpi"

    def __init__(
        self,
        peer: int,
        who: str,
        layout: RegionLayout,
        seconds: float,
        *,
        mpi: Any,
        pair: Any,
        pid: int | None,
    ) -> None:
        super().__init__(who, layout, seconds)
        self._mpi, self._pair, self._peer = mpi, pair, peer
        self._process = None if pid is None else shared_memory.PeerProcess(pid)
        self._window = mpi.Win.Allocate(layout.size, 1, comm=pair)
        memory = np.frombuffer(self._window.tomemory(), np.uint8)
        # Before the barrier, right after which the peer may put its first word.
        memory[:] = 0
        pair.Barrier()
        # One passive-target epoch for the life of the window: a put needs no call of its target.
        self._window.Lock_all()
        self._memory = weakref.ref(memory)
        self.region = MemoryRegion(memory, layout)
        self.words = self.region.words
        self.acquire = self._window.Sync
        self._rooms = SendBuffers(layout.slots)

    def room(self, slot: int, nbytes: int) -> Tensor:
        return self._rooms.get(slot, nbytes)

    def send(self, slot: int, number: int, source: Tensor | None, form: TensorMetadata) -> None:
        nbytes, flag = form.nbytes, self.layout.flag(slot)
        if nbytes > self.layout.nbytes:
            raise RunError(
                f"a tensor of {nbytes} bytes in a channel to {self.peer}",
                why=f"Its window has {self.layout.nbytes} for each.",
                fix="Make the channel with more capacity=.",
            )
        self.check()
        start = self._rooms.start(slot, source, form)
        self._words_to(flag + 1, number, *form.block())
        # MPI does not order puts: `begun` before the tensor, the tensor before its flag.
        self._window.Flush(self._peer)
        if nbytes:
            data = self._mpi.buffer.fromaddress(start, nbytes)
            self._put(data, self.layout.offset(slot))
        self._window.Flush(self._peer)
        self._words_to(flag, number)
        self._window.Flush(self._peer)

    def _words_to(self, index: int, *words: int) -> None:
        data = b"".join(word.to_bytes(8, "little") for word in words)
        self._put(bytearray(data), 8 * index)
        # The buffer is a temporary one, which may go only after MPI has read it.
        self._window.Flush_local(self._peer)

    def _put(self, data: Any, start: int) -> None:
        byte = self._mpi.BYTE
        self._window.Put([data, byte], self._peer, [start, len(data), byte])

    def arrived(self, slot: int, block: Sequence[int]) -> Tensor:
        return self.region.slot(slot)

    def give_back(self, slot: int, number: int) -> None:
        self._words_to(self.layout.credit(slot), number)
        self._window.Flush(self._peer)

    def check(self) -> None:
        self._pair.Iprobe()  # lets MPI make progress where it has no thread of its own
        self._window.Sync()
        if self.words[self.layout.closed]:
            raise self.lost("has closed the channel")
        if self._process is not None and self._process.ended():
            raise self.lost("vanished")

    def close(self, *, patient: bool) -> None:
        """Free the window, collectively, where both ends close within some seconds.

        Where an end still holds a tensor of it, or does not close, it stays until MPI ends.
        """
        # Without the references of this object, the weak one tells whether a caller has a tensor.
        self.acquire = None
        self.words = memoryview(bytes(self.layout.header)).cast("Q")
        del self.region
        mine = _FREE if self._memory() is None else _HELD
        self._words_to(self.layout.closed, mine)
        self._window.Flush(self._peer)
        theirs = self._wait_for_the_other() if patient else 0
        if self._process is not None:
            self._process.close()
        # These calls are collective: an end that has gone or holds a tensor would block them.
        if mine == theirs == _FREE:
            self._window.Unlock_all()
            self._window.Free()
            self._pair.Free()

    def _wait_for_the_other(self) -> int:
        """What the other end says when it closes; 0 where it does not in time."""
        words = memoryview(self._window.tomemory())[: self.layout.header].cast("Q")
        deadline = time.monotonic() + min(self.seconds, _GOODBYE_SECONDS)
        while not words[self.layout.closed] and time.monotonic() < deadline:
            self._pair.Iprobe()
            self._window.Sync()
            time.sleep(0.001)
        return words[self.layout.closed]


def open_mpi_transport(
    peer: int, form: TensorMetadata | None, slots: int, capacity: int, seconds: float
) -> MpiTransport:
    """One end of a channel; errors as of `Channel`. The other end calls the same.

    Args:
        peer: Its rank in MPI's world.
        capacity: Bytes of a slot of a dynamic channel.
    """
    mpi = _mpi()
    world = mpi.COMM_WORLD
    if not 0 <= peer < world.size or peer == world.rank:
        raise UsageError(
            f"a channel over MPI from rank {world.rank} to rank {peer}",
            why=f"MPI's world has {world.size} ranks.",
            fix="Start the ranks with mpiexec, and name another one.",
        )
    nbytes = capacity if form is None else form.nbytes
    wanted = {"form": form, "slots": slots, "bytes": nbytes}
    here = shared_memory.machine()
    meeting = _MpiRendezvous(world, peer, seconds)
    theirs = meeting.swap({**wanted, "machine": here, "pid": os.getpid()})
    meeting.check_same_request(wanted, theirs)
    # Sorted, because both ends must give the ranks of the new group in the same order.
    both = world.group.Incl(sorted([world.rank, peer]))
    pair = world.Create_group(both, _TAG)
    together = bool(here) and theirs["machine"] == here
    return MpiTransport(
        1 - pair.rank,
        f"rank {peer}",
        RegionLayout(slots, nbytes),
        seconds,
        mpi=mpi,
        pair=pair,
        pid=theirs["pid"] if together else None,
    )


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra(
            "a channel over MPI without mpi4py",
            why=str(error),
            fix='pip install "headway[mpi]", and start the ranks with its mpiexec.',
        ) from error
    return MPI


class _MpiRendezvous(ChannelRendezvous):
    def __init__(self, world: Any, peer: int, seconds: float) -> None:
        super().__init__(world.rank, peer, seconds)
        self._world = world

    def swap(self, says: dict[str, Any]) -> dict[str, Any]:
        sending = self._world.isend(says, self.peer, _TAG)
        deadline = time.monotonic() + self.seconds
        # Probing, because a receive of MPI has no time-out.
        while not self._world.iprobe(self.peer, _TAG):
            if time.monotonic() > deadline:
                sending.cancel()
                raise self.late()
            time.sleep(0.001)
        theirs: dict[str, Any] = self._world.recv(source=self.peer, tag=_TAG)
        sending.wait()
        return theirs
