"""Volumes in NIfTI-1 files, `.nii` or `.nii.gz`, with numpy alone.

The header is that of nifti1.h (348 bytes, either byte order); the voxels follow in one piece, the
first dimension fastest.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError

HEADER = 348
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


@dataclass(frozen=True)
class Volume:
    """What a file holds.

    Attributes:
        voxels: [X, Y, Z] and further dimensions, of the file's type; scaled where it says so.
        affine: [3, 4] from indices to millimetres (right, front, up), zero where it is not stated.
    """

    voxels: NDArray[Any]
    affine: NDArray[np.float64]


def read_nifti(path: str | Path) -> Volume:
    """The volume of a file.

    Raises:
        DataError: There is no such file, it is no NIfTI-1 file, or it is cut short.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("a volume cannot be read", where=str(path), why=str(error)) from error
    if len(content) < HEADER or content[344:347] != b"n+1":
        raise DataError("not a NIfTI-1 file with its voxels in it", where=str(path))
    order = "<" if struct.unpack_from("<i", content)[0] == HEADER else ">"
    dims = struct.unpack_from(f"{order}8h", content, 40)
    (code,) = struct.unpack_from(f"{order}h", content, 70)
    offset, slope, start = struct.unpack_from(f"{order}3f", content, 108)
    if code not in TYPES:
        raise DataError(f"voxels of type {code}", where=str(path), why=f"known are {sorted(TYPES)}")
    dtype, shape = np.dtype(order + TYPES[code]), dims[1 : 1 + dims[0]]
    size = int(np.prod(shape)) * dtype.itemsize
    if len(content) < int(offset) + size:
        raise DataError(
            "a volume is cut short",
            where=str(path),
            why=f"{size} bytes of voxels from byte {int(offset)} on, of {len(content)}",
        )
    flat = np.frombuffer(content, dtype, size // dtype.itemsize, int(offset))
    voxels = flat.reshape(shape, order="F")
    if slope not in (0.0, 1.0) or (slope and start):
        voxels = voxels * slope + start
    (stated,) = struct.unpack_from(f"{order}h", content, 254)
    rows = struct.unpack_from(f"{order}12f", content, 280) if stated else (0.0,) * 12
    return Volume(voxels, np.array(rows, dtype=np.float64).reshape(3, 4))
