"""A pipeline table under a memory bound for given costs, and a lower bound that no table beats.

The tables of the literature come first, as they are and with their bubbles filled with weight
gradients; then list scheduling with random rules and with the times of the best tables plus noise;
then local search on the best ones. The result is a legal table within the bound, never longer than
the best known one, and depends on the seed alone unless a time limit is given.

List scheduling: an idle rank starts the most urgent action that is there and fits into the memory
bound; urgency is a number that the caller gives to every cell. Micro-batches of a stage stay in
ascending order. Messages arrive after latency and transfer time; links are not shared here.

Local search: only a change within a run of actions that follow each other without a gap on the
critical path can shorten a table (the blocks of job-shop scheduling: Grabowski, Nowicki and
Smutnicki). Acceptance is late acceptance hill climbing (Burke and Bykov).

The lower bound holds for every order, with whole or split backwards, and for tables that recompute.
For rank r it is max(head + work, first + work - early), where nothing reaches r before `head`, no
gradient before `first`, and at most `early` of forward work fits into the memory before the first
gradient. It is headway's own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from headway.errors import PlanError
from headway.planner.schedule_search.placements import PipePlacement, make_placement
from headway.schedule.check import check_schedule
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import peak_activations
from headway.schedule.timing import Order, ScheduleTimer, TimerRun
from headway.schedule.weight_gradients import declare_activations, fill_with_weight_gradients

# Seconds, and shares of the memory bound, that are off by rounding alone.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class UrgencyPolicy:
    """How ranks choose.

    Attributes:
        urgency: Of each cell; the smallest goes first.
        patience: How long an idle rank may wait for a more urgent cell that is on its way.
        careful: The oldest micro-batch always keeps the memory that it still needs on every rank:
            then no rank can fill up with others, and nothing gets stuck (stages of equal size).
    """

    urgency: Sequence[float]
    patience: float = 0.0
    careful: bool = True


class ListProblem:
    """The cells of a layout, what each sets free, and what it holds."""

    def __init__(self, layout: PipePlacement, most_activations: float) -> None:
        self.layout = layout
        self.most = most_activations
        self.timer = ScheduleTimer(layout.plain_table(), layout.costs)
        wiring = self.timer.wiring
        self.actions, self.ranks, self.seconds = wiring.actions, wiring.ranks, wiring.seconds
        cells = range(len(self.actions))
        self.held = [layout.costs.activation[action.stage] for action in self.actions]
        self.is_forward = [action.kind == ActionKind.FORWARD for action in self.actions]
        self.is_last_use = [action.kind == ActionKind.WEIGHT_GRAD for action in self.actions]
        self.feeds: list[list[tuple[int, float]]] = [[] for _ in cells]
        self.num_needs = [0 for _ in cells]
        # An event without a message is the end of a cell on the same rank.
        giver = {cell: (cell, 0.0) for cell in cells}
        for cell in cells:
            for message in wiring.sends[cell]:
                giver[message.event] = (cell, message.wire + message.latency)
        for cell in cells:
            for event in wiring.needs[cell]:
                source, delay = giver[event]
                self._feed(source, cell, delay)
        self._keep_order()
        self.entering = _entering(layout)

    def _feed(self, source: int, cell: int, delay: float) -> None:
        self.feeds[source].append((cell, delay))
        self.num_needs[cell] += 1

    def _keep_order(self) -> None:
        """A stage takes its micro-batches in ascending order."""
        before: dict[tuple[ActionKind, str, int], int] = {}
        for cell, action in enumerate(self.actions):
            visit = (action.kind, action.pipe, action.stage)
            if visit in before:
                self._feed(before[visit], cell, 0.0)
            before[visit] = cell

    def run(self, policy: UrgencyPolicy) -> Order | None:
        """Rows of cells; None if the ranks got stuck because their memory was full."""
        return _Listing(self, policy).run()


def _entering(layout: PipePlacement) -> list[int]:
    """Micro-batches from the oldest: the first of each pipe, then the second ones."""
    found = [
        (place, index, microbatch)
        for index, pipe in enumerate(layout.pipes)
        for place, microbatch in enumerate(pipe.microbatches)
    ]
    return [microbatch for _, _, microbatch in sorted(found)]


class _Listing:
    def __init__(self, problem: ListProblem, policy: UrgencyPolicy) -> None:
        self.problem, self.policy = problem, policy
        ranks = range(problem.layout.ranks)
        self.rows: list[list[int]] = [[] for _ in ranks]
        self.ready: list[list[int]] = [[] for _ in ranks]
        self.free_at = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.at = [0.0] * len(problem.actions)
        self.num_needs = list(problem.num_needs)
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]
        self.need: dict[int, list[float]] = {m: [0.0 for _ in ranks] for m in problem.entering}
        self.forwards_left = dict.fromkeys(problem.entering, 0)
        self.oldest = 0
        for cell, action in enumerate(problem.actions):
            if problem.is_forward[cell]:
                self.need[action.microbatch][problem.ranks[cell]] += problem.held[cell]
                self.forwards_left[action.microbatch] += 1
            if not self.num_needs[cell]:
                self.ready[problem.ranks[cell]].append(cell)

    def run(self) -> Order | None:
        while self.events:
            time, rank = heappop(self.events)
            # The rank has started another cell since this was noted, or has nothing to start.
            if self.free_at[rank] > time or not self.ready[rank]:
                continue
            cell = self._choose(rank, time)
            if cell is not None:
                self._start(rank, cell, max(time, self.at[cell]))
        done = sum(map(len, self.rows)) == len(self.problem.actions)
        return self.rows if done else None

    def _choose(self, rank: int, time: float) -> int | None:
        latest = time + self.policy.patience + _ROUNDING
        urgency, at = self.policy.urgency, self.at
        best = None
        for cell in self.ready[rank]:
            if (
                at[cell] <= latest
                and (best is None or urgency[cell] < urgency[best])
                and (not self.problem.is_forward[cell] or self._fits(rank, cell))
            ):
                best = cell
        return best

    def _fits(self, rank: int, cell: int) -> bool:
        microbatch = self.problem.actions[cell].microbatch
        total = self.held[rank] + self.problem.held[cell]
        oldest = self.problem.entering[self.oldest]
        if self.policy.careful and microbatch != oldest:
            total += self.need[oldest][rank]
        return total <= self.problem.most + _ROUNDING

    def _start(self, rank: int, cell: int, start: float) -> None:
        problem = self.problem
        end = start + problem.seconds[cell]
        self.free_at[rank] = end
        self.rows[rank].append(cell)
        self.ready[rank].remove(cell)
        if problem.is_forward[cell]:
            self._hold(rank, cell, start)
        elif problem.is_last_use[cell]:
            self.held[rank] -= problem.held[cell]
        for consumer, delay in problem.feeds[cell]:
            self.num_needs[consumer] -= 1
            self.at[consumer] = max(self.at[consumer], end + delay)
            if not self.num_needs[consumer]:
                self.ready[problem.ranks[consumer]].append(consumer)
                heappush(self.events, (self.at[consumer], problem.ranks[consumer]))
                # A patient rank may take a cell before it is there, so it looks again now.
                if self.policy.patience:
                    heappush(self.events, (start, problem.ranks[consumer]))
        heappush(self.events, (end, rank))

    def _hold(self, rank: int, cell: int, start: float) -> None:
        microbatch = self.problem.actions[cell].microbatch
        self.held[rank] += self.problem.held[cell]
        self.need[microbatch][rank] -= self.problem.held[cell]
        self.forwards_left[microbatch] -= 1
        entering = self.problem.entering
        if self.forwards_left[entering[self.oldest]]:
            return
        while self.oldest + 1 < len(entering) and not self.forwards_left[entering[self.oldest]]:
            self.oldest += 1
        # What was kept for the old micro-batch is free: ranks that could not start anything look
        # again.
        for other in range(len(self.rows)):
            heappush(self.events, (max(start, self.free_at[other]), other))


def earliest_starts(problem: ListProblem) -> list[float]:
    """When each cell would start if its micro-batch had the ranks to itself."""
    starts = [0.0] * len(problem.actions)
    microbatches = [action.microbatch for action in problem.actions]
    same = [
        [(cell, delay) for cell, delay in feeds if microbatches[cell] == microbatches[source]]
        for source, feeds in enumerate(problem.feeds)
    ]
    left = [0] * len(starts)
    for feeds in same:
        for cell, _ in feeds:
            left[cell] += 1
    stack = [cell for cell, number in enumerate(left) if not number]
    while stack:
        source = stack.pop()
        for cell, delay in same[source]:
            starts[cell] = max(starts[cell], starts[source] + problem.seconds[source] + delay)
            left[cell] -= 1
            if not left[cell]:
                stack.append(cell)
    return starts


def random_urgency(problem: ListProblem, solo: Sequence[float], draw: random.Random) -> list[float]:
    """A rule drawn at random: a period between micro-batches, and how late weight gradients are."""
    total = max(solo)
    work = sum(problem.seconds) / (problem.layout.ranks * len(problem.entering))
    period = draw.uniform(0.0, 1.2) * work
    # 10 times the total puts weight gradients behind everything else: they only fill gaps.
    late = draw.choice((0.0, draw.uniform(0.0, 0.5) * total, 10.0 * total))
    eager = draw.choice((0.0, 0.0, draw.uniform(-0.5, 0.5) * total))
    place = {m: turn for turn, m in enumerate(problem.entering)}
    return [
        start
        + period * place[action.microbatch]
        + late * (action.kind == ActionKind.WEIGHT_GRAD)
        + eager * (action.kind == ActionKind.FORWARD)
        for start, action in zip(solo, problem.actions, strict=True)
    ]


# Steps after which late acceptance forgets a value.
_MEMORY = 30
# Places that an action moves at most.
_FARTHEST = 6
# Weight of the ends of the ranks beside the makespan, which alone is flat.
_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class TableCandidate:
    """A table as an order of the cells of a timer."""

    makespan: float
    timer: ScheduleTimer
    order: Order

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        actions = self.timer.wiring.actions
        return tuple(tuple(actions[cell] for cell in row) for row in self.order)


class TableMove(NamedTuple):
    """The cell at `source` of a rank's row goes to `target`."""

    rank: int
    source: int
    target: int


def improve_table(
    candidate: TableCandidate,
    most_activations: float,
    *,
    moves: int,
    draw: random.Random,
    target: float = 0.0,
    enough: Callable[[], bool] = lambda: False,
) -> TableCandidate:
    """The best table that a number of moves find; the given one if they find none."""
    return _Climb(candidate, most_activations, draw).run(moves, target, enough)


class _Climb:
    def __init__(self, candidate: TableCandidate, most: float, draw: random.Random) -> None:
        self.timer, self.most, self.draw = candidate.timer, most, draw
        self.order = [list(row) for row in candidate.order]
        self.best = candidate
        self.givers = {
            message.event: cell
            for cell, messages in enumerate(self.timer.wiring.sends)
            for message in messages
        }
        self.memory = [_change_of_memory(a, self.timer) for a in self.timer.wiring.actions]
        self.current, self.run_now = self._value()

    def run(self, moves: int, target: float, enough: Callable[[], bool]) -> TableCandidate:
        past = [self.current] * _MEMORY
        tight = self._tight_places()
        for turn in range(moves):
            if self.best.makespan <= target + _ROUNDING or enough():
                break
            move = self._draw_move(tight)
            if move is None or not self._apply(move):
                continue
            value, run = self._value()
            if value <= max(self.current, past[turn % _MEMORY]):
                self.current, self.run_now = value, run
                tight = self._tight_places()
                self._keep_if_no_worse()
            else:
                self._shift(TableMove(move.rank, move.target, move.source))
            past[turn % _MEMORY] = self.current
        return self.best

    def _value(self) -> tuple[float, TimerRun]:
        run = self.timer.run(self.order)
        if run.stuck:
            return math.inf, run
        ends = sum(run.at[row[-1]] for row in self.order if row)
        return max(run.at) + _TIE * ends / len(self.order), run

    def _keep_if_no_worse(self) -> None:
        """Of equally long tables the last one, from which another search goes on."""
        makespan = max(self.run_now.at)
        if makespan <= self.best.makespan + _ROUNDING:
            self.best = TableCandidate(makespan, self.timer, [list(row) for row in self.order])

    def _tight_places(self) -> list[tuple[int, int]]:
        """(rank, position) of cells on a critical path that start when the one before them ends."""
        at, starts, wiring = self.run_now.at, self.run_now.starts, self.timer.wiring
        place = {
            cell: (rank, position)
            for rank, row in enumerate(self.order)
            for position, cell in enumerate(row)
        }
        cell = max(place, key=lambda cell: at[cell])
        found = []
        while starts[cell] > _ROUNDING:
            rank, position = place[cell]
            causes = [self.givers.get(e, e) for e in wiring.needs[cell] if self._just(e, cell)]
            if position and self._just(self.order[rank][position - 1], cell):
                found.append((rank, position))
                causes.append(self.order[rank][position - 1])
            if not causes:
                break  # a message queued for its link
            cell = self.draw.choice(causes)
        return found

    def _just(self, event: int, cell: int) -> bool:
        return self.run_now.at[event] >= self.run_now.starts[cell] - _ROUNDING

    def _draw_move(self, tight: list[tuple[int, int]]) -> TableMove | None:
        if tight and self.draw.random() < 0.9:
            rank, position = self.draw.choice(tight)
        else:
            rank = self.draw.randrange(len(self.order))
            position = self.draw.randrange(1, max(2, len(self.order[rank])))
        far = self.draw.randint(1, _FARTHEST)
        # Either the cell goes forward, or the one in front of it goes behind it.
        if self.draw.random() < 0.5:
            move = TableMove(rank, position, max(0, position - far))
        else:
            move = TableMove(rank, position - 1, min(len(self.order[rank]) - 1, position - 1 + far))
        return move if position < len(self.order[rank]) and self._keeps_order(move) else None

    def _keeps_order(self, move: TableMove) -> bool:
        """No cell passes one of its own kind and stage, or of its own micro-batch and stage."""
        row, actions = self.order[move.rank], self.timer.wiring.actions
        moving = actions[row[move.source]]
        low, high = sorted((move.source, move.target))
        for position in range(low, high + 1):
            other = actions[row[position]]
            if position == move.source or (other.pipe, other.stage) != (moving.pipe, moving.stage):
                continue
            if other.kind == moving.kind or other.microbatch == moving.microbatch:
                return False
        return True

    def _apply(self, move: TableMove) -> bool:
        """Whether the row stays within the memory bound; if not, it is left as it was."""
        self._shift(move)
        held = 0.0
        for cell in self.order[move.rank]:
            held += self.memory[cell]
            if held > self.most + _ROUNDING:
                self._shift(TableMove(move.rank, move.target, move.source))
                return False
        return True

    def _shift(self, move: TableMove) -> None:
        row = self.order[move.rank]
        row.insert(move.target, row.pop(move.source))


def _change_of_memory(action: Action, timer: ScheduleTimer) -> float:
    match action.kind:
        case ActionKind.FORWARD:
            return timer.costs.activation[action.stage]
        case ActionKind.BACKWARD | ActionKind.WEIGHT_GRAD:
            return -timer.costs.activation[action.stage]
        case _:
            return 0.0


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
        fitting = math.floor(most / size + _ROUNDING) if size else math.inf
        return time * min(fitting, sum(number for _, _, number in pieces))
    # A fractional knapsack is never below any set of whole micro-batches.
    total, left = 0.0, most
    for time, size, number in sorted(pieces, key=lambda p: p[0] / p[1] if p[1] else math.inf)[::-1]:
        fitting = min(float(number), left / size) if size else float(number)
        total += fitting * time
        left -= fitting * size
    return total


def known_tables(layout: PipePlacement, most_activations: float) -> tuple[PipelineSchedule, ...]:
    """Tables within a memory bound.

    Args:
        most_activations: That a rank may hold, in the unit of the costs.
    """
    found = []
    for schedule in _named(layout):
        if max(peak_activations(schedule, layout.costs)) <= most_activations + _ROUNDING:
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
