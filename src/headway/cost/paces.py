"""The pace of each kind of kernel from measured times: seconds = FLOPs / a + bytes / b.

Both terms are at least nothing. Of a kind that was measured with one shape, or computes nothing,
all is streaming. Relative errors count, so that small kernels are as important as large ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.cluster.device import Pace
from headway.cluster.readings import Timed

Point = tuple[float, float, float]
"""FLOPs, bytes, seconds."""


def paces_of(timed: Sequence[Timed], floor: float) -> tuple[dict[str, Pace], str]:
    """By kind; and the misses of all in words.

    Args:
        timed: In any order.
        floor: Seconds of a launch, of which a backward has one for each gradient.
    """
    found: dict[str, Pace] = {}
    misses: list[float] = []
    for kind in dict.fromkeys(one.kind for one in timed):
        same = [one for one in timed if one.kind == kind]
        ahead = _fit([_without(one.forward, floor) for one in same], misses)
        back = _fit([_without(one.backward, 2 * floor) for one in same], misses)
        found[kind] = Pace(
            forward=ahead[0],
            forward_stream=ahead[1],
            backward=back[0],
            backward_stream=back[1],
        )
    if not misses:
        return found, "none"
    return found, f"fit error {sum(misses) / len(misses):.0%} (largest {max(misses):.0%})"


def _without(point: Point, floor: float) -> Point:
    """Without its launch; never less than a fifth of its time."""
    flops, moved, seconds = point
    return flops, moved, max(seconds - floor, 0.2 * seconds)


def _fit(points: Sequence[Point], misses: list[float]) -> tuple[float | None, float | None]:
    """FLOP/s and bytes/s; None where a term is nothing."""
    table = np.array([(flops / s, moved / s) for flops, moved, s in points])
    best: tuple[float, tuple[float, float]] | None = None
    for used in ((0, 1), (0,), (1,)):
        columns = table[:, list(used)]
        if not columns.any(axis=0).all() or len(used) > len(points):
            continue
        inverse = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
        if (inverse <= 0).any():
            continue
        error = float(((columns @ inverse - 1.0) ** 2).sum())
        if best is None or error < best[0] - 1e-12:
            both = [0.0, 0.0]
            for place, value in zip(used, inverse, strict=True):
                both[place] = float(value)
            best = error, (both[0], both[1])
    if best is None:
        return None, None
    misses += np.abs(table @ np.array(best[1]) - 1.0).tolist()
    return tuple(float(f"{1.0 / one:.4g}") if one else None for one in best[1])  # type: ignore[return-value]
