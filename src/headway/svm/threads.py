"""Blocks of kernel values by several threads: a block is made by one of them.

torch divides each product and each function among its threads, which wait for each other at the end
of every one. Where other programs use the cores, all wait for one that does not run, at each of
the thousands of products of a fit. Here a thread takes the next block when it is done with one, so
that nobody waits for more than the last blocks of a sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

CHUNK = 512
"""Rows and columns of a block: 1 MiB of float32, which the second cache holds."""
_WORTHWHILE = 4 * CHUNK * CHUNK
"""Kernel values from which on threads are called: half a millisecond."""


class _Team:
    """The threads of this process, for those who use them at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.size = 1
        self.helpers: ThreadPoolExecutor | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self.size = torch.get_num_threads()
                if self.size > 1:
                    alone = partial(torch.set_num_threads, 1)
                    self.helpers = ThreadPoolExecutor(self.size - 1, "blocks", alone)
        # torch's number is one of each thread.
        torch.set_num_threads(1)

    def leave(self) -> None:
        torch.set_num_threads(self.size)
        with self._lock:
            self._users -= 1
            if self._users == 0 and self.helpers is not None:
                self.helpers.shutdown()
                self.helpers = None


_TEAM = _Team()


@contextmanager
def threads_over_blocks(*, concurrent: bool = True) -> Iterator[None]:
    """Inside, torch has one thread, and `over_chunks` as many as torch had before.

    Args:
        concurrent: Whether blocks may be made by several threads at once; else all stays as it is.
    """
    if not concurrent:
        yield
        return
    _TEAM.enter()
    try:
        yield
    finally:
        _TEAM.leave()


def over_chunks(
    count: int, columns: int, work: Callable[[int, int], None], *, concurrent: bool
) -> None:
    """Call `work` with the first row of each chunk, and the one behind its last.

    Args:
        count: How many rows there are.
        columns: Of the blocks that are made of each chunk, for how long that takes.
        concurrent: Whether `work` may be called by several threads at once.
    """
    # An iterator of a list: who asks next gets the next one, whichever thread that is.
    todo = iter([(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)])

    def take() -> None:
        for first, last in todo:
            work(first, last)

    helpers = _TEAM.helpers
    if helpers is None or not concurrent or count * columns < _WORTHWHILE:
        take()
        return
    called = [helpers.submit(take) for _ in range(_TEAM.size - 1)]
    take()
    for one in called:
        # One that has not begun has nothing left to do.
        if not one.cancel():
            one.result()
