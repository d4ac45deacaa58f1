"""Hit rates and counts of a data cache, over a rank and its data-loading processes.

Every process adds to a row of its own of a shared table, so that no count needs a lock; a row
outlives its process. A killed process loses only what it had not yet added.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from headway.data.cache.memfd import attach_memfds, create_memfds, memfd_available
from headway.units import format_bytes, format_seconds

_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """Counts of one rank and its data-loading processes since the cache was opened.

    Attributes:
        memory_seconds: Time that it took to get them.
        disk_samples, disk_bytes, disk_seconds: The same of the local disk.
        remote_samples, remote_bytes, remote_seconds: The same of the source, with `prepare`.
        memory_stored, disk_stored: Samples put into a level.
        not_stored: Samples for which some level had no room.
        saved_seconds: What the samples found took when they were stored, less what it took to get
            them. Of all processes together: with W of them reading at once, W times the wall clock.
    """

    memory_samples: int = 0
    memory_bytes: int = 0
    memory_seconds: float = 0.0
    disk_samples: int = 0
    disk_bytes: int = 0
    disk_seconds: float = 0.0
    remote_samples: int = 0
    remote_bytes: int = 0
    remote_seconds: float = 0.0
    memory_stored: int = 0
    disk_stored: int = 0
    not_stored: int = 0
    damaged: int = 0
    saved_seconds: float = 0.0

    @property
    def samples(self) -> int:
        return self.memory_samples + self.disk_samples + self.remote_samples

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)

    def explain(self) -> str:
        """One line: "1000 samples: 600 from memory (12 MiB in 3 ms), ..., 40 s saved"."""
        found = [
            f"{samples} from {name} ({format_bytes(size)} in {format_seconds(seconds)})"
            for name, samples, size, seconds in (
                ("memory", self.memory_samples, self.memory_bytes, self.memory_seconds),
                ("the local disk", self.disk_samples, self.disk_bytes, self.disk_seconds),
                ("the source", self.remote_samples, self.remote_bytes, self.remote_seconds),
            )
            if samples
        ]
        if self.damaged:
            found.append(f"{self.damaged} damaged and read again")
        if self.saved_seconds:
            found.append(f"{format_seconds(self.saved_seconds)} saved")
        return f"{self.samples} samples: {', '.join(found) or 'nothing read'}"


class CacheCounters:
    """The table behind `CacheStatistics`; copies of it, by fork or by value, add to the same."""

    _NAMES = tuple(field.name for field in fields(CacheStatistics))

    def __init__(self) -> None:
        if memfd_available():
            self._token, (self._file,) = create_memfds(1)
            os.ftruncate(self._file, self._size)
            weakref.finalize(self, os.close, self._file)
        else:
            # -1 maps anonymous memory, which forked processes share.
            self._token, self._file = "", -1
        self._open()

    @property
    def _size(self) -> int:
        return 8 * _ROWS * (len(self._NAMES) + 2)

    def _open(self) -> None:
        memory = mmap.mmap(self._file, self._size)
        # Column 0: the process of the row; the last: what has been warned of, one bit each.
        table: NDArray[np.float64] = np.frombuffer(memory, np.float64).reshape(_ROWS, -1)
        # 0 is no process: `_own` looks for a row at the first use, and again in a fork.
        self._table, self._pid = table, 0
        self._row: NDArray[np.float64] = table[0]

    def add(self, **amounts: float) -> None:
        """Add to the counts of these names. Numbers up to 2**53 are exact."""
        row = self._own()
        for name, amount in amounts.items():
            row[1 + self._NAMES.index(name)] += amount

    def first(self, kind: int) -> bool:
        """Whether nobody has asked so before, in any process: for warnings that come once."""
        seen = self._table[:, -1].astype(np.int64)
        if (seen & (1 << kind)).any():
            return False
        row = self._own()
        row[-1] = int(row[-1]) | (1 << kind)
        return True

    def statistics(self) -> CacheStatistics:
        """The sums over all processes."""
        sums = self._table[:, 1:-1].sum(axis=0).tolist()
        counts = {
            name: value if name.endswith("_seconds") else int(value)
            for name, value in zip(self._NAMES, sums, strict=True)
        }
        return CacheStatistics(**counts)

    def _own(self) -> NDArray[np.float64]:
        """This process's row: the next free one from its number on; at worst it shares one."""
        pid = os.getpid()
        if pid != self._pid:
            # Processes are numbered upwards: most find the row of their own number free.
            for step in range(_ROWS):
                number = (pid + step) % _ROWS
                if self._table[number, 0] in (0, pid):
                    break
            self._table[number, 0] = pid
            self._pid, self._row = pid, self._table[number]
        return self._row

    def __reduce__(self) -> tuple[object, ...]:
        """A process that gets this by value joins the table."""
        return _joined, (os.getpid(), self._token, self._file)


def _joined(pid: int, token: str, file: int) -> CacheCounters:
    """The counters of another process; new ones if it has ended, or cannot share."""
    files = attach_memfds(pid, token, [file]) if token else None
    if files is None:
        return CacheCounters()
    counters = CacheCounters.__new__(CacheCounters)
    counters._token, counters._file = token, files[0]
    weakref.finalize(counters, os.close, files[0])
    counters._open()
    return counters
