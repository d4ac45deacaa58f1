"""`Stream`: messages of several tensors between two processes of one machine, told apart by tags.

A put copies the tensors into a room of this process's arena and sends a small block through a
channel; the receiver uses them where they lie, for as long as it likes: the room comes back when
the last of them is gone (`arena`). So nothing is copied at the receiver, no size has to be known
beforehand, and nobody has to say when a tensor has been used. Invariant: a put waits for nothing
but a free block, of which there are `ahead`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from headway.channel.arena import Arena, Loans
from headway.channel.channel import Channel
from headway.channel.copying import copy
from headway.errors import PeerLost

_ALIGNED = 64
"""Bytes, as torch aligns its own tensors: kernels round alike."""
_WORDS = 5
"""Of a block: tag, room, offset and bytes of the room, loan."""

FormOf = tuple[Sequence[int], torch.dtype]


def open_stream(
    peer: int, *, ahead: int, group: dist.ProcessGroup | None = None, timeout: float = 300.0
) -> Stream | None:
    """One end; the other rank does the same. None at both where they have no memory in common.

    Args:
        peer: Global rank of the other end.
        ahead: Messages in one direction that the receiver may not yet have looked at.
        group: Over which addresses are exchanged; None: the default one.
        timeout: Seconds that a wait may take.

    Raises:
        PeerLost: The other end is gone.
        Stalled: It does not come in time.
    """
    channel = Channel(
        peer, shape=(_WORDS,), dtype=torch.int64, slots=ahead, group=group, timeout=timeout
    )
    if channel.provider == "shared_memory":
        return Stream(channel)
    channel.close()
    return None


class Stream:
    """One end of it; see `open_stream`.

    Args:
        channel: Of blocks, in shared memory.

    Attributes:
        peer: Global rank of the other end.

    Raises:
        PeerLost: The other end is gone.
    """

    def __init__(self, channel: Channel) -> None:
        self.peer = channel.peer
        self._channel = channel
        self._arena = Arena()
        self._words = np.array([os.getpid(), self._arena.file, 0, 0, 0], dtype=np.int64)
        self._block = torch.from_numpy(self._words)
        pid, file, *_ = self._swap()
        try:
            self._loans = Loans(pid, file)
        except OSError as error:
            raise PeerLost(
                f"rank {self.peer} vanished before a stream to it was open",
                why=str(error),
                fix="Its own error, or the signal that killed it, is the cause.",
            ) from error
        self._swap()  # only now may the other end go
        self._early: dict[int, deque[list[int]]] = {}

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
            copy(tensor, view, address + start, tensor.nbytes)
        self._words[:] = (tag, room.number, room.offset, len(room.bytes), room.loans)
        self._channel.put(self._block)

    def take(self, tag: int, forms: Sequence[FormOf]) -> list[Tensor]:
        """The tensors of the next message of a tag, where they lie; waits for it.

        Args:
            tag: As it was put.
            forms: Shape and type of each tensor, as it was put.

        Raises:
            PeerLost: The other end is gone, and had not put it before.
            Stalled: It does not come in time.
        """
        starts, size = _starts([math.prod(shape) * dtype.itemsize for shape, dtype in forms])
        if not size:
            return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in forms]
        while not (waiting := self._early.get(tag)):
            with self._channel.get() as block:
                found, *where = block.tolist()
            self._early.setdefault(found, deque()).append(where)
        storage = self._loans.take(*waiting.popleft()).untyped_storage()
        return [
            _tensor(storage, start, tuple(shape), dtype)
            for (shape, dtype), start in zip(forms, starts, strict=True)
        ]

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
    """Where tensors of some bytes begin one behind the other, and the bytes of all."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return found, end
