"""What rows of units cost, however long: a run of equal units is joined until it repeats itself.

At each price a row of units is the cheapest way through the placements between them: a product of
matrices in min-plus algebra. Where one more unit of the same kind adds the same amounts to every
strategy, whatever enters and leaves, so does each further one, and its placements are chosen alike:
P U = a P implies P U^n = a^n P. Invariant: what a row costs is the sum of the strategies of its
units, which can be named. Source: Cai et al. 2022 (TensorOpt), FT-LDP; Baccelli et al. 1992
(Synchronization and Linearity), 3.7, the cyclicity of min-plus powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import numpy as np

from headway.planner.operators import Floats

_SAME = 1e-12
"""Share by which what a further unit adds may differ, as sums of floats do."""


@dataclass(eq=False)
class Run:
    """Further units behind a chain, of the kind of its last one.

    Attributes:
        step: (2, J, len(PARTS)): what each of them adds.
        picks: (2, J, A, B): the placement in front of it.
    """

    step: Floats
    picks: np.ndarray


Longer = tuple[tuple[Run, int], ...]
"""How many further units the runs on the way have."""


@dataclass(eq=False)
class Chain:
    """A row of units.

    Attributes:
        rows: (2, J, A, B, len(PARTS)): without and with recomputation, by price, by placement at
            both ends.
        last: Kind of the last unit.
        before: The row without it; None: it is alone.
        picks: (2, J, A, B): the placement in front of it.
        run: Units of the same kind that may follow; None: not known, or each adds something else.
        behind: With one more unit, by its kind.
    """

    rows: Floats
    last: int
    before: Chain | None = None
    picks: np.ndarray | None = None
    run: Run | None = None
    behind: dict[int, Chain] = field(default_factory=dict)


class Chains:
    """The rows of one model under one setting.

    Args:
        weights: (2, J, len(PARTS)) prices.
        unit: Gives the rows of a kind of unit.
    """

    def __init__(self, weights: Floats, unit: Callable[[int], Floats]) -> None:
        self.weights = weights
        self._unit = unit
        self._first: dict[int, Chain] = {}
        self._priced: dict[int, Floats] = {}

    def first(self, kind: int) -> Chain:
        """A unit alone."""
        if kind not in self._first:
            self._first[kind] = Chain(self._unit(kind), kind)
        return self._first[kind]

    def of(self, kinds: Sequence[int]) -> tuple[Chain, Longer]:
        """A row of units of these kinds, one or more."""
        chain = self.first(kinds[0])
        runs: Longer = ()
        for number, (kind, alike) in enumerate(groupby(kinds)):
            left = len(list(alike)) - (number == 0)
            while left:
                before = chain
                chain, runs = self.longer(chain, runs, kind)
                left -= 1
                if chain is before:  # nothing new comes
                    *others, (run, units) = runs
                    runs, left = (*others, (run, units + left)), 0
        return chain, runs

    def longer(self, chain: Chain, runs: Longer, kind: int) -> tuple[Chain, Longer]:
        """With one more unit."""
        if self.missing(chain, kind):
            self.join([(chain, kind)])
        if chain.run is None or kind != chain.last:
            return chain.behind[kind], runs
        if runs and runs[-1][0] is chain.run:
            return chain, (*runs[:-1], (chain.run, runs[-1][1] + 1))
        return chain, (*runs, (chain.run, 1))

    @staticmethod
    def missing(chain: Chain, kind: int) -> bool:
        """Whether `join` has not seen this unit behind this chain."""
        return kind not in chain.behind and (chain.run is None or kind != chain.last)

    def join(self, pairs: Iterable[tuple[Chain, int]]) -> None:
        """Chains and units behind them, those of one kind and shape at once."""
        groups: dict[tuple[int, tuple[int, ...]], list[Chain]] = {}
        for chain, kind in pairs:
            groups.setdefault((kind, chain.rows.shape), []).append(chain)
        for (kind, _), chains in groups.items():
            right = self._unit(kind)
            if kind not in self._priced:
                self._priced[kind] = _price(right, self.weights)
            left = np.stack([chain.rows for chain in chains])
            rows, picks = joined(left, right, self.weights, self._priced[kind])
            for chain, own, between in zip(chains, rows, picks.astype(np.int8), strict=True):
                _follow(chain, Chain(own, kind, chain, between))


def _follow(chain: Chain, more: Chain) -> None:
    """Notes what comes behind a chain: a run of its last unit, or a chain of its own."""
    if more.last == chain.last and more.rows.shape == chain.rows.shape:
        added = more.rows - chain.rows
        step = added[:, :, :1, :1]
        if (np.abs(added - step) <= _SAME * np.abs(more.rows)).all():
            assert more.picks is not None
            chain.run = Run(step[:, :, 0, 0].copy(), more.picks)
            return
    chain.behind[more.last] = more


def rows_of(chain: Chain, runs: Longer) -> Floats:
    """(2, J, A, B, len(PARTS)) of a chain with longer runs."""
    found = chain.rows
    for run, number in runs:
        found = found + number * run.step[:, :, None, None]
    return found


def path(
    chain: Chain, runs: Longer, again: int, price: int, ends: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Of every unit of a chain the placements at its entry and exit, as numbers."""
    entry, exit_ = ends
    states = []
    further = {id(run): number for run, number in runs}
    here: Chain | None = chain
    while here is not None:
        fronts = [] if here.picks is None else [here.picks]
        if here.run is not None:
            fronts = [here.run.picks] * further.get(id(here.run), 0) + fronts
        for front in fronts:
            between = int(front[again, price, entry, exit_])
            states.append((between, exit_))
            exit_ = between
        here = here.before
    return ((entry, exit_), *reversed(states))


def _price(rows: Floats, weights: Floats) -> Floats:
    """(..., 2, J, A, B): what strategies (..., 2, J, A, B, 5) cost."""
    found: Floats = np.einsum("...rjabp,rjp->...rjab", rows, weights)
    return found


def joined(
    left: Floats, right: Floats, weights: Floats, other: Floats | None = None
) -> tuple[Floats, np.ndarray]:
    """One after the other, by the cheapest placement between them, (..., 2, J, A, C, 5) and picks.

    There may be several in front, (..., 2, J, A, B, 5). `other` is `_price` of those behind.
    """
    if left.shape[-2] == 1 and right.shape[-3] == 1:
        sums = left[..., :, 0, None, :] + right[..., None, 0, :, :]
        return sums, np.zeros(sums.shape[:-1], dtype=np.int64)
    priced = _price(left, weights)
    other = _price(right, weights) if other is None else other
    best = priced[..., :, 0, None] + other[..., None, 0, :]
    picks = np.zeros(best.shape, dtype=np.int64)
    for between in range(1, left.shape[-2]):
        sums = priced[..., :, between, None] + other[..., None, between, :]
        picks[sums < best] = between
        np.minimum(best, sums, out=best)
    one, two = _lines(picks.shape[:-1], left.shape[-2], right.shape[:-1])
    return _taken(left, one + picks) + _taken(right, two + picks * right.shape[3]), picks


@lru_cache(maxsize=256)
def _lines(
    shape: tuple[int, ...], between: int, right: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The lines of both tables where the placement between them is the first one."""
    one = np.arange(math.prod(shape)).reshape(*shape, 1) * between
    two = np.arange(math.prod(right[:2])).reshape(*right[:2], 1, 1) * right[2] * right[3]
    return one, two + np.arange(right[3])


def _taken(table: Floats, lines: np.ndarray) -> Floats:
    return table.reshape(-1, table.shape[-1]).take(lines, axis=0)
