"""How well a segmentation agrees with the truth: variation of information, adapted Rand error.

Both are sums over a contingency table: how many voxels each pair of a segment and a body shares.
It is sparse, and is added up chunk by chunk, so that memory is that of a chunk and of the pairs.

Variation of information (Meila 2003), in bits: split = H(segment | body), how many segments a body
is spread over; merge = H(body | segment), how many bodies a segment holds. Adapted Rand error
(Arganda-Carreras et al. 2015): 1 - the harmonic mean of precision, the share of the pairs of voxels
of one segment that are of one body, and recall, the share of the pairs of one body that are of one
segment. Pairs of a voxel with itself do not count, as in scikit-image (which, in 0.26, returns
precision and recall under each other's name).

Counted are voxels that both volumes label: an id of 0 or less is no segment and no body. Bodies of
fewer than `dust` voxels of the volume are left out; they are what proof-reading leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError

DUST = 1000
CHUNK = 1 << 23
"""Voxels that are counted at a time."""

Labels = NDArray[Any]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Contingency:
    """How many voxels each pair of ids shares; every pair stands once.

    Attributes:
        segments: Of each pair; 0 is no segment.
        bodies: Of each pair; 0 is no body.
        counts: Voxels.
    """

    segments: Labels
    bodies: Labels
    counts: Counts

    def without_dust(self, dust: int) -> Contingency:
        """Of bodies with at least so many voxels, and of voxels without a body nothing."""
        sizes, place = _sums(self.bodies, self.counts)
        return self._only((self.bodies != 0) & (sizes[place] >= dust))

    def labelled(self) -> Contingency:
        """Of voxels that have a segment."""
        return self._only(self.segments != 0)

    def _only(self, kept: NDArray[np.bool_]) -> Contingency:
        return Contingency(self.segments[kept], self.bodies[kept], self.counts[kept])


def contingency(parts: Iterable[tuple[Labels, Labels]]) -> Contingency:
    """The table of a volume in parts.

    Args:
        parts: Segments and bodies of the same voxels; see `chunks`.
    """
    tables = [_of_part(segments, bodies) for segments, bodies in parts]
    empty = np.zeros(0, dtype=np.int64)
    if not tables:
        return Contingency(empty, empty, empty)
    segments = np.concatenate([table.segments for table in tables])
    bodies = np.concatenate([table.bodies for table in tables])
    return _added(segments, bodies, np.concatenate([table.counts for table in tables]))


def chunks(segments: Any, truth: Any, voxels: int = CHUNK) -> Iterator[tuple[Labels, Labels]]:
    """Two volumes [z, y, x] plane by plane, so many voxels at a time.

    Args:
        segments: An array, or anything that is sliced like one, as a dataset of HDF5 or Zarr.

    Raises:
        DataError: They have other shapes.
    """
    if tuple(segments.shape) != tuple(truth.shape):
        raise DataError(
            f"the segments have shape {list(segments.shape)}, and the truth {list(truth.shape)}",
            fix="Give two volumes of the same voxels; cut the larger one.",
        )
    planes = max(1, voxels // max(1, int(np.prod(segments.shape[1:]))))
    for first in range(0, segments.shape[0], planes):
        part = slice(first, first + planes)
        yield np.asarray(segments[part]), np.asarray(truth[part])


def _of_part(segments: Labels, bodies: Labels) -> Contingency:
    return _added(_ids(segments), _ids(bodies), None)


def _ids(labels: Labels) -> Labels:
    flat = labels.reshape(-1)
    return np.where(flat > 0, flat, 0) if flat.dtype.kind == "i" else flat


def _added(segments: Labels, bodies: Labels, counts: Counts | None) -> Contingency:
    """Each pair once."""
    rows, row = np.unique(segments, return_inverse=True)
    columns, column = np.unique(bodies, return_inverse=True)
    # A number for each pair; as many as rows times columns fit into 64 bits.
    pairs = row.astype(np.int64) * max(len(columns), 1) + column
    found, place = np.unique(pairs, return_inverse=True)
    totals = np.zeros(len(found), dtype=np.int64)
    np.add.at(totals, place, 1) if counts is None else np.add.at(totals, place, counts)
    row, column = np.divmod(found, max(len(columns), 1))
    return Contingency(rows[row], columns[column], totals)


def _sums(ids: Labels, counts: Counts) -> tuple[Counts, NDArray[np.int64]]:
    """The voxels of each id, and where each entry's id stands among them."""
    found, place = np.unique(ids, return_inverse=True)
    totals = np.zeros(len(found), dtype=np.int64)
    np.add.at(totals, place, counts)
    return totals, place


@dataclass(frozen=True)
class BodyError:
    """A body that is split, or a segment that merges bodies.

    Attributes:
        parts: Segments of the body, or bodies of the segment.
        bits: What it adds to the variation of information.
    """

    id: int
    voxels: int
    parts: int
    bits: float


@dataclass(frozen=True)
class Agreement:
    """What a segmentation reaches.

    Attributes:
        voxels: Of bodies that are no dust.
        coverage: The share of them that has a segment; all other figures are of those.
        bodies: How many there are.
        segments: How many lie in them.
        split: H(segment | body), bits.
        merge: H(body | segment), bits.
        rand_error: 1 - 2 precision recall / (precision + recall).
        worst_splits: Bodies, the worst first.
        worst_merges: Segments, the worst first.
    """

    voxels: int
    coverage: float
    bodies: int
    segments: int
    split: float
    merge: float
    rand_error: float
    precision: float
    recall: float
    worst_splits: tuple[BodyError, ...]
    worst_merges: tuple[BodyError, ...]


def agreement(table: Contingency, *, dust: int = DUST, worst: int = 10) -> Agreement:
    """The figures of a contingency table.

    Args:
        dust: Bodies of fewer voxels are left out.
        worst: How many bodies and segments are named.

    Raises:
        DataError: No voxel has both a segment and a body.
    """
    wanted = table.without_dust(dust)
    found = wanted.labelled()
    total = int(found.counts.sum())
    if not total:
        raise DataError(
            "no voxel has both a segment and a body",
            why=f"{int(wanted.counts.sum())} voxels are of bodies of at least {dust} voxels, "
            f"{int(table.labelled().counts.sum())} have a segment.",
            fix="Give two volumes of the same voxels, or a smaller --dust.",
        )
    of_segments, segment = _sums(found.segments, found.counts)
    of_bodies, body = _sums(found.bodies, found.counts)
    share = found.counts / total
    splits = -share * np.log2(found.counts / of_bodies[body])
    merges = -share * np.log2(found.counts / of_segments[segment])
    both = _pairs(found.counts)
    # Without any pair of voxels nothing is wrong.
    precision, recall = (both / n if n else 1.0 for n in map(_pairs, (of_segments, of_bodies)))
    return Agreement(
        voxels=int(wanted.counts.sum()),
        coverage=total / int(wanted.counts.sum()),
        bodies=len(of_bodies),
        segments=len(of_segments),
        split=float(splits.sum()) + 0.0,  # no -0.0
        merge=float(merges.sum()) + 0.0,
        rand_error=1 - 2 * precision * recall / (precision + recall) if both else 1.0,
        precision=precision,
        recall=recall,
        worst_splits=_worst(found.bodies, body, of_bodies, splits, worst),
        worst_merges=_worst(found.segments, segment, of_segments, merges, worst),
    )


def _pairs(counts: Counts) -> float:
    """Ordered pairs of two voxels of one entry."""
    wide = counts.astype(np.float64)
    return float((wide * (wide - 1)).sum())


def _worst(
    ids: Labels, place: NDArray[np.int64], sizes: Counts, bits: NDArray[np.float64], most: int
) -> tuple[BodyError, ...]:
    names = np.zeros(len(sizes), dtype=ids.dtype)
    names[place] = ids
    totals, parts = np.bincount(place, bits), np.bincount(place)
    order = [n for n in np.argsort(-totals, kind="stable")[:most] if parts[n] > 1]
    return tuple(
        BodyError(int(names[n]), int(sizes[n]), int(parts[n]), float(totals[n])) for n in order
    )
