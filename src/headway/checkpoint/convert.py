"""Conversion between a checkpoint and one safetensors file, in constant memory.

Out: the tensors of the model, under the names that its own `state_dict` gives them. In: the tensors
of any safetensors file, as the model of a checkpoint of step 0. No tensor is ever whole in memory,
and torch is not needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from headway.checkpoint.directory import (
    BLOCK,
    begin,
    check_file,
    commit,
    newest,
    read_exactly,
    read_manifest,
    sync_directory,
    write_file,
)
from headway.checkpoint.format import (
    DTYPES,
    FileEntry,
    Manifest,
    SafetensorsEntry,
    StoredChunk,
    TensorEntry,
    build_header,
    read_header,
)
from headway.errors import CheckpointError

MODEL = "model."
"""Prefix of the logical names of the model's parameters and buffers."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What a conversion wrote: the path, how many tensors, their bytes."""

    path: Path
    tensors: int
    bytes: int


def to_safetensors(source: Path, destination: Path) -> ConversionResult:
    """Write the model of a checkpoint as one safetensors file.

    Args:
        source: A checkpoint, a directory of checkpoints or a run directory (its newest one).

    Raises:
        CheckpointDamaged: The checkpoint's files are not what its manifest says.
        CheckpointError: There is no checkpoint or no model in it, or the file exists.
    """
    checkpoint = newest(source)
    manifest = read_manifest(checkpoint)
    # Now, because a safetensors file has no checksum: a copy of damaged bytes would look sound.
    for name, file in manifest.files.items():
        check_file(checkpoint / name, file)
    # Largest elements first, as the safetensors package does it: every tensor stays aligned.
    names = sorted(
        (name for name in manifest.tensors if name.startswith(MODEL)),
        key=lambda name: (-DTYPES[manifest.tensors[name].dtype][1], name),
    )
    if not names:
        raise CheckpointError(
            f"holds no tensor whose name begins with {MODEL!r}", where=str(checkpoint)
        )
    _refuse_existing(destination)
    folder = destination.absolute().parent
    if not folder.is_dir():
        raise CheckpointError(
            "its directory does not exist", where=str(destination), fix=f"mkdir -p {folder}"
        )
    entries = [manifest.tensors[name] for name in names]
    rows = [
        (name.removeprefix(MODEL), entry.dtype, entry.shape)
        for name, entry in zip(names, entries, strict=True)
    ]
    head, stored = build_header(rows, {"format": "pt", "headway_step": str(manifest.step)})
    partial = destination.with_name(destination.name + ".partial")
    with partial.open("wb") as out:
        out.write(head)
        for entry, place in zip(entries, stored, strict=True):
            for chunk in entry.chunks:
                _copy_chunk(checkpoint / chunk.file, chunk, entry, out.fileno(), place.start)
        out.flush()
        out.truncate(len(head) + sum(entry.bytes for entry in entries))
        os.fsync(out.fileno())
    partial.rename(destination)  # only now: the name never stands for half a file
    sync_directory(destination.parent)
    return ConversionResult(
        path=destination, tensors=len(names), bytes=sum(entry.bytes for entry in entries)
    )


def from_safetensors(source: Path, destination: Path) -> ConversionResult:
    """Make a directory of checkpoints whose step 0 is the model in a safetensors file.

    Args:
        destination: The directory to make; it must be empty or not exist.

    Raises:
        CheckpointError: Not a safetensors file, an unknown element type, or a directory in use.
    """
    stored, _ = read_header(source)
    # An empty directory is as good as none.
    if destination.is_dir() and not any(destination.iterdir()):
        destination.rmdir()
    _refuse_existing(destination)
    partial = begin(destination, 0)
    name = "rank-00000.safetensors"
    # In the order of the file: its data are copied as one run behind a header with other names.
    rows = [(MODEL + row.key, row.dtype, row.shape) for row in stored]
    head, places = build_header(rows, {"format": "pt", "writer": "headway"})
    start = stored[0].start if stored else source.stat().st_size
    file = write_file(partial / name, _blocks(source, start, head))
    sync_directory(partial)
    manifest = Manifest(
        step=0,
        facts={},
        tensors={place.key: _tensor_entry(place, name) for place in places},
        files={name: FileEntry(bytes=file.bytes, crc32=file.crc32)},
    )
    manifest.check(where=str(source))
    return ConversionResult(
        path=commit(destination, manifest), tensors=len(stored), bytes=manifest.bytes
    )


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise CheckpointError("exists already", where=str(path), fix="choose another destination")


def _tensor_entry(place: SafetensorsEntry, file: str) -> TensorEntry:
    whole = StoredChunk(
        offsets=tuple(0 for _ in place.shape),
        shape=place.shape,
        file=file,
        start=place.start,
        bytes=place.bytes,
    )
    return TensorEntry(dtype=place.dtype, shape=place.shape, chunks=(whole,))


def _blocks(source: Path, start: int, head: bytes) -> Iterator[memoryview]:
    """A new header, then the data of a file from byte `start` on."""
    yield memoryview(head)
    block = memoryview(bytearray(BLOCK))
    with source.open("rb", buffering=0) as file:
        file.seek(start)
        while count := file.readinto(block):
            yield block[:count]


def _copy_chunk(source: Path, chunk: StoredChunk, entry: TensorEntry, out: int, start: int) -> None:
    """Copy a box to its places in the row-major tensor that begins at byte `start` of `out`."""
    block = memoryview(bytearray(min(BLOCK, max(1, chunk.bytes))))
    with source.open("rb", buffering=0) as file:
        file.seek(chunk.start)
        for offset, length in _contiguous_runs(chunk, entry):
            done = 0
            while done < length:
                part = block[: min(len(block), length - done)]
                read_exactly(file, part)
                _write_at(out, part, start + offset + done)
                done += len(part)


def _write_at(out: int, part: memoryview, position: int) -> None:
    written = 0
    while written < len(part):
        written += os.pwrite(out, part[written:], position + written)


def _contiguous_runs(chunk: StoredChunk, entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a box in its row-major tensor: (byte offset, bytes), in order.

    Trailing dimensions that the box spans fully belong to one run with the dimension before them.
    """
    if not chunk.bytes:
        return
    size = DTYPES[entry.dtype][1]
    dims = len(entry.shape)
    strides = [size * math.prod(entry.shape[dim + 1 :]) for dim in range(dims)]
    inner = dims
    while inner and chunk.shape[inner - 1 :] == entry.shape[inner - 1 :]:
        inner -= 1
    inner = max(0, inner - 1)  # rows of the last dimension that is cut follow each other, too
    length = size * math.prod(chunk.shape[inner:])
    base = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True))
    for index in product(*(range(extent) for extent in chunk.shape[:inner])):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), length
