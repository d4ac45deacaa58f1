"""A box of a tensor, with the shape of the whole: for what is dealt to ranks unevenly.

A DTensor says of itself which part a rank has; of a table whose rows lie on some of the ranks there
is none. Like a DTensor it answers torch.distributed.checkpoint, which asks for boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.checkpoint.save_plan import TensorBox

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


class TensorPart(Tensor):
    """Type, shape and device of a whole tensor, and the memory of a box of it.

    As a tensor it has one element for all; nothing can be computed with it.

    Attributes:
        local: The memory, of the box's shape.
        box: Where it belongs.
    """

    local: Tensor
    box: TensorBox

    @classmethod
    def of(cls, local: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> TensorPart:
        """The box that begins at `offsets` in a tensor of this shape."""
        part = local.new_zeros(()).expand(tuple(shape)).as_subclass(cls)
        part.local, part.box = local, TensorBox(tuple(offsets), tuple(local.shape))
        return part

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The protocol of torch.distributed.checkpoint, as DTensors have it."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # takes a second

        offsets, sizes = torch.Size(self.box.offsets), torch.Size(self.box.shape)
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The same protocol: the memory of what `__create_chunk_list__` has named."""
        return self.local
