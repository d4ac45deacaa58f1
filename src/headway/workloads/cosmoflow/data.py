"""Universes as samples: made when they are asked for, or read from files.

A sample is (log(1 + matter) [4, W, W, W] at redshifts 0, 0.5, 1.5 and 3, parameters [4] scaled to
[-1, 1]), both float32. A file holds one sample as LBANN's reader expects it: `full` [4, W, W, W],
before the logarithm, and `unitPar` [4]. Of files a rank reads its part of each sample only, where a
plan splits samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.data.slabs.slab_source import SlabSource, slabs_in, write_sample
from headway.data.source import Source
from headway.workloads.cosmoflow.matter_field import CELL, PeriodicBox, matter

FULL = "full"
UNIT_PARAMETERS = "unitPar"
KEPT = 512 * 2**20
"""Bytes of universes that a rank keeps in memory; others are made again."""

Float = NDArray[np.float32]
Pair = tuple[Tensor, Tensor]


def prepared(parts: tuple[Tensor, ...]) -> Pair:
    """Matter and parameters of a batch, as in files, as the model takes them."""
    cubes, targets = parts
    return torch.log1p(cubes.float()), targets.float()


class Universes:
    """Universes of `generate.matter`; the first ones are kept in memory.

    Args:
        first: Number of the first one; other numbers are other universes.
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
        self.box, self.order = PeriodicBox(width, cell), order
        self._made: dict[int, tuple[Float, Float]] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> Pair:
        """The samples as one batch: [N, 4, W, W, W] and [N, 4]."""
        cubes, targets = zip(*(self.universe(int(index)) for index in indices), strict=True)
        return prepared((torch.from_numpy(np.stack(cubes)), torch.from_numpy(np.stack(targets))))

    def universe(self, sample: int) -> tuple[Float, Float]:
        """Matter [4, W, W, W] and parameters [4]."""
        made = self._made.get(sample)
        if made is None:
            made = matter(self.seed, self.first + sample, self.box, order=self.order)
            if len(self._made) * made[0].nbytes < KEPT:
                self._made[sample] = made
        return made


class RotatedUniverses:
    """Universes seen from elsewhere: none has a middle or a direction, and all are periodic.

    Each sample is turned, mirrored and shifted at random, anew in each epoch.
    """

    def __init__(self, universes: Universes) -> None:
        self._universes = universes

    def __len__(self) -> int:
        return len(self._universes)

    def read(self, indices: Sequence[int]) -> Pair:
        """The samples as they are."""
        return self._universes.read(indices)

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Pair:
        """The samples, each turned as its seed says."""
        cubes, targets = self._universes.read(indices)
        draws = map(np.random.default_rng, seeds)
        return torch.stack([_rotated(c, d) for c, d in zip(cubes, draws, strict=True)]), targets


def _rotated(cube: Tensor, draw: np.random.Generator) -> Tensor:
    order = (1 + draw.permutation(3)).tolist()
    mirrored = (1 + np.flatnonzero(draw.integers(0, 2, 3))).tolist()
    shifts = draw.integers(0, cube.shape[-1], 3).tolist()
    return cube.permute(0, *order).flip(mirrored).roll(shifts, (1, 2, 3))


def write(folder: str | Path, universes: Universes) -> None:
    """One .hdf5 file for each universe, float32; files that are there are left alone.

    Raises:
        MissingExtra: h5py is not installed.
    """
    for sample in range(len(universes)):
        cube, parameters = universes.universe(sample)
        path = Path(folder) / f"universe-{universes.first + sample:010d}.hdf5"
        write_sample(path, {FULL: cube, UNIT_PARAMETERS: parameters})


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
        split: Validation universes have other numbers, or lie in another folder; those of training
            that are made are `RotatedUniverses`.
        directory: Folder with the folders `train` and `validation`, see `slabs_in`; None: made
            here.
        order: See `generate.matter`.

    Raises:
        DataError: There are no such files.
        MissingExtra: h5py is not installed.
    """
    if directory is not None:
        readers = slabs_in(Path(directory) / split, FULL, UNIT_PARAMETERS)
        return SlabSource(*readers, finish=prepared)
    first = 0 if split == "train" else 1 << 32
    made = Universes(count, width, first=first, seed=seed, order=order)
    return RotatedUniverses(made) if split == "train" else made
