"""A directory of checkpoints on disk: what counts as committed, atomic commit, retention.

Whatever process dies at whatever moment, a directory named `step-00000050` is complete. It is
filled under the name `step-00000050.partial` and renamed when everything in it has reached the
disk; to be deleted, it is first renamed back to a name that ends in `.partial`.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable
from io import FileIO
from pathlib import Path

from headway.checkpoint.format import MANIFEST_NAME, FileEntry, Manifest
from headway.errors import CheckpointDamaged, CheckpointError

BLOCK = 4 * 2**20
"""Bytes that are read, summed or written at a time: large, so that the GIL is seldom taken."""

_COMMITTED = re.compile(r"step-(\d{8,})")
# Also `.removed.partial` and `.replaced.partial`, left by an interrupted commit or deletion.
_PARTIAL = re.compile(r"step-\d{8,}(\.\w+)?\.partial")


def step_path(directory: Path, step: int) -> Path:
    """Where the committed checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def partial_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it counts."""
    return directory / f"step-{step:08d}.partial"


def committed_steps(directory: Path) -> list[int]:
    """The steps of all committed checkpoints, oldest first; none where there is no directory."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _COMMITTED.fullmatch(name)))


def begin(directory: Path, step: int) -> Path:
    """Make an empty directory to write into; what earlier attempts left half done is deleted."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    partial = partial_path(directory, step)
    partial.mkdir()
    return partial


def remove_leftovers(directory: Path) -> None:
    """Delete what a save or a deletion that was interrupted has left."""
    # Saves of a run follow each other, so that every partial directory is a leftover.
    for name in os.listdir(directory) if directory.is_dir() else ():
        if _PARTIAL.fullmatch(name):
            shutil.rmtree(directory / name)


def commit(directory: Path, manifest: Manifest) -> Path:
    """Turn the partial directory of the manifest's step into a committed checkpoint.

    The data files have been written and synchronised by then. A checkpoint of the same step that
    stands in the way (a restart came back to it, or it is damaged) is replaced.
    """
    partial = partial_path(directory, manifest.step)
    final = step_path(directory, manifest.step)
    with (partial / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        # Before the rename: a power cut could else leave a committed name with an empty manifest.
        os.fsync(file.fileno())
    sync_directory(partial)
    # A rename does not replace a full directory; what is moved away counts no more at any moment.
    if final.exists():
        replaced = final.with_name(f"{final.name}.replaced.partial")
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    # The rename itself must be on the disk before `retain` deletes older checkpoints.
    sync_directory(directory)
    return final


def retain(
    directory: Path,
    step: int,
    keep: int,
    damaged: Iterable[int] = (),
    pinned: Collection[int] = (),
) -> None:
    """Delete what is no longer needed once `step` is committed.

    Args:
        keep: How many checkpoints stay: the newest ones, counted from `step` backwards.
        damaged: Steps that a restore found damaged: they are of no use any more, and as they may
            be newer than `step`, counting them would push sound ones out.
        pinned: Steps that stay, however old; they do not count.
    """
    # A damaged checkpoint of this very step has just been replaced.
    bad = set(damaged) - {step}
    steps = committed_steps(directory)
    sound = [old for old in steps if old <= step and old not in bad and old not in pinned]
    for old in [*sound[: max(0, len(sound) - keep)], *(old for old in steps if old in bad)]:
        final = step_path(directory, old)
        removed = final.with_name(f"{final.name}.removed.partial")
        final.rename(removed)  # first: a crash while files go must not leave a committed name
        shutil.rmtree(removed)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of one committed checkpoint.

    Raises:
        CheckpointDamaged: It is missing or malformed.
        CheckpointError: It was written in another format.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is missing", where=str(checkpoint)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(
            "the manifest cannot be read", where=str(path), why=str(error)
        ) from None
    return Manifest.from_json(text, where=str(path))


def check_file(path: Path, entry: FileEntry) -> None:
    """Compare a data file with its size and checksum.

    Raises:
        CheckpointDamaged: They differ, or the file cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointDamaged(
                "has the wrong size",
                where=str(path),
                why=f"it has {size} bytes; the manifest says {entry.bytes}",
            )
        crc32 = checksum(path)
    except OSError as error:
        raise CheckpointDamaged("cannot be read", where=str(path), why=str(error)) from None
    if crc32 != entry.crc32:
        raise CheckpointDamaged(
            "has the wrong checksum",
            where=str(path),
            why=f"its CRC-32 is {crc32:08x}; the manifest says {entry.crc32:08x}",
        )


def checksum(path: Path) -> int:
    """CRC-32 of a file, in constant memory and without holding the GIL."""
    block = memoryview(bytearray(min(BLOCK, max(1, path.stat().st_size))))
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc32 = zlib.crc32(block[:count], crc32)
    return crc32


def newest(path: Path) -> Path:
    """The checkpoint that a user means by a path.

    Args:
        path: One checkpoint, a directory of checkpoints, or a run directory.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    for directory in (path, path / "checkpoints"):
        if steps := committed_steps(directory):
            return step_path(directory, steps[-1])
    raise CheckpointError(
        "there is no checkpoint",
        where=str(path),
        fix="give a run directory, its folder checkpoints/, or one step-... folder in that",
    )


def write_file(path: Path, blocks: Iterable[memoryview]) -> FileEntry:
    """Write a file, wait until it is on the disk, and return its size and checksum."""
    # Blocks go to the system without a copy; summing and writing them releases the GIL.
    size, crc32 = 0, 0
    with path.open("wb", buffering=2**20) as file:
        for block in blocks:
            for first in range(0, len(block), BLOCK):
                part = block[first : first + BLOCK]
                crc32 = zlib.crc32(part, crc32)
                file.write(part)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=size, crc32=crc32)


def read_exactly(file: FileIO, place: memoryview) -> None:
    """Fill `place` from the file's position.

    Raises:
        CheckpointDamaged: The file ends before.
    """
    filled = 0
    while filled < len(place):
        count = file.readinto(place[filled:])
        if not count:
            raise CheckpointDamaged(
                "ends too early",
                where=str(file.name),
                why=f"{len(place) - filled} of {len(place)} bytes are missing",
            )
        filled += count


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
