"""A made volume of neuron-like tubes: for demonstrations and tests, where no real one is at hand.

Smooth random paths cross the volume, and each voxel belongs to the nearest one. Where two meet
there is a dark membrane, which belongs to neither; insides are bright, with blobs like organelles,
and noise lies over all. This is not a model of tissue: a network that segments it well has shown
that it works, not that it is good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree

from headway.floodfill.network import Triple

_INSIDE, _MEMBRANE, _ORGANELLE = 165.0, 70.0, 115.0
_NOISE = 9.0
# Of the random directions along a path, in voxels: shorter ones fold upon themselves.
_BEND = 14.0


@dataclass(frozen=True)
class TubeVolume:
    """A volume and its truth.

    Attributes:
        image: [z, y, x] grey values.
        labels: [z, y, x] ids of the bodies from 1 on; 0 on membranes.
    """

    image: NDArray[np.uint8]
    labels: NDArray[np.int32]


def make_tubes(shape: Triple, *, seed: int = 0, radius: float = 8.0) -> TubeVolume:
    """The volume of a seed.

    Args:
        shape: Its size.
        radius: About that of a tube, in voxels; decides how many there are.
    """
    rng = np.random.default_rng(seed)
    nearest = _nearest_path(shape, _paths(shape, radius, rng))
    edges = np.zeros(shape, dtype=bool)
    for dim in range(3):
        here, there = (np.moveaxis(array, dim, 0) for array in (nearest, edges))
        there[:-1] |= here[:-1] != here[1:]
        there[1:] |= here[:-1] != here[1:]
    blobs = ndimage.gaussian_filter(rng.standard_normal(shape, dtype=np.float32), 2.5)
    image = np.where(blobs > 2 * blobs.std(), np.float32(_ORGANELLE), np.float32(_INSIDE))
    image[edges] = _MEMBRANE
    image = ndimage.gaussian_filter(image, 0.7)
    image += rng.normal(0.0, _NOISE, shape).astype(np.float32)
    # Not the number of the path: where one crosses another, what is left of it are two bodies.
    labels, _ = ndimage.label(~edges)
    return TubeVolume(np.clip(np.rint(image), 0, 255).astype(np.uint8), labels.astype(np.int32))


def _paths(shape: Triple, radius: float, rng: np.random.Generator) -> list[NDArray[np.float64]]:
    """Points [n, 3] of each path, a voxel apart; they begin at random places and end outside."""
    length = max(shape)
    count = max(2, round(float(np.prod(shape)) / (np.pi * radius**2 * length)))
    paths = []
    for start in rng.uniform(0, shape, (count, 3)):
        bends = ndimage.gaussian_filter1d(rng.standard_normal((2 * length, 3)), _BEND, axis=0)
        # The drift keeps a path from curling up; both halves leave the start in opposite senses.
        steps = bends / bends.std() * 0.6 + _direction(rng)
        steps /= np.linalg.norm(steps, axis=1, keepdims=True)
        points = np.cumsum(steps, axis=0)
        points += start - points[length]
        inside = np.all((points > -radius) & (points < np.add(shape, radius)), axis=1)
        paths.append(points[np.flatnonzero(inside)])
    return paths


def _direction(rng: np.random.Generator) -> NDArray[np.float64]:
    vector = rng.standard_normal(3)
    return np.asarray(vector / np.linalg.norm(vector))


def _nearest_path(shape: Triple, paths: list[NDArray[np.float64]]) -> NDArray[np.int32]:
    """The number of the nearest path, from 1 on, for each voxel."""
    owners = np.repeat(np.arange(1, len(paths) + 1, dtype=np.int32), [len(p) for p in paths])
    tree = cKDTree(np.concatenate(paths))
    labels = np.empty(shape, dtype=np.int32)
    plane = np.indices(shape[1:]).reshape(2, -1).T
    for z in range(shape[0]):
        _, nearest = tree.query(np.insert(plane, 0, z, axis=1))
        labels[z] = owners[nearest].reshape(shape[1:])
    return labels
