"""Chains of fronts by dynamic programming, and their powers: an independent way to a front.
The search eliminates nodes of a graph; the tests check it against this. A block is a matrix of
fronts, one for each choice at its entry and at its exit. Its power is the matrix of the unrolled
repetition, by squaring in the semiring of (union, product) of fronts. Source: Cai et al. 2022
(TensorOpt), section on the frontier algebra, and FT-LDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.planner.pareto.front import (
    Floats,
    Ints,
    concatenate_fronts,
    reduce_front,
    reduce_rows,
    spread,
)

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

    def front(self, entry: int, exit_: int) -> Floats:
        """Of one pair of choices, (K, d)."""
        cell = self.costs[:, entry, exit_].T
        return cell[reduce_front(cell)]

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
