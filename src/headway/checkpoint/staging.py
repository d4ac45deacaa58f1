"""Host staging buffer: a rank's part of a checkpoint is copied to it while training waits.

Also what a checkpoint says of torch's tensors: their specs, and whether they match a manifest.

After `copy` returns nothing refers to the training tensors any more. The memory is kept from save
to save: on the machines measured, the first copy into fresh memory took four to eight times as long
as the next one (page faults), so `reserve` may touch it before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.channel.mapped_memory import copied, file_of
from headway.checkpoint.format import DTYPES
from headway.checkpoint.save_plan import HeldTensorSpec, SavePiece, TensorBox
from headway.checkpoint.tensor_part import TensorPart
from headway.errors import CheckpointError

_PAGE = 4096


def spec_of(name: str, tensor: Tensor) -> HeldTensorSpec:
    """Element type and shape of a tensor, and the part that this rank has of it.

    Raises:
        CheckpointError: A sparse or quantised tensor, one whose sum is still to be taken or whose
            part is no box, or an unknown element type.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    box = local_box(tensor)
    known = local_data(tensor).layout == torch.strided and dtype in DTYPES
    if not known or (box is not None and box.shape != tuple(local_data(tensor).shape)):
        raise CheckpointError(
            "cannot be stored in a checkpoint",
            where=f"tensor {name}",
            why=f"it is a {type(tensor).__name__} of {dtype} with layout {tensor.layout}",
            fix="give a dense tensor, the same on all ranks, or a DTensor split into boxes, of one "
            "of: " + ", ".join(DTYPES),
        )
    return HeldTensorSpec(dtype, tuple(tensor.shape), box)


def local_data(tensor: Tensor) -> Tensor:
    """The memory that this rank has of a tensor."""
    if isinstance(tensor, TensorPart):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> TensorBox | None:
    """The part of a tensor that this rank has; None: all of it.

    A sum that is still to be taken has no part: its box is one of no element.
    """
    if isinstance(tensor, TensorPart):
        return tensor.box if tensor.box.shape != tuple(tensor.shape) else None
    if not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements):
        return None
    none = TensorBox((0,) * tensor.dim(), (0,) * tensor.dim())
    if any(p.is_partial() for p in tensor.placements):
        return none
    # The protocol by which torch.distributed.checkpoint asks a tensor for its parts.
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        return none
    return TensorBox(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, HeldTensorSpec]:
    """Of all; raises as `spec_of`."""
    return {name: spec_of(name, tensor) for name, tensor in tensors.items()}


def staged_bytes(pieces: Sequence[SavePiece], tensors: Mapping[str, Tensor]) -> int:
    """The memory that copies of this rank's pieces take; none of those that lie in files."""
    return sum(p.bytes for p in pieces if file_of(local_data(tensors[p.name])) is None)


class StagingBuffer:
    """One reusable host buffer; its size is the largest share so far."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, *, pinned: bool = False) -> None:
        """Hold at least `size` bytes, every page touched."""
        if self._allocate(size, pinned):
            # One byte in each page is enough to have the kernel map it.
            self._buffer[::_PAGE].zero_()

    def _allocate(self, size: int, pinned: bool) -> bool:
        """Hold at least `size` bytes; True if they are new."""
        if self._buffer.numel() >= size and (self._buffer.is_pinned() or not pinned or not size):
            return False
        self._buffer = torch.empty(0, dtype=torch.uint8)  # gives the old one back first
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return True

    def copy(self, pieces: Sequence[SavePiece], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's pieces.

        Args:
            pieces: At most one per tensor, larger elements first (see `partition_writes`).

        Returns:
            Logical name -> contiguous host tensor of the piece's shape, valid until the next call.
        """
        devices = {tensors[piece.name].device for piece in pieces} - {torch.device("cpu")}
        pinned = any(device.type == "cuda" for device in devices)
        self._allocate(staged_bytes(pieces, tensors), pinned)
        staged: dict[str, Tensor] = {}
        start = 0
        for piece in pieces:
            source = local_data(tensors[piece.name]).detach()
            part = source[piece.rows] if source.dim() else source  # a number has no rows
            if file_of(source) is not None:
                # What memory does not hold is not copied to memory.
                staged[piece.name] = copied(part)
                continue
            # Larger elements come first, so that `start` is a multiple of this element's size:
            # `view` needs it.
            place = self._buffer[start : start + piece.bytes].view(part.dtype).view(part.shape)
            place.copy_(part, non_blocking=True)  # asynchronous only from a GPU to pinned memory
            staged[piece.name] = place
            start += piece.bytes
        # Copies from a GPU are only queued: training must not change their sources before they are
        # done.
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return staged

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
