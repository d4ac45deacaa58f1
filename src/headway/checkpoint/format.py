"""The on-disk format: JSON manifest, safetensors headers, and plain values as JSON.

A manifest says which part of which tensor lies where in which file. One that can be built describes
every element of every tensor once, and carries the size and CRC-32 of every file, so that a
checkpoint is either provably whole or named as damaged. Tensors go by logical name; nothing depends
on how many ranks wrote them.

A safetensors file: 8 bytes with the length of the header (little-endian), the header (JSON, padded
with spaces to a multiple of 8), then the tensors without gaps; see
https://huggingface.co/docs/safetensors.

Facts are what travels with the tensors (scheduler, data cursor, counters), without pickle:
`decode_facts(encode_facts(facts)) == facts` with the same types. What JSON cannot say is tagged:
`{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$float": "nan"}`. A dictionary with a key
that begins with "$" is written in the tagged form too: no user's key can be taken for a tag.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.documents import MAX_DEPTH, check_limits, document, parse_json, to_type
from headway.errors import CheckpointDamaged, CheckpointError, DocumentError


def encode_facts(value: Any) -> Any:
    """The JSON form of nested plain values.

    Args:
        value: None, bool, int, float, str, bytes; list, tuple, dict, OrderedDict, Counter of such.

    Raises:
        CheckpointError: A value of another type; the message names its path. Or values nested
            deeper than `Manifest.from_json` reads.
    """
    try:
        encoded = _encode(value, "facts")
        check_limits([encoded])  # in a manifest they are one level down
    except (RecursionError, ValueError):
        raise CheckpointError(
            "the facts cannot be stored in a checkpoint",
            why=f"they are nested deeper than {MAX_DEPTH} levels of JSON; a tuple counts twice, "
            "an ordered dictionary three times",
            fix="store a flat form of them",
        ) from None
    return encoded


def _encode(value: Any, path: str) -> Any:
    kind = type(value)
    # The exact types only: an IntEnum or numpy's str_ would come back as another type.
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):  # numpy's float64 is a float too, and schedulers return it
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind is list or kind is tuple:
        items = [_encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in (dict, OrderedDict, Counter):
        return _encode_mapping(value, path)
    raise CheckpointError(
        "cannot be stored in a checkpoint",
        where=path,
        why=f"it is a {kind.__module__}.{kind.__qualname__}; facts are plain values, "
        "because nothing in a checkpoint is pickled",
        fix="store tensors as tensors, and of an object the plain values that rebuild it",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str) -> Any:
    kind = type(value)
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if kind is dict and plain:
        return {key: _encode(item, f"{path}.{key}") for key, item in value.items()}
    pairs = [
        [_encode(key, f"{path} key {key!r}"), _encode(item, f"{path}[{key!r}]")]
        for key, item in value.items()
    ]
    return {{dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}[kind]: pairs}


def decode_facts(value: Any) -> Any:
    """The values that `encode_facts` was given.

    Raises:
        CheckpointDamaged: A tag that no version of this format writes.
    """
    if isinstance(value, list):
        return [decode_facts(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A user's key that begins with "$" was written in the tagged form: a single one is always a
    # tag.
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag.startswith("$"):
            return _decode_tagged(tag, content)
    return {key: decode_facts(item) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any) -> Any:
    try:
        match tag:
            case "$tuple":
                return tuple(decode_facts(item) for item in content)
            case "$float":
                return float(content)
            case "$bytes":
                # Without `validate` foreign characters are skipped silently.
                return base64.b64decode(content, validate=True)
            case "$dict" | "$ordered" | "$counter":
                pairs = [(decode_facts(key), decode_facts(item)) for key, item in content]
                kinds: dict[str, type[Any]] = {
                    "$dict": dict,
                    "$ordered": OrderedDict,
                    "$counter": Counter,
                }
                return kinds[tag](dict(pairs))
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the facts hold a malformed {tag}", why=str(error)) from None
    raise CheckpointDamaged(f"the facts hold the unknown tag {tag}")


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
class StoredChunk:
    """A box of a tensor: where it begins in the tensor, its shape, and where its bytes lie."""

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
    chunks: tuple[StoredChunk, ...]

    @property
    def bytes(self) -> int:
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
        facts: Everything that is not a tensor; see `headway.checkpoint.format`.
        tensors: Logical name -> entry.
        files: Name of a data file -> entry.
    """

    step: int
    facts: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())

    def to_json(self) -> str:
        """Readable JSON, one line per tensor, with a checksum of its own content.

        Raises:
            CheckpointError: The facts hold something that is not a plain value.
        """
        # `asdict` would copy the facts, which are encoded as they are.
        body = dataclasses.asdict(dataclasses.replace(self, facts={}))
        body["facts"] = encode_facts(self.facts)
        # By hand: `indent` would put every number of a tensor's shape on a line of its own.
        lines = [
            f'"format": {self.format},',
            f'"step": {self.step},',
            f'"checksum": {_checksum(body)},',
            # `encode_facts` has tagged NaN and infinity, which Python would write although JSON has
            # neither.
            f'"facts": {json.dumps(body["facts"], allow_nan=False)},',
            f'"files": {_json_table(body["files"])},',
            f'"tensors": {_json_table(body["tensors"])}',
        ]
        return "{\n" + "\n".join(lines) + "\n}\n"

    @staticmethod
    def from_json(text: str, *, where: str = MANIFEST_NAME) -> Manifest:
        """Parse and check a manifest.

        Raises:
            CheckpointDamaged: Not JSON, a wrong checksum, or contradictions in the content.
            CheckpointError: A format of another version of headway.
        """
        body = _parse_manifest(text, where)
        stated = body.pop("checksum", None)
        if stated != _checksum(body):
            raise CheckpointDamaged("the manifest does not match its own checksum", where=where)
        facts = body.pop("facts", None)
        if not isinstance(facts, dict):
            raise CheckpointDamaged("the manifest states no facts", where=where)
        try:
            # What the facts hold is the user's: there is no type that `to_type` could check them
            # against.
            manifest = to_type({**body, "facts": {}}, Manifest, where=where)
            manifest = dataclasses.replace(manifest, facts=decode_facts(facts))
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
            # A manifest is input: its names must not lead out of the checkpoint's directory.
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
            if not _is_inside(chunk, entry.shape) or chunk.bytes != math.prod(chunk.shape) * size:
                yield f"the part at {list(chunk.offsets)} does not fit shape {list(entry.shape)}"
        covered = sum(math.prod(chunk.shape) for chunk in entry.chunks)
        if covered != math.prod(entry.shape) or not entry.chunks:
            yield f"{covered} of {math.prod(entry.shape)} elements are described"
        if len({chunk.offsets for chunk in entry.chunks}) != len(entry.chunks):
            yield "two parts begin at the same place"


def _is_inside(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.shape) == len(shape):
        return False
    boxes = zip(chunk.offsets, chunk.shape, shape, strict=True)
    return all(offset >= 0 <= extent and offset + extent <= full for offset, extent, full in boxes)


def _parse_manifest(text: str, where: str) -> dict[str, Any]:
    try:
        body = parse_json(text)
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
    # Of the canonical text, so that a manifest may be re-indented without becoming damaged.
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def _json_table(rows: Mapping[str, Any]) -> str:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f"{{\n{lines}\n}}" if rows else "{}"


_LARGEST_HEADER = 100_000_000  # the safetensors package refuses longer headers


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a safetensors file.

    Attributes:
        dtype: Element type, a key of `DTYPES`.
        start: Its first byte, counted from the beginning of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def build_header(
    rows: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[SafetensorsEntry]]:
    """The bytes before the first tensor, and where each tensor will lie.

    Args:
        rows: (key, dtype, shape) in the order in which the tensors follow the header.

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
    # The tensors then begin at a multiple of 8 bytes; with large elements first all are aligned.
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise CheckpointError(f"{len(rows)} tensors are too many for one safetensors file")
    head = len(text).to_bytes(8, "little") + text
    starts = [table[key]["data_offsets"][0] + len(head) for key, _, _ in rows]
    stored = [SafetensorsEntry(*row, start) for row, start in zip(rows, starts, strict=True)]
    return head, stored


def read_header(path: Path) -> tuple[list[SafetensorsEntry], dict[str, str]]:
    """The tensors of a safetensors file, in the order in which they lie, and its metadata.

    Raises:
        CheckpointDamaged: Not a whole safetensors file.
        CheckpointError: It cannot be opened, or holds an element type that headway does not know.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # Before it is read: eight damaged bytes could ask for more memory than any machine has.
            if length > min(size - 8, _LARGEST_HEADER):
                raise CheckpointDamaged(
                    "is not a safetensors file",
                    where=str(path),
                    why=f"it states a header of {length} bytes; the file has {size}",
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError("cannot be read", where=str(path), why=str(error)) from None
    try:
        table = parse_json(text)
        metadata = dict(table.pop("__metadata__", {}))
        stored = [_safetensors_entry(key, row, 8 + length, path) for key, row in table.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(
            "has a malformed safetensors header", where=str(path), why=str(error)
        ) from None
    # A tensor without elements begins where the next one does, and must come before it.
    stored.sort(key=lambda row: (row.start, row.bytes))
    _check_layout(stored, 8 + length, size, path)
    return stored, metadata


def _safetensors_entry(
    key: str, row: Mapping[str, Any], start: int, path: Path
) -> SafetensorsEntry:
    names = {code: name for name, (code, _) in DTYPES.items()}
    if row["dtype"] not in names:
        raise CheckpointError(
            f"tensor {key} has the unknown element type {row['dtype']}",
            where=str(path),
            why=f"known are {', '.join(names)}",
        )
    begin, end = (int(offset) for offset in row["data_offsets"])
    shape = tuple(int(extent) for extent in row["shape"])
    stored = SafetensorsEntry(key, names[row["dtype"]], shape, start + begin)
    # Two negative extents have a positive product, so that the bytes alone do not show them.
    if stored.bytes != end - begin or min(shape, default=0) < 0:
        raise ValueError(f"{key}: {end - begin} bytes for shape {list(shape)}")
    return stored


def _check_layout(stored: Sequence[SafetensorsEntry], start: int, size: int, path: Path) -> None:
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
