"""The text: the Python standard library's own source files, as bytes.

Every machine that runs headway has it. A file is training or validation text by a hash of its name
alone, so that the split is the same everywhere and for ever. Each split is concatenated in sorted
order, with a newline after each file, into one flat uint8 file in a cache directory; that file is
written aside and renamed, so that any number of ranks may build it at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.data.source import MemmapSource, Source
from headway.errors import DataError

Split = Literal["train", "validation"]

SPLITS: tuple[Split, ...] = ("train", "validation")
INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders below the standard library that are not part of it."""
VALIDATION_PER_MILLE = 50


@dataclass(frozen=True)
class SourceFile:
    """One .py file: its name relative to the library with forward slashes, and its bytes."""

    name: str
    size: int


def split_of(name: str) -> Split:
    """Which split the file of this relative name belongs to; about 5 % of the names validate."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    bucket = int.from_bytes(digest[:8], "big") % 1000
    return "validation" if bucket < VALIDATION_PER_MILLE else "train"


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(library: Path) -> list[SourceFile]:
    """All .py files below `library` without installed packages, sorted by name.

    Raises:
        DataError: There are none.
    """
    found = sorted(_walk(library, ""), key=lambda file: file.name)
    if not found:
        raise DataError(
            "the standard library has no .py files",
            where=str(library),
            why="this Python may have been installed without its sources, or as a zip file",
            fix="use a Python installation with .py files, or another recipe",
        )
    return found


def _walk(library: Path, prefix: str) -> Iterator[SourceFile]:
    with os.scandir(library / prefix) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in INSTALLED:
                    yield from _walk(library, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".py") and entry.is_file():
                yield SourceFile(f"{prefix}{entry.name}", entry.stat().st_size)


def text_file(
    split: Split, *, library: Path | None = None, directory: str | Path | None = None
) -> Path:
    """The flat file of one split, built on the first call.

    Args:
        split: "train" or "validation".
        library: Folder of the source files; None: the running interpreter's standard library.
        directory: Folder of the flat files; None: the user's cache folder, or the temporary folder
            where that cannot be written.

    Returns:
        The path; its name holds the Python version and a hash of the names and sizes of all source
        files, so that another interpreter or a patched library gets a file of its own.

    Raises:
        DataError: No source files, a source file that changes meanwhile or cannot be read, or no
            folder that can be written.
    """
    library = standard_library() if library is None else library
    files = source_files(library)
    name = f"stdlib-{platform.python_version()}-{_fingerprint(files)}-{split}.bin"
    members = [file for file in files if split_of(file.name) == split]
    size = sum(file.size + 1 for file in members)
    folders = cache_folders() if directory is None else (Path(directory),)
    for folder in folders:
        if _is_whole(folder / name, size):
            return folder / name
    problems = []
    for folder in folders:
        try:
            _write(folder / name, library, members, size)
        except OSError as error:
            problems.append(f"{folder}: {error}")
        else:
            return folder / name
    raise DataError(
        f"the {split} text cannot be stored",
        why=f"{size} bytes are needed; " + "; ".join(problems),
        fix="pass the recipe a `directory` that can be written",
    )


def _fingerprint(files: Sequence[SourceFile]) -> str:
    listing = "\n".join(f"{file.size} {file.name}" for file in files)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def cache_folders() -> tuple[Path, ...]:
    """Where flat files may lie, the preferred place first."""
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    temporary = Path(tempfile.gettempdir()) / f"headway{user}"
    try:
        home = Path.home()
    except RuntimeError:  # no home is known for this user
        return (temporary,)
    caches = {"darwin": "Library/Caches", "win32": "AppData/Local"}
    return home / caches.get(sys.platform, ".cache") / "headway", temporary


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _write(path: Path, library: Path, members: Sequence[SourceFile], size: int) -> None:
    """Write beside `path` and rename; of several writers the last wins, with the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            for file in members:
                out.write(_content(library, file))
                out.write(b"\n")
            out.flush()
            os.fsync(out.fileno())
        _publish(aside, path, size)
    finally:
        aside.unlink(missing_ok=True)


def _publish(aside: Path, path: Path, size: int) -> None:
    try:
        aside.replace(path)
    except PermissionError:
        # Windows does not replace a file that another rank has already mapped; that file is good.
        if not _is_whole(path, size):
            raise


def _content(library: Path, file: SourceFile) -> bytes:
    try:
        content = (library / file.name).read_bytes()
    except OSError as error:
        raise DataError(
            "a source file cannot be read", where=str(library / file.name), why=str(error)
        ) from error
    if len(content) != file.size:
        raise DataError(
            "a source file changed while it was read",
            where=str(library / file.name),
            why=f"it had {file.size} bytes and now has {len(content)}",
            fix="start again when the installation of Python is complete",
        )
    return content


class EvenlySpaced:
    """`count` samples of a source, spread evenly over it: a small validation set that is fair.

    The first samples of a sorted text are all of one folder.
    """

    def __init__(self, source: Source, count: int) -> None:
        self.source = source
        self.count = min(count, len(source))

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> Any:
        """The samples at `indices` of the selection; see `Source.read`."""
        length = len(self.source)
        return self.source.read([int(index) * length // self.count for index in indices])


def text_source(
    split: Split, window: int, *, directory: str | Path | None = None, count: int | None = None
) -> Source:
    """Windows of one split: (input int64[B, window], target int64[B, window]).

    Args:
        split: "train" or "validation".
        window: Bytes of a sample; the target is the input moved on by one byte.
        directory: See `text_file`.
        count: That many samples, evenly spread; None: all of them.

    Raises:
        DataError: See `text_file`.
    """
    source = MemmapSource(text_file(split, directory=directory), window=window, dtype="uint8")
    return source if count is None else EvenlySpaced(source, count)
