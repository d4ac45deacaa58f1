"""The search on devices of several types: bounds, sizes of micro-batches, and the front.
Tables, rows and cuts are those of the search on equal devices, one set for each type; new are the
layouts of types on the mesh, micro-batches of unequal sizes, and stages as slow as their slowest
copy. Combinations are opened in
the order of a lower bound: every operator's work evenly spread, or its launches, on the devices
    that do it.
Sources: Jia et al. 2022 (Whale), balancing inside and between task graphs, and Algorithm 1 for
    `balance = "whale"`;
Zheng et al. 2022 (Alpa), the cuts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np

from headway.cost.transformer import Machine
from headway.errors import NothingFits, PlanError
from headway.planner.estimate.degrees import Degrees, divisors, least_state_per_byte, state_per_byte
from headway.planner.estimate.operators import Floats
from headway.planner.estimate.partition import forced_stage_starts
from headway.planner.search.branch_and_bound import LEAST, NEAR, PlanSearch
from headway.planner.search.candidate import PlanCandidate
from headway.planner.search.mixed_candidate import (
    MixedCandidate,
    MixedCombination,
    MixedPoint,
    Picks,
    device_counts,
    device_layouts,
)
from headway.planner.search.request import MixedPlanRequest
from headway.planner.search.result import (
    ParetoResult,
    distinct_points,
    pareto_optimal,
    point_objectives,
)
from headway.planner.whale.load_balance import (
    DeviceShare,
    algorithm_1,
    slowest_stage,
    whole_filling,
)
from headway.units import format_bytes

DENSE = 1024
"""Up to so many samples of a micro-batch each has a bound of its own, beyond only some."""


class MixedBounds:
    """Bounds of one question."""

    def __init__(self, question: MixedPlanRequest, engines: Mapping[str, PlanSearch]) -> None:
        self.question = question
        self.engines = engines
        self.engine = next(iter(engines.values()))
        self._bounds: dict[tuple[str, int], Floats] = {}
        self._copies: dict[tuple[tuple[tuple[str, int], ...], int], tuple[Floats, Floats]] = {}

    def seconds(self, combination: MixedCombination) -> float:
        """Seconds that no plan of it is below; infinite where the parameters alone do not fit."""
        question, state = self.question, self.state(combination)
        for kinds, _ in combination.cells.classes:
            if state > sum(question.caps[kind] for kind in kinds):
                return np.inf
        costs = [self.costs(kinds, combination) for kinds, _ in combination.cells.classes]
        copies = [number for _, number in combination.cells.classes]
        need = -(-question.batch // combination.microbatches)
        return whole_filling(costs, copies, need)[1]

    def costs(self, kinds: tuple[str, ...], combination: MixedCombination) -> Floats:
        """Least seconds of a copy's step with micro-batches of 1, 2, ... samples."""
        m = combination.microbatches
        need = -(-self.question.batch // m)
        slowest, through = self._copy(tuple(sorted(Counter(kinds).items())), combination.tensor)
        return (m - 1) * slowest[:need] + through[:need]

    def _copy(self, stages: tuple[tuple[str, int], ...], tensor: int) -> tuple[Floats, Floats]:
        """Least seconds of a copy's slowest stage, and of all its stages one after the other, with
        micro-batches of 1, 2, ... samples.
        """
        key = (stages, tensor)
        if key not in self._copies:
            counts = np.array(list(self._kinds.values()))
            each = np.stack([self._spread(kind, tensor) for kind, _ in stages])
            numbers = np.array([number for _, number in stages])
            slowest, through = slowest_stage(each, counts, numbers)
            self._copies[key] = np.maximum.accumulate(slowest), np.maximum.accumulate(through)
        return self._copies[key]

    @cached_property
    def _kinds(self) -> Mapping[int, int]:
        """How many units there are of each kind."""
        return Counter(unit.kind for unit in self.engine.row)

    def _spread(self, kind: str, tensor: int) -> Floats:
        """(kinds of units, batch): seconds of a micro-batch of 1, 2, ... samples on t devices of a
        type: every operator's work evenly spread, or its launch."""
        key = (kind, tensor)
        if key not in self._bounds:
            passes, launches = self.engines[kind].bounds.work
            device = self.question.machines[kind].device
            batch = self.question.batch
            sparse = np.floor(np.geomspace(min(batch, DENSE), batch, 512))
            grid = np.unique([*range(1, min(batch, DENSE) + 1), *sparse, batch])
            stops = np.cumsum([0, *(unit.stop - unit.start for unit in self.engine.row)]).tolist()
            spans = {unit.kind: stops[n : n + 2] for n, unit in enumerate(self.engine.row)}
            found = []
            for number in self._kinds:
                some, calls = (
                    part[slice(*spans[number])][..., None] for part in (passes, launches)
                )
                work = some * grid / tensor + device.seconds_of_kernels(calls)
                slower = np.maximum(work, device.seconds_of_host(calls))
                found.append(np.where(some > 0, slower, 0.0).sum(axis=(0, 1)))
            at = np.searchsorted(grid, np.arange(1, batch + 1), side="right") - 1
            self._bounds[key] = np.maximum.accumulate(np.stack(found)[:, at], axis=1)
        return self._bounds[key]

    def held(self, combination: MixedCombination) -> float:
        """Bytes that the fullest device needs at least: some copy takes no less than the mean."""
        microbatch = -(-self.question.batch // combination.microbatches // combination.data)
        kept = min(self.engine.bounds.kept, self.engine.bounds.crossing) / combination.tensor
        return (self.state(combination) + kept * microbatch) / combination.pipeline

    def may_fit(
        self, combination: MixedCombination, tuples: np.ndarray, caps: Mapping[str, float]
    ) -> np.ndarray:
        """Which sizes leave room for the state and the least that forward keeps."""
        state, t = self.state(combination), combination.tensor
        kept = min(self.engine.bounds.kept, self.engine.bounds.crossing) / t
        fits = np.ones(len(tuples), dtype=bool)
        for c, (kinds, _) in enumerate(combination.cells.classes):
            fits &= state + kept * tuples[:, c] <= sum(caps[kind] for kind in kinds)
        return fits

    def state(self, combination: MixedCombination) -> float:
        """Bytes of weights, gradients and optimiser of a copy at any moment of a step, on the
        devices of one tensor rank."""
        question = self.engine.question
        degrees, copies = combination.degrees(1), question.work.optimiser.state
        per_byte = least_state_per_byte(question.itemsize, degrees, copies)
        return self.engine.bounds.held * per_byte / combination.tensor


# The sizes of micro-batches with which copies on unequal devices are tried.


def microbatch_shares(
    bounds: MixedBounds, combination: MixedCombination, caps: Mapping[str, float]
) -> np.ndarray:
    """(n, classes): micro-batches of the classes that together have the batch, none larger
    than it must be beside the others."""
    need = -(-bounds.question.batch // combination.microbatches)
    copies = [number for _, number in combination.cells.classes]
    if bounds.question.balance == "whale":
        found = _by_algorithm_1(bounds, combination, caps, need)
        return np.array([found]) if found else np.zeros((0, len(copies)), dtype=int)
    front: list[tuple[int, ...]] = [()]
    for number in copies[:-1]:
        front = [
            (*some, size)
            for some in front
            for size in range(1, max(1, _left(some, copies, need)) // number + 1)
        ]
    whole = [(*some, max(1, -(-_left(some, copies, need) // copies[-1]))) for some in front]
    return np.array([some for some in whole if _left(some[:-1], copies, need) > 0])


def _by_algorithm_1(
    bounds: MixedBounds, combination: MixedCombination, caps: Mapping[str, float], need: int
) -> tuple[int, ...] | None:
    """Whale's shares: by the rates of the devices of a copy, within its memory."""
    kept = bounds.engine.bounds.kept * min(combination.microbatches, combination.pipeline)
    shares = [
        DeviceShare(
            rate=sum(_flops(bounds.question.machines[kind]) for kind in kinds),
            memory=sum(caps[kind] for kind in kinds),
            scaled=need * kept / combination.tensor,
            fixed=bounds.state(combination),
        )
        for kinds in combination.cells.copies
    ]
    try:
        loads = dict(zip(combination.cells.copies, algorithm_1(shares).loads, strict=True))
    except PlanError:
        return None
    return tuple(
        max(1, int(np.ceil(loads[kinds] * need - 1e-9))) for kinds, _ in combination.cells.classes
    )


def _left(some: Sequence[int], copies: Sequence[int], need: int) -> int:
    return need - sum(n * size for n, size in zip(copies, some, strict=False))


def _flops(machine: Machine) -> float:
    return machine.device.rate(machine.dtype)


# Level 5 of the search: from a model and devices of several types to the frontier of plans.


BAND = 0.5
"""Plans are sought in bands of memory, each this share of the one before."""
KEPT = 24
"""Candidates that are kept for the next combination."""
MISSES = 2
"""Shares that do not fit, after which a combination is left, without `proof`."""
TRIES = 6
"""Shares of a batch that are priced for one combination, without `proof`."""
WORTH = 0.99
"""Other shares are priced where they are estimated to take at most so much of the best."""


@dataclass(frozen=True, kw_only=True)
class MixedSearchResult(ParetoResult[MixedPoint]):
    """What was found."""

    question: MixedPlanRequest
    search: MixedSearch = field(repr=False, compare=False)

    @property
    def value(self) -> float:
        return self.search.value(self.best.combination, self.best.seconds)


class MixedSearch:
    """Tables of all types of one question; `run` answers it."""

    def __init__(self, question: MixedPlanRequest) -> None:
        self.question = question
        self.engines = {kind: PlanSearch(question.of(kind)) for kind in question.machines}
        self.engine = next(iter(self.engines.values()))
        self.starts = forced_stage_starts(question.force, self.engine.row)
        self.points: list[MixedPoint] = []
        self.opened = 0
        self.closed = np.inf  # a bound of what was not priced of those that were opened
        self._known: Floats = np.zeros((0, 4))
        self._candidates: dict[tuple[str, Degrees], PlanCandidate] = {}
        self._picks: Picks = WeakKeyDictionary()
        self.bounds = MixedBounds(question, self.engines)

    def run(self) -> MixedSearchResult:
        """Search.

        Raises:
            NothingFits: No plan is within the memory.
        """
        waiting = [
            (self.bounds.seconds(combination), combination) for combination in self.combinations()
        ]
        considered = len(waiting)
        heapq.heapify(waiting)
        bound = np.inf
        limit = self.question.seconds
        end = np.inf if limit is None else perf_counter() + limit
        while waiting:
            seconds, combination = heapq.heappop(waiting)
            if not np.isfinite(seconds):
                continue
            late = bool(self.points) and perf_counter() > end
            if late or self._beaten(seconds, self.question.caps, combination):
                bound = min(bound, self.value(combination, seconds))
                continue
            self.opened += 1
            self._open(combination)
        if not self.points:
            raise self._impossible()
        return self._outcome(considered, float(bound))

    def combinations(self) -> Iterator[MixedCombination]:
        """All of them."""
        question = self.question
        kinds = list(question.machines)
        if question.balance == "whale":
            kinds.sort(key=lambda kind: -question.machines[kind].device.memory)
        counts = {kind: question.counts[kind] for kind in kinds}
        for amounts in device_counts(counts, question.devices):
            used = tuple((kind, number) for kind, number in amounts.items() if number)
            for t in self._tensor(amounts):
                cells = sum(amounts.values()) // t
                for p in divisors(cells):
                    d = cells // p
                    if max(len(self.starts) + 1, p) > len(self.engine.row) or d > question.batch:
                        continue
                    for m in microbatch_counts(question.batch // d):
                        for zero in question.zero if d > 1 else (0,):
                            for layout in device_layouts(
                                amounts,
                                tensor=t,
                                data=d,
                                pipeline=p,
                                every=question.balance == "exact",
                            ):
                                yield MixedCombination(
                                    amounts=used,
                                    tensor=t,
                                    data=d,
                                    pipeline=p,
                                    microbatches=m,
                                    zero=zero,
                                    cells=layout,
                                )

    def _tensor(self, amounts: Mapping[str, int]) -> tuple[int, ...]:
        question = self.question
        inner = min(m.network.levels[0].width for m in question.machines.values())
        split = any(how.startswith("split") for _, how in question.force)
        return tuple(
            t
            for t in divisors(sum(amounts.values()))
            if t <= inner
            and (question.tensor is None or t in question.tensor)
            and all(number % t == 0 for number in amounts.values())
            and (t > 1 or not split)
            and (t == 1 or not question.runnable)
        )

    def value(self, combination: MixedCombination, seconds: float) -> float:
        """What the objective counts."""
        if self.question.objective == "fewest-devices":
            return float(combination.devices)
        if self.question.objective == "cheapest":
            return self.question.cost(combination.amounts, seconds)
        return seconds

    def _beaten(
        self, seconds: float, caps: Mapping[str, float], combination: MixedCombination
    ) -> bool:
        """Whether no plan of it within the memory can be of use, if none is faster than this."""
        if not self.points:
            return False
        if self.question.objective == "frontier":
            most, held = max(caps.values()), self.bounds.held(combination)
            room = max(held, min(most, held / BAND), most * LEAST)
            return self._known_is(seconds * NEAR, room, combination)
        least = min(self.value(point.combination, point.seconds) for point in self.points)
        value = self.value(combination, seconds)
        return value >= least if self.question.objective != "fewest-devices" else value > least

    def _known_is(self, seconds: float, held: float, combination: MixedCombination) -> bool:
        """Whether a known plan is as good as one with these figures."""
        if not len(self._known):
            return False
        if self.question.objective == "fastest":
            return bool(self._known[:, 0].min() <= seconds)
        cost = self.question.cost(combination.amounts, seconds)
        most = np.array([seconds, held, combination.devices, cost])
        return bool((self._known <= most).all(axis=1).any())

    # -- opening -------------------------------------------------------------------------------

    def _open(self, combination: MixedCombination) -> None:
        """Adds the fastest plan of each band of memory that may hold one of use."""
        whole = max(self.question.caps.values())
        cap, floor = whole, self.bounds.seconds(combination)
        least = max(self.bounds.held(combination), whole * LEAST)
        while cap >= least:
            caps = {kind: min(cap, own) for kind, own in self.question.caps.items()}
            known = self._known_within(cap, combination)
            if floor < known:
                point, fits = self.fastest(combination, caps, known)
                if not fits:
                    return
                if point is not None:
                    self._add(point)
                    floor = max(floor, point.seconds)
                    while cap * BAND > point.bytes:
                        cap *= BAND
            if self.question.objective != "frontier":
                return
            cap *= BAND

    def _known_within(self, cap: float, combination: MixedCombination) -> float:
        """Seconds from which on no plan of this band is of use. Of the frontier: a slower one is
        beaten, or needs less than the band and is sought again below it."""
        if not self.points:
            return np.inf
        if self.question.objective == "fastest":
            return float(self._known[:, 0].min())
        if self.question.objective == "cheapest":
            least = min(self.value(point.combination, point.seconds) for point in self.points)
            return least / self.value(combination, 1.0)
        frontier = self.question.objective == "frontier"
        most = [np.inf, cap * BAND if frontier else np.inf, combination.devices, np.inf]
        near = self._known[(self._known <= most).all(axis=1)]
        each = self.question.cost(combination.amounts, 1.0)  # money of a second
        beaten = np.maximum(near[:, 0], near[:, 3] / each if frontier else 0.0)
        return float(beaten.min(initial=np.inf)) / (NEAR if frontier else 1.0)

    def fastest(
        self, combination: MixedCombination, caps: Mapping[str, float], limit: float = np.inf
    ) -> tuple[MixedPoint | None, bool]:
        """The fastest plan of a combination within the memory that is of use; whether one may fit.

        Sizes of micro-batches are tried in the order of what they are estimated to take: their
        bound times what the last ones took above theirs.

        Args:
            caps: Bytes, by type.
            limit: Seconds from which on no plan is of use.
        """
        tuples = microbatch_shares(self.bounds, combination, caps)
        tuples = tuples[self.bounds.may_fit(combination, tuples, caps)]
        if not len(tuples):
            return None, False
        fits = False

        def useful(seconds: float, held: float) -> bool:
            nonlocal fits
            fits = True
            return self.question.proof or not self._known_is(seconds, held, combination)

        classes = combination.cells.classes
        bounds = np.stack(
            [
                self.bounds.costs(kinds, combination)[tuples[:, c] - 1]
                for c, (kinds, _) in enumerate(classes)
            ]
        )
        factors, misses = np.ones(len(classes)), 0
        least = bounds.max(axis=0)
        open_ = least < limit
        skipped = ~open_
        fits = bool(skipped.any())
        best: MixedPoint | None = None
        tries = 0
        while open_.any():
            if not self.question.proof and tries == TRIES:
                break
            estimates = np.where(open_, (bounds * factors[:, None]).max(axis=0), np.inf)
            place = int(estimates.argmin())
            known = np.inf if best is None else best.seconds
            if not self.question.proof and estimates[place] >= known * WORTH:
                break
            open_[place] = False
            tries += 1
            sharing = self.sharing(combination, tuple(tuples[place].tolist()))
            point, own = None, sharing.least(caps)
            least[place] = max(least[place], own[0])
            skipped[place] = least[place] >= limit
            if skipped[place]:
                fits = fits or bool(np.isfinite(own[0]))
            elif useful(*own):
                fits, most = False, min(known, limit)
                point = sharing.fastest(caps, useful, most)
                if point is None and not fits:  # there is none, or none as fast
                    least[place], fits = max(least[place], most), most < np.inf
                skipped[place] = point is None and fits
            if point is None:
                misses += 1
                if misses == MISSES and best is None and not self.question.proof:
                    break
                continue
            factors = self._took(point) / bounds[:, place]
            if best is None or point.seconds < best.seconds:
                best = point
            open_ &= least < best.seconds
        least = least[open_ | skipped]
        self.closed = min(self.closed, self.value(combination, float(least.min(initial=np.inf))))
        return best, fits or best is not None

    def sharing(self, combination: MixedCombination, sizes: tuple[int, ...]) -> MixedCandidate:
        """A combination with sizes of micro-batches, on the tables of this search."""
        return MixedCandidate(
            combination=combination,
            sizes=sizes,
            candidate=self._candidate,
            starts=self.starts,
            picks=self._picks,
        )

    def _candidate(self, kind: str, degrees: Degrees) -> PlanCandidate:
        """The last ones are kept: other layouts have the same."""
        key = (kind, degrees)
        if key not in self._candidates:
            while len(self._candidates) >= KEPT:
                self._candidates.pop(next(iter(self._candidates)))
            self._candidates[key] = self.engines[kind].candidate(degrees)
        return self._candidates[key]

    def _took(self, point: MixedPoint) -> Floats:
        """(classes,): seconds of a step of each class of copies alone."""
        m = point.combination.microbatches
        found = []
        for number, (kinds, _) in enumerate(point.combination.cells.classes):
            each = []
            for stage, kind in zip(point.stages, kinds, strict=True):
                cells = sorted(point.combination.cells.types_of(point.stages.index(stage)))
                each.append(stage.parts[cells.index((number, kind))].stage.seconds)
            found.append((m - 1) * max(each) + sum(each))
        return np.array(found)

    def _add(self, point: MixedPoint) -> None:
        self.points.append(point)
        self.points, self._known = pareto_optimal(self.points, self._figures)

    def _figures(self, point: MixedPoint) -> tuple[float, ...]:
        """With money: slower devices may cost less than fewer fast ones."""
        cost = self.question.cost(point.combination.amounts, point.seconds)
        return *point_objectives(point), cost

    def _outcome(self, considered: int, bound: float) -> MixedSearchResult:
        points = distinct_points(self.points, self._figures)
        values = [(self.value(p.combination, p.seconds), p.seconds) for p in points]
        chosen = values.index(min(values))
        return MixedSearchResult(
            question=self.question,
            points=points,
            chosen=chosen,
            bound=min(bound, self.closed, values[chosen][0]),
            considered=considered,
            opened=self.opened,
            search=self,
        )

    def _impossible(self) -> PlanError:
        question = self.question
        there = ", ".join(
            f"{number} x {kind} with {format_bytes(question.caps[kind])}"
            for kind, number in question.counts.items()
        )
        least = min(question.zero)
        state = self.engine.bounds.held * state_per_byte(
            self.engine.question.itemsize, least, 1, self.engine.question.work.optimiser.state
        )
        return NothingFits(
            "no plan fits",
            problems=[
                f"there are {there}",
                f"weights, gradients and optimiser take {format_bytes(state)} in all copies' stages"
                " together, activations apart",
            ],
            fix="Allow more memory or devices, ZeRO, or a smaller batch.",
        )


def search_mixed(question: MixedPlanRequest) -> MixedSearchResult:
    """The frontier of plans on devices of several types, and the one that meets the objective.

    Raises:
        NothingFits: No plan is within the memory.
        PlanError: What is forced cannot be.
    """
    return MixedSearch(question).run()


def microbatch_counts(share: int) -> tuple[int, ...]:
    """Numbers of micro-batches that are tried: powers of two, and one for each sample."""
    return tuple(sorted({share, *(2**n for n in range(share.bit_length()) if 2**n <= share)}))
