"""The frontier: cost vectors of which none is worse than another in every objective.

Invariant: rows are in lexicographic order and no row is dominated (all objectives at most as much,
one less) by another or equal to another. Each row knows what it was made from, so that a strategy
can be recovered. Source: Cai et al. 2022 (TensorOpt), the operations reduce, union and product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.planner.frontier.rows import Floats, Ints, reduce_rows


@dataclass(frozen=True, slots=True)
class Front:
    """A Pareto front.

    Attributes:
        costs: (K, d), one row per strategy, one column per objective; lower is better.
        origins: (K, m), for each row where it came from: after `reduce` the number of the given
            row; after `union` the operand (0 or 1) and its row; after `product` a row of each.
    """

    costs: Floats
    origins: Ints

    def __len__(self) -> int:
        return len(self.costs)

    def union(self, other: Front) -> Front:
        """What is best of both; of equal rows the one of `self` stays."""
        front = reduce(np.concatenate([self.costs, other.costs]))
        row = front.origins[:, 0]
        second = row >= len(self)
        sources = np.stack([second.astype(np.int64), row - second * len(self)], axis=1)
        return Front(front.costs, sources)

    def product(self, other: Front) -> Front:
        """Sums of a row of each: two independent parts of one strategy."""
        sums = self.costs[:, None, :] + other.costs[None, :, :]
        front = reduce(sums.reshape(-1, self.costs.shape[1]))
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


def reduce(costs: Floats) -> Front:
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
