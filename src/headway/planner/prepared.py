"""One combination of degrees before any cut: its strategies, priced, and what bounds its plans.

Invariant: no plan is below `bound`, and what `picked` says of a stretch is its best strategy.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headway.cost.device import Number
from headway.planner.borders import forced_starts
from headway.planner.bounds import crowded, hull_bound, least_step
from headway.planner.degrees import Degrees, late_per_byte
from headway.planner.operators import Floats
from headway.planner.ordered import Ordered, ordered
from headway.planner.pricing import Pricing, Rows
from headway.planner.schemes import Book, Scheme, book
from headway.planner.shared import Shared
from headway.planner.stages import Tables

WIDTH = 4
"""Times the mean number of units of a stage: cuts with longer stages are sought later."""


class Prepared:
    """What is known of a combination before its stages are cut.

    Args:
        tables: Of its tensor degree and micro-batch.
        degrees: The combination.
        itemsize: Bytes of a parameter.
        shared: Facts of the model; made where not given.
        may_recompute: Whether units may keep only what enters them.
        late: Whether memory knows that a step begins without gradients.
    """

    def __init__(
        self,
        tables: Tables,
        degrees: Degrees,
        itemsize: int,
        shared: Shared | None = None,
        *,
        may_recompute: bool = True,
        late: bool = True,
    ) -> None:
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.shared = shared or Shared(tables.setting.work, tables.row, tables.classes)
        self.pricing = Pricing(tables, degrees, itemsize, self.shared)
        self.late = late_per_byte(itemsize, degrees) if late else 0.0
        self._passes = (0, 1) if may_recompute else (0,)
        self._known: dict[tuple[str, int], tuple[Floats, np.ndarray]] = {}
        self._orders: dict[tuple[str, int], Ordered] = {}
        self.least_rows = self.pricing.rows(tables.least(self.shared.whole))[0]

    @cached_property
    def book(self) -> Book | None:
        """The schedule's table; None where it cannot have these sizes."""
        d = self.degrees
        return book(Scheme(d.schedule, d.virtual, d.pipes), d.pipeline, d.microbatches)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Units that must begin a stage."""
        return forced_starts(self.tables.setting.force, self.tables.row)

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        """Micro-batches under way of each stage, on the rank that holds most of it."""
        return (1,) if self.book is None else self.book.in_flight()

    def bound(self, cap: float = np.inf) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it within `cap` is below.

        The stages' bytes add up to at most p caps, so that their seconds are at least those of the
        lower hull of the whole model's strategies. All ranks compute m / p micro-batches and sum
        their gradients behind them, or wait as the table says.
        """
        least, need = hull_bound(*self._spread, cap)
        return max(least, self._crowded), need

    @cached_property
    def _spread(self) -> tuple[Floats, Floats]:
        """(seconds, bytes) of the whole model's strategies, evenly spread over the ranks."""
        degrees, rows = self.degrees, self.least_rows[list(self._passes)]
        p, m = degrees.pipeline, degrees.microbatches
        seconds = least_step(degrees, rows[..., Rows.FORWARD], self.pricing.backward(rows))
        seconds = seconds + rows[..., Rows.AFTER] / p
        if degrees.virtual * degrees.pipes == 1:  # else sums may leave while a rank computes
            own = m * rows[..., Rows.SECONDS] + rows[..., Rows.TAIL]
            seconds = np.maximum(seconds, own / p)
        held = (degrees.pipes * self.there(rows) + rows[..., Rows.KEPT]) / p
        return seconds.ravel(), held.ravel()

    def there(self, rows: Floats) -> Floats:
        """Bytes of state at any moment of a step; rows (..., columns) as `Rows` says."""
        found: Floats = rows[..., Rows.STATE] * (1.0 - self.late / self.pricing.per_byte)
        return found

    def is_late(self, stage: int) -> bool:
        """Whether a stage holds all its micro-batches before its gradients are made."""
        return self.late > 0 and self._in_flight[stage] == self.degrees.microbatches

    def first(self, rows: Floats) -> Floats | None:
        """(classes, 2, K) bytes for a moment above state and kept ones, of a late stage; None:
        none is late. In the second backward all gradients are there, and a micro-batch less.

        Args:
            rows: (classes, 2, K, 9) as `Rows` says.
        """
        if not self.late:
            return None
        first = self.pricing.first[: len(rows), :, None]
        first = np.asarray(self.early(first, rows[..., Rows.MORE]))
        if self.degrees.microbatches == 1:
            return np.broadcast_to(first, rows.shape[:-1])
        return np.maximum(first, rows[..., Rows.MORE] - rows[..., Rows.KEPT])

    def early(self, first: Number, more: Number) -> Number:
        """Bytes for a moment in the first backward of a step, as a rank keeps its gradients.

        Args:
            first: As `Pricing.first` has it, where all gradients are kept.
            more: Where they are there already, as `Rows` says.
        """
        share = self.degrees.gradient_share
        return share * first + (1.0 - share) * more

    @cached_property
    def _crowded(self) -> float:
        return crowded(self.tables, self.degrees)

    def _enough(self, cap: float, known: float) -> bool:
        """Whether there may be a plan within `cap` that is faster than `known`."""
        room = self.tables.room
        places = self.places(cap, known, float(room.whole.sum()))
        return bool((places.sum(axis=1) >= room.counts[:, 0]).all())

    def places(self, cap: float, known: float, whole: float) -> Floats:
        """(kinds, stages): `Room.places` of this combination; arguments as there."""
        per_byte = self.pricing.per_byte
        return self.tables.room.places(
            self.degrees,
            self._in_flight,
            self._passes,
            state=per_byte,
            passing=self.pricing.passing,
            tied=float(self.shared.whole[0]) / self.degrees.tensor * per_byte,
            late=self.late,
            cap=cap,
            known=known,
            whole=whole,
        )

    def _prepared(self, border: str, width: int = 0) -> tuple[Floats, np.ndarray]:
        """(classes, 2, K, 9) as `Rows` says, and the prices; of stretches of at most `width` units,
        0: of all."""
        key = border, width
        if key not in self._known:
            several = self.degrees.pipeline > 1
            doubled = self.shared.doubles if several else self.shared.whole
            if width:
                doubled = doubled[: self.tables.classes.lengths[width - 1][1]]
            cells = self.tables.cells(border if several else "", doubled)
            self._known[key] = self.pricing.rows(cells), cells.prices
        return self._known[key]

    def _order(self, border: str, width: int) -> Ordered:
        """The strategies of every class, the fastest first."""
        key = border, width
        if key not in self._orders:
            rows = self._prepared(border, width)[0]
            first, some = self.first(rows), len(self._passes)
            self._orders[key] = ordered(
                rows[:, :some],
                self.degrees.microbatches,
                self.pricing.passing,
                None if first is None else first[:, :some],
                self.pricing.waiting[: len(rows), None],
            )
        return self._orders[key]

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        """How many units a stage may have, as a cut is sought first, then, and (0) any number."""
        length = len(self.tables.row)
        few = [WIDTH * -(-length // self.degrees.stages)]
        while few[-1] < length / 2:
            few.append(few[-1] * WIDTH)
        return (0,) if self._starts else (*few[:-1], 0)

    def _most_units(self, cap: float) -> int:
        """No stage with more units fits into so many bytes."""
        counts = self.tables.room.counts
        places = self.places(cap, np.inf, float(self.tables.room.whole.sum()))
        return int(np.minimum(places, counts).sum(axis=0).max())

    def _picked(self, border: str, cap: float, width: int = 0) -> tuple[Floats, np.ndarray]:
        """(stages, classes): the least time of a stage with so many behind it, and its strategy;
        `width` as in `_prepared`."""
        counts = np.array(self._in_flight[::-1])
        flights, place = np.unique(counts, return_inverse=True)
        times, picks = self._order(border, width).picked(cap, flights)
        return times[place], picks[place]
