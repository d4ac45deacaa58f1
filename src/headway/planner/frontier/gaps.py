"""Where the frontier may still hold something better than what is known.

Invariant: a corner is the upper end of a box that no known strategy, divided by 1 + epsilon,
dominates; strategies outside of all boxes are not needed. A corner is open as long as lower bounds
do not exclude its box. A partial strategy is dropped only if the bounds of its completions exclude
all open boxes; the error of an epsilon does therefore not grow with the depth of the graph. Source
of the corners: Klamroth, Lacour and Vanderpooten 2015, "On the representation of the search region
in multi-objective optimization"; of the weightings of two neighbours: Aneja and Nair 1979.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.planner.frontier.bounds import Bounds
from headway.planner.frontier.front import reduce
from headway.planner.frontier.rows import Bools, Floats, Ints

_ROUNDING = 1e-9
_TIGHT = 4
_PAIRS = 4_000_000


@dataclass(frozen=True, slots=True)
class Gaps:
    """Open corners, each with the few weightings that bound its box best.

    Attributes:
        corners: (m, d).
        tight: (m, q), numbers of weightings.
        limits: (m, q), weighted costs of the corner, a little raised against rounding.
    """

    corners: Floats
    tight: Ints
    limits: Floats

    def let_pass(self, least: Floats) -> Bools:
        """Which of n partial strategies may have a completion in an open box; least is (n, J)."""
        found = np.zeros(len(least), dtype=np.bool_)
        size = max(1, _PAIRS // max(1, len(self.corners)))
        for start in range(0, len(least), size):
            part = least[start : start + size]
            alive = np.ones((len(part), len(self.corners)), dtype=np.bool_)
            for weighting, limit in zip(self.tight.T, self.limits.T, strict=True):
                alive &= part[:, weighting] < limit
            found[start : start + size] = alive.any(axis=1)
        return found


def corners_of(points: Floats, start: Floats) -> Floats:
    """Corners (m, d) of what no point dominates: x is open if x < a corner in every objective.

    Args:
        points: Rows (n, d) of a front, in lexicographic order.
        start: (d,), corner of the whole region of interest.
    """
    if len(start) == 2:
        first = np.minimum(np.append(points[:, 0], start[0]), start[0])
        second = np.minimum(np.insert(points[:, 1], 0, start[1]), start[1])
        return np.stack([first, second], axis=1)
    return cut(start[None], points)


def cut(corners: Floats, points: Floats) -> Floats:
    """The corners (m, d) of what is below one of these corners and dominated by no point."""
    for point in points:
        hit = (point < corners).all(axis=1)
        if not hit.any():
            continue
        width = corners.shape[1]
        pieces = np.repeat(corners[hit][None], width, axis=0)
        for objective, value in enumerate(point):
            pieces[objective, :, objective] = value
        corners = np.concatenate([corners[~hit], pieces.reshape(-1, width)])
        corners = -reduce(-corners).costs
    return corners


def open_gaps(bounds: Bounds, corners: Floats, used: Ints | None = None) -> Gaps:
    """The corners whose boxes the bounds of whole strategies do not exclude.

    Args:
        bounds: Of whole strategies.
        corners: (m, d).
        used: Weightings to which partial strategies are to be compared; `tight` are places in it.
    """
    costs = corners @ bounds.weights.T
    corners = corners[(bounds.least < costs * (1 + _ROUNDING)).all(axis=1)]
    weights, least = bounds.weights, bounds.least
    if used is not None:
        weights, least = weights[used], least[used]
    costs = (corners @ weights.T) * (1 + _ROUNDING)
    with np.errstate(over="ignore"):  # beside nothing, anything is infinitely much
        slack = costs / np.where(least > 0, least, np.finfo(np.float64).tiny)
    tight = np.argsort(slack, axis=1, kind="stable")[:, :_TIGHT]
    return Gaps(corners, tight, np.take_along_axis(costs, tight, axis=1))


def certified_factor(weights: Floats, least: Floats, corners: Floats) -> float:
    """The least f such that no strategy is below a corner divided by f.

    Args:
        weights: (J, d).
        least: (J,), lower bounds of the weighted costs.
        corners: (m, d), of the strategies that are known.
    """
    if not len(corners):
        return 1.0
    costs = corners @ weights.T
    ratios = np.divide(costs, least, out=np.full_like(costs, np.inf), where=least > 0)
    ratios = np.where(costs <= least * (1 + _ROUNDING), 1.0, ratios)
    return max(1.0, float(ratios.min(axis=1).max()))


def chords(points: Floats, gaps: Gaps) -> Floats:
    """Weightings (n, 2) under which the two known neighbours of an open corner are equal."""
    if points.shape[1] != 2 or len(points) < 2:
        return np.zeros((0, points.shape[1]))
    after = np.searchsorted(points[:, 0], gaps.corners[:, 0])
    inner = np.unique(after[(after > 0) & (after < len(points))])
    rise, fall = (points[inner] - points[inner - 1]).T
    return np.stack([-fall, rise], axis=1)
