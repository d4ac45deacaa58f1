"""List scheduling of a pipeline's table, and local search on its critical path.

List scheduling: an idle rank starts the most urgent action that is there and fits into the memory
bound; urgency is a number that the caller gives to every cell. Micro-batches of a stage stay in
ascending order. Messages arrive after latency and transfer time; links are not shared here.

Local search: only a change within a run of actions that follow each other without a gap on the
critical path can shorten a table (the blocks of job-shop scheduling: Grabowski, Nowicki and
Smutnicki). Acceptance is late acceptance hill climbing (Burke and Bykov).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from headway.planner.schedule_search.placements import PipePlacement
from headway.schedule.pipeline_schedule import Action, ActionKind
from headway.schedule.timing import Order, ScheduleTimer, TimerRun

_START_ROUNDING = 1e-9


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
        latest = time + self.policy.patience + _START_ROUNDING
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
        return total <= self.problem.most + _START_ROUNDING

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
    same = [
        [(cell, delay) for cell, delay in feeds if _same_microbatch(problem, source, cell)]
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


def _same_microbatch(problem: ListProblem, a: int, b: int) -> bool:
    return problem.actions[a].microbatch == problem.actions[b].microbatch


def random_urgency(problem: ListProblem, solo: Sequence[float], draw: random.Random) -> list[float]:
    """A rule drawn at random: a period between micro-batches, and how late weight gradients are."""
    total = max(solo)
    period = draw.uniform(0.0, 1.2) * _work_of_a_microbatch(problem)
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


def _work_of_a_microbatch(problem: ListProblem) -> float:
    return sum(problem.seconds) / (problem.layout.ranks * len(problem.entering))


_ROUNDING = 1e-9
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
