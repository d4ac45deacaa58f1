"""List scheduling of a pipeline: an idle rank starts the most urgent action that is there and fits.

Invariant: the rows that come out respect the memory bound, and every stage sees its micro-batches
in ascending order (they are alike, so nothing is lost). An action is urgent by a number that the
caller gives to every cell; messages arrive after latency and wire time, links are not shared here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from headway.planner.layouts import Layout
from headway.schedule import Kind
from headway.schedule.timing import Order, Timer

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Policy:
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


class Problem:
    """The cells of a layout, what each sets free, and what it holds."""

    def __init__(self, layout: Layout, most_activations: float) -> None:
        self.layout = layout
        self.most = most_activations
        self.timer = Timer(layout.plain_table(), layout.costs)
        wiring = self.timer.wiring
        self.actions, self.ranks, self.seconds = wiring.actions, wiring.ranks, wiring.seconds
        cells = range(len(self.actions))
        self.held = [layout.costs.activation[action.stage] for action in self.actions]
        self.is_forward = [action.kind == Kind.FORWARD for action in self.actions]
        self.is_last_use = [action.kind == Kind.WEIGHT_GRAD for action in self.actions]
        self.feeds: list[list[tuple[int, float]]] = [[] for _ in cells]
        self.num_needs = [0 for _ in cells]
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
        before: dict[tuple[Kind, str, int], int] = {}
        for cell, action in enumerate(self.actions):
            visit = (action.kind, action.pipe, action.stage)
            if visit in before:
                self._feed(before[visit], cell, 0.0)
            before[visit] = cell

    def run(self, policy: Policy) -> Order | None:
        """Rows of cells; None if the ranks got stuck because their memory was full."""
        return _Listing(self, policy).run()


def _entering(layout: Layout) -> list[int]:
    """Micro-batches from the oldest: the first of each pipe, then the second ones."""
    found = [
        (place, index, microbatch)
        for index, pipe in enumerate(layout.pipes)
        for place, microbatch in enumerate(pipe.microbatches)
    ]
    return [microbatch for _, _, microbatch in sorted(found)]


class _Listing:
    """One execution."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
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
        for other in range(len(self.rows)):
            heappush(self.events, (max(start, self.free_at[other]), other))


def alone(problem: Problem) -> list[float]:
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


def _same_microbatch(problem: Problem, a: int, b: int) -> bool:
    return problem.actions[a].microbatch == problem.actions[b].microbatch


def random_urgency(problem: Problem, solo: Sequence[float], draw: random.Random) -> list[float]:
    """A rule drawn at random: a period between micro-batches, and how late weight gradients are.

    Args:
        problem: Whose cells.
        solo: Their starts by `alone`.
        draw: The random numbers.
    """
    total = max(solo)
    period = draw.uniform(0.0, 1.2) * _work_of_a_microbatch(problem)
    late = draw.choice((0.0, draw.uniform(0.0, 0.5) * total, 10.0 * total))
    eager = draw.choice((0.0, 0.0, draw.uniform(-0.5, 0.5) * total))
    place = {m: turn for turn, m in enumerate(problem.entering)}
    return [
        start
        + period * place[action.microbatch]
        + late * (action.kind == Kind.WEIGHT_GRAD)
        + eager * (action.kind == Kind.FORWARD)
        for start, action in zip(solo, problem.actions, strict=True)
    ]


def _work_of_a_microbatch(problem: Problem) -> float:
    """Per rank, on average."""
    return sum(problem.seconds) / (problem.layout.ranks * len(problem.entering))
