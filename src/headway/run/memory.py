"""How much memory this process holds now."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def resident_bytes(device: torch.device) -> int:
    """Bytes: allocated on a CUDA device; on the CPU the resident set of the process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        # Not Linux: the largest resident set so far, which getrusage gives in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
