"""One combination of degrees on its tables: the frontier of its stages, cuts and placements.

A cut is the best one by Alpa's sum of stages; its price is what the schedule's table takes with
these stages, their messages and sums (`schemes.Book`), without a pipeline what the exchange behind
the last backward leaves to be seen (`overlap`). Invariant: what a point says is what its stages'
strategies cost, priced by `cost` alone, and is never below `bound`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np

from headway.errors import PlanError
from headway.planner.borders import without_crossing
from headway.planner.bounds import least_1f1b, least_step
from headway.planner.overlap import BUCKETS
from headway.planner.pipeline_cuts import cut
from headway.planner.point import Point, Stage
from headway.planner.prepared import Prepared
from headway.planner.pricing import Rows

__all__ = ["Candidate", "Point", "Stage"]

SHARES = 2
"""How often the memory of a rank with several stages is divided between them in another way."""


class Candidate(Prepared):
    """A combination of degrees, ready to be asked for the fastest plan within a memory."""

    def fastest(self, cap: float, known: float = np.inf, *, parts: bool = True) -> Point | None:
        """The fastest plan of which no device needs more than `cap` bytes.

        Args:
            cap: Bytes.
            known: Seconds of a plan that is known; others are not of interest unless faster.
            parts: False: what of a step is messages and so on is left open, see `detailed`.
        """
        if self.degrees.pipeline == 1:
            return None if self._starts else self._alone(cap)
        if self.book is None or not self._enough(cap, known):
            return None
        best: Point | None = None
        value = np.inf
        for border in self.tables.borders:
            for point, sums in self._within(border, cap, value, known):
                value = min(value, sums)
                if point is not None and point.seconds < known:
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
        first = self.first(rows)
        more = own[..., Rows.MORE] if first is None else first[0, list(self._passes)]
        held = np.maximum(held + more, self.pricing.updated(own))
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

    def _within(
        self, border: str, cap: float, sums: float, known: float
    ) -> Iterator[tuple[Point | None, float]]:
        """Plans within the memory, with Alpa's sum of their stages; None: not faster than `known`.

        Where a rank has several stages, each may first have all of the memory; if they do not fit
        together, shares between that and equal ones are tried.
        """
        assert self.book is not None
        several = max(map(len, self.book.table.hosted))
        found = self._cut(border, cap, sums, known)
        if found is None or found[0] is None or found[0].bytes <= cap:
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
            if found is not None and found[0] is not None and found[0].bytes <= cap:
                least = middle
                yield found
            else:
                most = middle

    def _cut(
        self, border: str, cap: float, sums: float, known: float, barred: Collection[int] = ()
    ) -> tuple[Point | None, float] | None:
        """The best cut of which no stage alone needs more than `cap`, without the parts of its
        step (None: not faster than `known`), and Alpa's sum.

        Args:
            border: Placement between stages.
            cap: Bytes.
            sums: Alpa's sum of a cut that is known; others are not of interest unless smaller.
            known: Seconds of a plan that is known, as in `fastest`.
            barred: Units at which no stage begins.
        """
        degrees, of = self.degrees, self.tables.classes.of
        m, chunks = degrees.microbatches, degrees.virtual
        least = self.least_rows[list(self._passes)]
        floor = float((least[..., Rows.SECONDS] + least[..., Rows.TAIL] / m).min())
        # m chunks t_max + (sum - chunks t_max) / chunks, times chunks; all cuts of one micro-batch
        # have one sum: the longest stage, whose gradients are last, counts once more
        weight = max(2, chunks * (m * chunks - 1) + 1)
        if chunks * degrees.pipes == 1:  # no rank ends before its m micro-batches and its sum
            sums = min(sums, floor + (weight - 1) * known / m)
        free = not self._starts and not barred
        for width in self._widths if free else (0,):
            times, picks = self._picked(border, cap, width)
            if not free:
                own = without_crossing(of, self._starts, barred)
                cuts = cut(own, times, weight, floor, sums)
            else:
                cuts = cut(of, times, weight, floor, sums, self.tables.classes.within(width))
            found = sums if cuts is None else cuts.seconds(weight)
            if not width or floor + (weight - 1) * self.tables.least_of(width + 1) > found:
                break  # no longer stage is of use
            if width >= self._most_units(cap):
                break  # none fits
        if cuts is None:
            return None
        if not barred and not self.shared.nameless.isdisjoint(cuts.borders[1:-1]):
            return self._cut(border, cap, sums, known, self.shared.nameless)
        prices = len(self._prepared(border, width)[1])
        chosen = []
        for place, (start, stop) in enumerate(pairwise(cuts.borders)):
            number = int(of[start, stop])
            again, price = divmod(int(picks[len(times) - 1 - place, number]), prices)
            chosen.append((start, stop, number, again, price))
        stages = self._stages(border, chosen, width)
        ahead = sum(stage.forward for stage in stages)
        back = sum(stage.seconds - stage.forward for stage in stages)
        if least_step(degrees, np.asarray(ahead), np.asarray(back)) >= known:
            return None
        late = self._at_least(border, stages) >= known
        return None if late else self._point(border, stages, parts=False), cuts.seconds(weight)

    def _at_least(self, border: str, stages: tuple[Stage, ...]) -> float:
        """Seconds below which the table does not take, without playing it; of 1F1B alone."""
        if self.degrees.schedule != "1f1b" or self.book is None or self.book.rounds:
            return 0.0
        starts = [stage.start for stage in stages]
        params = np.array([stage.params for stage in stages])
        least = least_1f1b(
            self.degrees.microbatches,
            np.array(self._in_flight),
            np.array([stage.forward for stage in stages]),
            np.array([stage.seconds for stage in stages]),
            np.array(self.pricing.wire(self.book, border, starts)).sum(axis=0),
            np.array(self.pricing.sums(starts, params)),
        )
        return least + max(stage.after for stage in stages)

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
        self, border: str, chosen: Sequence[tuple[int, int, int, int, int]], width: int = 0
    ) -> tuple[Stage, ...]:
        """From (start, stop, class, recomputation, place among the prices) of each; `width` as in
        `_prepared`."""
        rows, prices = self._prepared(border, width)
        setting, several = self.tables.setting, self.degrees.pipeline > 1
        firsts, made = self.pricing.first, self.tables.transients.first(setting, several=several)[1]
        starts, stops, numbers, agains, places = np.array(chosen).T
        own = rows[numbers, agains, places]
        firsts = np.asarray(self.early(firsts[numbers, agains], own[:, Rows.MORE]))
        columns = np.stack(
            [
                self.pricing.backward(own),
                firsts,
                made[numbers, agains],
                self.shared.weight_shares(starts, stops),
                prices[places],
                self.pricing.waiting[numbers],
            ]
        )
        stages = []
        for place, (start, stop, _, again, _) in enumerate(chosen):
            seconds, tail, state, kept, forward, compute, params, after, more = own[place].tolist()
            backward, first, gradients, share, price, waiting = columns[:, place].tolist()
            passes = self.pricing.split_passes(start, stop, again, int(price), border)
            if passes is not None:
                forward, backward = passes
                seconds = forward + backward
            stages.append(
                Stage(
                    start=start,
                    stop=stop,
                    price=int(price),
                    recompute=bool(again),
                    seconds=seconds,
                    tail=tail,
                    state=state,
                    kept=kept * self._in_flight[place],
                    transient=more,
                    first=first,
                    gradients=gradients if self.is_late(place) else 0.0,
                    flights=self._in_flight[place],
                    passing=state * self.pricing.passing + waiting,
                    params=params,
                    forward=forward,
                    weight=share * max(backward - again * compute, 0.0),
                    after=after,
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
            reading=price.reading,
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
                self.book.held(rank, kept) + max(stages[number].moment for number in hosted),
                sum(stages[number].passing for number in hosted),
            )
            for rank, hosted in enumerate(self.book.table.hosted)
        )
