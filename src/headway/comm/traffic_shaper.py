"""Traffic shaper for emulation without root: one paced network interface per node of ranks.

Bandwidth is emulated in arithmetic instead of in the kernel: a line that serves n bytes one after
the other needs exactly n / rate seconds for them, whoever sent them. Its state (when it is free
again, and the remainder of that division) lies in a small file that the ranks map. All of it is
integers, so that no byte is lost or gained over any number of reservations.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.errors import UsageError

_SECOND = 1_000_000_000
_LAYOUT = struct.Struct("<4q")  # rate, free, rest, sent


@dataclass(frozen=True)
class _ShaperState:
    """State of the emulated line.

    Attributes:
        rate: Bytes per second.
        free: When everything so far will have left, in whole nanoseconds of `time.monotonic_ns`.
        rest: Of the division, in nanoseconds * rate: 0 to rate - 1.
        sent: Bytes so far.
    """

    rate: int
    free: int
    rest: int
    sent: int

    def after(self, num_bytes: int, now: int) -> _ShaperState:
        """Queue bytes at a time; a line that was idle begins at once, with nothing saved up."""
        begin, rest = (self.free, self.rest) if self.free > now else (now, 0)
        whole, rest = divmod(num_bytes * _SECOND + rest, self.rate)
        return _ShaperState(self.rate, begin + whole, rest, self.sent + num_bytes)


class TrafficShaper:
    """The interface of a node; a context manager that lets go of the file.

    Use `TrafficShaper.of`. Ranks, and threads of a rank, may call everything at the same time.
    """

    def __init__(self, descriptor: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._descriptor = descriptor
        self._clock = clock
        self._thread = threading.Lock()
        self._map = mmap.mmap(descriptor, _LAYOUT.size)

    @classmethod
    def of(
        cls, path: Path, rate: float, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> TrafficShaper:
        """Open the interface of a node; the first one makes it.

        Args:
            path: The file; in a folder that is removed with the job.
            rate: Bytes per second, at least 1; one that was set since stays as it is.
            clock: Nanoseconds, the same for all processes of the machine.

        Raises:
            UsageError: No such rate, or the file cannot be made.
        """
        if not rate >= 1:
            raise UsageError(f"an interface of {rate} bytes per second sends nothing")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                "the emulated interface cannot be opened", where=str(path), why=str(error.strerror)
            ) from error
        # The lock keeps other ranks from reading the state before the first one has written it.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_size < _LAYOUT.size:
            os.pwrite(descriptor, _LAYOUT.pack(round(rate), 0, 0, 0), 0)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return cls(descriptor, clock)

    def reserve(self, num_bytes: int) -> float:
        """Queue bytes behind everything that this node has queued so far.

        Returns:
            The time, in seconds of `time.monotonic`, at which the last of them has left.
        """
        with self._locked() as line:
            line = self._store(line.after(num_bytes, self._clock()))
        return line.free / _SECOND

    def set_rate(self, rate: float) -> None:
        """From now on, also for what is queued, at the new rate; for all ranks of the node."""
        with self._locked() as line:
            now = self._clock()
            queued = max(0, line.free - now) * line.rate + (line.rest if line.free > now else 0)
            whole, rest = divmod(queued, round(rate))  # bytes * nanoseconds stay the same
            self._store(_ShaperState(round(rate), now + whole, rest, line.sent))

    @property
    def rate(self) -> int:
        """Bytes per second."""
        with self._locked() as line:
            return line.rate

    @property
    def sent(self) -> int:
        """Bytes queued by all ranks of the node since the beginning."""
        with self._locked() as line:
            return line.sent

    def close(self) -> None:
        """Let go of the file; may be called again."""
        with self._thread:
            if not self._map.closed:
                self._map.close()
                os.close(self._descriptor)

    def __enter__(self) -> TrafficShaper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _locked(self) -> Iterator[_ShaperState]:
        """The state, under a lock that ends with its holder if that is killed."""
        # flock belongs to the open file, which the threads of a rank share: they need this lock.
        with self._thread:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield _ShaperState(*_LAYOUT.unpack(self._map[: _LAYOUT.size]))
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _store(self, line: _ShaperState) -> _ShaperState:
        self._map[: _LAYOUT.size] = _LAYOUT.pack(line.rate, line.free, line.rest, line.sent)
        return line
