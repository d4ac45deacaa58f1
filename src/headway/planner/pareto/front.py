"""Pareto fronts and their algebra: reduction, union, product, and powers of blocks.
A batch of R sets of cost vectors is one numpy array (d, R, n): d objectives, padded with infinity;
a vector with an infinite cost is forbidden. A reduced front is in lexicographic order, and of equal
vectors the first one stays.
`Front` holds one front with the rows that each of its vectors was made from, so that a strategy can
be recovered.

A block is a matrix of fronts, one for each choice at its entry and at its exit. Its power is the
matrix of the unrolled repetition, by squaring in the semiring of (union, product) of fronts.

Sources: Cai et al. 2022 (TensorOpt), section on the frontier algebra, and FT-LDP; reduction by
    sorting and sweeping
as in Kung, Luccio and Preparata 1975, "On finding the maxima of a set of vectors".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    alive = np.isfinite(costs.sum(axis=0))
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
    wanted = np.linspace(0, 1, most)[None] + 2 * cell
    places_of = np.searchsorted((way + 2 * cell).ravel(), wanted.ravel()).reshape(wanted.shape)
    kept = np.zeros_like(valid)
    ends = valid.sum(axis=1, keepdims=True) - 1
    kept[cell, np.clip(places_of - cell * picks.shape[1], 0, np.maximum(ends, 0))] = True
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
    with np.errstate(invalid="ignore"):
        lows = first.argmin(axis=1)[:, None], second.argmin(axis=1)[:, None]
        rise = first[rows, lows[1]] - first[rows, lows[0]]
        fall = second[rows, lows[0]] - second[rows, lows[1]]
    usable = np.isfinite(rise) & np.isfinite(fall) & (rise > 0) & (fall > 0)
    slope = np.divide(fall, rise, out=np.ones_like(rise), where=usable)
    for weight in _PIVOT_WEIGHTS:
        pivot = (first * (weight * slope) + second).argmin(axis=1)[:, None]
        was_alive = alive[rows, pivot]
        alive &= (first < first[rows, pivot]) | (second < second[rows, pivot])
        alive[rows, pivot] = was_alive


def _sweep_two(costs: Floats, picks: Ints) -> tuple[Floats, Ints]:
    """Sort by the first objective; keep what has less of the second than all before it."""
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
    order = np.lexsort((*values[::-1], sets))
    keep = _undominated(_ranks(values[:, order], sets[order], picks.shape[0]))
    order = order[keep]
    counts = np.bincount(sets[order], minlength=picks.shape[0])
    within = np.arange(len(order)) - (np.cumsum(counts) - counts)[sets[order]]
    found = np.full((picks.shape[0], max(1, int(counts.max(initial=0)))), -1)
    found[sets[order], within] = index[order]
    return take(costs, found), found


def _ranks(values: Floats, sets: Ints, number: int) -> Ints:
    """Values without the first objective as whole numbers, such that sets cannot be compared.

    A later set has higher ranks in the second objective and lower ones in the third.
    """
    ranks = np.stack([np.unique(row, return_inverse=True)[1] for row in values[1:]])
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
        alive_within = ~np.tril(before, -1).any(axis=1)
        kept.append(start + alive[alive_within])
        archive = _with(archive, block[:, alive_within])
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)


def _beaten(block: Ints, archive: Ints) -> Bools:
    if archive.shape[1] == 0:
        return np.zeros(block.shape[1], dtype=np.bool_)
    if len(archive) == 2:  # a staircase: falling second row
        place = np.searchsorted(archive[0], block[0], side="right") - 1
        beaten: Bools = (place >= 0) & (archive[1][np.maximum(place, 0)] <= block[1])
        return beaten
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


# The frontier: cost vectors of which none is worse than another in every objective.


@dataclass(frozen=True, slots=True)
class Front:
    """A Pareto front.

    Attributes:
        costs: (K, d), one row per strategy, one column per objective; lower is better.
        origins: (K, m), for each row where it came from: after `reduce_front` the number of the
            given row; after `union` the operand (0 or 1) and its row; after `product` a row of
            each.
    """

    costs: Floats
    origins: Ints

    def __len__(self) -> int:
        return len(self.costs)

    def union(self, other: Front) -> Front:
        """What is best of both; of equal rows the one of `self` stays."""
        front = reduce_front(np.concatenate([self.costs, other.costs]))
        row = front.origins[:, 0]
        second = row >= len(self)
        sources = np.stack([second.astype(np.int64), row - second * len(self)], axis=1)
        return Front(front.costs, sources)

    def product(self, other: Front) -> Front:
        """Sums of a row of each: two independent parts of one strategy."""
        sums = self.costs[:, None, :] + other.costs[None, :, :]
        front = reduce_front(sums.reshape(-1, self.costs.shape[1]))
        pairs = np.stack(np.divmod(front.origins[:, 0], max(1, len(other))), axis=1)
        return Front(front.costs, pairs)

    def thin(self, epsilon: float) -> Front:
        """Fewer rows, such that each row of `self` is within 1 + epsilon of a kept one.

        That is: for each row there is a kept one that costs at most (1 + epsilon) times as much
        in every objective. Two objectives: the fewest rows possible. More: one row per box of a
        logarithmic grid (Papadimitriou and Yannakakis 2000).

        Raises:
            ValueError: `epsilon` is negative.
        """
        if epsilon < 0:
            raise ValueError(f"epsilon is {epsilon}, must not be negative")
        if epsilon == 0 or len(self) < 2:
            return self
        two = self.costs.shape[1] == 2
        kept = _cover(self.costs, epsilon) if two else _boxes(self.costs, epsilon)
        return Front(self.costs[kept], self.origins[kept])


def reduce_front(costs: Floats) -> Front:
    """The front of some cost vectors (n, d); vectors with an infinite cost are forbidden."""
    if costs.shape[1] == 0:
        raise ValueError("a front needs at least one objective")
    if len(costs) == 0:
        return Front(costs, np.zeros((0, 1), dtype=np.int64))
    _, picks = reduce_rows(np.ascontiguousarray(costs.T)[:, None, :])
    rows = picks[0][picks[0] >= 0]
    return Front(costs[rows], rows[:, None])


def _cover(costs: Floats, epsilon: float) -> list[int]:
    """Greedy from the least first objective: the farthest row that still covers the first open."""
    kept: list[int] = []
    first, second = costs.T
    start = 0
    while start < len(costs):
        last = int(np.searchsorted(first, first[start] * (1 + epsilon), side="right")) - 1
        last = max(last, start)
        kept.append(last)
        covered = second[last] <= (1 + epsilon) * second
        open_rows = np.flatnonzero(~covered[last + 1 :])
        start = last + 1 + int(open_rows[0]) if len(open_rows) else len(costs)
    return kept


def _boxes(costs: Floats, epsilon: float) -> Ints:
    with np.errstate(divide="ignore"):
        boxes = np.floor(np.log(costs) / np.log1p(epsilon))
    _, kept = np.unique(boxes, axis=0, return_index=True)
    return np.sort(kept)


# Chains: the linear dynamic programme, and repeated blocks by powers.


_PRODUCT_CANDIDATES = 2_000_000


@dataclass(frozen=True, slots=True)
class FrontBlock:
    """A matrix of fronts.

    Attributes:
        costs: (d, C_in, C_out, K), padded with infinity.
        halves: The two blocks that it was made from; none if it was given.
        picks: (C_in, C_out, K), places in (choice between, row of the first, row of the second);
            none if it was given.
        factor: No strategy is better in all objectives by more than this factor.
    """

    costs: Floats
    halves: tuple[FrontBlock, FrontBlock] | None = None
    picks: Ints | None = None
    factor: float = 1.0

    def front(self, entry: int, exit_: int) -> Front:
        """Of one pair of choices; origins are rows of the cell."""
        return reduce_front(self.costs[:, entry, exit_].T)

    def choices(self, entry: int, exit_: int, row: int) -> list[int]:
        """The choices at all borders between the given blocks, both ends included."""
        return [choice for choice, _ in self.steps(entry, exit_, row)] + [exit_]

    def steps(self, entry: int, exit_: int, row: int) -> list[tuple[int, int]]:
        """Of every given block on the way its entry choice and the row of its cell."""
        if self.halves is None or self.picks is None:
            return [(entry, row)]
        place = int(self.picks[entry, exit_, row])
        first, second = self.halves
        shape = (first.costs.shape[2], first.costs.shape[3], second.costs.shape[3])
        between, one, two = (int(part) for part in np.unravel_index(place, shape))
        return [*first.steps(entry, between, one), *second.steps(between, exit_, two)]


def block_of(fronts: Floats) -> FrontBlock:
    """A block from candidates (C_in, C_out, n, d); each cell is reduced to its front.

    Raises:
        ValueError: Not four axes.
    """
    if fronts.ndim != 4:
        raise ValueError(f"a block has 4 axes (in, out, rows, objectives), not {fronts.shape}")
    entries, exits = fronts.shape[:2]
    costs = np.moveaxis(fronts, 3, 0).reshape(fronts.shape[3], entries * exits, -1)
    reduced, _ = reduce_rows(np.ascontiguousarray(costs))
    return FrontBlock(reduced.reshape(len(costs), entries, exits, -1))


def product(first: FrontBlock, second: FrontBlock, rows: int | None = None) -> FrontBlock:
    """One after the other: the fronts over the choice between them.

    Args:
        rows: Most rows of a cell; more are thinned, evenly by ratio, which raises `factor`.

    Raises:
        ValueError: The numbers of choices between them differ.
    """
    width, entries, between, _ = first.costs.shape
    exits = second.costs.shape[2]
    if between != second.costs.shape[1]:
        raise ValueError(f"{between} choices at an exit, {second.costs.shape[1]} at the entry")
    right = second.costs.transpose(0, 2, 1, 3)[:, None, :, :, None, :]
    size = max(
        1, _PRODUCT_CANDIDATES // (exits * between * first.costs.shape[3] * second.costs.shape[3])
    )
    parts = []
    factor = 1.0
    for start in range(0, entries, size):
        left = first.costs[:, start : start + size, None, :, :, None]
        sums = (left + right).reshape(width, -1, between * left.shape[4] * right.shape[5])
        whole, picks = reduce_rows(sums)
        if rows is not None and picks.shape[1] > rows:
            thinned, picks = spread(whole, picks, rows)
            factor = max(factor, covering_factor(whole, thinned))
            whole = thinned
        parts.append((whole, picks))
    costs, picks = concatenate_fronts([part for part, _ in parts], [part for _, part in parts])
    return FrontBlock(
        costs.reshape(width, entries, exits, -1),
        (first, second),
        picks.reshape(entries, exits, -1),
        factor * max(first.factor, second.factor),
    )


def repeat(block: FrontBlock, times: int, rows: int | None = None) -> FrontBlock:
    """The block so many times in a row, by about log2(times) squarings.

    Args:
        block: As many choices at the entry as at the exit.
        times: At least 1.
        rows: As in `product`.

    Raises:
        ValueError: `times` is less than 1.
    """
    if times < 1:
        raise ValueError(f"a block is repeated {times} times, must be at least once")
    power, found = block, None
    while True:
        if times % 2:
            found = power if found is None else product(found, power, rows)
        times //= 2
        if not times:
            assert found is not None
            return found
        power = product(power, power, rows)


def chain(blocks: Sequence[FrontBlock], rows: int | None = None) -> FrontBlock:
    """Different blocks in a row, from the first one on.

    With one choice at the entry of the first block this is FT-LDP: a vector of fronts that goes
    along the chain. `rows` as in `product`.
    """
    found = blocks[0]
    for block in blocks[1:]:
        found = product(found, block, rows)
    return found


def covering_factor(whole: Floats, kept: Floats) -> float:
    """The least f such that each row of each front (d, R, K) costs a kept row divided by f.

    An upper bound: only the nearest kept rows before and behind are looked at, which for two
    objectives are the best ones.
    """
    factor = 1.0
    for cell in range(whole.shape[1]):
        rows = whole[:, cell, np.isfinite(whole[0, cell])]
        some = kept[:, cell, np.isfinite(kept[0, cell])]
        if not rows.size:
            continue
        behind = np.searchsorted(some[0], rows[0])
        near = [np.clip(place, 0, some.shape[1] - 1) for place in (behind - 1, behind)]
        ratios = np.minimum(*(_ratio(some[:, place], rows) for place in near))
        factor = max(factor, float(ratios.max()))
    return factor


def _ratio(kept: Floats, rows: Floats) -> Floats:
    ratio = np.divide(kept, rows, out=np.where(kept > 0, np.inf, 1.0), where=rows > 0)
    worst: Floats = ratio.max(axis=0)
    return worst
