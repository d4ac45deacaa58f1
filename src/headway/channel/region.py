"""A region: registered memory of flags, credits, metadata and the slots for tensors.

    line 2s      written by the sender into slot s: flag, begun, block (12 words)
    line 2s + 1  written by the receiver of what this end puts: credit
    line 2S      closed, token, asleep
    slots        from `Layout.header` on, each at a page

All words are unsigned, of 8 bytes, aligned, and have one writer. A flag is the number of the put
(1, 2, ...), not a bit: what is lost, doubled or overwritten shows. Invariant: a flag is stored
after all that it speaks of. That a reader who sees it also sees the rest holds where stores become
visible in their order and loads are done in theirs (x86-64); `shared_memory` refuses all others.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import RunError

LINE = 16
"""Words of a line: 128 bytes, two cache lines, because processors fetch them in pairs."""
MOST_DIMS = 8
BLOCK = 4 + MOST_DIMS
"""Words of a metadata block: dtype, number of dimensions, bytes, key, sizes."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""Types that go through a channel; a block holds the place in this list."""


def pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages; at least one."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


@dataclass(frozen=True)
class Form:
    """Shape and type of a tensor, as in a metadata block."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def block(self, key: int = 0) -> tuple[int, ...]:
        """The words of the metadata.

        Args:
            key: Which memory of the sender holds it.

        Raises:
            RunError: Too many dimensions, or a type that no channel carries.
        """
        if len(self.shape) > MOST_DIMS or self.dtype not in DTYPES:
            raise RunError(
                f"a tensor of {len(self.shape)} dimensions of {self.dtype} in a channel",
                why=f"A metadata block has {MOST_DIMS} dimensions and {len(DTYPES)} types.",
                fix="Put a view with fewer dimensions, or of another type.",
            )
        sizes = (*self.shape, *[0] * (MOST_DIMS - len(self.shape)))
        return DTYPES.index(self.dtype), len(self.shape), self.nbytes, key, *sizes

    @classmethod
    def of(cls, block: Sequence[int]) -> Form:
        """The form that a block describes."""
        return cls(tuple(block[4 : 4 + block[1]]), DTYPES[block[0]])

    def view(self, memory: Tensor) -> Tensor:
        """The tensor at the beginning of some bytes [at least nbytes]."""
        return memory[: self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where things are in a region.

    Attributes:
        slots: Tensors that may be under way at once.
        nbytes: Of each slot; 0: the tensors lie elsewhere.
    """

    slots: int
    nbytes: int

    def flag(self, slot: int) -> int:
        """The word of a slot's flag; `begun` is the next one, then comes the block."""
        return 2 * LINE * slot

    def credit(self, slot: int) -> int:
        return 2 * LINE * slot + LINE

    @property
    def closed(self) -> int:
        """The word that says that the writer of this region has closed its end."""
        return 2 * LINE * self.slots

    @property
    def token(self) -> int:
        """The word by which a region is known."""
        return self.closed + 1

    @property
    def asleep(self) -> int:
        """The word that says that the writer of this region sleeps until it is rung."""
        return self.closed + 2

    @property
    def header(self) -> int:
        """Bytes before the first slot."""
        return pages(8 * (self.closed + LINE))

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self.offset(self.slots)

    def offset(self, slot: int) -> int:
        """Bytes before a slot."""
        return self.header + slot * (pages(self.nbytes) if self.nbytes else 0)


class Region:
    """Memory in its layout; tensors that are made of it keep it alive.

    Args:
        memory: Writable, of `layout.size` bytes, zero at first.
        layout: Where things are.

    Attributes:
        words: The header.
    """

    def __init__(self, memory: mmap.mmap | NDArray[np.uint8], layout: Layout) -> None:
        self.layout = layout
        header: Any = memory
        self.words = memoryview(header)[: layout.header].cast("Q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def slot(self, slot: int) -> Tensor:
        """The bytes of a slot."""
        start = self.layout.offset(slot)
        return self._bytes[start : start + self.layout.nbytes]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this region."""
        start = self._bytes.data_ptr()
        return start <= tensor.data_ptr() < start + self._bytes.numel()
