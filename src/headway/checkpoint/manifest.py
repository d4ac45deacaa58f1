"""The manifest of a checkpoint: which part of which tensor lies where in which file.

Invariant: a manifest that can be built describes every element of every tensor once, and carries
the size and the CRC-32 of every file, so that a checkpoint is either provably whole or named as
damaged. Tensors go by logical name; nothing in here depends on how many ranks wrote them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from headway.checkpoint.facts import decode, encode
from headway.documents import document, to_type
from headway.errors import CheckpointDamaged, CheckpointError, DocumentError

FORMAT = 1
MANIFEST_NAME = "manifest.json"

DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "float64": ("F64", 8),
        "float32": ("F32", 4),
        "float16": ("F16", 2),
        "bfloat16": ("BF16", 2),
        "float8_e4m3fn": ("F8_E4M3", 1),
        "float8_e5m2": ("F8_E5M2", 1),
        "complex64": ("C64", 8),
        "int64": ("I64", 8),
        "int32": ("I32", 4),
        "int16": ("I16", 2),
        "int8": ("I8", 1),
        "uint64": ("U64", 8),
        "uint32": ("U32", 4),
        "uint16": ("U16", 2),
        "uint8": ("U8", 1),
        "bool": ("BOOL", 1),
    }
)
"""Element type as torch names it -> (safetensors code, bytes of one element)."""


@document
class Chunk:
    """A box of a tensor: where it begins in the tensor, its shape, and where its bytes lie.

    Attributes:
        offsets: First index of the box in each dimension of the tensor.
        shape: Extent of the box in each dimension.
        file: Name of the data file in the checkpoint's directory.
        start: Byte of the file at which the box begins (row-major, little-endian).
        bytes: Length of the box in bytes.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    bytes: int


@document
class TensorEntry:
    """One tensor: element type, shape of the whole, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@document
class FileEntry:
    """Size and CRC-32 of one data file."""

    bytes: int
    crc32: int


@document
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The optimiser step after which it was taken.
        facts: Everything that is not a tensor; see `headway.checkpoint.facts`.
        tensors: Logical name -> entry.
        files: Name of a data file -> entry.
        format: Version of this layout.
    """

    step: int
    facts: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.bytes for entry in self.tensors.values())

    def to_json(self) -> str:
        """Readable JSON, one line per tensor, with a checksum of its own content.

        Raises:
            CheckpointError: The facts hold something that is not a plain value.
        """
        body = self._body()
        lines = [
            f'"format": {self.format},',
            f'"step": {self.step},',
            f'"checksum": {_checksum(body)},',
            f'"facts": {json.dumps(body["facts"], allow_nan=False)},',
            f'"files": {_table(body["files"])},',
            f'"tensors": {_table(body["tensors"])}',
        ]
        return "{\n" + "\n".join(lines) + "\n}\n"

    def _body(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "step": self.step,
            "facts": encode(self.facts),
            "files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()},
            "tensors": {name: dataclasses.asdict(entry) for name, entry in self.tensors.items()},
        }

    @staticmethod
    def from_json(text: str, *, where: str = MANIFEST_NAME) -> Manifest:
        """Parse and check a manifest.

        Args:
            text: What `to_json` wrote.
            where: Name of the file, for messages.

        Raises:
            CheckpointDamaged: Not JSON, a wrong checksum, or contradictions in the content.
            CheckpointError: A format of another version of headway.
        """
        body = _parse(text, where)
        stated = body.pop("checksum", None)
        if stated != _checksum(body):
            raise CheckpointDamaged("the manifest does not match its own checksum", where=where)
        facts = body.pop("facts", None)
        if not isinstance(facts, dict):
            raise CheckpointDamaged("the manifest states no facts", where=where)
        try:
            manifest = to_type({**body, "facts": {}}, Manifest, where=where)
            manifest = dataclasses.replace(manifest, facts=decode(facts))
        except (DocumentError, CheckpointDamaged) as error:
            raise CheckpointDamaged(
                "the manifest is malformed", where=where, why=error.why or error.what
            ) from None
        manifest.check(where=where)
        return manifest

    def check(self, *, where: str = MANIFEST_NAME) -> None:
        """Every element of every tensor lies in exactly one place inside a listed file.

        Raises:
            CheckpointDamaged: With one line per contradiction (at most ten).
        """
        problems = [
            f"{name}: {problem}"
            for name, entry in self.tensors.items()
            for problem in self._problems(entry)
        ]
        problems += [
            f"{name!r} is not a plain file name"
            for name in self.files
            if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name
        ]
        if problems:
            more = [f"... and {len(problems) - 10} more"] if len(problems) > 10 else []
            raise CheckpointDamaged(
                "the manifest contradicts itself",
                where=where,
                why="\n  ".join(problems[:10] + more),
            )

    def _problems(self, entry: TensorEntry) -> Iterator[str]:
        if entry.dtype not in DTYPES:
            yield f"unknown element type {entry.dtype}"
            return
        size = DTYPES[entry.dtype][1]
        for chunk in entry.chunks:
            file = self.files.get(chunk.file)
            if file is None:
                yield f"lies in {chunk.file}, which is not listed"
            elif chunk.start < 0 or chunk.start + chunk.bytes > file.bytes:
                yield f"bytes {chunk.start}+{chunk.bytes} are not inside {chunk.file}"
            if not _inside(chunk, entry.shape) or chunk.bytes != math.prod(chunk.shape) * size:
                yield f"the part at {list(chunk.offsets)} does not fit shape {list(entry.shape)}"
        covered = sum(math.prod(chunk.shape) for chunk in entry.chunks)
        if covered != math.prod(entry.shape) or not entry.chunks:
            yield f"{covered} of {math.prod(entry.shape)} elements are described"
        if len({chunk.offsets for chunk in entry.chunks}) != len(entry.chunks):
            yield "two parts begin at the same place"


def _inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    """The box lies inside a tensor of that shape."""
    if not len(chunk.offsets) == len(chunk.shape) == len(shape):
        return False
    boxes = zip(chunk.offsets, chunk.shape, shape, strict=True)
    return all(offset >= 0 <= extent and offset + extent <= full for offset, extent, full in boxes)


def _parse(text: str, where: str) -> dict[str, Any]:
    """The JSON object, once its format is known to be ours."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CheckpointDamaged("the manifest is not JSON", where=where, why=str(error)) from None
    if not isinstance(body, dict) or "format" not in body:
        raise CheckpointDamaged("the manifest states no format", where=where)
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint format {body['format']!r} is unknown",
            where=where,
            why=f"this version of headway reads format {FORMAT}",
            fix="restore it with the version of headway that wrote it",
        )
    return body


def _checksum(body: Mapping[str, Any]) -> int:
    """CRC-32 of the canonical JSON text of everything but the checksum itself."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def _table(rows: Mapping[str, Any]) -> str:
    """A JSON object with one line per entry."""
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f"{{\n{lines}\n}}" if rows else "{}"
