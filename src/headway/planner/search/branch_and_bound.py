"""Best-first branch and bound over combinations of degrees, to the Pareto front of plans.
Combinations are opened in the order of their lower bounds: of compute alone at first, of their own
    tables then. One
whose bounds a known point beats is never opened. The same request gives the same points in the same
order, and
`gap` is proven by the bounds of all that was left closed. Planning by levels as in Zheng et al.
2022 (Alpa) and Cai et al. 2022 (TensorOpt; the objectives).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from headway.errors import NothingFits, PlanError
from headway.planner.estimate.degrees import Degrees, combinations, describe_degrees
from headway.planner.search.candidate import PlanCandidate, SearchBounds
from headway.planner.search.plan_point import Point
from headway.planner.search.request import Objective, PlanRequest
from headway.planner.search.result import ALIKE, ParetoResult, distinct_points, pareto_optimal
from headway.schedule.generators.registry import schedule_options
from headway.units import format_bytes

__all__ = [
    "Objective",
    "PlanRequest",
    "PlanSearch",
    "SearchResult",
    "describe_degrees",
    "find_plans",
]

FINER = 0.75
"""Plans are sought in bands of memory, each this share of the one before."""
NEAR = 1.02
"""A band in which no plan can be faster than a known one by more than this factor is left."""
TABLES = 64
"""Combinations with another schedule than the first one of the question that are opened, those with
the least bounds first: their tables take time. The gap counts what is left closed."""
LEAST = 0.02
"""Of the allowed memory: plans that need less than this share count as needing it."""


@dataclass(frozen=True, kw_only=True)
class SearchResult(ParetoResult[Point]):
    """What was found.

    Attributes:
        floor: Seconds that no plan takes less than on as many devices as the chosen one, also none
            that the search leaves out: work evenly spread, no bubble, no launch waits, and what of
            the exchange is longer than the backward passes.
    """

    question: PlanRequest
    floor: float
    search: PlanSearch = field(repr=False, compare=False)

    @property
    def value(self) -> float:
        return _value(self.question, self.best)

    @property
    def unexplored(self) -> float:
        """By which share the chosen point's time is above `floor`."""
        return max(0.0, self.best.seconds / self.floor - 1.0) if self.floor > 0 else 0.0


class PlanSearch(SearchBounds):
    """Tables and combinations of one question; `run` answers it."""

    def __init__(self, question: PlanRequest) -> None:
        super().__init__(question)
        self.points: list[Point] = []
        self.opened = 0
        self._known: np.ndarray = np.zeros((0, 3))

    def run(self) -> SearchResult:
        """Search.

        Raises:
            NothingFits: No plan is within the memory.
        """
        question = self.question
        end = np.inf if question.seconds is None else perf_counter() + question.seconds
        waiting: list[tuple[float, Degrees, float, bool]] = []
        for degrees in self.combinations():
            seconds, held = self._first_bound(degrees)
            waiting.append((seconds, degrees, held, False))
        considered = len(waiting)
        heapq.heapify(waiting)
        bound, tables = np.inf, 0
        while waiting:
            seconds, degrees, held, tight = heapq.heappop(waiting)
            if held > question.cap or not np.isfinite(seconds):
                continue
            late = bool(self.points) and perf_counter() > end
            if late or self._beaten(seconds, question.cap, degrees.devices, held):
                bound = min(bound, _bound_value(question, degrees.devices, seconds))
                continue
            candidate = self.candidate(degrees)
            if not tight:
                better = candidate.bound(question.cap)
                line = (max(seconds, better[0]), degrees, max(held, better[1]), True)
                heapq.heappush(waiting, line)
                continue
            if degrees.pipeline > 1 and degrees.schedule != question.schedules[0]:
                if tables == TABLES:
                    bound = min(bound, _bound_value(question, degrees.devices, seconds))
                    continue
                tables += 1
            self.opened += 1
            self._open(candidate)
        if not self.points:
            raise self._impossible()
        return self._outcome(considered, float(bound))

    def combinations(self) -> Iterator[Degrees]:
        """All of them."""
        question = self.question
        inner = question.machine.network.levels[0].width
        for devices in question.devices:
            allowed = question.tensor or tuple(
                t for t in range(1, devices + 1) if devices % t == 0 and t <= min(inner, devices)
            )
            if any(how.startswith("split") for _, how in question.force):
                allowed = tuple(t for t in allowed if t > 1)
            yield from combinations(
                devices,
                question.batch,
                units=len(self.row),
                tensor=allowed,
                zero=question.zero,
                schedules=schedule_options(question.schedules),
                orders=question.orders,
                one_level=int(min(inner, devices)),
            )

    def candidate(self, degrees: Degrees, *, late: bool = True) -> PlanCandidate:
        """A combination of degrees on the search's tables; `late` as for `CandidateBounds`."""
        shared = self.tables_of(degrees.tensor, degrees.microbatch)
        recompute = self.question.recompute == "any" or degrees.pipeline > 1
        return PlanCandidate(
            shared, degrees, self.question.itemsize, self.shared, may_recompute=recompute, late=late
        )

    _candidate = candidate

    def _open(self, candidate: PlanCandidate) -> None:
        """Adds the fastest plan of each band of memory that may hold one of use."""
        cap = self.question.cap
        least = max(candidate.bound()[1], self.question.cap * LEAST)
        devices = candidate.degrees.devices
        while cap >= least:
            if not self._beaten(candidate.bound(cap)[0], cap, devices, cap):
                known = self._known_within(cap, devices)
                point = candidate.fastest(cap, known, parts=False)
                if point is not None:
                    self._add(point)
                    cap = min(cap, point.bytes)
                elif not np.isfinite(known):
                    return
            if self.question.objective != "frontier":
                return
            cap *= FINER

    def _known_within(self, cap: float, devices: int) -> float:
        """Seconds from which on no plan of this band is of use. Of the frontier: a slower one is
        beaten, or needs less than the band and is sought again below it."""
        found = [point.seconds for point in self.points]
        if self.question.objective == "frontier":
            found = [
                point.seconds
                for point in self.points
                if point.bytes <= cap * FINER and point.devices <= devices
            ]
        elif self.question.objective != "fastest":
            found = []
        return min(found, default=np.inf)

    def _add(self, point: Point) -> None:
        self.points.append(point)
        self.points, self._known = pareto_optimal(self.points)

    def _beaten(self, seconds: float, cap: float, devices: int, held: float) -> bool:
        """Whether nothing of use can be found.

        Args:
            cap: that needs at most this memory
            devices: on so many devices,
            held: and none needs less memory than this.
        """
        if not len(self.points):
            return False
        if self.question.objective == "frontier":
            most = np.array(
                [
                    seconds * NEAR,
                    max(held, min(cap, held / FINER), self.question.cap * LEAST),
                    devices,
                ]
            )
            return bool((self._known <= most).all(axis=1).any())
        least, fewest = min((_value(self.question, p), p.devices) for p in self.points)
        value = _bound_value(self.question, devices, seconds)
        if self.question.objective == "fewest-devices":
            return value > least
        return value > least * ALIKE if devices < fewest else value >= least

    def _outcome(self, considered: int, bound: float) -> SearchResult:
        question = self.question
        found = distinct_points(self.points)
        points = tuple(self.candidate(point.degrees).detailed(point) for point in found)
        values = [_value(question, point) for point in points]
        equal = [n for n, value in enumerate(values) if value <= min(values) * ALIKE]
        chosen = min(equal, key=lambda n: (points[n].devices, points[n].seconds))
        return SearchResult(
            question=question,
            points=points,
            chosen=chosen,
            bound=min(bound, values[chosen]),
            floor=min(
                self.floor(degrees)
                for degrees in self.combinations()
                if degrees.devices == points[chosen].devices
            ),
            considered=considered,
            opened=self.opened,
            search=self,
        )

    def _impossible(self) -> PlanError:
        """Without looking for changes that would do: `refusal.refusal` does."""
        question = self.question
        counts = " or ".join(map(str, question.devices))
        return NothingFits(
            "no plan fits",
            problems=[f"{counts} devices, {format_bytes(question.cap)} allowed on each"],
            fix="headway.planner.explain.infeasible.infeasible_error(question) says which changes "
            "would do.",
        )


def find_plans(question: PlanRequest) -> SearchResult:
    """The frontier of plans, and the one that meets the objective.

    Raises:
        NothingFits: No plan is within the memory; `refusal.refusal` says what would do.
        PlanError: What is forced cannot be.
    """
    return PlanSearch(question).run()


def _value(question: PlanRequest, point: Point) -> float:
    return _bound_value(question, point.devices, point.seconds)


def _bound_value(question: PlanRequest, devices: int, seconds: float) -> float:
    """What the objective counts."""
    if question.objective == "fewest-devices":
        return float(devices)
    if question.objective == "cheapest":
        return question.cost(devices, seconds)
    return seconds
