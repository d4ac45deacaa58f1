"""Memory for tensors that are read at random.

With pages of 4 KiB each such access first misses the processor's table of addresses, whose entries
for gigabytes are in no cache either. Torch asks for larger pages only if THP_MEM_ALLOC_ENABLE=1 is
set in the environment; NumPy does so for arrays of 4 MiB and more, where Linux gives them on
request (/sys/kernel/mm/transparent_hugepage/enabled is "madvise" or "always").
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LINE = 64


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` in pages of 2 MiB if there are any; its first entry begins a cache line."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
