"""Stored samples behind two open files, shared without locks by all processes of a node.

    index   sample i at byte 16 i: where its blob begins (plus 1; 0: not there), and how long it is
    data    blobs, one after the other: header (magic, CRC-32, sample, length, cost), then the bytes

Nothing is served that was not stored whole for this sample. A blob is written first and its record
after it, in one write; neither is ever changed. So a process that is killed leaves at most unused
room, and readers need no lock; only claiming room at the end of the data file takes one.

Blobs are never evicted. An epoch visits every sample once, in a new order each time, so whatever
the eviction rule, at most the C samples held at its beginning hit, of N. Keeping the first C
reaches C/N; LRU, with C/N = c, reaches c + (1 - c) ln(1 - c): 15 % at c = 1/2; random replacement
28 %. Evicted are whole stores that no process uses, least recently used first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from headway.data.cache.serialization import Buffer, Encoded
from headway.errors import DataError
from headway.units import format_bytes

HEADER = struct.Struct("<4sIQQQ")
RECORD = struct.Struct("<QQ")
WAIT = 5.0
"""Seconds to wait for the lock when a sample is stored; after that it is not stored."""

LOCK_SECONDS = 20.0
"""Seconds to wait for the lock when a store is opened or thrown away."""

_MAGIC = b"hwd1"
_LARGEST = 2**30
"""Bytes of one system call; Linux moves at most 2 GiB."""

_BUFFERS = 512
"""Most buffers of one system call; Linux takes 1024."""

_REFUSALS = 64
"""Samples refused for lack of room until no more are offered; one that is large proves little."""

_SCAN = 4096
"""Records looked at together."""


class DamagedBlob(Exception):
    """A blob that is not what was stored; it has been dropped."""


@dataclass(frozen=True)
class Blob:
    """A stored sample.

    Attributes:
        payload: Its bytes, in memory of its own.
        cost: Nanoseconds that it took to read and prepare when it was stored.
    """

    payload: memoryview
    cost: int


@contextmanager
def file_lock(path: str, seconds: float) -> Iterator[bool]:
    """Holds a lock that excludes all processes and threads; False if it was not free in time.

    Args:
        seconds: How long to try. Holders need milliseconds, unless they were stopped.
    """
    # A descriptor of its own for each use: those inherited by a fork would share the lock.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _acquire(lock, time.monotonic() + seconds)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _acquire(lock: int, deadline: float) -> bool:
    pause = 0.0005
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)  # holders need milliseconds


class BlobStore:
    """The samples of one store.

    Args:
        lock: Path of the lock for claiming room.
        salt: Enters the checksums, so that a blob of another store is no blob of this one.
        verify: Compare checksums at every read; otherwise only the headers. For files.
        room: Bytes that may still be claimed; called with the lock held, with the bytes wanted.
    """

    def __init__(
        self,
        index: int,
        data: int,
        *,
        lock: str,
        samples: int,
        salt: bytes,
        verify: bool,
        room: Callable[[int], int],
    ) -> None:
        self.index, self.data = index, data
        self._lock, self._samples, self._room = lock, samples, room
        self._salt = zlib.crc32(salt)
        self._verify = verify
        self._refused = 0

    def get(self, sample: int) -> Blob | None:
        """What is stored of a sample; None if nothing is.

        Raises:
            DamagedBlob: Something is, but not what was stored; from now on nothing is.
        """
        record = self._record(sample)
        if record is None:
            return None
        blob = self._blob(sample, *record)
        if blob is None:
            # Another process may have dropped it and stored it again meanwhile.
            again = self._record(sample)
            blob = self._blob(sample, *again) if again not in (None, record) else None
        if blob is None:
            os.pwrite(self.index, bytes(RECORD.size), RECORD.size * sample)
            raise DamagedBlob(f"sample {sample}")
        return blob

    def put(self, sample: int, encoded: Encoded, cost: int) -> bool | None:
        """Store a sample; what is stored already stays.

        Returns:
            True if it was stored, None if somebody else has stored it, False if there is no room
            (or nobody gave way for seconds).

        Raises:
            OSError: The disk is full, or the files are gone.
        """
        if self._refused > _REFUSALS:
            return False
        size = HEADER.size + encoded.size
        with file_lock(self._lock, WAIT) as mine:
            if not mine:
                return False
            if self._record(sample) is not None:
                return None
            # The length of the file is what has been claimed; the lock keeps two from claiming the
            # same room.
            begin = os.fstat(self.data).st_size
            begin += -begin % 16
            if size > self._room(size):
                self._refused += 1
                return False
            os.ftruncate(self.data, begin + size)  # claims the room; written without the lock
        head = self._header(sample, encoded.buffers, encoded.size, cost)
        _write(self.data, (head, *encoded.buffers), size, begin)
        # Last, and in one write: whoever reads the record finds the whole blob.
        os.pwrite(self.index, RECORD.pack(begin + 1, size), RECORD.size * sample)
        return True

    def freeze(self) -> None:
        """Store no more."""
        self._refused = _REFUSALS + 1

    def any_sample(self) -> int | None:
        """Some sample that is stored, from a random place on; None if there is none."""
        start = int.from_bytes(os.urandom(8), "little") % self._samples
        for first in [*range(start, self._samples, _SCAN), *range(0, start, _SCAN)]:
            records = os.pread(self.index, _SCAN * RECORD.size, first * RECORD.size)
            places = np.frombuffer(records[: len(records) // 16 * 16], "<u8")[::2]
            stored: list[int] = places.nonzero()[0].tolist()  # 0: not there
            if stored:
                return int(first) + stored[0]
        return None

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return os.fstat(self.index).st_size + os.fstat(self.data).st_size

    @property
    def gone(self) -> bool:
        """Whether somebody has deleted a file."""
        return not (os.fstat(self.index).st_nlink and os.fstat(self.data).st_nlink)

    def _record(self, sample: int) -> tuple[int, int] | None:
        record = os.pread(self.index, RECORD.size, RECORD.size * sample)
        if len(record) < RECORD.size:
            return None
        place, size = RECORD.unpack(record)
        return (int(place) - 1, int(size)) if place else None

    def _blob(self, sample: int, begin: int, size: int) -> Blob | None:
        """The blob at a place; None if it is not a sound one of this sample."""
        if size < HEADER.size or begin + size > os.fstat(self.data).st_size:
            return None
        stored = np.empty(size, np.uint8).data  # not bytearray: that would clear it first
        if not _read(self.data, stored, begin):
            return None
        magic, checksum, number, length, cost = HEADER.unpack_from(stored)
        payload = stored[HEADER.size :]
        if magic != _MAGIC or number != sample or length != len(payload):
            return None
        if self._verify and checksum != self._checksum(sample, length, cost, (payload,)):
            return None
        return Blob(payload, cost)

    def _header(self, sample: int, buffers: Sequence[Buffer], length: int, cost: int) -> bytes:
        checksum = self._checksum(sample, length, cost, buffers) if self._verify else 0
        return HEADER.pack(_MAGIC, checksum, sample, length, cost)

    def _checksum(self, sample: int, length: int, cost: int, buffers: Sequence[Buffer]) -> int:
        value = zlib.crc32(struct.pack("<QQQ", sample, length, cost), self._salt)
        for buffer in buffers:
            value = zlib.crc32(buffer, value)
        return value


def _write(file: int, buffers: Sequence[Buffer], size: int, begin: int) -> None:
    if len(buffers) <= _BUFFERS and os.pwritev(file, buffers, begin) == size:
        return
    # A partial write, or too many buffers for one call: one copy, then piece by piece.
    whole = memoryview(b"".join(buffers))
    done = 0
    while done < size:
        written = os.pwrite(file, whole[done : done + _LARGEST], begin + done)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


def _read(file: int, into: memoryview, begin: int) -> bool:
    """Fill `into`; False if the file ends before, or cannot be read."""
    done = 0
    try:
        while done < len(into):
            count = os.preadv(file, [into[done : done + _LARGEST]], begin + done)
            if not count:
                return False
            done += count
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """What the stored samples are; two stores of equal keys hold the same samples.

    Attributes:
        digest: Hexadecimal, over everything that decides what a sample is.
        facts: The same, to be read by people.
    """

    name: str
    digest: str
    facts: dict[str, object]
    samples: int

    @property
    def folder(self) -> str:
        """A name for the store's directory."""
        return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.name)[-80:]}-{self.digest[:16]}"

    @property
    def index_bytes(self) -> int:
        return RECORD.size * self.samples


class CacheLevelLost(Exception):
    """A level can no longer be used; the text says why."""


def check_limit(limit: int, key: StoreKey, where: str) -> None:
    """Raise a DataError unless a level of this size can hold any sample."""
    if limit <= key.index_bytes:
        raise DataError(
            "the data cache is too small for its index",
            where=where,
            why=f"It may take {format_bytes(limit)}; the index of {key.samples} samples alone has "
            f"{format_bytes(key.index_bytes)}.",
            fix="Give it more.",
        )


def close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)
