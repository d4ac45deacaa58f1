"""Best-first branch and bound over combinations of degrees, to the Pareto front of plans.
Combinations are opened in the order of their lower bounds: of compute alone at first, of their own
tables then. One whose bounds a known point beats is never opened. The same request gives the same
points in the same order, and `gap` is proven by the bounds of all that was left closed. Planning by
levels as in Zheng et al. 2022 (Alpa) and Cai et al. 2022 (TensorOpt; the objectives).
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter

import numpy as np

from headway.errors import NothingFits, PlanError
from headway.planner.estimate.degrees import (
    Degrees,
    combinations,
    least_state_per_byte,
)
from headway.planner.estimate.gradient_exchange import ModelParameters
from headway.planner.estimate.operators import (
    OperatorSetting,
    check_force,
    kernel_count,
    roofline_seconds,
)
from headway.planner.estimate.partition import (
    IntervalClasses,
    LayerUnit,
    interval_classes,
    make_units,
)
from headway.planner.estimate.segments import SegmentTables, make_segment_tables
from headway.planner.estimate.transient_memory import TransientMemory
from headway.planner.search.candidate import PlanCandidate, lower_hull_bound, step_lower_bound
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.planner.search.result import ALIKE, ParetoResult, distinct_points, pareto_optimal
from headway.schedule.generators.registry import schedule_options
from headway.units import format_bytes

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


class SearchBounds:
    """The tables of one question, and what bounds its combinations before any is opened."""

    def __init__(self, question: PlanRequest) -> None:
        self.question = question
        self.row: tuple[LayerUnit, ...] = make_units(question.work)
        self.classes: IntervalClasses = interval_classes(self.row)
        self.shared = ModelParameters(question.work, self.row, self.classes)
        self.transients = TransientMemory(question.work, self.row, self.classes)
        self._tables: dict[tuple[int, int], SegmentTables] = {}
        self._least: dict[tuple[int, int], tuple[float, float]] = {}
        self._sums: dict[tuple[int, int, int], float] = {}

    def tables_of(self, tensor: int, samples: int) -> SegmentTables:
        """Shared by all combinations with this tensor degree and micro-batch."""
        key = (tensor, samples)
        if key not in self._tables:
            question = self.question
            setting = OperatorSetting(
                work=question.work,
                machine=question.priced,
                tensor=tensor,
                samples=samples,
                force=question.force,
            )
            if tensor > 1:
                check_force(setting)
            self._tables[key] = make_segment_tables(
                setting, self.row, self.classes, self.transients
            )
        return self._tables[key]

    def first(self, degrees: Degrees) -> tuple[float, float]:
        """Work alone, evenly spread; state, and what is kept without or with recomputation."""
        question = self.question
        p, b = degrees.pipeline, degrees.microbatch
        copies = question.work.optimiser.state
        per_byte = least_state_per_byte(question.itemsize, degrees, copies)
        state = self.held * per_byte * degrees.pipes
        forward, backward = self._least_seconds(degrees.tensor, b)
        passes = np.array([backward, forward + backward])
        seconds = step_lower_bound(degrees, np.full(2, forward), passes)
        held = (state + b * np.array([self.kept, self.crossing])) / degrees.tensor / p
        return lower_hull_bound(seconds, held, question.cap)

    def floor(self, degrees: Degrees) -> float:
        """Seconds below which no plan of these degrees is, whatever its cut, its schedule, its
        order of axes and its placements: work evenly spread without a bubble, and what of the
        exchange is longer than all backward passes."""
        forward, backward = self._least_seconds(degrees.tensor, degrees.microbatch)
        m, p, d = degrees.microbatches, degrees.pipeline, degrees.data
        compute = (forward + backward) * m / p
        if d == 1:
            return compute
        sums = self._least_sums(degrees.tensor, p, d)
        return compute + max(0.0, sums - backward * m / p)

    def _least_sums(self, tensor: int, pipeline: int, data: int) -> float:
        """Seconds in which gradients are scattered, in the better order of the axes."""
        key = (tensor, pipeline, data)
        if key not in self._sums:
            network, held = self.question.machine.network, self.held / tensor / pipeline
            self._sums[key] = min(
                float(network.reduce_scatter(held, data, tensor * inside))
                for inside in (1, pipeline)
            )
        return self._sums[key]

    def _least_seconds(self, tensor: int, samples: int) -> tuple[float, float]:
        """Of a micro-batch in both passes: every operator's work evenly spread, or its launch."""
        key = (tensor, samples)
        if key not in self._least:
            device = self.question.machine.device
            passes, launches = self.work
            spread = passes * samples / tensor + device.seconds_of_kernels(launches)
            slower = np.where(passes > 0, np.maximum(spread, device.seconds_of_host(launches)), 0.0)
            forward, backward = slower.sum(axis=0)
            self._least[key] = float(forward), float(backward)
        return self._least[key]

    @cached_property
    def work(self) -> tuple[np.ndarray, np.ndarray]:
        """(operators, 2): seconds of one sample on one device in both passes, and kernels."""
        setting = self.tables_of(1, self.question.work.samples).setting
        operators = self.question.work.graph.operators
        batched = self.question.work.batch_loops
        known: dict[int, list[tuple[float, float, int]]] = {}
        for unit in self.row:
            if unit.kind not in known:
                known[unit.kind] = [
                    (
                        *(roofline_seconds(setting, o) if o.name in batched else (0.0, 0.0)),
                        kernel_count(o),
                    )
                    for o in operators[unit.start : unit.stop]
                ]
        each = np.array([line for unit in self.row for line in known[unit.kind]])
        return each[:, :2] / self.question.work.samples, each[:, 2:]

    @cached_property
    def held(self) -> int:
        """Bytes of all parameters."""
        return self.question.work.graph.parameter_bytes

    @cached_property
    def kept(self) -> float:
        """Bytes that a sample's forward keeps."""
        return self.question.work.graph.saved_bytes / self.question.work.samples

    @cached_property
    def crossing(self) -> float:
        """Bytes of one sample that enter units."""
        graph = self.question.work.graph
        entered = sum(graph.tensors[unit.entry].bytes for unit in self.row if unit.entry)
        return entered / self.question.work.samples


class PlanSearch:
    """Tables and combinations of one question; `run` answers it.

    Args:
        allow: Which combinations are looked at; None: all.
    """

    def __init__(
        self, question: PlanRequest, allow: Callable[[Degrees], bool] | None = None
    ) -> None:
        self.question = question
        self.allow = allow
        self.bounds = SearchBounds(question)
        self.row = self.bounds.row
        self.shared = self.bounds.shared
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
            seconds, held = self.bounds.first(degrees)
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

    def related(self, question: PlanRequest) -> PlanSearch:
        """A search of another question of the same model, machine and forced choices: its tables
        are these."""
        other = copy.copy(self)
        other.question, other.bounds = question, copy.copy(self.bounds)
        other.bounds.question = question
        other.points, other.opened, other._known = [], 0, np.zeros((0, 3))
        return other

    def tables_of(self, tensor: int, samples: int) -> SegmentTables:
        """Shared by all combinations with this tensor degree and micro-batch."""
        return self.bounds.tables_of(tensor, samples)

    def combinations(self) -> Iterator[Degrees]:
        """All of them."""
        return filter(self.allow, self._every_combination())

    def _every_combination(self) -> Iterator[Degrees]:
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

    def candidate(self, degrees: Degrees) -> PlanCandidate:
        """A combination of degrees on the search's tables."""
        shared = self.tables_of(degrees.tensor, degrees.microbatch)
        recompute = self.question.recompute == "any" or degrees.pipeline > 1
        return PlanCandidate(
            shared, degrees, self.question.itemsize, self.shared, may_recompute=recompute
        )

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
                self.bounds.floor(degrees)
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
