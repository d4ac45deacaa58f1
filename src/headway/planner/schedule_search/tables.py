"""A pipeline table under a memory bound for given costs, and a lower bound that no table beats.

The tables of the literature come first, as they are and with their bubbles filled with weight
gradients; then list scheduling with random rules and with the times of the best tables plus noise;
then local search on the best ones. The result is a legal table within the bound, never longer than
the best known one, and depends on the seed alone unless a time limit is given.

The lower bound holds for every order, with whole or split backwards, and for tables that recompute.
For rank r it is max(head + work, first + work - early), where nothing reaches r before `head`, no
gradient before `first`, and at most `early` of forward work fits into the memory before the first
gradient. It is headway's own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway.errors import PlanError
from headway.planner.schedule_search.heuristics import (
    ListProblem,
    TableCandidate,
    UrgencyPolicy,
    earliest_starts,
    improve_table,
    random_urgency,
)
from headway.planner.schedule_search.placements import PipePlacement, make_placement
from headway.schedule.check import check_schedule
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import peak_activations
from headway.schedule.timing import ScheduleTimer
from headway.schedule.weight_gradients import declare_activations, fill_with_weight_gradients

_BOUND_ROUNDING = 1e-9
Piece = tuple[float, float, int]
"""Of a stage on a rank: time and activations of a forward, and how many micro-batches come."""


def lower_bound(layout: PipePlacement, most_activations: float) -> float:
    """The least makespan that is possible by these arguments; infinite if nothing fits.

    Args:
        most_activations: That a rank may hold, in the unit of the costs.
    """
    chains = max(_one_microbatch(layout, pipe) for pipe in layout.pipes if pipe.microbatches)
    return max(chains, *(_of_rank(layout, rank, most_activations) for rank in range(layout.ranks)))


def _seconds(layout: PipePlacement, kind: ActionKind, pipe: SchedulePipe, stage: int) -> float:
    action = Action(kind, pipe.name, stage, 0)
    return layout.costs.seconds(action, pipe.placement[stage], recompute=False)


def _hop(layout: PipePlacement, pipe: SchedulePipe, giver: int, taker: int) -> float:
    if pipe.placement[giver] == pipe.placement[taker]:
        return 0.0
    wire = layout.costs.message
    return layout.costs.latency + (wire[min(giver, taker)] if wire else 0.0)


def _arrivals(layout: PipePlacement, pipe: SchedulePipe) -> tuple[list[float], list[float]]:
    """Earliest starts of a forward and of an input gradient at each stage, alone on the ranks."""
    stages = range(len(pipe.placement))
    forward, gradient, time = [0.0 for _ in stages], [0.0 for _ in stages], 0.0
    for stage in stages:
        time += _hop(layout, pipe, stage - 1, stage) if stage else 0.0
        forward[stage] = time
        time += _seconds(layout, ActionKind.FORWARD, pipe, stage)
    for stage in reversed(stages):
        time += _hop(layout, pipe, stage + 1, stage) if stage + 1 < len(stages) else 0.0
        gradient[stage] = time
        time += _seconds(layout, ActionKind.INPUT_GRAD, pipe, stage)
    return forward, gradient


def _one_microbatch(layout: PipePlacement, pipe: SchedulePipe) -> float:
    last = _seconds(layout, ActionKind.INPUT_GRAD, pipe, 0) + _work_of_weights(layout, pipe, 0)
    return _arrivals(layout, pipe)[1][0] + last


def _work_of_weights(layout: PipePlacement, pipe: SchedulePipe, stage: int) -> float:
    """W without its overhead: a whole backward has but one."""
    return _seconds(layout, ActionKind.WEIGHT_GRAD, pipe, stage) - layout.costs.overhead


def _of_rank(layout: PipePlacement, rank: int, most: float) -> float:
    work, head, first = 0.0, math.inf, math.inf
    pieces: list[Piece] = []
    for pipe in layout.pipes:
        forward, gradient = _arrivals(layout, pipe)
        for stage, place in enumerate(pipe.placement):
            if place != rank:
                continue
            number = len(pipe.microbatches)
            ahead = _seconds(layout, ActionKind.FORWARD, pipe, stage)
            back = _seconds(layout, ActionKind.INPUT_GRAD, pipe, stage)
            work += number * (ahead + back + _work_of_weights(layout, pipe, stage))
            head, first = min(head, forward[stage]), min(first, gradient[stage])
            pieces.append((ahead, layout.costs.activation[stage], number))
    return max(head + work, first + work - _early(pieces, most)) if pieces else 0.0


def _early(pieces: list[Piece], most: float) -> float:
    """Most forward work that fits into memory: whole micro-batches of the best ratio, or parts."""
    if all(piece[:2] == pieces[0][:2] for piece in pieces):
        time, size, _ = pieces[0]
        fitting = math.floor(most / size + _BOUND_ROUNDING) if size else math.inf
        return time * min(fitting, sum(number for _, _, number in pieces))
    # A fractional knapsack is never below any set of whole micro-batches.
    total, left = 0.0, most
    for time, size, number in sorted(pieces, key=lambda p: p[0] / p[1] if p[1] else math.inf)[::-1]:
        fitting = min(float(number), left / size) if size else float(number)
        total += fitting * time
        left -= fitting * size
    return total


_BYTES_ROUNDING = 1e-9


def known_tables(layout: PipePlacement, most_activations: float) -> tuple[PipelineSchedule, ...]:
    """Tables within a memory bound.

    Args:
        most_activations: That a rank may hold, in the unit of the costs.
    """
    found = []
    for schedule in _named(layout):
        if max(peak_activations(schedule, layout.costs)) <= most_activations + _BYTES_ROUNDING:
            found.append(schedule)
        try:
            filled = fill_with_weight_gradients(schedule, layout.costs, most_activations)
        except PlanError:
            continue
        if filled.order != schedule.order:
            found.append(filled)
    return tuple(found)


def _named(layout: PipePlacement) -> Iterator[PipelineSchedule]:
    number = sum(len(pipe.microbatches) for pipe in layout.pipes)
    for name, kind in SCHEDULES.items():
        if kind.placement != layout.placement:
            continue
        try:
            schedule = make_schedule(name, stages=layout.ranks, microbatches=number)
        # Not every schedule exists for these sizes.
        except PlanError:
            continue
        # What is found is written with the pipes of the placement.
        if set(schedule.pipes) == set(layout.pipes):
            yield replace(schedule, recompute=())


_ROUNDING = 1e-9
# Tables of a placement that are kept to be varied.
_POOL = 4
# How often list scheduling and local search take turns.
_TURNS = 6


@dataclass(frozen=True, kw_only=True)
class ScheduleSearchBudget:
    """How long a search goes on, for each placement.

    Attributes:
        moves: Moves of the local search, shared by the best tables.
        seconds: Time limit of the whole search; with one, the result depends on the machine.
    """

    lists: int = 400
    moves: int = 4000
    seed: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class Improvement:
    """A best table so far: by which means it was found, and how long it takes."""

    means: str
    makespan: float


@dataclass(frozen=True)
class ScheduleSearchResult:
    """What a search found.

    Attributes:
        schedule: The best table; a known one under its own name if nothing shorter was found.
        bound: No table of any of the placements is shorter.
        trail: Every best table on the way, from the best known one on.
        out_of_time: The time limit ended the search: another machine may find another table.
    """

    schedule: PipelineSchedule
    makespan: float
    bound: float
    placement: str
    costs: StageCosts
    trail: tuple[Improvement, ...]
    out_of_time: bool = False

    @property
    def is_optimal(self) -> bool:
        """Proven; False says nothing."""
        return self.makespan <= self.bound + _ROUNDING


def search_schedule(
    ranks: int,
    microbatches: int,
    costs: StageCosts,
    *,
    most_activations: float,
    placements: Sequence[str] = ("straight", "v", "both-directions"),
    budget: ScheduleSearchBudget | None = None,
) -> ScheduleSearchResult:
    """The shortest table that can be found under a memory bound.

    Args:
        ranks: D.
        microbatches: N.
        costs: Of D stages (finer placements cut them in halves), or of 2D or 4D.
        most_activations: That a rank may hold, in the unit of `costs.activation`.
        placements: "straight", "v", "loop", "w" hold one copy of the weights, "both-directions" and
            "both-v" two.
        budget: How much work; the default takes seconds.

    Raises:
        PlanError: No table within the bound was found.
        UsageError: An unknown placement.
    """
    if ranks < 1 or microbatches < 1 or not placements:
        raise ValueError("a search needs a rank, a micro-batch and a placement")
    return _TableSearch(
        [make_placement(name, ranks, microbatches, costs) for name in placements],
        most_activations,
        budget or ScheduleSearchBudget(),
    ).run()


class _TableSearch:
    def __init__(
        self, layouts: Sequence[PipePlacement], most: float, budget: ScheduleSearchBudget
    ) -> None:
        self.most, self.budget = most, budget
        self.draw = random.Random(budget.seed)
        self.end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds
        bounded = ((lower_bound(layout, most), layout) for layout in layouts)
        # The least bound first: its tables may exclude other placements, and it bounds all of them.
        self.layouts = sorted(bounded, key=lambda pair: pair[0])
        self.best: tuple[TableCandidate, PipePlacement, str] | None = None
        self.trail: list[Improvement] = []
        self.out_of_time = False

    def run(self) -> ScheduleSearchResult:
        starts = [self._known(layout) for _, layout in self.layouts]
        # The trail begins with the best known table.
        self.trail = self.trail[-1:]
        for (bound, layout), pool in zip(self.layouts, starts, strict=True):
            if bound < self._makespan - _ROUNDING and not self._late():
                self._search(layout, bound, pool)
        return self._found()

    @property
    def _makespan(self) -> float:
        return self.best[0].makespan if self.best else math.inf

    def _late(self) -> bool:
        self.out_of_time = self.out_of_time or time.monotonic() > self.end
        return self.out_of_time

    def _offer(
        self, candidate: TableCandidate, layout: PipePlacement, name: str, means: str
    ) -> None:
        if candidate.makespan < self._makespan - _ROUNDING:
            self.best = candidate, layout, name
            self.trail.append(Improvement(f"{means}, {layout.placement}", candidate.makespan))

    def _known(self, layout: PipePlacement) -> list[TableCandidate]:
        pool: list[TableCandidate] = []
        for schedule in known_tables(layout, self.most):
            timer = ScheduleTimer(schedule, layout.costs)
            candidate = TableCandidate(timer.makespan(), timer, timer.wiring.order)
            self._offer(candidate, layout, schedule.name, schedule.name)
            _add(pool, candidate)
        return pool

    def _search(self, layout: PipePlacement, bound: float, pool: list[TableCandidate]) -> None:
        problem = ListProblem(layout, self.most)
        solo = earliest_starts(problem)
        for turn in range(_TURNS):
            for _ in range(_share(self.budget.lists, turn)):
                if self._makespan <= bound + _ROUNDING or self._late():
                    return
                candidate = self._list(problem, solo, pool)
                if candidate is not None:
                    self._offer(candidate, layout, "searched", "list scheduling")
                    _add(pool, candidate)
            self._climb(layout, bound, pool, _share(self.budget.moves, turn))

    def _climb(
        self, layout: PipePlacement, bound: float, pool: list[TableCandidate], moves: int
    ) -> None:
        """From every table of the pool; what is found is varied in the next turn."""
        # A copy: `_add` changes the pool.
        for start in tuple(pool):
            better = improve_table(
                start,
                self.most,
                moves=moves // len(pool),
                draw=self.draw,
                target=bound,
                enough=self._late,
            )
            self._offer(better, layout, "searched", "local search")
            _add(pool, better)

    def _list(
        self, problem: ListProblem, solo: list[float], pool: list[TableCandidate]
    ) -> TableCandidate | None:
        """One run: after a random rule, or near one of the best tables."""
        cell = sum(problem.seconds) / len(problem.seconds)
        if not pool or self.draw.random() < 0.4:
            urgency = random_urgency(problem, solo, self.draw)
        else:
            urgency = starts_of(self.draw.choice(pool), problem)
        noise = self.draw.choice((0.0, 0.3, 1.0, 3.0)) * cell
        policy = UrgencyPolicy(
            [value + noise * self.draw.gauss(0.0, 1.0) for value in urgency],
            patience=self.draw.choice((0.0, 0.0, self.draw.uniform(0.0, 1.0) * cell)),
            careful=self.draw.random() < 0.8,
        )
        order = problem.run(policy)
        if order is None:
            return None
        return TableCandidate(problem.timer.makespan(order), problem.timer, order)

    def _found(self) -> ScheduleSearchResult:
        if self.best is None:
            raise PlanError(
                f"no table was found that holds at most {self.most:g} activations on a rank",
                problems=[f"{layout.placement}: no known table fits" for _, layout in self.layouts],
                fix="Allow more activations, make micro-batches smaller, or search longer.",
            )
        candidate, layout, name = self.best
        schedule = PipelineSchedule(name=name, pipes=layout.pipes, order=candidate.rows())
        schedule = declare_activations(schedule)
        check_schedule(schedule)
        return ScheduleSearchResult(
            schedule,
            candidate.makespan,
            self.layouts[0][0],
            layout.placement,
            layout.costs,
            tuple(self.trail),
            self.out_of_time,
        )


def _share(budget: int, turn: int) -> int:
    return budget // _TURNS + (turn < budget % _TURNS)


def starts_of(candidate: TableCandidate, problem: ListProblem) -> list[float]:
    """When the actions of a problem start in a table; a whole backward counts as I, then W."""
    run, actions = candidate.timer.run(candidate.order), candidate.timer.wiring.actions
    start = dict(zip(actions, run.starts, strict=True))
    found = []
    for action in problem.actions:
        if action in start:
            found.append(start[action])
            continue
        whole = start[replace(action, kind=ActionKind.BACKWARD)]
        later = action.kind == ActionKind.WEIGHT_GRAD
        found.append(whole + (_half_of(action, problem) if later else 0.0))
    return found


def _half_of(action: Action, problem: ListProblem) -> float:
    """Time of the input gradient that goes before a weight gradient."""
    costs = problem.layout.costs
    before = replace(action, kind=ActionKind.INPUT_GRAD)
    rank = problem.timer.schedule.rank_of(action)
    return costs.seconds(before, rank, recompute=False)


def _add(pool: list[TableCandidate], candidate: TableCandidate) -> None:
    # Of equally long ones the newest stays, so that the search moves on.
    pool[:] = [o for o in pool if abs(candidate.makespan - o.makespan) > _ROUNDING]
    pool.append(candidate)
    pool.sort(key=lambda other: other.makespan)
    del pool[_POOL:]
