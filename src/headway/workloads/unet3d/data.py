"""Heads as samples: synthetic phantoms, patches of a real head (NIfTI), or files.

A sample is (two images [2, W, W, W] float32, of the whole head and of the brain alone; labels
[W, W, W] int64: 0 none, 1 cortex, 2 deep grey matter, 3 cerebellum). It follows from the seed and
its number alone. A file holds one sample, `images` and `labels`, both uint8; where a plan splits
samples, a rank reads only its part of each.

The real head is `ch2` with the labels `aal`, of one subject on one grid (Debian's mricron-data,
BSD licence; not part of headway):

    apt-get download mricron-data && dpkg -x mricron-data_*.deb mricron
    headway train unet3d --set arguments.volumes=mricron/

`read_nifti` reads NIfTI-1 volumes, `.nii` or `.nii.gz`, with numpy alone: the header of nifti1.h
(348 bytes, either byte order), then the voxels, the first dimension fastest.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.data.slabs.slab_source import SlabSource, slabs_in, write_sample
from headway.data.source import Source
from headway.errors import DataError

HEADER = 348
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


@dataclass(frozen=True)
class NiftiVolume:
    """What a file holds.

    Attributes:
        voxels: [X, Y, Z] and further dimensions, of the file's type; scaled where it says so.
        affine: [3, 4] from indices to millimetres (right, front, up), zero where it is not stated.
    """

    voxels: NDArray[Any]
    affine: NDArray[np.float64]


def read_nifti(path: str | Path) -> NiftiVolume:
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
    return NiftiVolume(voxels, np.array(rows, dtype=np.float64).reshape(3, 4))


# Heads as samples: phantoms that are made, patches of a real one, or files.


IMAGES, LABELS = "images", "labels"
CLASSES = ("none", "cortex", "deep grey", "cerebellum")
DEEP = (71, 78)
CEREBELLUM = (91, 116)
"""First and last label of the atlas; all others from 1 on are cortex."""

Split = Literal["train", "validation"]
Bytes = NDArray[np.uint8]
Float = NDArray[np.float64]


class _Heads:
    """Batches of samples."""

    count: int

    def sample(self, number: int) -> tuple[Bytes, Bytes]:
        """Images [2, W, W, W] and labels [W, W, W]."""
        raise NotImplementedError

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples as one batch: [N, 2, W, W, W] and [N, W, W, W]."""
        images, labels = zip(*(self.sample(int(index)) for index in indices), strict=True)
        return prepared((torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))))

    def __len__(self) -> int:
        return self.count


def prepared(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch, as in files, as the loss takes them."""
    images, labels = parts
    return images.float() / 64 - 1, labels.long()


def write(folder: str | Path, heads: _Heads) -> None:
    """One .hdf5 file for each sample; files that are there are left alone.

    Raises:
        MissingExtra: h5py is not installed.
    """
    for number in range(len(heads)):
        images, labels = heads.sample(number)
        write_sample(Path(folder) / f"head-{number:08d}.hdf5", {IMAGES: images, LABELS: labels})


class Phantoms(_Heads):
    """Heads of ellipsoids: a skull, white matter, and three kinds of grey matter of one brightness.

    Args:
        first: Number of the first one; other numbers are other heads.
    """

    def __init__(self, count: int, width: int, *, first: int = 0, seed: int = 0) -> None:
        self.count, self.width, self.first, self.seed = count, width, first, seed

    def sample(self, number: int) -> tuple[Bytes, Bytes]:
        """See `_Heads.sample`."""
        random = _stream(self.seed, self.first + number)
        place = (np.indices((self.width,) * 3) + 0.5) * (2 / self.width) - 1
        place = place - random.uniform(-0.08, 0.08, (3, 1, 1, 1))
        size = random.uniform(0.78, 0.92, 3)
        head = _radius(place, (0, 0, 0), size)
        brain = head < 0.88
        labels = np.where(brain & (head > 0.66), 1, 0)
        for side in (-1, 1):
            nucleus = _radius(place, (0, 0, side * 0.2), random.uniform(0.13, 0.19, 3))
            labels[nucleus < 1] = 2
        cerebellum = _radius(place, (-0.42, -0.34, 0), random.uniform(0.24, 0.34, 3))
        labels[brain & (cerebellum < 1)] = 3
        tissue = np.where(labels > 0, 90.0, 140.0)
        outside = np.where(head < 1, 60.0, 8.0)
        noise = random.normal(0, 10, (self.width,) * 3)
        whole = np.where(brain, tissue, outside) + noise
        images = np.stack([whole, np.where(brain, whole, 0)])
        return np.clip(images, 0, 255).astype(np.uint8), labels.astype(np.uint8)


def _radius(place: Float, centre: Sequence[float], size: Any) -> Float:
    """Distance from a centre, in units of an ellipsoid's half axes."""
    steps = [(place[dim] - centre[dim]) / size[dim] for dim in range(3)]
    result: Float = np.sqrt(sum((step**2 for step in steps), start=np.zeros(())))
    return result


class Patches(_Heads):
    """Cubes out of one half of a head: training from the left one, validation from the right.

    The class in the middle of a cube is drawn first, all with the same chance: the nuclei are few.
    That voxel lies in the brain: a cube of air says nothing.

    Args:
        folder: With `ch2.nii.gz`, `ch2bet.nii.gz` and `aal.nii.gz`, on one grid.
        split: "train" or "validation".

    Raises:
        DataError: A file is missing or damaged, the grids differ, or a cube does not fit.
    """

    def __init__(
        self, folder: str | Path, split: Split, count: int, width: int, *, seed: int = 0
    ) -> None:
        files = [Path(folder) / f"{name}.nii.gz" for name in ("ch2", "ch2bet", "aal")]
        head, brain, atlas = (read_nifti(file) for file in files)
        shapes = [volume.voxels.shape for volume in (head, brain, atlas)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 3:
            raise DataError("the grids differ", where=str(folder), why=f"shapes {shapes}")
        half = shapes[0][0] // 2
        if width > min(half, *shapes[0][1:]):
            raise DataError(
                f"cubes of {width} voxels do not fit", where=str(folder), why=f"a half has {half}"
            )
        # The first dimension goes from left to right where the affine says so.
        left = (split == "train") == (atlas.affine[0, 0] >= 0)
        chosen = slice(0, half) if left else slice(-half, None)
        self.images = np.stack([head.voxels[chosen], brain.voxels[chosen]])
        self.labels = classes_of(atlas.voxels[chosen])
        self.count, self.width = count, width
        self.seed, self.kind = seed, 0 if split == "train" else 1 << 32
        inside = (self.labels > 0) | (self.images[1] > 0)
        present = (np.argwhere(inside & (self.labels == c)) for c in range(len(CLASSES)))
        self._places = [places for places in present if len(places)]

    def sample(self, number: int) -> tuple[Bytes, Bytes]:
        """See `_Heads.sample`."""
        random = _stream(self.seed, self.kind + number)
        places = self._places[int(random.integers(len(self._places)))]
        middle = places[int(random.integers(len(places)))]
        most = np.array(self.labels.shape) - self.width
        corner = np.clip(middle - self.width // 2, 0, most)
        inside = tuple(slice(start, start + self.width) for start in corner.tolist())
        return self.images[(slice(None), *inside)], self.labels[inside]


def classes_of(atlas: NDArray[Any]) -> Bytes:
    """The four classes of the atlas' 116 labels."""
    classes = np.where(atlas > 0, 1, 0)
    classes[(atlas >= DEEP[0]) & (atlas <= DEEP[1])] = 2
    classes[(atlas >= CEREBELLUM[0]) & (atlas <= CEREBELLUM[1])] = 3
    return classes.astype(np.uint8)


def source(
    split: Split,
    *,
    width: int,
    count: int,
    volumes: str | Path | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Source:
    """Training or validation samples.

    Args:
        split: Of phantoms other numbers, of the real head the other half.
        volumes: Folder of the real head; None: phantoms.
        directory: Folder with the folders `train` and `validation`, see `slabs_in`; None: made
            here.
        seed: Of phantoms, or of the places of cubes.

    Raises:
        DataError: See `Patches` and `slabs_in`.
        MissingExtra: h5py is not installed.
    """
    if directory is not None:
        return SlabSource(*slabs_in(Path(directory) / split, IMAGES, LABELS), finish=prepared)
    if volumes is not None:
        return Patches(volumes, split, count, width, seed=seed)
    return Phantoms(count, width, first=0 if split == "train" else 1 << 32, seed=seed)


def _stream(seed: int, sample: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, sample]))
