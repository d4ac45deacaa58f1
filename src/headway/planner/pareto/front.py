"""Pareto fronts, and batches of them: what no other vector equals or beats in every objective.

A batch of R sets of cost vectors is one numpy array (d, R, n): d objectives, padded with infinity;
a vector with an infinite cost is forbidden. A reduced front is in lexicographic order, and of equal
vectors the first one stays.

Sources: Cai et al. 2022 (TensorOpt), section on the frontier algebra; reduction by sorting and
sweeping as in Kung, Luccio and Preparata 1975, "On finding the maxima of a set of vectors".
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

_PIVOT_FROM = 24
_PIVOT_WEIGHTS = (0.25, 1.0, 4.0)
_BLOCK = 128


def reduce_rows(costs: Floats) -> tuple[Floats, Ints]:
    """The front of each set.

    Args:
        costs: (d, R, n).

    Returns:
        The fronts (d, R, K), padded with infinity, and for each of their rows its place among
        the n, (R, K), padded with -1. K is the size of the largest front, at least 1.
    """
    if costs.shape[0] == 1:
        best = costs[0].argmin(axis=1)[:, None]
        least = np.take_along_axis(costs[0], best, axis=1)
        return least[None], np.where(np.isfinite(least), best, -1)
    # One sum tests all objectives: infinities have the same sign, so none cancels.
    alive = np.isfinite(costs.sum(axis=0))
    # Worth its three passes for long rows only; it drops most of them before they are sorted.
    if costs.shape[0] == 2 and costs.shape[2] >= _PIVOT_FROM:
        _drop_behind_pivots(costs, alive)
    picks = kept_positions(alive)
    if costs.shape[0] == 2:
        return _sweep_two(costs, picks)
    return _sweep_many(costs, picks)


def kept_positions(mask: Bools) -> Ints:
    """Of each row of a mask (R, n) the places of what is true, (R, K), padded with -1."""
    sets, width = mask.shape
    flat = np.flatnonzero(mask)
    row = flat // width
    counts = np.bincount(row, minlength=sets)
    within = np.arange(len(flat)) - (np.cumsum(counts) - counts)[row]
    found = np.full((sets, max(1, int(counts.max(initial=0)))), -1)
    found[row, within] = flat - row * width
    return found


def take(costs: Floats, picks: Ints) -> Floats:
    """The picked vectors (d, R, K) of (d, R, n); where the pick is -1, infinity."""
    chosen = np.take_along_axis(costs, np.maximum(picks, 0)[None], axis=2)
    chosen[:, picks < 0] = np.inf
    return chosen


def spread(costs: Floats, picks: Ints, most: int) -> tuple[Floats, Ints]:
    """At most so many rows of each front, evenly spaced by ratio of costs, both ends among them."""
    if picks.shape[1] <= most:
        return costs, picks
    valid = picks >= 0
    logs = np.log(np.maximum(np.where(valid, costs, 1.0), np.finfo(np.float64).tiny))
    steps = np.abs(np.diff(logs, axis=2)).max(axis=0) * valid[:, 1:]
    way = np.concatenate([np.zeros((len(picks), 1)), steps.cumsum(axis=1)], axis=1)
    way /= np.maximum(way[:, -1:], np.finfo(np.float64).tiny)
    cell = np.arange(len(picks))[:, None]
    # The ways of cell c are moved to [2 c, 2 c + 1], so that one search serves all cells.
    wanted = np.linspace(0, 1, most)[None] + 2 * cell
    places_of = np.searchsorted((way + 2 * cell).ravel(), wanted.ravel()).reshape(wanted.shape)
    kept = np.zeros_like(valid)
    ends = valid.sum(axis=1, keepdims=True) - 1
    kept[cell, np.clip(places_of - cell * picks.shape[1], 0, np.maximum(ends, 0))] = True
    # Fronts that are short enough already keep all of their rows.
    chosen = kept_positions(np.where(ends < most, valid, kept & valid))
    return take(costs, chosen), np.take_along_axis(pad_fronts(picks), chosen, axis=1)


def concatenate_fronts(costs: list[Floats], picks: list[Ints]) -> tuple[Floats, Ints]:
    """Fronts of several batches as one batch."""
    if len(costs) == 1:
        return costs[0], picks[0]
    width = max(part.shape[1] for part in picks)
    sets = sum(part.shape[0] for part in picks)
    whole = np.full((len(costs[0]), sets, width), np.inf)
    places_of = np.full((sets, width), -1)
    start = 0
    for cost, pick in zip(costs, picks, strict=True):
        stop, used = start + pick.shape[0], pick.shape[1]
        whole[:, start:stop, :used] = cost
        places_of[start:stop, :used] = pick
        start = stop
    return whole, places_of


def _drop_behind_pivots(costs: Floats, alive: Bools) -> None:
    """A few vectors of the lower hull dominate most of the rest; clears these in `alive`."""
    first, second = costs
    rows = np.arange(alive.shape[0])[:, None]
    # In a set without a finite vector the differences are inf - inf; it is not usable below.
    with np.errstate(invalid="ignore"):
        lows = first.argmin(axis=1)[:, None], second.argmin(axis=1)[:, None]
        rise = first[rows, lows[1]] - first[rows, lows[0]]
        fall = second[rows, lows[0]] - second[rows, lows[1]]
    usable = np.isfinite(rise) & np.isfinite(fall) & (rise > 0) & (fall > 0)
    slope = np.divide(fall, rise, out=np.ones_like(rise), where=usable)
    for weight in _PIVOT_WEIGHTS:
        pivot = (first * (weight * slope) + second).argmin(axis=1)[:, None]
        # The comparison below would clear the pivot itself; of equal vectors argmin takes the
        # first, the one that must stay.
        was_alive = alive[rows, pivot]
        alive &= (first < first[rows, pivot]) | (second < second[rows, pivot])
        alive[rows, pivot] = was_alive


def _sweep_two(costs: Floats, picks: Ints) -> tuple[Floats, Ints]:
    # Sorted by the first objective; what has less of the second than all before it is kept.
    order = np.argsort(take(costs[:1], picks)[0], axis=1, kind="stable")
    picks = np.take_along_axis(picks, order, axis=1)
    second = take(costs[1:], picks)[0]
    keep = np.isfinite(second)
    keep[:, 1:] &= second[:, 1:] < np.minimum.accumulate(second, axis=1)[:, :-1]
    picks = np.take_along_axis(pad_fronts(picks), kept_positions(keep), axis=1)
    chosen = take(costs, picks)
    tied = (chosen[0, :, :-1] == chosen[0, :, 1:]) & (picks[:, 1:] >= 0)
    if tied.any():  # equal in the first objective: only the last one has the least of the second
        keep = picks >= 0
        keep[:, :-1] &= ~tied
        picks = np.take_along_axis(pad_fronts(picks), kept_positions(keep), axis=1)
        chosen = take(costs, picks)
    return chosen, picks


def pad_fronts(picks: Ints) -> Ints:
    """With one column of -1 behind, so that the place -1 picks -1."""
    return np.pad(picks, ((0, 0), (0, 1)), constant_values=-1)


def _sweep_many(costs: Floats, picks: Ints) -> tuple[Floats, Ints]:
    """Three objectives and more: all sets in one sweep, made incomparable by their ranks."""
    sets, place = np.nonzero(picks >= 0)
    index = picks[sets, place]
    values = costs[:, sets, index]
    # The last key of lexsort counts most: by set, and lexicographically within it.
    order = np.lexsort((*values[::-1], sets))
    keep = _undominated(_ranks(values[:, order], sets[order], picks.shape[0]))
    order = order[keep]
    counts = np.bincount(sets[order], minlength=picks.shape[0])
    within = np.arange(len(order)) - (np.cumsum(counts) - counts)[sets[order]]
    found = np.full((picks.shape[0], max(1, int(counts.max(initial=0)))), -1)
    found[sets[order], within] = index[order]
    return take(costs, found), found


def _ranks(values: Floats, sets: Ints, number: int) -> Ints:
    """Values without the first objective as whole numbers, such that sets cannot be compared."""
    ranks = np.stack([np.unique(row, return_inverse=True)[1] for row in values[1:]])
    # A later set has higher ranks in the second objective and lower ones in the third.
    ranks[0] += sets * len(sets)
    ranks[1] += (number - 1 - sets) * len(sets)
    return ranks


def _undominated(ranks: Ints) -> Ints:
    """Places of columns that no earlier column equals or beats in every row; columns are sorted."""
    kept: list[Ints] = []
    archive = ranks[:, :0]
    for start in range(0, ranks.shape[1], _BLOCK):
        block = ranks[:, start : start + _BLOCK]
        alive = np.flatnonzero(~_beaten(block, archive))
        block = block[:, alive]
        before = np.ones((len(alive), len(alive)), dtype=np.bool_)
        for row in block:
            before &= row[:, None] >= row[None, :]
        # Columns are in lexicographic order, so only an earlier one (below the diagonal) can
        # dominate.
        alive_within = ~np.tril(before, -1).any(axis=1)
        kept.append(start + alive[alive_within])
        archive = _with(archive, block[:, alive_within])
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)


def _beaten(block: Ints, archive: Ints) -> Bools:
    if archive.shape[1] == 0:
        return np.zeros(block.shape[1], dtype=np.bool_)
    if len(archive) == 2:  # a staircase: falling second row
        # The last step at or left of the column has the least second value of all of these.
        place = np.searchsorted(archive[0], block[0], side="right") - 1
        return np.asarray((place >= 0) & (archive[1][np.maximum(place, 0)] <= block[1]))
    worse = np.ones((block.shape[1], archive.shape[1]), dtype=np.bool_)
    for mine, theirs in zip(block, archive, strict=True):
        worse &= mine[:, None] >= theirs[None, :]
    return np.asarray(worse.any(axis=1))


def _with(archive: Ints, more: Ints) -> Ints:
    joined = np.concatenate([archive, more], axis=1)
    if len(joined) > 2:
        return joined
    joined = joined[:, np.lexsort((joined[1], joined[0]))]
    keep = np.ones(joined.shape[1], dtype=np.bool_)
    keep[1:] = joined[1, 1:] < np.minimum.accumulate(joined[1])[:-1]
    return joined[:, keep]


def reduce_front(costs: Floats) -> Ints:
    """The rows of cost vectors (n, d) that form their front; those with an infinite cost are
    forbidden."""
    if costs.shape[1] == 0:
        raise ValueError("a front needs at least one objective")
    if len(costs) == 0:
        return np.zeros(0, dtype=np.int64)
    _, picks = reduce_rows(np.ascontiguousarray(costs.T)[:, None, :])
    rows: Ints = picks[0][picks[0] >= 0]
    return rows
