"""Signs as bits: packing with error feedback, and unpacking through a table.

Invariant: a value counts as negative if its sign bit is set (minus zero, too), in packing and in
what is left over alike; otherwise residual and message would not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.comm.method import Piece

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

STRIDE = 2**16
"""Values that are worked on at a time: they stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class BitRange:
    """Values of one layer within a part of the packed array.

    Attributes:
        layer: Its number.
        start: In values of the part; a multiple of 8.
        stop: See `start`.
        offset: Where the range begins in the layer.
    """

    layer: int
    start: int
    stop: int
    offset: int


def ranges(pieces: Sequence[Piece], number: int, part: int) -> list[BitRange]:
    """What part `number` of `part` values contains of each layer."""
    first = number * part
    found = []
    for layer, piece in enumerate(pieces):
        start, stop = max(piece.start, first), min(piece.stop, first + part)
        if start < stop:
            found.append(BitRange(layer, start - first, stop - first, start - piece.start))
    return found


def pack_signs(values: Floats, scale: float, bits: Bytes) -> None:
    """Write one bit per value (1: not negative) and subtract what it stands for from the value.

    Args:
        values: float32 or float64; replaced by value - scale sign(value).
        scale: Not negative.
        bits: One byte for 8 values; the last one is filled up with zeros.
    """
    integer = np.dtype(f"i{values.itemsize}")
    sign = np.iinfo(integer).min
    magnitude = np.asarray(scale, values.dtype).view(integer)
    for start in range(0, values.size, STRIDE):
        here = values[start : start + STRIDE]
        keys: NDArray[np.int64] = here.view(integer)
        packed = np.packbits(keys >= 0)
        bits[start // 8 : start // 8 + packed.size] = packed
        said = keys & sign
        said |= magnitude
        here -= said.view(values.dtype)


def mean_magnitude(values: Floats) -> float:
    """The scale of a layer: the mean of |value|, summed block by block in double precision."""
    block = np.empty(min(STRIDE, values.size), values.dtype)
    total = 0.0
    for start in range(0, values.size, STRIDE):
        here = values[start : start + STRIDE]
        total += float(np.abs(here, out=block[: here.size]).sum())
    return total / values.size


def sum_signs(rows: Sequence[tuple[Bytes, float]], out: Floats) -> None:
    """Replace `out` by the sum over rows of scale for a bit that is set and -scale for others.

    Args:
        rows: Bits and scale of each rank, added in this order.
        out: 8 values per byte.
    """
    tables = [_signs() * np.asarray(scale, out.dtype) for _, scale in rows]
    step = STRIDE // 8
    work = np.empty((step, 8), out.dtype)
    wide = out.reshape(-1, 8)
    for start in range(0, len(wide), step):
        here = wide[start : start + step]
        for number, ((bits, _), table) in enumerate(zip(rows, tables, strict=True)):
            said = work[: len(here)] if number else here
            # mode: without it numpy copies through a buffer to be able to take back errors.
            np.take(table, bits[start : start + step], axis=0, out=said, mode="clip")
            if number:
                here += said


def _signs() -> NDArray[np.int8]:
    """int8[256, 8]: what each byte stands for."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    return np.unpackbits(every, axis=1).astype(np.int8) * np.int8(2) - np.int8(1)
