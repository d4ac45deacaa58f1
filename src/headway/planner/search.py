"""Level 4 of the search: from a model and a cluster to the frontier of plans.

Combinations of degrees are opened in the order of their lower bounds (compute alone at first, their
own tables then); one whose bounds a known point beats is never opened. Invariant: the same
input gives the same points in the same order, and `Outcome.gap` is proven by the bounds of all that
was left closed. Source: planning by levels as in Zheng et al. 2022 (Alpa) and Cai et al. 2022
(TensorOpt; the objectives).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from headway.cost.transformer import Machine
from headway.errors import PlanError
from headway.planner.candidate import Candidate, Point, hull_bound
from headway.planner.degrees import Degrees, combinations, state_per_byte
from headway.planner.frontier.front import reduce
from headway.planner.operators import Setting, Workload, check_force, kernels, roofline
from headway.planner.row import Stretches, Unit, stretches, units
from headway.planner.stages import Tables, tables
from headway.units import format_bytes

Objective = Literal["fastest", "fewest-devices", "cheapest", "frontier"]
FINER = 0.75
"""Plans are sought in bands of memory, each this share of the one before."""
NEAR = 1.02
"""A band in which no plan can be faster than a known one by more than this factor is left."""
ALIKE = 1.001
LEAST = 0.02
"""Of the allowed memory: plans that need less than this share count as needing it."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        work: The model.
        machine: Devices and links.
        devices: Numbers of devices that may be used, ascending.
        batch: Samples of a step.
        memory: Bytes of a device that a plan may use; None: the device's.
        objective: What the chosen plan must be best in.
        price: Of one device and hour; None: not known.
        tensor: Degrees of the tensor axis; None: all up to the devices of the innermost level.
        zero: Stages of ZeRO.
        schedules: Of pipelines: "1f1b", "gpipe".
        force: As in `Setting`.
    """

    work: Workload
    machine: Machine
    devices: tuple[int, ...]
    batch: int
    memory: float | None = None
    objective: Objective = "frontier"
    price: float | None = None
    tensor: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 3)
    schedules: tuple[str, ...] = ("1f1b",)
    force: tuple[tuple[str, str], ...] = ()

    @property
    def cap(self) -> float:
        return self.memory or self.machine.device.memory

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        specs = self.work.graph.parameters.values()
        return max((spec.itemsize for spec in specs), default=4)

    def cost(self, devices: int, seconds: float) -> float:
        """Of a step; in seconds of devices where no price is known."""
        return devices * seconds * (1.0 if self.price is None else self.price / 3600.0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found.

    Attributes:
        question: What was asked.
        points: The frontier over (seconds, bytes, devices), fastest first.
        chosen: The number of the point that meets the objective.
        bound: What the objective's value is at least; `gap` compares it with the chosen point.
        considered: Combinations of degrees that there are.
        opened: Of those, how many were solved.
    """

    question: Question
    points: tuple[Point, ...]
    chosen: int
    bound: float
    considered: int
    opened: int
    search: Search = field(repr=False, compare=False)

    @property
    def best(self) -> Point:
        return self.points[self.chosen]

    @property
    def gap(self) -> float:
        """By which share the chosen point may be above the best there is."""
        value = _value(self.question, self.best)
        return max(0.0, value / self.bound - 1.0) if self.bound > 0 else 0.0


class Search:
    """Tables and combinations of one question; `run` answers it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.row: tuple[Unit, ...] = units(question.work)
        self.classes: Stretches = stretches(self.row)
        self._tables: dict[tuple[int, int], Tables] = {}
        self._least: dict[tuple[int, int], tuple[float, float]] = {}
        self.points: list[Point] = []
        self.opened = 0
        self._known: np.ndarray = np.zeros((0, 3))

    def tables_of(self, tensor: int, samples: int) -> Tables:
        """Shared by all combinations with this tensor degree and micro-batch."""
        key = (tensor, samples)
        if key not in self._tables:
            question = self.question
            setting = Setting(
                work=question.work,
                machine=question.machine,
                tensor=tensor,
                samples=samples,
                force=question.force,
            )
            if tensor > 1:
                check_force(setting)
            self._tables[key] = tables(setting, self.row, self.classes)
        return self._tables[key]

    def run(self) -> Outcome:
        """Search.

        Raises:
            PlanError: Nothing fits; says what would.
        """
        question = self.question
        waiting: list[tuple[float, Degrees, float, bool]] = []
        for degrees in self.combinations():
            seconds, held = self._first_bound(degrees)
            waiting.append((seconds, degrees, held, False))
        considered = len(waiting)
        heapq.heapify(waiting)
        bound = np.inf
        while waiting:
            seconds, degrees, held, tight = heapq.heappop(waiting)
            if held > question.cap or not np.isfinite(seconds):
                continue
            if self._beaten(seconds, question.cap, degrees.devices, held):
                bound = min(bound, _bound_value(question, degrees.devices, seconds))
                continue
            candidate = self._candidate(degrees)
            if not tight:
                better = candidate.bound(question.cap)
                line = (max(seconds, better[0]), degrees, max(held, better[1]), True)
                heapq.heappush(waiting, line)
                continue
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
                schedules=question.schedules,
            )

    def _first_bound(self, degrees: Degrees) -> tuple[float, float]:
        """Work alone, evenly spread; state, and what is kept without or with recomputation."""
        question = self.question
        m, p, b = degrees.microbatches, degrees.pipeline, degrees.microbatch
        per_byte = state_per_byte(question.itemsize, degrees.zero, degrees.data)
        state = self.held * per_byte
        forward, backward = self._least_seconds(degrees.tensor, b)
        seconds = np.array([forward + backward, 2 * forward + backward]) * (m + p - 1) / p
        held = (state + b * np.array([self.kept, self.crossing])) / degrees.tensor / p
        return hull_bound(seconds, held, question.cap)

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
                    (*(roofline(setting, o) if o.name in batched else (0.0, 0.0)), kernels(o))
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

    def _candidate(self, degrees: Degrees) -> Candidate:
        shared = self.tables_of(degrees.tensor, degrees.microbatch)
        return Candidate(shared, degrees, self.question.itemsize)

    def _open(self, candidate: Candidate) -> None:
        """Adds the fastest plan of each band of memory that may hold one of use."""
        cap = self.question.cap
        least = max(candidate.bound()[1], self.question.cap * LEAST)
        devices = candidate.degrees.devices
        while cap >= least:
            if not self._beaten(candidate.bound(cap)[0], cap, devices, cap):
                point = candidate.fastest(cap)
                if point is None:
                    return
                self._add(point)
                cap = min(cap, point.bytes)
            if self.question.objective != "frontier":
                return
            cap *= FINER

    def _add(self, point: Point) -> None:
        self.points.append(point)
        front = reduce(np.array([_vector(p) for p in self.points]))
        self.points = [self.points[row] for row in front.origins[:, 0]]
        self._known = front.costs

    def _beaten(self, seconds: float, cap: float, devices: int, held: float) -> bool:
        """Whether nothing of use can be found.

        Args:
            seconds: No plan is faster
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
        least = min(_value(self.question, point) for point in self.points)
        value = _bound_value(self.question, devices, seconds)
        return value >= least if self.question.objective != "fewest-devices" else value > least

    def _outcome(self, considered: int, bound: float) -> Outcome:
        question = self.question
        points = _distinct(sorted(self.points, key=_vector))
        values = [(_value(question, point), point.seconds) for point in points]
        chosen = values.index(min(values))
        return Outcome(
            question=question,
            points=points,
            chosen=chosen,
            bound=min(bound, values[chosen][0]),
            considered=considered,
            opened=self.opened,
            search=self,
        )

    def _impossible(self) -> PlanError:
        """What is missing, and the cheapest changes that would do."""
        free = Search(replace(self.question, memory=np.inf))
        least = min(
            (free._candidate(degrees).bound()[1], degrees) for degrees in free.combinations()
        )
        need = least[0]
        problems = [
            f"the least that any split needs is {format_bytes(need)} per device "
            f"({describe(least[1])}); {format_bytes(self.question.cap)} are allowed"
        ]
        fixes = [f"allow {format_bytes(need - self.question.cap)} more per device"]
        for factor in (2, 4, 8, 16):
            wider = self.question.devices[-1] * factor
            bigger = Search(replace(self.question, devices=(wider,)))
            if bigger.fits():
                fixes.append(f"take {wider} devices")
                break
        return PlanError("no plan fits", problems=problems, fix=", or ".join(fixes) + ".")

    def fits(self) -> bool:
        """Whether some combination has a plan within the memory."""
        by_memory = sorted((self._first_bound(d)[1], d) for d in self.combinations())
        return any(
            held <= self.question.cap and self._candidate(d).fastest(self.question.cap) is not None
            for held, d in by_memory[:64]
        )


def search(question: Question) -> Outcome:
    """The frontier of plans, and the one that meets the objective.

    Raises:
        PlanError: Nothing fits, or what is forced cannot be.
    """
    return Search(question).run()


def describe(degrees: Degrees) -> str:
    """ "tensor 8, data 4, pipe 2, 24 micro-batches of 4, ZeRO 1"."""
    words = [
        f"{name} {size}"
        for name, size in (
            ("tensor", degrees.tensor),
            ("data", degrees.data),
            ("pipe", degrees.pipeline),
        )
        if size > 1
    ] or ["one device"]
    words.append(f"{degrees.microbatches} micro-batches of {degrees.microbatch}")
    if degrees.zero:
        words.append(f"ZeRO {degrees.zero}")
    return ", ".join(words)


def _vector(point: Point) -> tuple[float, float, float]:
    return point.seconds, point.bytes, float(point.devices)


def _distinct(points: list[Point]) -> tuple[Point, ...]:
    """Without points that another one equals to a thousandth with as few or fewer devices."""
    kept: list[Point] = []
    for point in points:
        near = (point.seconds * ALIKE, point.bytes * ALIKE, float(point.devices))
        others = [other for other in points if other.devices < point.devices]
        if not any(np.all(np.array(_vector(other)) <= near) for other in others):
            kept.append(point)
    return tuple(kept)


def _value(question: Question, point: Point) -> float:
    return _bound_value(question, point.devices, point.seconds)


def _bound_value(question: Question, devices: int, seconds: float) -> float:
    """What the objective counts."""
    if question.objective == "fewest-devices":
        return float(devices)
    if question.objective == "cheapest":
        return question.cost(devices, seconds)
    return seconds
