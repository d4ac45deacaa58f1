"""The level of the data cache on the node's own disk.

    DIRECTORY/.lock                 held for moments: opening, claiming room, deleting
    DIRECTORY/NAME-DIGEST/users     locked (shared) by every process that uses the store
    DIRECTORY/NAME-DIGEST/index     see `cache_shelf`
    DIRECTORY/NAME-DIGEST/data
    DIRECTORY/NAME-DIGEST/store.json   what is stored, for people

Invariant: all stores of a directory together stay within its limit, whichever processes write.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.data.cache_format import Encoded
from headway.data.cache_levels import LevelLost, StoreKey, check_limit, close_all
from headway.data.cache_shelf import PATIENCE, Blob, Damaged, Shelf, locked
from headway.errors import DataError

_STORE = re.compile(r".+-[0-9a-f]{16}")
_LOCK = ".lock"


class DiskLevel:
    """A store in a directory of the node's own disk, shared by its processes and by later jobs.

    The directory may hold stores of other data; all of them together stay within the limit. It may
    be deleted at any time: it is then begun afresh.

    Args:
        directory: Made if it is missing.
        limit: Bytes of all stores in it; None: half of what they have and what is free on the disk.
        key: What is stored.

    Raises:
        DataError: The directory cannot be used, or the limit does not even hold the index.
    """

    name = "disk"
    _close: weakref.finalize[[list[int]], DiskLevel]

    def __init__(self, directory: Path, limit: int | None, key: StoreKey) -> None:
        self.directory, self.key = directory.absolute(), key
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.limit = self._default_limit() if limit is None else limit
            check_limit(self.limit, key, f"disk cache {directory}")
            self._shelf = self._open()
        except OSError as error:
            raise DataError(
                "the directory of the data cache cannot be used",
                where=str(directory),
                why=f"{error.strerror or error}.",
                fix="Give a directory on a local disk in which you may write.",
            ) from error

    def get(self, sample: int) -> Blob | None:
        """What is stored of a sample.

        Raises:
            Damaged: It was damaged, and has been dropped.
            LevelLost: The directory was deleted and cannot be made again.
        """
        try:
            return self._current().get(sample)
        except OSError as error:
            raise Damaged(f"sample {sample}: {error.strerror}") from error

    def put(self, sample: int, encoded: Encoded, cost: int) -> bool | None:
        """See `Shelf.put`.

        Raises:
            LevelLost: The disk is full or the directory cannot be written.
        """
        try:
            return self._current().put(sample, encoded, cost)
        except FileNotFoundError:
            return False  # deleted this moment; the next call begins afresh
        except OSError as error:
            raise LevelLost(f"{self.directory}: {error.strerror or error}") from error

    def freeze(self) -> None:
        """Store no more."""
        self._shelf.freeze()

    def any_sample(self) -> int | None:
        """Some sample that is stored."""
        return self._current().any_sample()

    def renew(self) -> None:
        """Throw away what is stored, for all processes that use it."""
        with locked(str(self.directory / _LOCK), PATIENCE):
            shutil.rmtree(self._folder, ignore_errors=True)
        self._reopen()

    @property
    def size(self) -> int:
        """Bytes of this store."""
        return self._shelf.size

    def close(self) -> None:
        """Close the files; again is harmless."""
        self._close()

    def __reduce__(self) -> tuple[object, ...]:
        """A process that gets this by value opens the same store."""
        return DiskLevel, (self.directory, self.limit, self.key)

    @property
    def _folder(self) -> Path:
        return self.directory / self.key.folder

    def _default_limit(self) -> int:
        return (shutil.disk_usage(self.directory).free + _stored(str(self.directory))) // 2

    def _current(self) -> Shelf:
        if self._shelf.gone:
            self._reopen()
        return self._shelf

    def _reopen(self) -> None:
        for last in (False, False, False, True):
            close = self._close
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._shelf = self._open()
                close()  # only now: numbers of closed files may become those of others
                return
            except OSError as error:
                # Somebody may be deleting right now; that ends. `mkdir` says "exists" of what is
                # there when it is made and gone when it is looked at.
                if last or not isinstance(error, FileNotFoundError | FileExistsError):
                    raise LevelLost(f"{self.directory}: {error.strerror or error}") from error

    def _open(self) -> Shelf:
        lock = str(self.directory / _LOCK)
        with locked(lock, PATIENCE) as mine:
            if not mine:
                raise TimeoutError(0, f"another process has held {lock} for {PATIENCE:.0f} s")
            self._folder.mkdir(exist_ok=True)
            files: list[int] = []
            close = weakref.finalize(self, close_all, files)
            files.extend(_opened(self._folder / name) for name in ("users", "index", "data"))
            # Held by every process that inherits the descriptor, and so until the last one ends.
            fcntl.flock(files[0], fcntl.LOCK_SH)
            os.utime(files[0])
            self._describe()
        self._close = close
        return Shelf(
            files[1],
            files[2],
            lock=lock,
            samples=self.key.samples,
            salt=self.key.digest.encode(),
            verify=True,
            # Not a method: files are closed with the level, so nothing may lead back to it.
            room=functools.partial(_room, str(self.directory), str(self._folder), self.limit),
        )

    def _describe(self) -> None:
        """Say in words what is stored; for people only, so a full disk does not matter here."""
        path = self._folder / "store.json"
        text = json.dumps({"format": 1, **self.key.facts}, indent=2, ensure_ascii=False)
        with contextlib.suppress(OSError):
            if not path.exists():
                path.write_text(text + "\n", encoding="utf-8")


def _room(directory: str, own: str, limit: int, wanted: int) -> int:
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
    """Bytes of all stores of a directory, as they are claimed."""
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
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(users)
