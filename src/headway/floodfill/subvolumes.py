"""A volume cut into sub-volumes that overlap, and their objects put together again.

Each sub-volume is segmented by itself. In the middle of an overlap, where objects of both have seen
all of their surroundings, an object of one is the same as one of the other if each has at least a
share of the other's voxels; with a share of more than one half an object has one partner at most,
so that an error of one sub-volume does not join two objects of the other. A voxel of an overlap
belongs to the sub-volume from whose border it is further away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import UsageError
from headway.floodfill.network import Triple

Ids = NDArray[Any]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Subvolume:
    """A part of the volume.

    Attributes:
        box: What is segmented.
        owned: What of it the result takes; the parts of all sub-volumes tile the volume.
        sound: Where its objects have seen all of their surroundings: half a field of view away from
            the borders that lie inside the volume.
    """

    box: Box
    owned: Box
    sound: Box

    @property
    def shape(self) -> Triple:
        """Of the box."""
        z, y, x = (part.stop - part.start for part in self.box)
        return z, y, x


def cut_volume(shape: Triple, size: Triple, overlap: Triple, fov: Triple) -> list[Subvolume]:
    """Sub-volumes of at most `size` that overlap by at least `overlap`, in the order of z, y, x.

    Raises:
        UsageError: The overlap is as large as the sub-volumes, or too small to compare objects in.
    """
    for whole, part, common, seen in zip(shape, size, overlap, fov, strict=True):
        if whole <= part:
            continue
        if not 2 * (seen // 2) < common < part or part < seen:
            raise UsageError(
                f"sub-volumes of {part} voxels that overlap by {common}",
                why=f"The field of view is {seen}: an overlap must be more than {2 * (seen // 2)}, "
                "and less than a sub-volume.",
                fix="Change --subvolume or --overlap.",
            )
    dims = [_cut(*sizes) for sizes in zip(shape, size, overlap, fov, strict=True)]
    return [
        Subvolume(*(tuple(part[kind] for part in parts) for kind in range(3)))
        for parts in itertools.product(*dims)
    ]


def _cut(whole: int, part: int, common: int, seen: int) -> list[tuple[slice, slice, slice]]:
    """Box, owned and sound range of each part along one dimension."""
    count = 1 if whole <= part else -(-(whole - common) // (part - common))
    starts = [round(n * (whole - part) / (count - 1)) for n in range(count)] if count > 1 else [0]
    stops = [min(start + part, whole) for start in starts]
    middles = [(a + b) // 2 for a, b in zip(starts[1:], stops[:-1], strict=True)]
    margin = seen // 2
    return [
        (
            slice(start, stop),
            slice(low, high),
            slice(start + margin * (start > 0), stop - margin * (stop < whole)),
        )
        for start, stop, low, high in zip(
            starts, stops, [0, *middles], [*middles, whole], strict=True
        )
    ]


def reconcile(
    parts: Sequence[Subvolume], ids: Callable[[int, Box], Ids], counts: Sequence[int], share: float
) -> list[NDArray[np.uint32]]:
    """The ids of the volume for those of each sub-volume.

    Args:
        ids: The ids of a sub-volume, by its number, in a box of the volume; from 1 on, 0 is none.
        counts: How many objects each sub-volume has.
        share: Of its voxels in the middle of the overlap that an object must share with another.

    Returns:
        For each sub-volume [1 + objects], 0 first; the ids of the volume are consecutive, in the
        order of the sub-volumes and of their objects.
    """
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    roots = np.arange(first[-1] + 1)

    def root(number: int) -> int:
        while roots[number] != number:
            number = roots[number]
        return number

    for a, b in itertools.combinations(range(len(parts)), 2):
        box = _common(parts[a].sound, parts[b].sound)
        if box is None:
            continue
        for one, other in _same(ids(a, box), ids(b, box), share):
            pair = root(int(first[a] + one)), root(int(first[b] + other))
            # The smaller one: the result does not depend on the order of the pairs.
            roots[max(pair)] = min(pair)
    final = np.array([root(number) for number in range(len(roots))])
    numbers = np.unique(final, return_inverse=True)[1].astype(np.uint32)
    return [
        np.concatenate((numbers[:1], numbers[low + 1 : high + 1]))
        for low, high in itertools.pairwise(first)
    ]


def _common(one: Box, other: Box) -> Box | None:
    box = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return box if all(part.start < part.stop for part in box) else None


def _same(one: Ids, other: Ids, share: float) -> Iterator[tuple[int, int]]:
    """Pairs of ids of two volumes that are one object."""
    base = int(other.max(initial=0)) + 1
    pairs, common = np.unique(one.astype(np.int64) * base + other, return_counts=True)
    of_one, of_other = np.bincount(one.ravel()), np.bincount(other.ravel())
    for pair, voxels in zip(pairs, common, strict=True):
        a, b = divmod(int(pair), base)
        if a and b and voxels >= share * of_one[a] and voxels >= share * of_other[b]:
            yield a, b
