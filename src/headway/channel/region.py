"""Registered memory of a channel: flags, credits, metadata and slots; copying tensors into it.

Words of a region, by lines:

    line 2s      written by the sender into slot s: flag, begun, metadata (12 words)
    line 2s + 1  written by the receiver of what this end puts: credit
    line 2S      closed, token, asleep
    slots        from `RegionLayout.header` on, each at a page

All words are unsigned, of 8 bytes, aligned, and have one writer. A flag is the number of the put
(1, 2, ...), not a bit: what is lost, doubled or overwritten shows. A flag is stored after all that
it announces. That a reader who sees it also sees the rest holds where stores become visible in
their order and loads are done in theirs (x86-64); `shared_memory` refuses all other processors.

A tensor is copied by one memcpy where its elements lie one after another in host memory at that
moment; all others (strides, other devices, lazy conjugate or negative bits) torch copies.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from headway.errors import RunError

# Bytes up to which a copy is over before another thread could use the interpreter's lock.
SMALL_COPY_BYTES = 65536

# ctypes releases the interpreter's lock for the call. 1 KiB takes 0.6 us, torch's copy_ 1.2.
_copy_bytes = ctypes.CDLL(None).memcpy
_copy_bytes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_bytes.restype = None


class CopyTarget:
    """Memory that tensors of one form are copied to, again and again."""

    __slots__ = ("address", "bytes", "nbytes", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self.bytes = memory_at(self.address, self.nbytes) if self.nbytes else memoryview(b"")


class RepeatedSource:
    """The tensor that was copied last: a buffer that is put in every step is looked at only once.

    It is not kept alive. That it still lies where it did, as it did, is asked each time.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._address = 0
        self._bytes = memoryview(b"")

    def copy(self, source: Tensor, target: CopyTarget) -> bool:
        """Copy it, if it is the one from before; 0.4 instead of 1.4 us."""
        known = self._source
        if known is None or known() is not source:
            self._source, self._address = weakref.ref(source), 0
            return False
        if (
            source.data_ptr() != self._address
            or source.nbytes != target.nbytes
            or not source.is_contiguous()
        ):
            return self._look(source, target)
        target.bytes[:] = self._bytes
        return True

    def _look(self, source: Tensor, target: CopyTarget) -> bool:
        """The second time: copy it from where it lies, if its bytes lie in order and elsewhere."""
        self._address = start = tensor_address(source)
        # Strided, or made in the target itself: `copy_tensor` deals with both.
        if not start or start == target.address:
            self._source = None
            return False
        self._bytes = memory_at(start, target.nbytes)
        target.bytes[:] = self._bytes
        return True


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory as bytes; whoever uses them keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def copy_tensor(source: Tensor, target: Tensor, address: int, nbytes: int) -> None:
    """Copy a tensor of any device and strides into memory, which `target` shows in its form."""
    start = tensor_address(source)
    if start:
        if start != address:  # the tensor may have been made in place
            _copy_bytes(address, start, nbytes)
    elif nbytes:
        with torch.no_grad():
            target.copy_(source)


def tensor_address(tensor: Tensor) -> int:
    """Where the bytes of a tensor lie one after another in memory; 0 where they do not."""
    kind = type(tensor)
    # A subclass (DTensor, a fake tensor) may keep its values elsewhere than at its data_ptr.
    plain = (
        (kind is Tensor or kind is Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )
    return tensor.data_ptr() if plain else 0


# Words of a line: 128 bytes, two cache lines, because processors fetch them in pairs.
LINE_WORDS = 16
MOST_DIMS = 8
METADATA_WORDS = 4 + MOST_DIMS
"""Words of a metadata block: dtype, number of dimensions, bytes, key, sizes."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""Types that go through a channel; a block holds the place in this list."""


def round_up_to_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages; at least one."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


@dataclass(frozen=True)
class TensorMetadata:
    """Shape and type of a tensor, as in a metadata block."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def block(self, key: int = 0) -> tuple[int, ...]:
        """The words of the metadata; `key` says which memory of the sender holds the tensor.

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
    def of(cls, block: Sequence[int]) -> TensorMetadata:
        """The form that a block describes."""
        return cls(tuple(block[4 : 4 + block[1]]), DTYPES[block[0]])

    def view(self, memory: Tensor) -> Tensor:
        """The tensor at the beginning of some bytes [at least nbytes]."""
        return memory[: self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class RegionLayout:
    """Where things are in a region.

    Attributes:
        slots: Tensors that may be under way at once.
        nbytes: Of each slot; 0: the tensors lie elsewhere.
    """

    slots: int
    nbytes: int

    def flag(self, slot: int) -> int:
        """The word of a slot's flag; `begun` is the next one, then comes the block."""
        return 2 * LINE_WORDS * slot

    def credit(self, slot: int) -> int:
        return 2 * LINE_WORDS * slot + LINE_WORDS

    @property
    def closed(self) -> int:
        """The word that says that the writer of this region has closed its end."""
        return 2 * LINE_WORDS * self.slots

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
        return round_up_to_pages(8 * (self.closed + LINE_WORDS))

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self.offset(self.slots)

    def offset(self, slot: int) -> int:
        """Bytes before a slot."""
        return self.header + slot * (round_up_to_pages(self.nbytes) if self.nbytes else 0)


class MemoryRegion:
    """Writable memory of `layout.size` bytes, zero at first; tensors made of it keep it alive."""

    def __init__(self, memory: mmap.mmap | NDArray[np.uint8], layout: RegionLayout) -> None:
        self.layout = layout
        header: Any = memory
        self.words = memoryview(header)[: layout.header].cast("Q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def slot(self, slot: int) -> Tensor:
        """The bytes of a slot."""
        start = self.layout.offset(slot)
        return self._bytes[start : start + self.layout.nbytes]
