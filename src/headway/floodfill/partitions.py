"""Where training patches begin: every kind of neighbourhood equally often.

Most voxels of a thick neurite see their own body all around, and a network that is trained on them
alone never learns to follow a thin one. So each voxel gets a class, by the part of the box around
it that is of its own body, and patches are drawn class by class (Januszewski et al. 2018, and the
reference implementation, `compute_partitions`). The counts are differences of sums along each axis
(a summed-volume table), so that a box costs the same whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from headway.errors import DataError
from headway.floodfill.network import Triple

THRESHOLDS = (0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Between the 13 classes; class 1 is below the first."""

Classes = NDArray[np.uint8]


def partition_map(bodies: NDArray[Any], radius: Triple, *, min_size: int = 10_000) -> Classes:
    """The class of each voxel; 0 where no patch may begin.

    Args:
        bodies: [z, y, x] ids; 0 is no body.
        radius: The box reaches so far to both sides, 2 radius + 1 voxels. Where it does not lie
            inside of the volume, the voxel has no class.
        min_size: Bodies of fewer voxels have no class.

    Raises:
        DataError: No body is large enough, or no box fits.
    """
    _check_size(bodies.shape, radius)
    ids, numbers = np.unique(bodies, return_inverse=True)
    numbers = numbers.reshape(bodies.shape)
    sizes = np.bincount(numbers.ravel(), minlength=len(ids))
    large = np.flatnonzero((sizes >= min_size) & (ids != 0))
    if not large.size:
        most = int(sizes[ids != 0].max(initial=0))
        raise DataError(
            f"no body has {min_size} voxels",
            why=f"The largest of {int((ids != 0).sum())} bodies has {most}.",
            fix="Lower min_size, or give labels in which each body has one id, and 0 is none.",
        )
    classes = np.zeros(bodies.shape, dtype=np.uint8)
    boxes = ndimage.find_objects(numbers + 1)
    volume = float(np.prod([2 * r + 1 for r in radius]))
    for number in large:
        box = boxes[number]
        own = numbers[box] == number
        fractions = box_counts(own, radius)[own] / volume
        classes[box][own] = 1 + np.searchsorted(THRESHOLDS, fractions, side="right")
    for dim, width in enumerate(radius):
        faces = np.moveaxis(classes, dim, 0)
        faces[:width] = 0
        faces[len(faces) - width :] = 0
    return classes


def box_counts(own: NDArray[np.bool_], radius: Sequence[int]) -> NDArray[np.int32]:
    """How many voxels of the box around each voxel are true; nothing is beyond the faces."""
    counts = own.astype(np.int32)
    for dim, reach in enumerate(radius):
        sums = np.moveaxis(np.cumsum(counts, axis=dim, dtype=np.int32), dim, 0)
        length = len(sums)
        place = np.arange(length)
        until = sums[np.minimum(place + reach, length - 1)]
        before = sums[np.maximum(place - reach - 1, 0)]
        before[place - reach - 1 < 0] = 0
        counts = np.moveaxis(until - before, 0, dim)
    return counts


def _check_size(shape: Sequence[int], radius: Sequence[int]) -> None:
    least = [2 * reach + 1 for reach in radius]
    if any(size < wanted for size, wanted in zip(shape, least, strict=True)):
        raise DataError(
            f"a volume of {_times(shape)} voxels is too small for training",
            why=f"A patch in which the field of view moves has {_times(least)}.",
            fix="Give a larger volume, or a smaller fov and deltas.",
        )


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


@dataclass(frozen=True)
class BalancedPlaces:
    """The voxels of each class that there is, from which places are drawn.

    Attributes:
        voxels: Flat indices of the voxels, an array for each class.
    """

    shape: Triple
    voxels: tuple[NDArray[np.int64], ...]

    @staticmethod
    def of(classes: Classes) -> BalancedPlaces:
        """
        Raises:
            DataError: No voxel has a class.
        """
        found = [np.flatnonzero(classes == c) for c in range(1, len(THRESHOLDS) + 2)]
        voxels = tuple(indices for indices in found if indices.size)
        if not voxels:
            raise DataError(
                "no training patch fits around any voxel of a body",
                why="All voxels of bodies that are large enough lie near a face of the volume.",
                fix="Give a larger volume, or a smaller fov and deltas.",
            )
        z, y, x = classes.shape
        return BalancedPlaces((z, y, x), voxels)

    def draw(self, seed: int, slot: int, patch: int) -> Triple:
        """The middle of a patch of a slot: in as many patches as there are classes, each once."""
        turn, place = divmod(patch, len(self.voxels))
        order = _random(seed, slot, turn, 0).permutation(len(self.voxels))
        voxels = self.voxels[order[place]]
        index = voxels[_random(seed, slot, patch, 1).integers(voxels.size)]
        z, y, x = np.unravel_index(index, self.shape)
        return int(z), int(y), int(x)


def _random(seed: int, slot: int, number: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, slot, number, purpose])
