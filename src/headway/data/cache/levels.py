"""The two levels of the data cache: the node's local disk and its host memory.

    DIRECTORY/.lock                 held for moments: opening, claiming room, deleting
    DIRECTORY/NAME-DIGEST/users     locked (shared) by every process that uses the store
    DIRECTORY/NAME-DIGEST/index     see `blob_store`
    DIRECTORY/NAME-DIGEST/data
    DIRECTORY/NAME-DIGEST/store.json   what is stored, for people

All stores of a directory together stay within its limit, whichever processes write. The memory
level holds the same two files as memfds, which the kernel frees with the last process that uses
them, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import stat
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from headway.cluster.local_machine import memory_bytes
from headway.data.cache.blob_store import (
    LOCK_SECONDS,
    Blob,
    BlobStore,
    CacheLevelLost,
    DamagedBlob,
    StoreKey,
    check_limit,
    close_all,
    file_lock,
)
from headway.data.cache.memfd import attach_memfds, create_memfds, memfd_available
from headway.data.cache.serialization import Encoded
from headway.documents import parse_json
from headway.errors import DataError
from headway.units import format_bytes

_STORE = re.compile(r".+-[0-9a-f]{16}")
_LOCK = ".lock"
_MOST_NOTE_BYTES = 4096


class CacheLevel(ABC):
    """One level: a store of samples that all processes of a node share.

    Attributes:
        limit: Bytes.
    """

    name: str
    limit: int
    key: StoreKey
    _store: BlobStore
    _close: weakref.finalize[[list[int]], Any]

    @abstractmethod
    def get(self, sample: int) -> Blob | None:
        """What is stored of a sample.

        Raises:
            DamagedBlob: It was damaged, and has been dropped.
            CacheLevelLost: The level is gone and cannot be made again.
        """

    @abstractmethod
    def put(self, sample: int, encoded: Encoded, cost: int) -> bool | None:
        """See `BlobStore.put`.

        Raises:
            CacheLevelLost: Nothing more can be stored.
        """

    @abstractmethod
    def any_sample(self) -> int | None:
        """Some sample that is stored."""

    @abstractmethod
    def renew(self) -> None:
        """Throw away what is stored.

        Raises:
            CacheLevelLost: The system gives no new files.
        """

    def freeze(self) -> None:
        """Store no more."""
        self._store.freeze()

    @property
    def size(self) -> int:
        """Bytes of this store."""
        return self._store.size

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._close()


@final
class DiskLevel(CacheLevel):
    """A store in a directory of the node's own disk, shared by its processes and by later jobs.

    The directory may hold stores of other data; all of them together stay within the limit. It may
    be deleted at any time: it is then begun afresh.

    Args:
        limit: Bytes of all stores in it; None: half of what they have and what is free on the disk.

    Raises:
        DataError: The directory cannot be used, or the limit does not even hold the index.
    """

    name = "disk"

    def __init__(self, directory: Path, limit: int | None, key: StoreKey) -> None:
        self.directory, self.key = directory.absolute(), key
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.limit = self._default_limit() if limit is None else limit
            check_limit(self.limit, key, f"disk cache {directory}")
            self._store = self._open()
        except OSError as error:
            raise DataError(
                "the directory of the data cache cannot be used",
                where=str(directory),
                why=f"{error.strerror or error}.",
                fix="Give a directory on a local disk in which you may write.",
            ) from error

    def get(self, sample: int) -> Blob | None:
        try:
            return self._current().get(sample)
        except OSError as error:
            # As damage, so that the sample is read from the source again.
            raise DamagedBlob(f"sample {sample}: {error.strerror}") from error

    def put(self, sample: int, encoded: Encoded, cost: int) -> bool | None:
        try:
            return self._current().put(sample, encoded, cost)
        except FileNotFoundError:
            return False  # deleted this moment; the next call begins afresh
        except OSError as error:
            raise CacheLevelLost(f"{self.directory}: {error.strerror or error}") from error

    def any_sample(self) -> int | None:
        return self._current().any_sample()

    def renew(self) -> None:
        # For all processes that use it: they find their files gone and begin afresh, too.
        with file_lock(str(self.directory / _LOCK), LOCK_SECONDS):
            shutil.rmtree(self._folder, ignore_errors=True)
        self._reopen()

    def __reduce__(self) -> tuple[object, ...]:
        # A process that gets this by value opens the same store.
        return DiskLevel, (self.directory, self.limit, self.key)

    @property
    def _folder(self) -> Path:
        return self.directory / self.key.folder

    def _default_limit(self) -> int:
        return (shutil.disk_usage(self.directory).free + _stored(str(self.directory))) // 2

    def _current(self) -> BlobStore:
        if self._store.gone:
            self._reopen()
        return self._store

    def _reopen(self) -> None:
        for last in (False, False, False, True):
            close = self._close
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._store = self._open()
                close()  # only now: numbers of closed files may become those of others
                return
            except OSError as error:
                # Somebody may be deleting right now; that ends. `mkdir` says "exists" of what is
                # there when it is made and gone when it is looked at.
                if last or not isinstance(error, FileNotFoundError | FileExistsError):
                    raise CacheLevelLost(f"{self.directory}: {error.strerror or error}") from error

    def _open(self) -> BlobStore:
        lock = str(self.directory / _LOCK)
        with file_lock(lock, LOCK_SECONDS) as mine:
            if not mine:
                raise TimeoutError(0, f"another process has held {lock} for {LOCK_SECONDS:.0f} s")
            self._folder.mkdir(exist_ok=True)
            files: list[int] = []
            # The list is filled below: if one file cannot be opened, those before it are closed all
            # the same.
            close = weakref.finalize(self, close_all, files)
            files.extend(_opened(self._folder / name) for name in ("users", "index", "data"))
            # Held by every process that inherits the descriptor, and so until the last one ends.
            fcntl.flock(files[0], fcntl.LOCK_SH)
            os.utime(files[0])  # the time of last use, by which unused stores are deleted
            self._describe()
        self._close = close
        return BlobStore(
            files[1],
            files[2],
            lock=lock,
            samples=self.key.samples,
            salt=self.key.digest.encode(),
            verify=True,
            # Not a method: files are closed with the level, so nothing may lead back to it.
            room=functools.partial(_free_bytes, str(self.directory), str(self._folder), self.limit),
        )

    def _describe(self) -> None:
        # For people only, so a full disk does not matter here.
        path = self._folder / "store.json"
        text = json.dumps({"format": 1, **self.key.facts}, indent=2, ensure_ascii=False)
        with contextlib.suppress(OSError):
            if not path.exists():
                path.write_text(text + "\n", encoding="utf-8")


def _free_bytes(directory: str, own: str, limit: int, wanted: int) -> int:
    """Bytes that the directory may still take; unused stores make room for `wanted`."""
    room = limit - _stored(directory)
    if room >= wanted:
        return room
    for folder in _by_last_use(directory):
        if room >= wanted:
            break
        if folder != own:
            with _unused(folder) as unused:
                if unused:
                    shutil.rmtree(folder, ignore_errors=True)
                    room = limit - _stored(directory)
    return room


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _stores(directory: str) -> list[str]:
    """The stores of a directory; anything else in it is not ours."""
    try:
        names = [name for name in os.listdir(directory) if _STORE.fullmatch(name)]
    except OSError:
        return []
    return [f"{directory}/{name}" for name in names]


def _stored(directory: str) -> int:
    return sum(
        _facts(f"{folder}/{name}")[0] for folder in _stores(directory) for name in ("index", "data")
    )


def _by_last_use(directory: str) -> list[str]:
    return sorted(_stores(directory), key=lambda folder: _facts(f"{folder}/users")[1])


def _facts(path: str) -> tuple[int, float]:
    """Bytes of a file and when it was last used; zeros if it is missing."""
    try:
        facts = os.stat(path)
    except OSError:
        return 0, 0.0
    return facts.st_size, facts.st_mtime


@contextmanager
def _unused(folder: str) -> Iterator[bool]:
    """Whether this is a store that no process uses; none can begin to inside the `with`."""
    try:
        users = os.open(f"{folder}/users", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        # Every process that uses the store holds this lock shared.
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(users)


@final
class MemoryLevel(CacheLevel):
    """Samples in host memory, held once for all processes of a user on this machine.

    They lie in files without a name that only exist in memory, and vanish with the last process
    that uses them, however it ends. Processes that do not inherit them find them by a note in the
    directory for temporary files.

    Raises:
        DataError: The limit is more than the machine has, or does not even hold the index.
        CacheLevelLost: This system has no such files.
    """

    name = "memory"

    def __init__(self, limit: int, key: StoreKey) -> None:
        self.limit, self.key = limit, key
        check_limit(limit, key, "memory cache")
        machine = memory_bytes()
        if limit > machine:
            raise DataError(
                "the data cache is larger than the memory of this machine",
                why=f"It may take {format_bytes(limit)}; the machine (or its container) "
                f"has {format_bytes(machine)}.",
                fix="Set `memory` to what the training leaves free.",
            )
        if not memfd_available():
            raise CacheLevelLost("this system has no memfd_create")
        try:
            self._store = self._open(fresh=False)
        except OSError as error:
            raise CacheLevelLost(str(error)) from error

    def get(self, sample: int) -> Blob | None:
        return self._store.get(sample)

    def put(self, sample: int, encoded: Encoded, cost: int) -> bool | None:
        try:
            return self._store.put(sample, encoded, cost)
        except OSError as error:
            raise CacheLevelLost(error.strerror or str(error)) from error

    def any_sample(self) -> int | None:
        return self._store.any_sample()

    def renew(self) -> None:
        # Processes that use the old files keep them.
        close = self._close
        try:
            self._store = self._open(fresh=True)
        except OSError as error:
            raise CacheLevelLost(error.strerror or str(error)) from error
        close()  # only now: numbers of closed files may become those of others

    def __reduce__(self) -> tuple[object, ...]:
        # A process that gets this by value uses the same files.
        return _same_level, (self.limit, self.key, os.getpid(), self._token, self._files)

    def _open(self, fresh: bool) -> BlobStore:
        note = _notes() / f"memory-{self.key.digest[:16]}-{self.limit}"
        with file_lock(f"{note}.lock", LOCK_SECONDS) as mine:
            found = _noted(note) if mine and not fresh else None
            # Without the lock, or afresh, they are new files; without the lock nobody else finds
            # them.
            token, files = found or create_memfds(2)
            if mine and not found:
                _write_note(note, {"pid": os.getpid(), "token": token, "fds": files})
        return self._store_of(token, files)

    def _store_of(self, token: str, files: list[int]) -> BlobStore:
        self._token, self._files = token, files
        self._close = weakref.finalize(self, close_all, files)
        most = self.limit - self.key.index_bytes
        return BlobStore(
            files[0],
            files[1],
            lock=f"/proc/self/fd/{files[0]}",  # memfds have no other path
            samples=self.key.samples,
            salt=self.key.digest.encode(),
            verify=False,
            room=lambda _: most - os.fstat(files[1]).st_size,
        )


def _same_level(
    limit: int, key: StoreKey, pid: int, token: str, descriptors: list[int]
) -> MemoryLevel:
    """The level of another process; if that has ended, the one that its note leads to."""
    files = attach_memfds(pid, token, descriptors)
    if files is None:
        return MemoryLevel(limit, key)
    level = MemoryLevel.__new__(MemoryLevel)
    level.limit, level.key = limit, key
    level._store = level._store_of(token, files)
    return level


def _notes() -> Path:
    """A directory of this user alone.

    Raises:
        PermissionError: Somebody else has made it, or could write to it.
    """
    path = Path(tempfile.gettempdir()) / f"headway-cache-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # In a directory that others can write, a note could lead to files of theirs. Not `stat`: a link
    # of somebody else's could stand there, to a directory of ours.
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or not _is_private(facts, 0o077):
        raise PermissionError(0, f"{path} is a link, or others can read or write it")
    return path


def _is_private(facts: os.stat_result, forbidden: int) -> bool:
    return facts.st_uid == os.getuid() and not facts.st_mode & forbidden


def _write_note(note: Path, content: dict[str, object]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(note, flags, 0o600), "w", encoding="ascii") as file:
        file.write(json.dumps(content))


def _noted(note: Path) -> tuple[str, list[int]] | None:
    """Token and descriptors of the files that a note leads to; None if they are no more."""
    try:
        # Of what is opened, not of the path, behind which it could be exchanged. A pipe in its
        # place must not be waited for.
        with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or not _is_private(facts, 0o022):
                return None
            found = parse_json(file.read(_MOST_NOTE_BYTES))
        token = str(found["token"])
        files = attach_memfds(found["pid"], token, [*found["fds"]][:2])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return (token, files) if files and len(files) == 2 else None
