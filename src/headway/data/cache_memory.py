"""The level of the data cache in host memory.

Invariant: the samples lie in files without a name that exist in memory only, so that the kernel
frees them with the last process that uses them, however it ends.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from pathlib import Path

from headway.data.cache_format import Encoded
from headway.data.cache_levels import LevelLost, StoreKey, check_limit, close_all
from headway.data.cache_nameless import attach, available, create
from headway.data.cache_shelf import PATIENCE, Blob, Shelf, locked
from headway.errors import DataError
from headway.units import format_bytes


class MemoryLevel:
    """Samples in host memory, held once for all processes of a user on this machine.

    They lie in files without a name that only exist in memory, and vanish with the last process
    that uses them, however it ends. Processes that do not inherit them find them by a note in the
    directory for temporary files.

    Args:
        limit: Bytes.
        key: What is stored.

    Raises:
        DataError: The limit is more than the machine has, or does not even hold the index.
        LevelLost: This system has no such files.
    """

    name = "memory"
    _close: weakref.finalize[[list[int]], MemoryLevel]

    def __init__(self, limit: int, key: StoreKey) -> None:
        self.limit, self.key = limit, key
        check_limit(limit, key, "memory cache")
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if limit > machine:
            raise DataError(
                "the data cache is larger than the memory of this machine",
                why=f"It may take {format_bytes(limit)}; the machine has {format_bytes(machine)}.",
                fix="Set `memory` to what the training leaves free.",
            )
        if not available():
            raise LevelLost("this system has no memfd_create")
        try:
            self._shelf = self._open(fresh=False)
        except OSError as error:
            raise LevelLost(str(error)) from error

    def get(self, sample: int) -> Blob | None:
        """What is stored of a sample.

        Raises:
            Damaged: It was damaged, and has been dropped.
        """
        return self._shelf.get(sample)

    def put(self, sample: int, encoded: Encoded, cost: int) -> bool | None:
        """See `Shelf.put`.

        Raises:
            LevelLost: The system gives no more memory.
        """
        try:
            return self._shelf.put(sample, encoded, cost)
        except OSError as error:
            raise LevelLost(error.strerror or str(error)) from error

    def freeze(self) -> None:
        """Store no more."""
        self._shelf.freeze()

    def any_sample(self) -> int | None:
        """Some sample that is stored."""
        return self._shelf.any_sample()

    def renew(self) -> None:
        """Begin afresh; processes that use the old files keep them.

        Raises:
            LevelLost: The system gives no more files.
        """
        close = self._close
        try:
            self._shelf = self._open(fresh=True)
        except OSError as error:
            raise LevelLost(error.strerror or str(error)) from error
        close()  # only now: numbers of closed files may become those of others

    @property
    def size(self) -> int:
        """Bytes of this store."""
        return self._shelf.size

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._close()

    def __reduce__(self) -> tuple[object, ...]:
        """A process that gets this by value uses the same files."""
        return _same_level, (self.limit, self.key, os.getpid(), self._token, self._files)

    def _open(self, fresh: bool) -> Shelf:
        note = _notes() / f"memory-{self.key.digest[:16]}-{self.limit}"
        with locked(f"{note}.lock", PATIENCE) as mine:
            found = _noted(note) if mine and not fresh else None
            token, files = found or create(2)
            if mine and not found:
                note.write_text(json.dumps({"pid": os.getpid(), "token": token, "fds": files}))
        return self._shelf_of(token, files)

    def _shelf_of(self, token: str, files: list[int]) -> Shelf:
        self._token, self._files = token, files
        self._close = weakref.finalize(self, close_all, files)
        most = self.limit - self.key.index_bytes
        return Shelf(
            files[0],
            files[1],
            lock=f"/proc/self/fd/{files[0]}",
            samples=self.key.samples,
            salt=self.key.digest.encode(),
            verify=False,
            room=lambda _: most - os.fstat(files[1]).st_size,
        )


def _same_level(
    limit: int, key: StoreKey, pid: int, token: str, descriptors: list[int]
) -> MemoryLevel:
    """The level of another process; if that has ended, the one that its note leads to."""
    files = attach(pid, token, descriptors)
    if files is None:
        return MemoryLevel(limit, key)
    level = MemoryLevel.__new__(MemoryLevel)
    level.limit, level.key = limit, key
    level._shelf = level._shelf_of(token, files)
    return level


def _notes() -> Path:
    """A directory of this user alone."""
    path = Path(tempfile.gettempdir()) / f"headway-cache-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(0, f"{path} can be written by others")
    return path


def _noted(note: Path) -> tuple[str, list[int]] | None:
    """Token and descriptors of the files that a note leads to; None if they are no more."""
    try:
        facts = json.loads(note.read_text())
        files = attach(facts["pid"], facts["token"], facts["fds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (str(facts["token"]), files) if files else None
