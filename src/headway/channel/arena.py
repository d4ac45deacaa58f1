"""Memory that one process lends to another of the same machine, room by room.

The lender writes into a room; the borrower uses it where it lies, and it is free again when the
last tensor of it is gone there, whoever held that one: autograd, a model, a list. Invariant: a room
is lent to one message at a time. Like all memory of channels it has no name, cannot shrink, and
lives as long as somebody has it mapped.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.channel.region import pages
from headway.channel.shared_memory import memory
from headway.errors import RunError

MOST_ROOMS = 4096
"""Each has a word before the first room, which the borrower writes: the loan that ended last."""
_HEADER = pages(8 * MOST_ROOMS)
_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


@dataclass(slots=True)
class Room:
    """A piece of an arena.

    Attributes:
        number: Of the room, from 0.
        offset: Bytes before it.
        bytes: All of it.
        loans: How many there were, with the present one.
    """

    number: int
    offset: int
    bytes: Tensor
    loans: int = 0


class Arena:
    """The lender's side; grows when nothing large enough is free.

    Attributes:
        file: Descriptor by which the borrower opens it.
    """

    def __init__(self) -> None:
        self.file, header = memory(_HEADER, grows=True)
        self._ended = memoryview(header).cast("Q")
        self._size = _HEADER
        self._rooms: list[Room] = []

    def lend(self, nbytes: int) -> Room:
        """A free room of at least some bytes, and not much larger; from now on it is lent.

        Raises:
            RunError: There are too many rooms, and the borrower uses them all.
        """
        wanted = pages(nbytes)
        fit = [
            room
            for room in self._rooms
            if wanted <= len(room.bytes) <= 2 * wanted and self._ended[room.number] == room.loans
        ]
        room = min(fit, key=lambda room: len(room.bytes)) if fit else self._make(wanted)
        room.loans += 1
        return room

    def _make(self, nbytes: int) -> Room:
        number, offset = len(self._rooms), self._size
        if number == MOST_ROOMS:
            raise RunError(
                f"{MOST_ROOMS} messages to another process of this machine are in use at once",
                why="Their memory is free when nobody uses their tensors any more.",
                fix="Clone what is to be kept, instead of keeping all that came.",
            )
        os.ftruncate(self.file, offset + nbytes)
        map_ = mmap.mmap(self.file, nbytes, flags=_FLAGS, offset=offset)
        self._size += nbytes
        self._rooms.append(Room(number, offset, torch.frombuffer(map_, dtype=torch.uint8)))
        return self._rooms[-1]

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


class Loans:
    """The borrower's side.

    Args:
        pid: Of the lender.
        file: As the lender has it.

    Raises:
        OSError: The lender has ended, or this process may not see it.
    """

    def __init__(self, pid: int, file: int) -> None:
        self._file = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        self._ended = memoryview(mmap.mmap(self._file, _HEADER)).cast("Q")
        self._maps: dict[int, mmap.mmap] = {}
        self._watched: dict[int, weakref.ref[object]] = {}

    def take(self, number: int, offset: int, nbytes: int, loan: int) -> Tensor:
        """The bytes of a room; it is given back when nothing uses their storage any more.

        Args:
            number: Of the room.
            offset: Of it.
            nbytes: Of it.
            loan: Which of the room's loans this is.
        """
        if number not in self._maps:
            self._maps[number] = mmap.mmap(self._file, nbytes, flags=_FLAGS, offset=offset)
        owner, ended = np.frombuffer(self._maps[number], dtype=np.uint8), self._ended

        def give_back(_: object) -> None:  # in whatever thread lets the last tensor go
            ended[number] = loan

        self._watched[number] = weakref.ref(owner, give_back)
        return torch.frombuffer(owner, dtype=torch.uint8)  # its storage holds the owner

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
