"""Samples as bytes and back, without pickle.

A sample is any nesting of dicts, lists and tuples over tensors, arrays, numbers, texts, bytes and
None. Its bytes are a JSON layout followed by the raw values in order. What differs from sample to
sample stands among the raw values, so that samples of equal structure have equal layouts, which are
parsed once. Types, bits and strides come back as they went in (strides, because torch chooses its
kernels by them), and the result shares memory with nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.documents import check_limits, parse_json
from headway.errors import DataError

Buffer = bytes | memoryview

_ALIGN = 16
"""Bytes; the largest element type is complex128."""

_LENGTH = struct.Struct("<I")
_WORD = struct.Struct("<q")
_KINDS = "biufcSUmM"
"""numpy's kinds of element types whose elements are plain bytes."""

_LAYOUTS = 1024
"""Most layouts that a decoder keeps; samples of ever new shapes have ever new ones."""


@dataclass(frozen=True)
class Encoded:
    """A sample as buffers that follow each other; nothing has been copied.

    Attributes:
        buffers: Valid as long as nobody writes into the sample.
    """

    buffers: tuple[Buffer, ...]
    size: int

    def to_bytes(self) -> bytes:
        """One copy of everything."""
        return b"".join(self.buffers)


def encode(sample: Any) -> Encoded:
    """The bytes of a sample.

    Raises:
        DataError: It holds something that has no such bytes; its place in the sample is named.
    """
    raw = _Raw()
    try:
        description = _describe(sample, raw, "")
        check_limits(description)
    except (RecursionError, ValueError) as error:  # no decoder would read it
        raise _refusal(f"something too deep: {error}", "") from None
    text = json.dumps(description, separators=(",", ":"), ensure_ascii=False)
    layout = text.encode("utf-8")
    head = _padded(_LENGTH.pack(len(layout)) + layout)
    return Encoded((head, *raw.buffers), len(head) + raw.size)


class Decoder:
    """Turns bytes into samples; keeps the layouts that it has met."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, Any] = {}

    def decode(self, stored: memoryview) -> Any:
        """The sample whose bytes these are; it takes them over.

        Args:
            stored: What `encode` made, writable bytes at an address divisible by 16.
        """
        (length,) = _LENGTH.unpack_from(stored)
        begin = _LENGTH.size
        text = stored[begin : begin + length].tobytes()
        layout = self._layouts.get(text)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()  # samples of ever new shapes: nothing is worth keeping
            layout = self._layouts[text] = parse_json(text)
        return _build(layout, _Cursor(stored, _rounded(begin + length)))


class _Raw:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.size = 0

    def add(self, value: Buffer) -> None:
        length = len(value)
        self.buffers.append(value)
        if padding := -length % _ALIGN:
            self.buffers.append(bytes(padding))
        self.size += length + padding

    def add_text(self, value: bytes) -> None:
        self.add(_WORD.pack(len(value)) + value)


def _describe(value: Any, raw: _Raw, place: str) -> list[Any]:
    """The layout of a value; its raw bytes are added to `raw`."""
    # Exact types: a subclass would come back as its base.
    kind = type(value)
    if kind is Tensor:
        return _describe_tensor(value, raw, place)
    if kind in (np.ndarray, np.memmap):
        return _describe_array(value, raw, place)
    if kind in (tuple, list):
        inner = [_describe(v, raw, f"{place}[{n}]") for n, v in enumerate(value)]
        return ["(" if kind is tuple else "[", *inner]
    if kind is dict:
        return ["{", *(_describe_entry(k, v, raw, place) for k, v in value.items())]
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        raw.add(value.tobytes())
        return ["N", value.dtype.str]
    return _describe_plain(value, raw, place)


def _describe_plain(value: Any, raw: _Raw, place: str) -> list[Any]:
    kind = type(value)
    if value is None:
        return ["n"]
    if kind is bool:
        raw.add(bytes([value]))
        return ["b"]
    if kind is int:
        if not -(2**63) <= value < 2**63:
            return ["I", str(value)]  # in the layout, as rare ones do not fit a word
        raw.add(_WORD.pack(value))
        return ["i"]
    if kind is float or kind is complex:
        raw.add(np.array(value).tobytes())
        return ["f" if kind is float else "c"]
    if kind is str:
        # File names of the system may hold lone surrogates, which strict UTF-8 refuses.
        raw.add_text(value.encode("utf-8", "surrogatepass"))
        return ["s"]
    if kind is bytes:
        raw.add_text(value)
        return ["y"]
    raise _refusal(f"a {kind.__module__}.{kind.__qualname__}", place)


def _describe_entry(key: Any, value: Any, raw: _Raw, place: str) -> list[Any]:
    if type(key) not in (str, int):
        raise _refusal(f"the key {key!r} of type {type(key).__name__}", place)
    return [key, _describe(value, raw, f"{place}[{key!r}]")]


def _describe_tensor(tensor: Tensor, raw: _Raw, place: str) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise _refusal(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}", place)
    if tensor.requires_grad:
        raise _refusal("a tensor that requires a gradient", place)
    # torch conjugates and negates lazily: the memory holds the numbers without it.
    plain = tensor.resolve_conj().resolve_neg()
    if not _is_dense(plain.shape, plain.stride()):
        plain = plain.clone()  # dense, with the dimensions in the same order where torch can
        if not _is_dense(plain.shape, plain.stride()):
            plain = plain.contiguous()
    # All elements in the order of memory, whatever the order of dimensions is.
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    raw.add(flat.view(torch.uint8).numpy().data if plain.numel() else b"")
    name = str(plain.dtype).removeprefix("torch.")
    return ["T", name, list(plain.shape), list(plain.stride())]


def _describe_array(array: NDArray[Any], raw: _Raw, place: str) -> list[Any]:
    kind = array.dtype
    if kind.kind not in _KINDS:
        raise _refusal(f"an array of {kind}", place)
    plain = array.view(np.ndarray)
    steps = [stride // max(kind.itemsize, 1) for stride in plain.strides]
    if not _is_dense(plain.shape, steps) or any(s % max(kind.itemsize, 1) for s in plain.strides):
        plain = plain.copy(order="K")
    order = np.argsort([-stride for stride in plain.strides], kind="stable")
    flat = plain.transpose(order).reshape(-1)
    raw.add(flat.view(np.uint8).data if flat.nbytes else b"")
    return ["A", kind.str, list(plain.shape), list(plain.strides)]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one stretch of memory, each once."""
    expected = 1
    long = ((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    for stride, size in sorted(long):
        if stride != expected:
            return False
        expected *= size
    return True


def _refusal(what: str, place: str) -> DataError:
    return DataError(
        f"the data cache cannot store {what}",
        where=f"sample{place}",
        why="It stores tensors and arrays of numbers in host memory, int, float, complex, bool, "
        "str, bytes and None, in dict, list and tuple.",
        fix="Turn it into one of these in `prepare`, for example a picture into a tensor.",
    )


def _padded(value: bytes) -> bytes:
    return value + bytes(-len(value) % _ALIGN)


def _rounded(size: int) -> int:
    return size + -size % _ALIGN


class _Cursor:
    def __init__(self, stored: memoryview, place: int) -> None:
        self._stored = stored
        self._place = place

    def take(self, size: int) -> memoryview:
        begin = self._place
        self._place = _rounded(begin + size)
        return self._stored[begin : begin + size]

    def take_text(self) -> bytes:
        (length,) = _WORD.unpack_from(self._stored, self._place)
        return self.take(_WORD.size + length)[_WORD.size :].tobytes()


def _build(layout: list[Any], raw: _Cursor) -> Any:
    tag = layout[0]
    if tag == "T":
        return _build_tensor(*layout[1:], raw=raw)
    if tag == "i":
        return _WORD.unpack(raw.take(8))[0]
    if tag == "(":
        return tuple(_build(inner, raw) for inner in layout[1:])
    if tag == "[":
        return [_build(inner, raw) for inner in layout[1:]]
    if tag == "{":
        return {key: _build(inner, raw) for key, inner in layout[1:]}
    if tag == "A":
        return _build_array(*layout[1:], raw=raw)
    if tag == "N":
        return _build_array(layout[1], [], [], raw=raw)[()]
    return _build_plain(layout, raw)


def _build_plain(layout: list[Any], raw: _Cursor) -> Any:
    match layout[0]:
        case "n":
            return None
        case "b":
            return bool(raw.take(1)[0])
        case "I":
            return int(layout[1])
        case "f":
            return struct.unpack("<d", raw.take(8))[0]
        case "c":
            return complex(*struct.unpack("<dd", raw.take(16)))
        case "s":
            return raw.take_text().decode("utf-8", "surrogatepass")
        case _:
            return raw.take_text()


def _build_tensor(name: str, shape: list[int], strides: list[int], *, raw: _Cursor) -> Tensor:
    kind: torch.dtype = getattr(torch, name)
    count = math.prod(shape)
    if not count:
        # `torch.frombuffer` refuses a buffer without bytes.
        return torch.empty(0, dtype=kind).as_strided(shape, strides)
    flat = torch.frombuffer(raw.take(count * kind.itemsize), dtype=kind)
    return flat.as_strided(shape, strides)


def _build_array(name: str, shape: list[int], strides: list[int], *, raw: _Cursor) -> NDArray[Any]:
    kind = np.dtype(name)
    size = kind.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, kind)
    return np.ndarray(shape, kind, raw.take(size), strides=strides)
