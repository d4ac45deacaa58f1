"""Which rank keeps the slab of a sample, and which rank needs it next.

The rule of LBANN's data store for HDF5: whoever reads a slab first owns it; in later epochs its
owner sends it to its consumer. The order of samples is a function of (seed, epoch), so each rank
computes all transfers of all ranks, and a message needs no request. Equal calls in equal order give
equal transfers on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OwnerPolicy = Literal["recent", "first"]
"""What is kept where not all fits: what was used last (LRU), or what came first."""


@dataclass(frozen=True, slots=True)
class SlabTransfer:
    """How one slab comes to its consumer.

    Attributes:
        owner: Partition that holds it; None: the consumer reads it from its file.
        kept: Whether the consumer holds it from now on.
        gone: Sample that the consumer lets go for it.
    """

    sample: int
    consumer: int
    owner: int | None = None
    kept: bool = False
    gone: int | None = None


class SlabOwnership:
    """The owner of every slab of one offset.

    Args:
        room: By partition, the most slabs that it may hold.
    """

    def __init__(self, room: Sequence[int], keep: OwnerPolicy) -> None:
        self._room, self._keep = tuple(room), keep
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in room]
        self._owner: dict[int, int] = {}

    def plan(self, samples: Sequence[int]) -> list[SlabTransfer]:
        """The moves of the samples of a mini-batch, in order of their positions.

        Slabs that are sent must be taken out before any is let go for those that are read.
        """
        # Position i of a mini-batch goes to partition i mod partitions. With k slabs of a sample
        # that is rank (i mod partitions) k + offset: a slab never leaves the ranks of its offset.
        partitions = len(self._room)
        return [
            self._move(sample, position % partitions) for position, sample in enumerate(samples)
        ]

    def held(self, partition: int) -> list[int]:
        """Samples of which a partition has the slab, in ascending order."""
        return sorted(self._held[partition])

    def _move(self, sample: int, to: int) -> SlabTransfer:
        owner = self._owner.get(sample)
        if owner is not None:
            self._held[owner].move_to_end(sample)
            return SlabTransfer(sample, to, owner)
        held, gone = self._held[to], None
        if len(held) >= self._room[to]:
            if self._keep == "first" or not held:
                return SlabTransfer(sample, to)
            # The least recently used: `move_to_end` keeps the slabs in this order.
            gone, _ = held.popitem(last=False)
            del self._owner[gone]
        held[sample] = None
        self._owner[sample] = to
        return SlabTransfer(sample, to, kept=True, gone=gone)
