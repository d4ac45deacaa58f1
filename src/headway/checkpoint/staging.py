"""Host memory into which a rank's share is copied while training waits.

Invariant: after `copy` returns nothing refers to the training tensors any more. The memory is kept
from save to save: on the machines measured, the first copy into fresh memory took four to eight
times as long as the next one (page faults), so `reserve` may touch it before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.checkpoint.manifest import DTYPES
from headway.checkpoint.shares import Piece, Spec
from headway.errors import CheckpointError

_PAGE = 4096


def spec_of(name: str, tensor: Tensor) -> Spec:
    """Element type and shape of a tensor.

    Raises:
        CheckpointError: A sparse, quantised or distributed tensor, or an unknown element type.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or dtype not in DTYPES or hasattr(tensor, "device_mesh"):
        raise CheckpointError(
            "cannot be stored in a checkpoint",
            where=f"tensor {name}",
            why=f"it is a {type(tensor).__name__} of {dtype} with layout {tensor.layout}",
            fix="give a dense tensor, the same on all ranks, of one of: " + ", ".join(DTYPES),
        )
    return Spec(dtype, tuple(tensor.shape))


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Of all; raises as `spec_of`."""
    return {name: spec_of(name, tensor) for name, tensor in tensors.items()}


class Staging:
    """One reusable host buffer; its size is the largest share so far."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, *, pinned: bool = False) -> None:
        """Hold at least `size` bytes, every page touched."""
        if self._allocate(size, pinned):
            self._buffer[::_PAGE].zero_()

    def _allocate(self, size: int, pinned: bool) -> bool:
        """Hold at least `size` bytes; true where they are new."""
        if self._buffer.numel() >= size and (self._buffer.is_pinned() or not pinned or not size):
            return False
        self._buffer = torch.empty(0, dtype=torch.uint8)  # gives the old one back first
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return True

    def copy(self, pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's pieces.

        Args:
            pieces: At most one per tensor, larger elements first (see `shares.cut`).
            tensors: Logical name -> tensor, on any device, of any strides.

        Returns:
            Logical name -> contiguous host tensor of the piece's shape. They lie in the buffer, so
            they are valid until the next call.
        """
        devices = {tensors[piece.name].device for piece in pieces} - {torch.device("cpu")}
        pinned = any(device.type == "cuda" for device in devices)
        self._allocate(sum(piece.bytes for piece in pieces), pinned)
        staged: dict[str, Tensor] = {}
        start = 0
        for piece in pieces:
            source = tensors[piece.name].detach()
            part = source[piece.first : piece.stop] if source.dim() else source
            place = self._buffer[start : start + piece.bytes].view(part.dtype).view(part.shape)
            place.copy_(part, non_blocking=True)
            staged[piece.name] = place
            start += piece.bytes
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return staged

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
