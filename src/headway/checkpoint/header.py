"""The header of a safetensors file, written and read without torch.

Layout of the file: 8 bytes with the length of the header (little-endian), the header (JSON, padded
with spaces to a multiple of 8), then the tensors without gaps. The format is documented at
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.manifest import DTYPES
from headway.errors import CheckpointDamaged, CheckpointError

_LARGEST = 100_000_000  # the safetensors package refuses longer headers


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file.

    Attributes:
        key: Its name in the file.
        dtype: Element type, a key of `DTYPES`.
        shape: Its shape.
        start: Its first byte, counted from the beginning of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def build_header(
    rows: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Stored]]:
    """The bytes before the first tensor, and where each tensor will lie.

    Args:
        rows: (key, dtype, shape) in the order in which the tensors follow the header.
        metadata: Free text entries.

    Raises:
        CheckpointError: Two tensors of one name, or too many for one file.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for key, dtype, shape in rows:
        if key in table:
            raise CheckpointError(f"two tensors are named {key!r}")
        code, size = DTYPES[dtype]
        end = position + math.prod(shape) * size
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST:
        raise CheckpointError(f"{len(rows)} tensors are too many for one safetensors file")
    head = len(text).to_bytes(8, "little") + text
    starts = [table[key]["data_offsets"][0] + len(head) for key, _, _ in rows]
    stored = [Stored(*row, start) for row, start in zip(rows, starts, strict=True)]
    return head, stored


def read_header(path: Path) -> tuple[list[Stored], dict[str, str]]:
    """The tensors of a safetensors file, in the order in which they lie, and its metadata.

    Raises:
        CheckpointDamaged: Not a whole safetensors file.
        CheckpointError: It cannot be opened, or holds an element type that headway does not know.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _LARGEST):
                raise CheckpointDamaged(
                    "is not a safetensors file",
                    where=str(path),
                    why=f"it states a header of {length} bytes; the file has {size}",
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError("cannot be read", where=str(path), why=str(error)) from None
    try:
        table = json.loads(text)
        metadata = dict(table.pop("__metadata__", {}))
        stored = [_stored(key, row, 8 + length, path) for key, row in table.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(
            "has a malformed safetensors header", where=str(path), why=str(error)
        ) from None
    stored.sort(key=lambda row: (row.start, row.bytes))
    _check_layout(stored, 8 + length, size, path)
    return stored, metadata


def _stored(key: str, row: Mapping[str, Any], start: int, path: Path) -> Stored:
    names = {code: name for name, (code, _) in DTYPES.items()}
    if row["dtype"] not in names:
        raise CheckpointError(
            f"tensor {key} has the unknown element type {row['dtype']}",
            where=str(path),
            why=f"known are {', '.join(names)}",
        )
    begin, end = (int(offset) for offset in row["data_offsets"])
    shape = tuple(int(extent) for extent in row["shape"])
    stored = Stored(key, names[row["dtype"]], shape, start + begin)
    if stored.bytes != end - begin or min(shape, default=0) < 0:
        raise ValueError(f"{key}: {end - begin} bytes for shape {list(shape)}")
    return stored


def _check_layout(stored: Sequence[Stored], start: int, size: int, path: Path) -> None:
    """The tensors follow each other without gaps and end where the file ends."""
    for row in stored:
        if row.start != start:
            raise CheckpointDamaged(f"tensor {row.key} is not where it should be", where=str(path))
        start += row.bytes
    if start != size:
        raise CheckpointDamaged(
            "is not a whole safetensors file",
            where=str(path),
            why=f"its header describes {start} bytes; the file has {size}",
        )
