"""Universes as samples: made when they are asked for, or read from HDF5 files.

A sample is (log(1 + matter) [4, W, W, W] at redshifts 0, 0.5, 1.5 and 3, parameters [4] scaled to
[-1, 1]), both float32. A file holds one sample as LBANN's reader expects it: `full` [4, W, W, W],
before the logarithm, and `unitPar` [4]. Either source reads parts of a sample, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.data.source import Source
from headway.errors import DataError
from headway.workloads.cosmoflow.generate import CELL, Box, matter

FULL = "full"
UNIT_PARAMETERS = "unitPar"
KEPT = 512 * 2**20
"""Bytes of universes that a rank keeps in memory; others are made again."""
Ranges = Sequence[tuple[int, int]]
"""First and last plus one along depth, height and width."""

Float = NDArray[np.float32]


class _Samples:
    """What both sources share: parts of samples, and batches of whole ones."""

    def part(self, sample: int, ranges: Ranges | None) -> tuple[Float, Float]:
        """Matter within ranges, and the parameters."""
        raise NotImplementedError

    def read_part(self, sample: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
        """A part of one sample, log(1 + matter) [4, d, h, w], and its parameters [4]."""
        found, parameters = self.part(sample, ranges)
        return torch.from_numpy(np.log1p(found)), torch.from_numpy(parameters.copy())

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples as one batch: [N, 4, W, W, W] and [N, 4]."""
        cubes, targets = zip(*(self.part(int(index), None) for index in indices), strict=True)
        return (
            torch.from_numpy(np.log1p(np.stack(cubes))),
            torch.from_numpy(np.stack(targets)),
        )


class Universes(_Samples):
    """Universes of `generate.matter`; the first ones are kept in memory.

    Args:
        count: How many.
        width: Cells along each side.
        first: Number of the first one; other numbers are other universes.
        seed: Of all of them.
        cell: Mpc/h.
        order: See `generate.matter`.
    """

    def __init__(
        self,
        count: int,
        width: int,
        *,
        first: int = 0,
        seed: int = 0,
        cell: float = CELL,
        order: Literal[1, 2] = 1,
    ) -> None:
        self.count, self.first, self.seed = count, first, seed
        self.box, self.order = Box(width, cell), order
        self._made: dict[int, tuple[Float, Float]] = {}

    def __len__(self) -> int:
        return self.count

    def part(self, sample: int, ranges: Ranges | None) -> tuple[Float, Float]:
        """See `_Samples.part`; the whole universe is made, whatever the ranges."""
        made = self._made.get(sample)
        if made is None:
            made = matter(self.seed, self.first + sample, self.box, order=self.order)
            if len(self._made) * made[0].nbytes < KEPT:
                self._made[sample] = made
        cube, parameters = made
        return (cube if ranges is None else cube[_slices(ranges)]), parameters


class Files(_Samples):
    """The .hdf5 files of a folder in sorted order, one sample each.

    Args:
        folder: Where they are.

    Raises:
        DataError: There are none, or h5py is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        _h5py()
        self.paths = sorted(Path(folder).glob("*.hdf5"))
        if not self.paths:
            raise DataError(
                "no .hdf5 files",
                where=str(folder),
                fix="write samples with headway.workloads.cosmoflow.data:write",
            )

    def __len__(self) -> int:
        return len(self.paths)

    def part(self, sample: int, ranges: Ranges | None) -> tuple[Float, Float]:
        """See `_Samples.part`; of `full` nothing but the ranges is read.

        Raises:
            DataError: The file is damaged, or no sample.
        """
        path = self.paths[sample]
        try:
            with _h5py().File(path, "r") as file:
                cube = file[FULL][... if ranges is None else _slices(ranges)]
                return np.asarray(cube, np.float32), np.asarray(file[UNIT_PARAMETERS], np.float32)
        except (OSError, KeyError) as error:
            raise DataError(
                "not a sample of CosmoFlow",
                where=str(path),
                why=str(error).strip("'\""),
                fix=f"a sample has the data sets {FULL} [4, W, W, W] and {UNIT_PARAMETERS} [4]",
            ) from error


def write(folder: str | Path, universes: Universes) -> None:
    """One .hdf5 file for each universe, float32; files that are there are left alone.

    Raises:
        DataError: h5py is not installed.
    """
    h5py, folder = _h5py(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for sample in range(len(universes)):
        path = folder / f"universe-{universes.first + sample:08d}.hdf5"
        if path.exists():
            continue
        cube, parameters = universes.part(sample, None)
        aside = path.with_suffix(".part")
        with h5py.File(aside, "w") as file:
            file.create_dataset(FULL, data=cube)
            file.create_dataset(UNIT_PARAMETERS, data=parameters)
        aside.replace(path)


def source(
    split: Literal["train", "validation"],
    *,
    width: int,
    count: int,
    directory: str | Path | None = None,
    seed: int = 0,
    order: Literal[1, 2] = 1,
) -> Source:
    """Training or validation samples.

    Args:
        split: Validation universes have other numbers, or lie in another folder.
        width: Cells along each side.
        count: Universes that are made.
        directory: Folder with the folders `train` and `validation` of files; None: made here.
        seed: Of what is made.
        order: See `generate.matter`.

    Raises:
        DataError: There are no such files.
    """
    if directory is not None:
        return Files(Path(directory) / split)
    first = 0 if split == "train" else 1 << 32
    return Universes(count, width, first=first, seed=seed, order=order)


def _slices(ranges: Ranges) -> tuple[slice, ...]:
    return (slice(None), *(slice(start, stop) for start, stop in ranges))


def _h5py() -> Any:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise DataError(
            "HDF5 files cannot be read",
            why="h5py is not installed",
            fix="pip install headway[hdf5]",
        ) from error
    return h5py
