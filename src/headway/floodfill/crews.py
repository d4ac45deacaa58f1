"""Which processes work at which sub-volume.

Sub-volumes are segmented independently of each other, so that processes begin one each. One that
finds none to begin joins those of the sub-volume with the fewest, where objects are filled ahead
of their turn (`seed_ledger.py`). The numbers are in a file of the folder of the work, changed under
a lock; a result does not depend on them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_OPEN, _COMPLETE = 0, 1


def prepare_crews(folder: Path, complete: list[bool]) -> None:
    """Begin with no process at any sub-volume; nobody may be at work.

    Args:
        complete: Of each sub-volume, whether it is segmented.
    """
    (folder / "crews.lock").touch()
    np.save(folder / "crews.npy", np.array([[0, state] for state in complete], dtype=np.int32))


class Crews:
    """A process's view of who works where, and its way in and out."""

    def __init__(self, folder: Path) -> None:
        self._lock = folder / "crews.lock"
        self._table = np.lib.format.open_memmap(folder / "crews.npy", "r+")

    def join(self) -> tuple[int, bool] | None:
        """Go to the sub-volume with the fewest processes, the first of them; None: none is left.

        Returns:
            Its number, and whether nobody else is there, so that this process has to prepare it.
        """
        with self._locked():
            still_open = np.flatnonzero(self._table[:, 1] == _OPEN)
            if not still_open.size:
                return None
            number = int(still_open[np.argmin(self._table[still_open, 0])])
            self._table[number, 0] += 1
            return number, self.size(number) == 1

    def leave(self, number: int, *, complete: bool) -> bool:
        """Leave a sub-volume; nobody joins one that is complete.

        Returns:
            Whether this process was the last one of a complete sub-volume.
        """
        with self._locked():
            self._table[number, 0] -= 1
            if complete:
                self._table[number, 1] = _COMPLETE
            return complete and int(self._table[number, 0]) == 0

    def size(self, number: int) -> int:
        """How many processes work at a sub-volume."""
        return int(self._table[number, 0])

    @property
    def complete(self) -> int:
        """How many sub-volumes are complete."""
        return int(np.count_nonzero(self._table[:, 1] == _COMPLETE))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The kernel releases it when a process dies.
        with self._lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
