"""Slices of image, truth and segmentation side by side, with marks where they disagree.

A segment has the colour of the body that it shares most voxels with. Orange lies between two
segments of one body (a split), red between two bodies of one segment (a merge).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt

from headway.report.pictures.canvas import Hue, draw_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Slice = NDArray[Any]
"""[y, x] of one plane."""

SPLIT, MERGE = (243, 156, 40), (214, 39, 40)
LEAST = 25
"""Pixels that a segment and a body share in the plane, at least, for their borders to count."""
BETWEEN = 5
"""Pixels by which ids reach into what has none, when borders are looked for."""
WIDTH = 240
"""Points of a panel."""


def segmentation_picture(planes: Mapping[int, tuple[Slice | None, Slice, Slice]]) -> bytes:
    """A PNG with a row for each plane.

    Args:
        planes: z -> image (grey values, or none), truth and segments.
    """
    with_image = all(image is not None for image, _, _ in planes.values())
    titles = [*(("image",) if with_image else ()), "truth", "segmentation"]
    rows: list[tuple[int, list[Slice]]] = []
    for z, (image, truth, segments) in planes.items():
        panels: list[Slice] = [] if image is None or not with_image else [image]
        rows.append((z, [*panels, coloured(truth), marked(truth, segments)]))

    def paint(figure: Figure, hue: Hue) -> None:
        grid = figure.subplots(len(rows), len(titles), squeeze=False)
        for axes_row, (z, panels) in zip(grid, rows, strict=True):
            for axes, panel, title in zip(axes_row, panels, titles, strict=True):
                axes.imshow(panel, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                axes.set_title(f"{title}, z = {z}", color=hue("ink"), fontsize=10)
                axes.set_axis_off()

    return draw_png((WIDTH * len(titles), (WIDTH + 20) * len(rows)), paint)


def coloured(ids: Slice) -> NDArray[np.uint8]:
    """RGB [y, x, 3]: a colour for each id, the same in every picture; 0 and less are black."""
    wide = np.where(ids > 0, ids, 0).astype(np.uint64)
    # The finaliser of splitmix64: ids that follow each other get unlike colours.
    wide = (wide ^ (wide >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    wide = (wide ^ (wide >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    parts = [(wide >> np.uint64(shift)) & np.uint64(255) for shift in (0, 16, 40)]
    # Not too dark, so that borders and what has no id stand out.
    bright = (64 + np.stack(parts, axis=-1) * 3 // 4).astype(np.uint8)
    bright[ids <= 0] = 0
    return bright


def marked(truth: Slice, segments: Slice) -> NDArray[np.uint8]:
    """RGB [y, x, 3] of the segments, in the colours of their bodies, with splits and merges."""
    found = coloured(_like_bodies(truth, segments))
    splits, merges = disagreements(truth, segments)
    found[splits] = SPLIT
    found[merges] = MERGE
    return found


def _like_bodies(truth: Slice, segments: Slice) -> Slice:
    """Each segment with the id of the body that it shares most voxels with."""
    ids, place, bodies, _, shared = _shared(truth, segments)
    shared[:, bodies <= 0] = 0
    best = np.where(shared.any(axis=1) & (ids > 0), bodies[shared.argmax(axis=1)], 0)
    return np.asarray(best[place])


def _shared(truth: Slice, segments: Slice) -> tuple[Slice, Slice, Slice, Slice, Slice]:
    """Ids of the segments, each pixel's place among them, both of the bodies; the table of pixels
    that each pair shares."""
    ids, place = np.unique(segments, return_inverse=True)
    bodies, body = np.unique(truth, return_inverse=True)
    shared = np.zeros((len(ids), len(bodies)), dtype=np.int64)
    np.add.at(shared, (place.ravel(), body.ravel()), 1)
    return ids, place.reshape(segments.shape), bodies, body.reshape(truth.shape), shared


def _widened(ids: Slice) -> Slice:
    """Ids that reach into what has none, by `BETWEEN` pixels."""
    away, nearest = distance_transform_edt(ids <= 0, return_indices=True)
    return np.where((away <= BETWEEN) & (ids > 0).any(), ids[tuple(nearest)], 0)


def disagreements(truth: Slice, segments: Slice) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Pixels beside a border that only the segments have (splits), and only the truth (merges).

    What has no id between two that have one is divided between them, so that a border may be thick.
    """
    truth, segments = _widened(truth), _widened(segments)
    _, place, _, body, shared = _shared(truth, segments)
    counts = (truth > 0) & (segments > 0) & (shared[place, body] >= LEAST)
    splits, merges = (np.zeros(truth.shape, dtype=bool) for _ in range(2))
    for dim in range(2):
        pairs: list[Sequence[Slice]] = [
            (np.moveaxis(ids, dim, 0)[:-1], np.moveaxis(ids, dim, 0)[1:])
            for ids in (truth, segments, counts)
        ]
        (here, there), (one, other), (near, far) = pairs
        labelled = near & far
        for marks, where in (
            (splits, labelled & (here == there) & (one != other)),
            (merges, labelled & (here != there) & (one == other)),
        ):
            rows = np.moveaxis(marks, dim, 0)
            rows[:-1] |= where
            rows[1:] |= where
    return splits, merges
