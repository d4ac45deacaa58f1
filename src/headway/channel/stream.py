"""`TensorStream`: tagged messages of several tensors between two processes of one machine.

A put copies the tensors into a block of this process's arena and sends a small header through a
channel; the receiver uses them where they lie, for as long as it likes. The block is free again
when the last tensor of it is gone there, whoever held that one: autograd, a model, a list. So
nothing is copied at the receiver, no size has to be known beforehand, and nobody has to report that
a tensor has been used. A put waits only for one of `ahead` headers. A block is lent to one message
at a time; like all memory of channels the arena has no name, cannot shrink, and lives as long as
somebody has it mapped.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from headway.channel.channel import Channel
from headway.channel.region import copy_tensor, round_up_to_pages
from headway.channel.shared_memory import create_memory
from headway.errors import TIMEOUT_SECONDS, PeerLost, RunError

# Each has a word before the first room, which the borrower writes: the loan that ended last.
MAX_ARENA_BLOCKS = 4096
_HEADER = round_up_to_pages(8 * MAX_ARENA_BLOCKS)
# MAP_POPULATE: the page faults happen here, not during the first copy into the memory.
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
# Loans after which memory that nobody wanted goes back to the system: some ten steps' worth.
_IDLE_LOANS = 64


@dataclass(slots=True)
class ArenaBlock:
    """A piece of an arena, `offset` bytes from its start.

    Attributes:
        loans: How many there were, with the present one.
        last: The arena's number of the last one.
        has_pages: Whether memory may be behind it.
    """

    number: int
    offset: int
    map: mmap.mmap
    bytes: Tensor
    loans: int = 0
    last: int = 0
    has_pages: bool = True

    def give_pages_back(self) -> None:
        """To the system, where it can take them; the next loan finds zeros."""
        with suppress(AttributeError, OSError):
            self.map.madvise(mmap.MADV_REMOVE)
        self.has_pages = False


class Arena:
    """The lender's side; grows when nothing large enough is free."""

    def __init__(self) -> None:
        # One file that grows, so that the borrower needs a single descriptor for all rooms.
        self.file, header = create_memory(_HEADER, grows=True)
        self._ended = memoryview(header).cast("Q")
        self._size = _HEADER
        self._rooms: list[ArenaBlock] = []
        self._loans = 0

    def lend(self, nbytes: int) -> ArenaBlock:
        """A free room of at least some bytes, and not much larger; from now on it is lent.

        Raises:
            RunError: There are too many rooms, and the borrower uses them all.
        """
        wanted = round_up_to_pages(nbytes)
        self._loans += 1
        free = [room for room in self._rooms if self._ended[room.number] == room.loans]
        # A small message in a large room would hold it for as long as any of its tensors lives.
        fit = [room for room in free if wanted <= len(room.map) <= 2 * wanted]
        # Messages of a kind that does not come again must not hold memory for ever.
        for room in free:
            if room.has_pages and (not fit or self._loans - room.last > _IDLE_LOANS):
                room.give_pages_back()
        room = min(fit, key=lambda room: len(room.map)) if fit else self._make(wanted)
        room.loans += 1
        room.last, room.has_pages = self._loans, True
        return room

    def _make(self, nbytes: int) -> ArenaBlock:
        number, offset = len(self._rooms), self._size
        if number == MAX_ARENA_BLOCKS:
            raise RunError(
                f"{MAX_ARENA_BLOCKS} messages to another process of this machine are in use "
                "at once",
                why="Their memory is free when nobody uses their tensors any more.",
                fix="Clone what is to be kept, instead of keeping all that came.",
            )
        os.ftruncate(self.file, offset + nbytes)
        map_ = mmap.mmap(self.file, nbytes, flags=_FLAGS, offset=offset)
        self._size += nbytes
        bytes_ = torch.frombuffer(map_, dtype=torch.uint8)
        self._rooms.append(ArenaBlock(number, offset, map_, bytes_))
        return self._rooms[-1]

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


class ArenaBorrower:
    """The borrower's side.

    Raises:
        OSError: The lender has ended, or this process may not see it.
    """

    def __init__(self, pid: int, file: int) -> None:
        self._file = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        self._ended = memoryview(mmap.mmap(self._file, _HEADER)).cast("Q")
        self._maps: dict[int, mmap.mmap] = {}
        self._watched: dict[int, weakref.ref[object]] = {}

    def take(self, number: int, offset: int, nbytes: int, loan: int) -> Tensor:
        """The bytes of a room; loan number `loan` ends when nothing uses their storage any more."""
        if number not in self._maps:
            self._maps[number] = mmap.mmap(self._file, nbytes, flags=_FLAGS, offset=offset)
        # Watched is an array that the storage owns: autograd and views keep the storage of a tensor
        # that came, but not the tensor object, whose end would return the room too early.
        owner, ended = np.frombuffer(self._maps[number], dtype=np.uint8), self._ended

        def give_back(_: object) -> None:  # in whatever thread lets the last tensor go
            ended[number] = loan

        # Kept, because a weak reference that is gone itself never calls back.
        self._watched[number] = weakref.ref(owner, give_back)
        return torch.frombuffer(owner, dtype=torch.uint8)  # its storage holds the owner

    def give_back(self, number: int, loan: int) -> None:
        """End a loan that has not been taken."""
        self._ended[number] = loan

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


# Bytes, as torch aligns its own tensors: a kernel may round differently on other addresses.
_ALIGNED = 64
# Of a block: tag, room, offset and bytes of the room, loan.
_WORDS = 5

ShapeAndDtype = tuple[Sequence[int], torch.dtype]


def open_stream(
    peer: int,
    *,
    ahead: int,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> TensorStream | None:
    """One end; the other rank does the same. None at both where they have no memory in common.

    Args:
        peer: Global rank of the other end.
        ahead: Messages in one direction that the receiver may not yet have looked at.
        group: As of `Channel`, like the time-out and the errors raised.
    """
    channel = Channel(
        peer, shape=(_WORDS,), dtype=torch.int64, slots=ahead, group=group, timeout=timeout
    )
    if channel.provider == "shared_memory":
        return TensorStream(channel)
    channel.close()
    return None


def open_streams(
    ahead: Mapping[tuple[int, int], int],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[int, TensorStream]:
    """This rank's streams, by global rank of the other end; collective.

    Args:
        ahead: Pairs of global ranks, the lower one first -> as of `open_stream`; the same on all.
    """
    own, found = dist.get_rank(), dict[int, TensorStream]()
    # In one order on all ranks: opening a stream waits for the rank at its other end.
    for pair in sorted(ahead):
        if own in pair:
            peer = sum(pair) - own
            stream = open_stream(peer, ahead=ahead[pair], group=group, timeout=timeout)
            if stream is not None:
                found[peer] = stream
    return found


class TensorStream:
    """One end of it; made by `open_stream`."""

    def __init__(self, channel: Channel) -> None:
        self.peer = channel.peer
        self._channel = channel
        self._arena = Arena()
        self._words = np.array([os.getpid(), self._arena.file, 0, 0, 0], dtype=np.int64)
        # It shares the array's memory, so that a put writes five words and makes no tensor.
        self._block = torch.from_numpy(self._words)
        pid, file, *_ = self._swap()
        try:
            self._loans = ArenaBorrower(pid, file)
        except OSError as error:
            raise PeerLost(
                f"rank {self.peer} vanished before a stream to it was open",
                why=str(error),
                fix="Its own error, or the signal that killed it, is the cause.",
            ) from error
        self._swap()  # the other end may only go after this one has opened its arena
        self._early: dict[int, deque[list[int]]] = {}
        self._forgotten: deque[int] = deque()

    def _swap(self) -> list[int]:
        self._channel.put(self._block)
        with self._channel.get() as came:
            return [int(word) for word in came.tolist()]

    def put(self, tag: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors of host memory; they may be changed at once. Nothing, if they are empty.

        Raises:
            PeerLost: The other end is gone.
            Stalled: It does not look at what came before.
        """
        starts, size = _starts([tensor.nbytes for tensor in tensors])
        if not size:
            return
        room = self._arena.lend(size)
        address = room.bytes.data_ptr()
        for tensor, start in zip(tensors, starts, strict=True):
            target = room.bytes[start : start + tensor.nbytes]
            view = target.view(tensor.dtype).view(tensor.shape)
            copy_tensor(tensor, view, address + start, tensor.nbytes)
        self._words[:] = (tag, room.number, room.offset, len(room.bytes), room.loans)
        self._channel.put(self._block)

    def take(self, tag: int, forms: Sequence[ShapeAndDtype]) -> list[Tensor]:
        """The tensors of the next message of a tag, where they lie; waits for it.

        Args:
            forms: Shape and type of each tensor, as it was put.

        Raises:
            PeerLost: The other end is gone, and had not put it before.
            Stalled: It does not come in time.
        """
        starts, size = _starts([math.prod(shape) * dtype.itemsize for shape, dtype in forms])
        if not size:
            return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in forms]
        # A schedule may take messages in another order than they were sent: other tags are kept.
        while (where := self._waiting(tag)) is None:
            with self._channel.get() as block:
                found, *place = block.tolist()
            self._early.setdefault(found, deque()).append(place)
        if self._forgotten:
            self._drop()
        storage = self._loans.take(*where).untyped_storage()
        return [
            _tensor(storage, start, tuple(shape), dtype)
            for (shape, dtype), start in zip(forms, starts, strict=True)
        ]

    def _waiting(self, tag: int) -> list[int] | None:
        """Where the first message of a tag lies, if one has come."""
        waiting = self._early.get(tag)
        if waiting is None:
            return None
        where = waiting.popleft()
        if not waiting:  # tags may be new for ever
            del self._early[tag]
        return where

    def forget(self, tag: int, forms: Sequence[ShapeAndDtype]) -> None:
        """In place of `take`, in any thread: what comes, or has come, is given back unread."""
        if _starts([math.prod(shape) * dtype.itemsize for shape, dtype in forms])[1]:
            self._forgotten.append(tag)

    def _drop(self) -> None:
        for _ in range(len(self._forgotten)):
            tag = self._forgotten.popleft()
            where = self._waiting(tag)
            if where is None:
                self._forgotten.append(tag)
            else:
                number, _, _, loan = where
                self._loans.give_back(number, loan)

    def close(self) -> None:
        """End it at both ends; tensors that came stay as long as somebody uses them."""
        self._channel.close()


def _tensor(
    storage: UntypedStorage, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Dense, and not a view: a stage may change in place what enters it."""
    strides = [math.prod(shape[n:]) for n in range(1, len(shape) + 1)]
    return torch.empty(0, dtype=dtype).set_(storage, start // dtype.itemsize, shape, strides)


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin one behind the other, and the bytes of all."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return found, end
