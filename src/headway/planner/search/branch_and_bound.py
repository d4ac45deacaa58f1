"""Best-first branch and bound over combinations of degrees, to the Pareto front of plans.

Combinations are opened in the order of their lower bounds: of compute alone at first, of their own
tables then. One whose bounds a known point beats is never opened. The same request gives the same
points in the same order, and `gap` is proven by the bounds of all that was left closed.

Planning by levels as in Zheng et al. 2022 (Alpa) and Cai et al. 2022 (TensorOpt; the objectives);
shares of a batch for unequal devices with `balance = "whale"` by Algorithm 1 of Jia et al. 2022.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np

from headway.cost.device import Array
from headway.cost.machines import Machine
from headway.errors import NothingFits, PlanError
from headway.planner.estimate.degrees import Degrees, combinations
from headway.planner.estimate.segments import SegmentTables
from headway.planner.estimate.stage_cut import forced_stage_starts
from headway.planner.pareto.front import reduce_front
from headway.planner.search.bounds import LayoutBounds, SearchBounds, step_estimate
from headway.planner.search.candidate import (
    FINER,
    Picks,
    PlanCandidate,
    ShareCandidate,
    with_rounding,
)
from headway.planner.search.device_layout import Combination, device_counts, layout_combinations
from headway.planner.search.neighbours import degree_steps
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.planner.whale.load_balance import DeviceShare, algorithm_1
from headway.schedule.generators.registry import PLAIN, ScheduleOption, schedule_options
from headway.units import format_bytes

# A band in which no plan can be faster than a known one by more than this factor is left.
NEAR = 1.02
# Combinations with one schedule other than 1F1B that are opened before their neighbours, those with
# the least estimates first: their tables take time. The gap counts what is left closed.
TABLES = 16
# Of the allowed memory: plans that need less than this share count as needing it.
LEAST = 0.02


# Figures that are as near are equal: of such plans the one on fewest devices is of use.
ALIKE = 1.001
# Candidates on devices of one type that are kept for the next layout of several.
KEPT = 24
# Plans are sought in bands of memory, each this share of the one before.
BAND = 0.5
# Shares that do not fit, after which a combination is left, without `proof`.
MISSES = 2
# Shares of a batch that are priced for one combination, without `proof`.
TRIES = 6
# Other shares are priced where they are estimated to take at most so much of the best.
WORTH = 0.99


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What was found.

    Attributes:
        points: The frontier over (seconds, bytes, devices), of groups of devices over money, too;
            fastest first.
        chosen: The number of the point that meets the objective.
        bound: What the objective's value is at least; `gap` compares it with the chosen point.
        floor: Seconds that no plan takes less than on as many devices as the chosen one, also none
            that the search leaves out: work evenly spread, no bubble, no launch waits, and what of
            the exchange is longer than the backward passes.
        opened: Of those considered, how many were priced.
    """

    question: PlanRequest
    points: tuple[Point, ...]
    chosen: int
    bound: float
    floor: float
    considered: int
    opened: int
    search: PlanSearch = field(repr=False, compare=False)

    @property
    def best(self) -> Point:
        return self.points[self.chosen]

    @property
    def value(self) -> float:
        """The objective's, of the chosen point."""
        return _value(self.question, self.best)

    @property
    def gap(self) -> float:
        """By which share the chosen point may be above the best there is."""
        return max(0.0, self.value / self.bound - 1.0) if self.bound > 0 else 0.0

    @property
    def unexplored(self) -> float:
        """By which share the chosen point's time is above `floor`."""
        return max(0.0, self.best.seconds / self.floor - 1.0) if self.floor > 0 else 0.0


def point_objectives(point: Point) -> tuple[float, ...]:
    """(seconds, bytes, devices), where devices of all types cost the same."""
    return point.seconds, point.bytes, float(point.devices)


def pareto_optimal(
    points: list[Point], of: Callable[[Point], tuple[float, ...]] = point_objectives
) -> tuple[list[Point], Array]:
    """Those that no other one beats; and (n, figures) of them, as `of` has them."""
    figures = np.array([of(point) for point in points])
    rows = reduce_front(figures)
    return [points[row] for row in rows], figures[rows]


def distinct_points(
    points: Iterable[Point], of: Callable[[Point], tuple[float, ...]] = point_objectives
) -> tuple[Point, ...]:
    """Fastest first, without points that one with fewer devices equals to a thousandth."""
    found, kept = sorted(points, key=of), []
    for point in found:
        near = np.array(of(point)) * ALIKE
        others = [other for other in found if other.devices < point.devices]
        if not any(np.all(np.array(of(other)) <= near) for other in others):
            kept.append(point)
    return tuple(kept)


def microbatch_shares(
    bounds: LayoutBounds, combination: Combination, caps: Mapping[str, float]
) -> np.ndarray:
    """(n, classes): micro-batches of the classes that together have the batch, none larger than it
    must be beside the others.
    """
    need = -(-bounds.question.batch // combination.degrees.microbatches)
    copies = [number for _, number in combination.classes]
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
    bounds: LayoutBounds, combination: Combination, caps: Mapping[str, float], need: int
) -> tuple[int, ...] | None:
    """Whale's shares: by the rates of the devices of a copy, within its memory; None: none fit."""
    # The first stage of 1F1B has min(m, p) micro-batches in flight.
    kept = bounds.first.kept * min(combination.degrees.microbatches, combination.degrees.pipeline)
    shares = [
        DeviceShare(
            rate=sum(_flops(bounds.types[kind].question.machine) for kind in kinds),
            memory=sum(caps[kind] for kind in kinds),
            scaled=need * kept / combination.degrees.tensor,
            fixed=bounds.state(combination),
        )
        for kinds in combination.copies
    ]
    try:
        loads = dict(zip(combination.copies, algorithm_1(shares).loads, strict=True))
    except PlanError:
        return None
    # 2.0000000001 samples are 2: rounding alone must not add one.
    return tuple(
        max(1, int(np.ceil(loads[kinds] * need - 1e-9))) for kinds, _ in combination.classes
    )


def _left(some: Sequence[int], copies: Sequence[int], need: int) -> int:
    return need - sum(n * size for n, size in zip(copies, some, strict=False))


def _flops(machine: Machine) -> float:
    return machine.device.rate(machine.dtype)


class LayoutCandidate:
    """A combination on devices of several types, as `PlanCandidate` is one on devices of one type.

    Args:
        known: Whether a known plan is as good as one with these seconds and bytes.

    Attributes:
        left_out: Seconds that the plans of all shares that were not priced take at least.
        exhausted: Whether `fastest` has found that no plan fits.
    """

    band = BAND
    exists = True

    def __init__(
        self,
        combination: Combination,
        bounds: LayoutBounds,
        sharing: Callable[[tuple[int, ...]], ShareCandidate],
        caps: Mapping[str, float],
        known: Callable[[float, float], bool],
    ) -> None:
        self.combination = combination
        self.degrees = combination.degrees
        self.bounds = bounds
        self.sharing = sharing
        self.caps = caps
        self.known = known
        self.left_out = np.inf
        self.exhausted = False

    def bound(self, cap: float = np.inf) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it is below; the same within any `cap`."""
        return self.bounds.seconds(self.combination), self.bounds.held(self.combination)

    def fastest(self, cap: float, limit: float = np.inf, *, parts: bool = True) -> Point | None:
        """The fastest plan within the memory that is of use.

        Args:
            cap: Bytes, of a device of any type.
            limit: Seconds from which on no plan is of use.
            parts: For `PlanCandidate`'s sake: here all parts are always there.
        """
        combination, bounds = self.combination, self.bounds
        proof = bounds.question.proof
        caps = {kind: min(cap, own) for kind, own in self.caps.items()}
        tuples = microbatch_shares(bounds, combination, caps)
        tuples = tuples[bounds.may_fit(combination, tuples, caps)]
        if not len(tuples):
            self.exhausted = True
            return None
        fits = False

        def useful(seconds: float, held: float) -> bool:
            nonlocal fits
            fits = True
            return proof or not self.known(seconds, held)

        classes = combination.classes
        costs = np.stack(
            [
                bounds.costs(kinds, combination)[tuples[:, c] - 1]
                for c, (kinds, _) in enumerate(classes)
            ]
        )
        factors, misses = np.ones(len(classes)), 0
        least = costs.max(axis=0)
        open_ = least < limit
        skipped = ~open_
        fits = bool(skipped.any())
        best: Point | None = None
        tries = 0
        while open_.any():
            if not proof and tries == TRIES:
                break
            # By estimated time: the bound of each size times what the last priced shares took above
            # theirs.
            estimates = np.where(open_, (costs * factors[:, None]).max(axis=0), np.inf)
            place = int(estimates.argmin())
            known = np.inf if best is None else best.seconds
            if not proof and estimates[place] >= known * WORTH:
                break
            open_[place] = False
            tries += 1
            sharing = self.sharing(tuple(tuples[place].tolist()))
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
                if misses == MISSES and best is None and not proof:
                    break
                continue
            # What the priced shares took above their bounds is the estimate of all others.
            factors = _class_seconds(point) / costs[:, place]
            if best is None or point.seconds < best.seconds:
                best = point
            open_ &= least < best.seconds
        least = least[open_ | skipped]
        self.left_out = min(self.left_out, float(least.min(initial=np.inf)))
        self.exhausted = best is None and not fits
        return best


def _class_seconds(point: Point) -> Array:
    m = point.degrees.microbatches
    each = [[stage.seconds for stage in one.stages] for one in point.classes]
    return np.array([(m - 1) * max(own) + sum(own) for own in each])


class PlanSearch:
    """Tables and combinations of one question; `run` answers it.

    Args:
        allow: Which degrees are looked at; None: all.

    Attributes:
        types: Tables and bounds by type of device; "" where the question has one.
    """

    def __init__(
        self, question: PlanRequest, allow: Callable[[Degrees], bool] | None = None
    ) -> None:
        self.question = question
        self.allow = allow
        kinds = [one.kind for one in question.groups] or [""]
        self.types = {kind: SearchBounds(question.of(kind)) for kind in kinds}
        self.bounds = next(iter(self.types.values()))
        self.layouts = LayoutBounds(question, self.types)
        self.row = self.bounds.row
        self.shared = self.bounds.shared
        self._begin()

    def _begin(self) -> None:
        self.points: list[Point] = []
        self.opened = 0
        self._found = False
        self._end = np.inf
        self._objective = self.question.objective
        # Seconds that no plan of what was left closed is below.
        self._closed: dict[Combination, float] = {}
        # (seconds, bytes) that no plan of a combination is below: without its tables, with them.
        self._firsts: dict[Combination, tuple[float, float]] = {}
        self._bounds: dict[Combination, tuple[float, float]] = {}
        self._known: np.ndarray = np.zeros((0, 3))
        self._candidates: dict[tuple[str, Degrees], PlanCandidate] = {}
        # Weak keys: what was picked on a candidate goes when `KEPT` drops it.
        self._picks: Picks = WeakKeyDictionary()

    def related(self, question: PlanRequest) -> PlanSearch:
        """A search of another question on the same model, machines and forced choices, with these
        tables."""
        # Tables depend on the model, the machines and what is forced alone; points begin anew.
        other = copy.copy(self)
        other.question = question
        other.types = {kind: copy.copy(bounds) for kind, bounds in self.types.items()}
        for kind, bounds in other.types.items():
            bounds.question = question.of(kind)
        other.bounds = next(iter(other.types.values()))
        other.layouts = LayoutBounds(question, other.types)
        other._begin()
        return other

    def run(self) -> SearchResult:
        """Search.

        Raises:
            NothingFits: No plan is within the memory.
        """
        considered = self._explore_all()
        if not self.points:
            raise self._impossible()
        return self._outcome(considered)

    def beats(self, point: Point) -> bool:
        """Whether this question has a plan that is chosen before a known one of another question.

        All that cannot is left closed, so that this takes little time.
        """
        self._begin()
        self._add(point)
        self._explore_all()
        return self._choice(self.points) != point

    def _explore_all(self) -> int:
        """Opens what the bounds leave of all combinations; returns how many there are."""
        limit = self.question.seconds
        self._end = np.inf if limit is None else perf_counter() + limit
        bounded: list[Combination] = []
        by_table: dict[ScheduleOption, list[Combination]] = {}
        for combination in self.combinations():
            scheme = combination.degrees.scheme
            own = bounded if scheme == PLAIN else by_table.setdefault(scheme, [])
            own.append(combination)
        self._explore(bounded)
        for some in by_table.values():
            self._explore_tables(some)
        return len(bounded) + sum(map(len, by_table.values()))

    def _explore(self, some: Sequence[Combination], most: float = np.inf) -> set[Combination]:
        """Opens what the bounds leave, the least first; returns what was opened.

        Args:
            most: Combinations that are opened at most once a plan is found, those with the least
                estimates first.
        """
        question, opened = self.question, set[Combination]()
        waiting: list[tuple[float, Combination, float, float, bool]] = []

        def wait(combination: Combination, seconds: float, held: float, *, tight: bool) -> None:
            rank = seconds
            if most < np.inf and np.isfinite(seconds):
                rank = step_estimate(combination.degrees, seconds)
            # Of equal ranks the lesser combination is first, so that a request has one answer.
            heapq.heappush(waiting, (rank, combination, seconds, held, tight))

        for combination in some:
            wait(combination, *self._bound(combination), tight=combination in self._bounds)
        while waiting:
            _, combination, seconds, held, tight = heapq.heappop(waiting)
            if held > with_rounding(question.cap) or not np.isfinite(seconds):
                continue
            # Without a plan the search goes on: a limit of time must not make a request infeasible.
            late = self._found and perf_counter() > self._end
            full = len(opened) >= most and bool(self.points)
            if late or full or self._beaten(seconds, question.cap, combination, held):
                self._closed[combination] = seconds
                continue
            candidate = self.open(combination)
            # Its own tables give a better bound, but take time: they are made when its turn comes.
            if not tight:
                better = candidate.bound(question.cap)
                both = max(seconds, better[0]), max(held, better[1])
                self._bounds[combination] = both
                wait(combination, *both, tight=True)
                continue
            if not candidate.exists:
                continue
            opened.add(combination)
            self._open(combination, candidate)
        return opened

    def _explore_tables(self, some: Sequence[Combination]) -> None:
        """Opens combinations with a schedule of which only tables say what it takes: those with the
        least estimates, and from their best plan on its neighbours until none is better.

        What other schedules have found has no part in it, so that the answer to a request with
        more schedules is never worse.
        """
        firsts = {one: self._bound(one) for one in some}
        cap = self.question.cap
        if all(self._beaten(seconds, cap, one, held) for one, (seconds, held) in firsts.items()):
            self._closed |= {one: seconds for one, (seconds, _) in firsts.items()}
            return
        before, self.points, self._known = self.points, [], np.zeros((0, 3))
        # The way to the fastest plan first; what needs less memory is sought beside all others.
        frontier = self._objective == "frontier"
        self._objective = "fastest" if frontier else self._objective
        opened = self._explore(some, TABLES)
        waiting = {(one.kind, one.degrees): one for one in some if one not in opened}
        best: Point | None = None
        while self.points and self._choice(self.points) != best:
            best = self._choice(self.points)
            for degrees in self._around(best, waiting):
                if self._found and perf_counter() > self._end:
                    break
                combination = waiting.pop((best.kind, degrees))
                candidate = self.open(combination)
                if candidate.exists and firsts[combination][1] <= with_rounding(cap):
                    self._closed.pop(combination, None)
                    self._open(combination, candidate)
        for point in before:
            self._add(point)
        self._objective = self.question.objective
        if frontier:
            closed = dict(self._closed)
            self._explore(some, TABLES)
            self._closed = closed

    def _around(
        self, point: Point, some: Mapping[tuple[str, Degrees], Combination]
    ) -> list[Degrees]:
        """Degrees one step away from a plan's, and those that differ in ZeRO or the order of axes
        alone, as far as they are among `some`."""
        old, most = point.degrees, self.question.most
        steps = degree_steps(self.question, old, units=len(self.row), most=most)
        found = [one.degrees for one in steps if one.degrees is not None]
        found += [replace(old, zero=zero) for zero in self.question.zero if old.data > 1]
        found += [replace(old, order=order) for order in self.question.orders]
        return [one for one in dict.fromkeys(found) if (point.kind, one) in some]

    def tables_of(self, tensor: int, samples: int, kind: str = "") -> SegmentTables:
        """Shared by all combinations with this tensor degree and micro-batch on one type."""
        return self._type(kind).tables_of(tensor, samples)

    def tables_at(self, point: Point) -> SegmentTables:
        """Those that a point on devices of one type was found in."""
        return self.tables_of(point.degrees.tensor, point.degrees.microbatch, point.kind)

    def machine_of(self, kind: str) -> Machine:
        """That of a type; "": of the first."""
        return self._type(kind).question.machine

    def _type(self, kind: str) -> SearchBounds:
        return self.types[kind] if kind else self.bounds

    def combinations(self) -> Iterator[Combination]:
        """All that the question allows."""
        every = self._every_combination()
        return (one for one in every if self.allow is None or self.allow(one.degrees))

    def _every_combination(self) -> Iterator[Combination]:
        question = self.question
        if not question.groups:
            for devices in question.devices:
                for degrees in self._degrees(devices):
                    yield Combination(degrees=degrees)
            return
        groups = list(question.groups)
        if question.balance == "whale":
            groups.sort(key=lambda one: -one.machine.device.memory)
        counts = {one.kind: one.count for one in groups}
        for amounts in device_counts(counts, question.devices or None):
            used = tuple((kind, number) for kind, number in amounts.items() if number)
            if len(used) == 1:
                for degrees in self._degrees(used[0][1]):
                    yield Combination(degrees=degrees, amounts=used)
            else:
                yield from layout_combinations(question, amounts, len(self.row))

    def _degrees(self, devices: int) -> Iterator[Degrees]:
        question = self.question
        inner = question.machine.network.levels[0].width
        allowed = question.tensor or tuple(
            t for t in range(1, devices + 1) if devices % t == 0 and t <= min(inner, devices)
        )
        if any(how.startswith("split") for _, how in question.force):
            allowed = tuple(t for t in allowed if t > 1)
        return combinations(
            devices,
            question.batch,
            units=len(self.row),
            tensor=allowed,
            zero=question.zero,
            schedules=schedule_options(question.schedules),
            orders=question.orders,
            one_level=int(min(inner, devices)),
        )

    def _bound(self, combination: Combination) -> tuple[float, float]:
        """The best known (seconds, bytes) that no plan of it is below."""
        known = self._bounds.get(combination) or self._firsts.get(combination)
        if known is None:
            known = self._firsts[combination] = self._first_bound(combination)
        return known

    def _first_bound(self, combination: Combination) -> tuple[float, float]:
        """(seconds, bytes) that no plan of it is below, without its own tables."""
        if combination.layout is not None:
            return self.layouts.seconds(combination), self.layouts.held(combination)
        return self._type(combination.kind).first(combination.degrees)

    def candidate(self, degrees: Degrees, kind: str = "") -> PlanCandidate:
        """A combination of degrees on the tables of devices of one type."""
        recompute = self.question.recompute == "any" or degrees.pipeline > 1
        return PlanCandidate(
            self.tables_of(degrees.tensor, degrees.microbatch, kind),
            degrees,
            self.question.itemsize,
            self.shared,
            may_recompute=recompute,
            kind=kind,
            limit=self.question.caps[kind] if kind else np.inf,
        )

    def open(self, combination: Combination) -> PlanCandidate | LayoutCandidate:
        """A combination with the tables of its types."""
        if combination.layout is None:
            return self.candidate(combination.degrees, combination.kind)
        return LayoutCandidate(
            combination,
            self.layouts,
            partial(self.sharing, combination),
            self.question.caps,
            partial(self._known_is, combination),
        )

    def sharing(self, combination: Combination, sizes: tuple[int, ...]) -> ShareCandidate:
        """A layout with the size of the micro-batches of each class of copies."""
        return ShareCandidate(
            combination=combination,
            sizes=sizes,
            candidate=self._cell_candidate,
            starts=forced_stage_starts(self.question.force, self.row),
            picks=self._picks,
        )

    def _cell_candidate(self, kind: str, degrees: Degrees) -> PlanCandidate:
        key = (kind, degrees)
        if key not in self._candidates:
            # Other layouts have the same cells; tables of all would not fit into memory.
            while len(self._candidates) >= KEPT:
                self._candidates.pop(next(iter(self._candidates)))
            self._candidates[key] = self.candidate(degrees, kind)
        return self._candidates[key]

    def _open(self, combination: Combination, candidate: PlanCandidate | LayoutCandidate) -> None:
        """Adds the fastest plan of each band of memory that may hold one of use."""
        self.opened += 1
        self._search_bands(combination, candidate)
        if np.isfinite(candidate.left_out):
            self._closed[combination] = candidate.left_out

    def _search_bands(
        self, combination: Combination, candidate: PlanCandidate | LayoutCandidate
    ) -> None:
        cap = self.question.cap
        least = max(candidate.bound()[1], self.question.cap * LEAST)
        # From the whole memory down: the next band begins below what the last plan needs.
        while cap >= least:
            if not self._beaten(candidate.bound(cap)[0], cap, combination, cap):
                known = self._known_within(cap, combination)
                point = candidate.fastest(cap, known, parts=False)
                if point is not None:
                    self._add(point)
                    cap = min(cap, point.bytes)
                elif not np.isfinite(known) or candidate.exhausted:
                    return
            if self._objective != "frontier":
                return
            cap *= candidate.band

    def _known_within(self, cap: float, combination: Combination) -> float:
        """Seconds from which on no plan of this band is of use."""
        if self._objective == "frontier":
            # A slower one is beaten, or needs less than the band and is sought again below it.
            found = [
                max(point.seconds, self._equal_cost(point, combination))
                for point in self.points
                if point.bytes <= cap * FINER and point.devices <= combination.devices
            ]
            # A layout's cuts take long: one that gains less than the frontier tells is not sought.
            near = 1.0 if combination.layout is None else NEAR
            # However little faster than all, it is of use: it would be the chosen one.
            fastest = min((point.seconds for point in self.points), default=np.inf)
            return max(min(found, default=np.inf) / near, fastest)
        if self._objective == "fastest":
            return min((point.seconds for point in self.points), default=np.inf)
        if self._objective == "cheapest" and combination.layout is not None:
            return min(
                (self._equal_cost(point, combination) for point in self.points), default=np.inf
            )
        return np.inf

    def _equal_cost(self, point: Point, combination: Combination) -> float:
        """Seconds of a plan on other devices that costs as much; 0 where all are of one type."""
        if not combination.amounts:
            return 0.0
        cost = self.question.cost(point.devices, point.seconds, point.amounts)
        return cost / self.question.cost(combination.devices, 1.0, combination.amounts)

    def _add(self, point: Point) -> None:
        self._found = True
        self.points.append(point)
        self.points, self._known = pareto_optimal(self.points, self._figures)

    def _figures(self, point: Point | Combination, *own: float) -> tuple[float, ...]:
        """What a point is judged by, with `own` as seconds and bytes where they are not the
        point's."""
        seconds, held = own if isinstance(point, Combination) else (point.seconds, point.bytes)
        found = (seconds, held, float(point.devices))
        if not point.amounts:
            return found
        # Of groups with money: slower devices may cost less than fewer fast ones.
        return *found, self.question.cost(point.devices, seconds, point.amounts)

    def _known_is(self, combination: Combination, seconds: float, held: float) -> bool:
        if not len(self._known):
            return False
        if self.question.objective == "fastest":
            return bool(self._known[:, 0].min() <= seconds)
        most = np.array(self._figures(combination, seconds, held))
        return bool((self._known <= most).all(axis=1).any())

    def _beaten(self, seconds: float, cap: float, combination: Combination, held: float) -> bool:
        """Whether nothing of use can be found."""
        if not len(self.points):
            return False
        if self._objective == "frontier":
            room = max(held, min(cap, held / FINER), self.question.cap * LEAST)
            most = np.array(self._figures(combination, seconds * NEAR, room))
            fastest = self._known[:, 0].min() <= seconds
            return bool(fastest and (self._known <= most).all(axis=1).any())
        least, fewest = min((_value(self.question, p), p.devices) for p in self.points)
        value = _bound_value(self.question, combination, seconds)
        if self.question.objective == "fewest-devices":
            return value > least
        # On fewer devices a plan is chosen even if it is a thousandth worse.
        return value > least * ALIKE if combination.devices < fewest else value >= least

    def _choice(self, points: Sequence[Point]) -> Point:
        """The one that meets the objective: of those that are as good the one on fewest devices."""
        values = [_value(self.question, point) for point in points]
        least = min(values) * ALIKE
        equal = [point for point, value in zip(points, values, strict=True) if value <= least]
        return min(equal, key=lambda point: (point.devices, point.seconds))

    def _outcome(self, considered: int) -> SearchResult:
        question = self.question
        found = distinct_points(self.points, self._figures)
        # The search prices without the parts of a step, which takes a third of the time.
        points = tuple(
            point
            if len(point.amounts) > 1  # has them already
            else self.candidate(point.degrees, point.kind).detailed(point)
            for point in found
        )
        chosen = points.index(best := self._choice(points))
        bounds = (_bound_value(question, one, least) for one, least in self._closed.items())
        return SearchResult(
            question=question,
            points=points,
            chosen=chosen,
            bound=min([_value(question, best), *bounds]),
            floor=min(
                self._floor(combination)
                for combination in self.combinations()
                if combination.devices == best.devices
            ),
            considered=considered,
            opened=self.opened,
            search=self,
        )

    def _floor(self, combination: Combination) -> float:
        if combination.layout is not None:
            return self.layouts.seconds(combination)
        return self._type(combination.kind).floor(combination.degrees)

    def _impossible(self) -> PlanError:
        question = self.question
        problems = [
            f"{' or '.join(map(str, question.devices))} devices, {format_bytes(question.cap)} "
            "allowed on each"
        ]
        if question.groups:
            there = ", ".join(
                f"{one.count} x {one.kind} with {format_bytes(question.caps[one.kind])}"
                for one in question.groups
            )
            problems = [f"there are {there}"]
        return NothingFits(
            "no plan fits",
            problems=problems,
            fix="Allow more memory or more devices, or take a smaller batch; `headway plan` says "
            "how much of each would do.",
        )


def find_plans(question: PlanRequest) -> SearchResult:
    """The frontier of plans, and the one that meets the objective.

    Raises:
        NothingFits: No plan is within the memory; `explain.infeasible` says what would do.
        PlanError: What is forced is not possible.
    """
    return PlanSearch(question).run()


def _value(question: PlanRequest, point: Point) -> float:
    return _bound_value(question, point, point.seconds)


def _bound_value(question: PlanRequest, one: Point | Combination, seconds: float) -> float:
    if question.objective == "fewest-devices":
        return float(one.devices)
    if question.objective == "cheapest":
        return question.cost(one.devices, seconds, one.amounts)
    return seconds
