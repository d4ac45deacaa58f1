"""Which share of the lookups of a table its most frequent rows take, measured from a stream of ids.

Tables of up to `EXACT_ROWS` rows are counted exactly. Of larger ones a summary of as many counters
is kept (Misra and Gries 1982; merged batch by batch as Agarwal et al., PODS 2012, show): a row's
count is never too large, and too small by at most the error, which is known and stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.documents import document
from headway.errors import DataError

EXACT_ROWS = 2**22
"""Rows of a table whose lookups are counted one by one: 32 MiB of counters."""
COUNTERS = 2**18
"""Of the summary of a larger table."""
RANGES = 64
"""Equal ranges of row numbers whose lookups are counted."""
_POINTS = 65
"""Of the curve, at most: evenly spaced in the logarithm of the rows."""

Ids = NDArray[np.int64]


@document
class AccessSkew:
    """How the lookups of a table fall on its rows.

    Attributes:
        rows: Of the table.
        lookups: That were counted; 0: nothing was, and all rows count as equally frequent.
        top: Numbers of rows, ascending: so many of the most frequent ones ...
        shares: ... take this share of the lookups, at least.
        error: By how much a share may be too small, at most.
        ranges: Share of the lookups of each of `RANGES` equal ranges of row numbers; empty: not
            counted.
    """

    rows: int
    lookups: int = 0
    top: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    error: float = 0.0
    ranges: tuple[float, ...] = ()

    def share(self, hot: float) -> float:
        """Of the lookups, those of so many most frequent rows, at least: the curve is concave, and
        between its points a straight line."""
        if hot <= 0:
            return 0.0
        if hot >= self.rows:
            return 1.0
        return float(np.interp(hot, [0, *self.top, self.rows], [0.0, *self.shares, 1.0]))

    def rows_for(self, share: float) -> int:
        """The fewest most frequent rows that take a share of the lookups, as far as is known."""
        rows, shares = [0, *self.top, self.rows], [0.0, *self.shares, 1.0]
        # Where several numbers of rows have the same share, the smallest counts.
        last = next(n for n, value in enumerate(shares) if value >= share - 1e-12)
        if last == 0:
            return 0
        way = (share - shares[last - 1]) / max(shares[last] - shares[last - 1], 1e-300)
        return int(np.ceil(rows[last - 1] + min(1.0, way) * (rows[last] - rows[last - 1]) - 1e-9))

    def unique(self, lookups: float, hot: float | None = None) -> float:
        """Different rows among so many independent lookups; with `hot`, among the most frequent
        rows only. Rows between two points of the curve count as equally frequent."""
        limit = self.rows if hot is None else min(hot, self.rows)
        if lookups <= 0 or limit <= 0:
            return 0.0
        edges = np.unique([0.0, *(float(n) for n in self.top if n < limit), float(limit)])
        mass = np.diff([self.share(edge) for edge in edges])
        width = np.diff(edges)
        each = np.clip(mass / width, 0.0, 1.0)
        with np.errstate(divide="ignore"):
            missed = np.exp(lookups * np.log1p(-each))
        return float(min(lookups, (width * (1.0 - missed)).sum()))

    def range_share(self, start: float, stop: float) -> float:
        """Of the lookups, those of the rows from `start` to before `stop`."""
        if not self.ranges:
            return (stop - start) / self.rows
        edges = np.linspace(0, self.rows, len(self.ranges) + 1)
        sums = np.concatenate([[0.0], np.cumsum(self.ranges)])
        return float(np.interp(stop, edges, sums) - np.interp(start, edges, sums))


class SkewCounter:
    """Counts lookups, in memory that does not grow with their number."""

    def __init__(
        self, rows: int, *, exact_rows: int = EXACT_ROWS, counters: int = COUNTERS
    ) -> None:
        """
        Args:
            rows: Of the table.
            exact_rows: Up to so many rows each one is counted.
            counters: Of the summary of a larger table.
        """
        self.rows = rows
        self.lookups = 0
        self._counters = counters
        self._counts: Ids | None = np.zeros(rows, dtype=np.int64) if rows <= exact_rows else None
        self._ids: Ids = np.zeros(0, dtype=np.int64)
        self._kept: Ids = np.zeros(0, dtype=np.int64)
        self._lost = 0
        self._ranges = np.zeros(RANGES, dtype=np.int64)

    def add(self, ids: Any) -> None:
        """Count the ids of a batch; an array of whole numbers of any shape.

        Raises:
            DataError: An id that the table does not have.
        """
        flat = np.asarray(ids).reshape(-1).astype(np.int64, copy=False)
        if not flat.size:
            return
        least, most = int(flat.min()), int(flat.max())
        if least < 0 or most >= self.rows:
            raise DataError(
                f"id {least if least < 0 else most} is outside a table of {self.rows} rows",
                fix=f"Ids go from 0 to {self.rows - 1}.",
            )
        self.lookups += flat.size
        self._ranges += np.bincount((flat * RANGES) // self.rows, minlength=RANGES)
        if self._counts is not None:
            self._counts += np.bincount(flat, minlength=self.rows)
            return
        ids, counts = np.unique(flat, return_counts=True)
        self._merge(ids, counts)

    def _merge(self, ids: Ids, counts: Ids) -> None:
        """Into the summary: what does not fit takes as much from each counter."""
        both = np.concatenate([self._ids, ids])
        self._ids, place = np.unique(both, return_inverse=True)
        total = np.zeros(len(self._ids), dtype=np.int64)
        np.add.at(total, place, np.concatenate([self._kept, counts]))
        if len(self._ids) > self._counters:
            cut = int(np.partition(total, -self._counters - 1)[-self._counters - 1])
            self._lost += cut
            total -= cut
            self._ids, total = self._ids[total > 0], total[total > 0]
        self._kept = total

    @property
    def skew(self) -> AccessSkew:
        """Of what was counted so far."""
        if not self.lookups:
            return AccessSkew(rows=self.rows)
        counts = self._kept if self._counts is None else self._counts[self._counts > 0]
        curve = np.cumsum(np.sort(counts)[::-1]) / self.lookups
        top = _spread(len(curve))
        return AccessSkew(
            rows=self.rows,
            lookups=self.lookups,
            top=tuple(int(n) for n in top if n < self.rows),
            shares=tuple(float(curve[n - 1]) for n in top if n < self.rows),
            # Each of the n rows may have been looked up so much more often, and others instead.
            error=min(1.0, self._lost * len(curve) / self.lookups),
            ranges=tuple(float(n) for n in self._ranges / self.lookups),
        )


def _spread(count: int) -> Sequence[int]:
    """Numbers from 1 to `count`, both included, in even ratios."""
    if count <= _POINTS:
        return list(range(1, count + 1))
    return sorted({round(n) for n in np.geomspace(1, count, _POINTS)})


def measure_skew(
    batches: Iterable[Any],
    rows: int,
    *,
    exact_rows: int = EXACT_ROWS,
    counters: int = COUNTERS,
) -> AccessSkew:
    """The skew of a stream of ids.

    Args:
        batches: Arrays of row numbers, of any shape.
        rows: Of the table.
        exact_rows: As in `SkewCounter`; so is `counters`.

    Raises:
        DataError: An id that the table does not have.
    """
    counter = SkewCounter(rows, exact_rows=exact_rows, counters=counters)
    for ids in batches:
        counter.add(ids)
    return counter.skew
