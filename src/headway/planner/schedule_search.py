"""A table under a memory bound for given costs, found by search: also for unequal stages and ranks.

Known tables come first; then list scheduling with random rules and with the times of the best
tables plus noise; then local search on the best ones. Invariant: the result is a legal table within
the bound, never longer than the best known one, and depends on the seed alone unless a time limit
is given. How far it can be from the best is known from a proven lower bound.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.errors import PlanError
from headway.planner.bound import lower_bound
from headway.planner.known_tables import known_tables
from headway.planner.layouts import Layout, make_layout
from headway.planner.list_scheduling import Policy, Problem, alone, random_urgency
from headway.planner.local_search import Candidate, improve
from headway.schedule import Action, Kind, PipelineSchedule, StageCosts
from headway.schedule.check import check_schedule
from headway.schedule.timing import Timer
from headway.schedule.weight_gradients import declare_activations

_ROUNDING = 1e-9
_POOL = 4
"""Tables of a placement that are kept to be varied."""
_TURNS = 6
"""How often list scheduling and local search take turns."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a search goes on, for each placement.

    Attributes:
        lists: Runs of list scheduling.
        moves: Moves of the local search, shared by the best tables.
        seed: Of the random numbers.
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
class Found:
    """What a search found.

    Attributes:
        schedule: The best table; a known one under its own name if nothing shorter was found.
        makespan: Of it.
        bound: No table of any of the placements is shorter.
        placement: Of the best table.
        costs: Of its stages.
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
    budget: Budget | None = None,
) -> Found:
    """The shortest table that can be found under a memory bound.

    Args:
        ranks: D.
        microbatches: N.
        costs: Of D stages (finer placements cut them in halves), or of 2D or 4D.
        most_activations: That a rank may hold, in the unit of `costs.activation`.
        placements: Of `layouts.PLACEMENTS`: "straight", "v", "loop", "w" hold one copy of the
            weights, "both-directions" and "both-v" two.
        budget: How much work; the default takes seconds.

    Raises:
        PlanError: No table within the bound was found.
        UsageError: An unknown placement.
    """
    if ranks < 1 or microbatches < 1 or not placements:
        raise ValueError("a search needs a rank, a micro-batch and a placement")
    return _Search(
        [make_layout(name, ranks, microbatches, costs) for name in placements],
        most_activations,
        budget or Budget(),
    ).run()


class _Search:
    def __init__(self, layouts: Sequence[Layout], most: float, budget: Budget) -> None:
        self.most, self.budget = most, budget
        self.draw = random.Random(budget.seed)
        self.end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds
        bounded = ((lower_bound(layout, most), layout) for layout in layouts)
        self.layouts = sorted(bounded, key=lambda pair: pair[0])
        self.best: tuple[Candidate, Layout, str] | None = None
        self.trail: list[Improvement] = []
        self.out_of_time = False

    def run(self) -> Found:
        starts = [self._known(layout) for _, layout in self.layouts]
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

    def _offer(self, candidate: Candidate, layout: Layout, name: str, means: str) -> None:
        if candidate.makespan < self._makespan - _ROUNDING:
            self.best = candidate, layout, name
            self.trail.append(Improvement(f"{means}, {layout.placement}", candidate.makespan))

    def _known(self, layout: Layout) -> list[Candidate]:
        pool: list[Candidate] = []
        for schedule in known_tables(layout, self.most):
            timer = Timer(schedule, layout.costs)
            candidate = Candidate(timer.makespan(), timer, timer.wiring.order)
            self._offer(candidate, layout, schedule.name, schedule.name)
            _add(pool, candidate)
        return pool

    def _search(self, layout: Layout, bound: float, pool: list[Candidate]) -> None:
        problem = Problem(layout, self.most)
        solo = alone(problem)
        for turn in range(_TURNS):
            for _ in range(_share(self.budget.lists, turn)):
                if self._makespan <= bound + _ROUNDING or self._late():
                    return
                candidate = self._list(problem, solo, pool)
                if candidate is not None:
                    self._offer(candidate, layout, "searched", "list scheduling")
                    _add(pool, candidate)
            self._climb(layout, bound, pool, _share(self.budget.moves, turn))

    def _climb(self, layout: Layout, bound: float, pool: list[Candidate], moves: int) -> None:
        """From every table of the pool; what is found is varied in the next turn."""
        for start in tuple(pool):
            better = improve(
                start,
                self.most,
                moves=moves // len(pool),
                draw=self.draw,
                target=bound,
                enough=self._late,
            )
            self._offer(better, layout, "searched", "local search")
            _add(pool, better)

    def _list(self, problem: Problem, solo: list[float], pool: list[Candidate]) -> Candidate | None:
        """One run: after a random rule, or near one of the best tables."""
        cell = sum(problem.seconds) / len(problem.seconds)
        if not pool or self.draw.random() < 0.4:
            urgency = random_urgency(problem, solo, self.draw)
        else:
            urgency = starts_of(self.draw.choice(pool), problem)
        noise = self.draw.choice((0.0, 0.3, 1.0, 3.0)) * cell
        policy = Policy(
            [value + noise * self.draw.gauss(0.0, 1.0) for value in urgency],
            patience=self.draw.choice((0.0, 0.0, self.draw.uniform(0.0, 1.0) * cell)),
            careful=self.draw.random() < 0.8,
        )
        order = problem.run(policy)
        if order is None:
            return None
        return Candidate(problem.timer.makespan(order), problem.timer, order)

    def _found(self) -> Found:
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
        return Found(
            schedule,
            candidate.makespan,
            self.layouts[0][0],
            layout.placement,
            layout.costs,
            tuple(self.trail),
            self.out_of_time,
        )


def _share(budget: int, turn: int) -> int:
    """Of one turn."""
    return budget // _TURNS + (turn < budget % _TURNS)


def starts_of(candidate: Candidate, problem: Problem) -> list[float]:
    """When the actions of a problem start in a table; a whole backward counts as I, then W."""
    run, actions = candidate.timer.run(candidate.order), candidate.timer.wiring.actions
    start = dict(zip(actions, run.starts, strict=True))
    found = []
    for action in problem.actions:
        if action in start:
            found.append(start[action])
            continue
        whole = start[replace(action, kind=Kind.BACKWARD)]
        later = action.kind == Kind.WEIGHT_GRAD
        found.append(whole + (_half_of(action, problem) if later else 0.0))
    return found


def _half_of(action: Action, problem: Problem) -> float:
    """Time of the input gradient that goes before a weight gradient."""
    costs = problem.layout.costs
    before = replace(action, kind=Kind.INPUT_GRAD)
    rank = problem.timer.schedule.rank_of(action)
    return costs.seconds(before, rank, recompute=False)


def _add(pool: list[Candidate], candidate: Candidate) -> None:
    """Keep the shortest; of equally long ones the newest, so that the search moves on."""
    pool[:] = [o for o in pool if abs(candidate.makespan - o.makespan) > _ROUNDING]
    pool.append(candidate)
    pool.sort(key=lambda other: other.makespan)
    del pool[_POOL:]
