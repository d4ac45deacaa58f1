"""One combination of degrees on its tables: the frontier of its stages, cuts and placements.

A cut is the best one by Alpa's sum of stages; its price is what the schedule's table takes with
these stages, their messages and sums (`schemes.Book`), without a pipeline what the exchange behind
the last backward leaves to be seen (`overlap`). Invariant: what a point says is what its stages'
strategies cost, priced by `cost` alone, and is never below `bound`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from headway.errors import PlanError
from headway.planner.borders import forced_starts, without_crossing
from headway.planner.bounds import crowded, hull_bound, least_step
from headway.planner.degrees import Degrees
from headway.planner.operators import Floats
from headway.planner.overlap import BUCKETS
from headway.planner.pipeline_cuts import cut
from headway.planner.point import Point, Stage
from headway.planner.pricing import Pricing, Rows
from headway.planner.schemes import Book, Scheme, book
from headway.planner.shared import Shared
from headway.planner.stages import Tables

__all__ = ["Candidate", "Point", "Stage"]

SHARES = 2
"""How often the memory of a rank with several stages is divided between them in another way."""


class Candidate:
    """A combination of degrees, ready to be asked for the fastest plan within a memory.

    Args:
        tables: Of its tensor degree and micro-batch.
        degrees: The combination.
        itemsize: Bytes of a parameter.
        shared: Facts of the model; made where not given.
        may_recompute: Whether units may keep only what enters them.
    """

    def __init__(
        self,
        tables: Tables,
        degrees: Degrees,
        itemsize: int,
        shared: Shared | None = None,
        *,
        may_recompute: bool = True,
    ) -> None:
        self.tables = tables
        self.degrees = degrees
        self.itemsize = itemsize
        self.shared = shared or Shared(tables.setting.work, tables.row, tables.classes)
        self.pricing = Pricing(tables, degrees, itemsize, self.shared)
        self._passes = (0, 1) if may_recompute else (0,)
        self._known: dict[str, tuple[Floats, np.ndarray]] = {}
        whole = int(tables.classes.of[0, -1])
        rows = tables.stretch(whole)[:, :, 0, 0]
        rows = self.pricing.rows(rows, self.shared.doubled(0, len(tables.row)))
        self.least_rows = tables.transients.beside(rows[None], Rows.KEPT, several=False)[0]

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
        degrees, rows = self.degrees, self.least_rows[list(self._passes)]
        p, m = degrees.pipeline, degrees.microbatches
        seconds = least_step(degrees, rows[..., Rows.FORWARD], self.pricing.backward(rows))
        seconds = seconds + rows[..., Rows.AFTER] / p
        if degrees.virtual * degrees.pipes == 1:  # else sums may leave while a rank computes
            own = m * rows[..., Rows.SECONDS] + rows[..., Rows.TAIL]
            seconds = np.maximum(seconds, own / p)
        held = (degrees.pipes * rows[..., Rows.STATE] + rows[..., Rows.KEPT]) / p
        least, need = hull_bound(seconds.ravel(), held.ravel(), cap)
        return max(least, crowded(self.tables, self.degrees)), need

    def fastest(self, cap: float, known: float = np.inf, *, parts: bool = True) -> Point | None:
        """The fastest plan of which no device needs more than `cap` bytes.

        Args:
            cap: Bytes.
            known: Seconds of a plan that is known; others are not of interest unless faster.
            parts: False: what of a step is messages and so on is left open, see `detailed`.
        """
        if self.degrees.pipeline == 1:
            return None if self._starts else self._alone(cap)
        if self.book is None:
            return None
        best: Point | None = None
        value = np.inf
        for border in self.tables.borders:
            for point, sums in self._within(border, cap, value, known):
                value = min(value, sums)
                if point.seconds < known:
                    best, known = point, point.seconds
        return self.detailed(best) if best and parts else best

    def detailed(self, point: Point) -> Point:
        """A point with all parts of its step."""
        return point if point.busy else self._point(point.border, point.stages)

    def _alone(self, cap: float) -> Point | None:
        """Without a pipeline: strategies by what they take at least, until none can be faster."""
        rows, _ = self._prepared("R")
        own = rows[0, list(self._passes)]
        value = self.degrees.microbatches * own[..., Rows.SECONDS] + own[..., Rows.TAIL]
        held = own[..., Rows.STATE] + own[..., Rows.KEPT]
        held = np.maximum(held + own[..., Rows.MORE], self.pricing.updated(own))
        value = np.where(held <= cap, value, np.inf).ravel()
        best: Point | None = None
        for place in np.argsort(value, kind="stable").tolist():
            if value[place] >= (np.inf if best is None else best.seconds):
                break
            again, price = divmod(place, rows.shape[2])
            chosen = [(0, len(self.tables.row), 0, again, price)]
            point = self._point("R", self._stages("R", chosen))
            if best is None or point.seconds < best.seconds:
                best = point
        return best

    def _prepared(self, border: str) -> tuple[Floats, np.ndarray]:
        """(classes, 2, K, 9) as `Rows` says, and the prices."""
        if border not in self._known:
            several = self.degrees.pipeline > 1
            cells, prices = self.tables.cells(border, several)
            whole = np.array([self.shared.doubled(0, len(self.tables.row))])
            doubles = self.shared.doubles if several else whole
            rows = self.pricing.rows(np.moveaxis(cells, 0, 1), doubles[:, None])
            rows = self.tables.transients.beside(
                np.moveaxis(rows, 0, 1), Rows.KEPT, several=several
            )
            self._known[border] = rows, prices
        return self._known[border]

    def _within(
        self, border: str, cap: float, sums: float, known: float
    ) -> Iterator[tuple[Point, float]]:
        """Plans within the memory, with Alpa's sum of their stages.

        Where a rank has several stages, each may first have all of the memory; if they do not fit
        together, shares between that and equal ones are tried.
        """
        assert self.book is not None
        several = max(map(len, self.book.table.hosted))
        found = self._cut(border, cap, sums, known)
        if found is None or found[0].bytes <= cap:
            if found is not None:
                yield found
            return
        least, most = cap / several, cap
        found = self._cut(border, least, np.inf, known)
        if found is None:
            return
        yield found
        for _ in range(SHARES):
            middle = (least + most) / 2
            found = self._cut(border, middle, np.inf, known)
            if found is not None and found[0].bytes <= cap:
                least = middle
                yield found
            else:
                most = middle

    def _cut(
        self, border: str, cap: float, sums: float, known: float
    ) -> tuple[Point, float] | None:
        """The best cut of which no stage alone needs more than `cap`, without the parts of its
        step, and Alpa's sum.

        Args:
            border: Placement between stages.
            cap: Bytes.
            sums: Alpa's sum of a cut that is known; others are not of interest unless smaller.
            known: Seconds of a plan that is known, as in `fastest`.
        """
        degrees, of = self.degrees, self.tables.classes.of
        m, chunks = degrees.microbatches, degrees.virtual
        rows, _ = self._prepared(border)
        times, picks = self._picked(self.pricing.updatable(rows, cap), cap)
        least = self.least_rows[list(self._passes)]
        floor = float((least[..., Rows.SECONDS] + least[..., Rows.TAIL] / m).min())
        # m chunks t_max + (sum - chunks t_max) / chunks, times chunks
        weight = chunks * (m * chunks - 1) + 1
        if chunks * degrees.pipes == 1:  # no rank ends before its m micro-batches and its sum
            sums = min(sums, floor + (weight - 1) * known / m)
        cuts = cut(*without_crossing(of, times, self._starts), weight, floor, sums)
        if cuts is None:
            return None
        chosen = []
        for place, (start, stop) in enumerate(pairwise(cuts.borders)):
            number = int(of[start, stop])
            again, price = divmod(int(picks[len(times) - 1 - place, number]), rows.shape[2])
            chosen.append((start, stop, number, again, price))
        stages = self._stages(border, chosen)
        ahead = sum(stage.forward for stage in stages)
        back = sum(stage.seconds - stage.forward for stage in stages)
        if least_step(degrees, np.asarray(ahead), np.asarray(back)) >= known:
            return None
        return self._point(border, stages, parts=False), cuts.seconds(weight)

    def _picked(self, rows: Floats, cap: float) -> tuple[Floats, np.ndarray]:
        """(stages, classes): the least time of a stage with so many behind it, and its strategy.

        What is best both with few and with many micro-batches under way is best between them.
        """
        m = self.degrees.microbatches
        counts = np.array(self._in_flight[::-1])
        flights, place = np.unique(counts, return_inverse=True)
        rows = rows[:, : len(self._passes)]
        flat = (len(rows), -1)
        value = (rows[..., Rows.SECONDS] + rows[..., Rows.TAIL] / m).reshape(flat)
        state, kept = rows[..., Rows.STATE].reshape(flat), rows[..., Rows.KEPT].reshape(flat)
        extra = rows[..., Rows.MORE].reshape(flat)
        times = np.full((len(flights), len(rows)), np.inf)
        picks = np.zeros((len(flights), len(rows)), dtype=np.int64)

        def pick(number: int, some: np.ndarray | slice) -> None:
            held = state[some] + flights[number] * kept[some]
            held += extra[some]
            allowed = np.where(held <= cap, value[some], np.inf)
            picks[number, some] = best = allowed.argmin(axis=1)
            times[number, some] = allowed[np.arange(len(allowed)), best]

        last = len(flights) - 1
        for number in {0, last}:
            pick(number, slice(None))
        waiting = [(0, last, np.arange(len(rows)))]
        while waiting:
            low, high, some = waiting.pop()
            same = (picks[low, some] == picks[high, some]) & (times[low, some] == times[high, some])
            picks[low:high, some[same]] = picks[low, some[same]]
            times[low:high, some[same]] = times[low, some[same]]
            some, middle = some[~same], (low + high) // 2
            if len(some) and middle > low:
                pick(middle, some)
                waiting += [(low, middle, some), (middle, high, some)]
        return times[place], picks[place]

    def planned(
        self,
        borders: Sequence[int],
        recompute: Collection[int] = (),
        *,
        buckets: Sequence[float] = BUCKETS,
        overlap: bool = True,
    ) -> Point:
        """The plan that is cut there, whether it fits or not; whole tensors cross its borders.

        Args:
            borders: The first unit of each stage, and the number of units.
            recompute: Numbers of the stages whose units keep only what enters them.
            buckets: Bytes of a bucket of gradients to choose from.
            overlap: Whether gradients leave while backward goes on, without a pipeline.

        Raises:
            PlanError: The schedule cannot have these sizes.
        """
        of, degrees = self.tables.classes.of, self.degrees
        if degrees.pipeline > 1 and self.book is None:
            raise PlanError(
                "the search has no price for this plan",
                problems=[f"{degrees.schedule}: {degrees.pipeline} ranks, {degrees.microbatches}"],
            )
        rows, _ = self._prepared("R")
        value = rows[..., Rows.SECONDS] + rows[..., Rows.TAIL] / degrees.microbatches
        chosen = []
        for place, (start, stop) in enumerate(pairwise(borders)):
            number = int(of[start, stop]) if degrees.pipeline > 1 else 0
            again = int(place in recompute)
            chosen.append((start, stop, number, again, int(value[number, again].argmin())))
        stages = self._stages("R", chosen)
        return self._point("R", stages, buckets=buckets, overlap=overlap)

    def _stages(
        self, border: str, chosen: Sequence[tuple[int, int, int, int, int]]
    ) -> tuple[Stage, ...]:
        """From (start, stop, class, recomputation, place among the prices) of each."""
        rows, prices = self._prepared(border)
        stages = []
        for place, (start, stop, number, again, price) in enumerate(chosen):
            one = rows[number, again, price]
            forward, backward = float(one[Rows.FORWARD]), float(self.pricing.backward(one))
            own = self.pricing.split_passes(start, stop, again, int(prices[price]), border)
            if own is not None:
                forward, backward = own
            share = self.shared.weight_share(start, stop)
            seconds = forward + backward if own else float(one[Rows.SECONDS])
            backward -= again * float(one[Rows.COMPUTE])
            stages.append(
                Stage(
                    start=start,
                    stop=stop,
                    price=int(prices[price]),
                    recompute=bool(again),
                    seconds=seconds,
                    tail=float(one[Rows.TAIL]),
                    state=float(one[Rows.STATE]),
                    kept=float(one[Rows.KEPT]) * self._in_flight[place],
                    transient=float(one[Rows.MORE]),
                    passing=float(one[Rows.STATE]) * self.pricing.passing,
                    params=float(one[Rows.PARAMS]),
                    forward=forward,
                    weight=share * max(backward, 0.0),
                    after=float(one[Rows.AFTER]),
                )
            )
        return tuple(stages)

    def _point(
        self,
        border: str,
        stages: tuple[Stage, ...],
        *,
        buckets: Sequence[float] = BUCKETS,
        overlap: bool = True,
        parts: bool = True,
    ) -> Point:
        """The price of these stages; `parts`: with what of it is messages, and so on."""
        if self.degrees.pipeline == 1:
            only = stages[0]
            price = self.pricing.alone(
                int(only.recompute),
                only.price,
                only.params,
                after=only.after,
                buckets=buckets,
                overlap=overlap,
            )
            ranks: tuple[float, ...] = (only.bytes,)
        else:
            assert self.book is not None
            price = self.pricing.pipeline(
                self.book,
                border,
                starts=[stage.start for stage in stages],
                forward=[stage.forward for stage in stages],
                seconds=[stage.seconds for stage in stages],
                weight=[stage.weight for stage in stages],
                params=[stage.params for stage in stages],
                after=[stage.after for stage in stages],
                parts=parts,
            )
            ranks = self._ranks(stages)
        return Point(
            degrees=self.degrees,
            border=border,
            stages=stages,
            seconds=price.seconds,
            messages=price.messages,
            exchange=price.exposed,
            hidden=price.hidden,
            update=price.update,
            busy=price.busy,
            ranks=ranks,
            bucket=price.bucket,
        )

    def _ranks(self, stages: tuple[Stage, ...]) -> tuple[float, ...]:
        """Bytes of each rank: of all its stages, at the fullest moment."""
        assert self.book is not None
        kept = [stage.kept / n for stage, n in zip(stages, self._in_flight, strict=True)]
        return tuple(
            sum(stages[number].state for number in hosted)
            + max(
                self.book.held(rank, kept) + max(stages[number].transient for number in hosted),
                sum(stages[number].passing for number in hosted),
            )
            for rank, hosted in enumerate(self.book.table.hosted)
        )
