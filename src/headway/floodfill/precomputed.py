"""Volumes in Neuroglancer's precomputed layout: a folder with `info` and a file for each chunk.

The layout (github.com/google/neuroglancer, src/datasource/precomputed/volume.md) counts x, y, z; an
array here is z, y, x. A chunk of encoding "raw" is its voxels with x fastest, which is the order in
which NumPy has an array [z, y, x]. One scale, not sharded, not compressed: a viewer is given the
folder by any server of files.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.documents import parse_json
from headway.floodfill.network import Triple

PREFIX = "precomputed"
_CHUNK = 64

Box = tuple[slice, ...]


class PrecomputedWriter:
    """Is assigned boxes that begin and end at chunks or at the end of the volume, or any others.

    Args:
        voxel: Size in nm, for z, y, x.
        facts: Written to `provenance.json`.
    """

    def __init__(
        self,
        folder: Path,
        shape: Triple,
        dtype: Any,
        *,
        voxel: tuple[float, float, float],
        facts: Mapping[str, Any],
    ) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        resolution = [float(size) for size in voxel[::-1]]
        key = "_".join(f"{size:g}" for size in resolution)
        scale = {
            "key": key,
            "size": list(shape[::-1]),
            "resolution": resolution,
            "voxel_offset": [0, 0, 0],
            "chunk_sizes": [[_CHUNK] * 3],
            "encoding": "raw",
        }
        info = {
            "@type": "neuroglancer_multiscale_volume",
            "type": "segmentation",
            "data_type": np.dtype(dtype).name,
            "num_channels": 1,
            "scales": [scale],
        }
        (folder / key).mkdir(parents=True)
        (folder / "info").write_text(json.dumps(info, indent=1))
        (folder / "provenance.json").write_text(json.dumps(dict(facts), indent=1))
        self._chunks = _Chunks(folder / key, shape, (_CHUNK,) * 3, self._dtype)

    def __setitem__(self, box: Box, voxels: NDArray[Any]) -> None:
        for path, size, inner, outer in self._chunks.of(box):
            whole = size == tuple(part.stop - part.start for part in inner)
            chunk = np.zeros(size, self._dtype) if whole else self._chunks.read(path, size).copy()
            chunk[inner] = voxels[outer]
            path.write_bytes(chunk.tobytes())


class PrecomputedReader:
    """Reads boxes of the first scale.

    Raises:
        ValueError: Not this layout, or an encoding that is not read.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "info").is_file():
            raise ValueError("There is no file info in the folder")
        info = parse_json((folder / "info").read_text())
        scale = info["scales"][0]
        if scale["encoding"] != "raw" or "sharding" in scale or info["num_channels"] != 1:
            raise ValueError(
                f"Chunks are encoded as {scale['encoding']}, in {info['num_channels']} channels"
                f"{', in shards' if 'sharding' in scale else ''}; read are single raw ones"
            )
        x, y, z = scale["size"]
        self.shape: Triple = (z, y, x)
        self.dtype: np.dtype[Any] = np.dtype(info["data_type"])
        chunk = tuple(scale["chunk_sizes"][0][::-1])
        offset = tuple(scale.get("voxel_offset", (0, 0, 0))[::-1])
        kind = self.dtype.newbyteorder("<")
        self._chunks = _Chunks(folder / scale["key"], self.shape, chunk, kind, offset)

    def __getitem__(self, index: Any) -> NDArray[Any]:
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *(slice(None),) * (3 - len(index)))
        if any(isinstance(part, slice) and part.step not in (None, 1) for part in index):
            raise ValueError("a step of a slice other than 1")
        box = tuple(
            slice(*part.indices(size)[:2])
            if isinstance(part, slice)
            else slice(range(size)[part], range(size)[part] + 1)
            for part, size in zip(index, self.shape, strict=True)
        )
        out = np.zeros([max(0, part.stop - part.start) for part in box], self.dtype)
        for path, size, inner, outer in self._chunks.of(box):
            out[outer] = self._chunks.read(path, size)[inner]
        return out[tuple(slice(None) if isinstance(part, slice) else 0 for part in index)]


class _Chunks:
    """The grid of chunks of a scale, and their files."""

    def __init__(
        self,
        folder: Path,
        shape: Triple,
        chunk: tuple[int, ...],
        dtype: np.dtype[Any],
        offset: tuple[int, ...] = (0, 0, 0),
    ) -> None:
        self._folder, self._shape, self._chunk = folder, shape, chunk
        self._dtype, self._offset = dtype, offset

    def of(self, box: Box) -> Iterator[tuple[Path, tuple[int, ...], Box, Box]]:
        """The chunks that a box meets: file, size, the part of the chunk, the part of the box."""
        box = tuple(
            slice(*part.indices(size)[:2]) for part, size in zip(box, self._shape, strict=True)
        )
        if any(part.stop <= part.start for part in box):
            return
        numbers = [
            range(part.start // step, (part.stop - 1) // step + 1)
            for part, step in zip(box, self._chunk, strict=True)
        ]
        for number in itertools.product(*numbers):
            low = [n * step for n, step in zip(number, self._chunk, strict=True)]
            high = [
                min(begin + step, size)
                for begin, step, size in zip(low, self._chunk, self._shape, strict=True)
            ]
            met = [
                (max(a, part.start), min(b, part.stop))
                for a, b, part in zip(low, high, box, strict=True)
            ]
            name = "_".join(
                f"{a + o}-{b + o}"
                for a, b, o in reversed(list(zip(low, high, self._offset, strict=True)))
            )
            inner = tuple(slice(a - c, b - c) for (a, b), c in zip(met, low, strict=True))
            outer = tuple(
                slice(a - p.start, b - p.start) for (a, b), p in zip(met, box, strict=True)
            )
            size = tuple(b - a for a, b in zip(low, high, strict=True))
            yield self._folder / name, size, inner, outer

    def read(self, path: Path, size: tuple[int, ...]) -> NDArray[Any]:
        """A chunk; one without a file is zero."""
        if not path.exists():
            return np.zeros(size, self._dtype)
        return np.frombuffer(path.read_bytes(), self._dtype).reshape(size)
