"""Memory of this process: how much it holds, and whether malloc keeps what has been freed."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from malloc.h of glibc."""

_LOOK = 4
"""Steps after which `HeapTrimmer` looks at what the process holds."""


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


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next step instead of returning it to the kernel.

    Nothing happens where the C library does not know the setting (musl, macOS).
    """
    mallopt = _malloc("mallopt")
    if mallopt is None:
        return
    # A step frees its activations and gradients and allocates the same again. Returned to the
    # kernel, each page faults anew: 5,600 faults, 60 ms, in a step of 0.6 s with 10 M parameters.
    # 32 MiB is the most that glibc accepts for the second; both must be set, because setting one
    # stops glibc from adapting the other.
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)


def give_back_freed_memory() -> None:
    """Return free memory to the kernel, once something large has been freed for good."""
    trim = _malloc("malloc_trim")
    if trim is not None:
        trim(0)


def _malloc(name: str) -> Callable[..., int] | None:
    """A function of glibc's malloc."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)


class HeapTrimmer:
    """Keeps what malloc holds of freed memory near to what a step takes.

    Steps whose tensors have a size of their own each time leave gaps that the next ones do not fit
    into: the heap of a process grows to several times what it ever uses. So it is given back to
    the kernel, but only once the process has grown: the step after it faults its pages in anew.

    Args:
        growth: Bytes that the process may hold more than some steps after freed memory was last
            given back.
    """

    def __init__(self, growth: int) -> None:
        self._growth, self._steps = growth, 0
        self._before: int | None = None

    def end_step(self) -> None:
        """Every few steps, look; give back what is free if the process has grown too much."""
        self._steps += 1
        if self._steps % _LOOK:
            return
        now = resident_bytes(torch.device("cpu"))
        if self._before is None:
            self._before = now
        elif now > self._before + self._growth:
            give_back_freed_memory()
            self._before = None
