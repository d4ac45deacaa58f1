"""Fill the bubbles of any schedule with weight gradients: every backward becomes I and W.

Nobody waits for a weight gradient (W) before the end of the step, so it can run where its rank
would idle; until then it holds the activations of its micro-batch. F and I of a rank keep their
order, memory stays within a bound, and the step never becomes longer. The split is that of Qi
et al. 2023 (Zero Bubble Pipeline Parallelism), section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from headway.errors import PlanError
from headway.schedule.pipeline_schedule import COMPUTE_KINDS, Action, ActionKind, PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import peak_activations
from headway.schedule.timing import Order, ScheduleTimer

_FITS = (1.0, 0.5, 1e-6)
"""Shares of a W that must fit into an idle time before W may start there. None is best for all
tables: a W that overruns its gap delays an I, one that waits leaves the gap. The best is kept."""
_ROUNDING = 1e-9
_NOT_YET = -1.0


def fill_with_weight_gradients(
    schedule: PipelineSchedule, costs: StageCosts, most_activations: float | None = None
) -> PipelineSchedule:
    """Split the backwards of a table and run the weight gradients where ranks idle.

    Chimera of N >= D with two pipes, F = I = W: the step takes 3N + D/2 - 1, which no table of
    these two pipes can beat, in D activations; the bubble is (D-2)/(6N+D-2).

    Args:
        schedule: With a flush, before `lower`. Weight gradients that it has are placed anew.
        most_activations: That a rank may hold, in the unit of `costs.activation`; None: the most
            that any rank holds in the given table.

    Returns:
        The shortest of several fillings; the given table where none is shorter. Its name is that
        of the given one with "-split", or "-refilled" if its backwards were split before.

    Raises:
        PlanError: The given table has messages or no flush, cannot be executed, or needs more
            memory than the bound even if every W follows its I at once.
    """
    tight = replace(schedule, order=tuple(tuple(_split(row)) for row in schedule.order), slots=None)
    _check(schedule, max(peak_activations(tight, costs)), most_activations)
    given = max(peak_activations(schedule, costs))
    most = given if most_activations is None else most_activations
    # All fillings are orders of the same cells, which are wired once.
    timer = ScheduleTimer(tight, costs)
    orders: list[Order] = [timer.wiring.order]
    orders += [order for fit in _FITS if (order := _BubbleFilling(timer, most, fit).order())]
    # Of equally short orders `min` keeps the first: the tight one, which holds least.
    best = min(orders, key=timer.makespan)
    if timer.makespan(best) > ScheduleTimer(schedule, costs).timing().makespan + _ROUNDING:
        return schedule
    rows = tuple(tuple(timer.wiring.actions[cell] for cell in row) for row in best)
    had_split = any(action.kind == ActionKind.WEIGHT_GRAD for _, action in schedule.actions())
    name = f"{schedule.name}-{'refilled' if had_split else 'split'}"
    return declare_activations(replace(tight, name=name, order=rows))


def declare_activations(schedule: PipelineSchedule) -> PipelineSchedule:
    """The table with `most_activations` as what it holds if all its stages are equal."""
    equal = StageCosts.of(schedule.stages, ranks=schedule.ranks)
    return replace(schedule, most_activations=max(peak_activations(schedule, equal)))


def _check(schedule: PipelineSchedule, needed: float, most: float | None) -> None:
    problems = []
    if not schedule.flush:
        problems.append("it has no flush: the optimiser's steps wait for weight gradients")
    elif any(action.kind not in COMPUTE_KINDS for _, action in schedule.actions()):
        problems.append("it has messages or all-reduces already; fill it before `lower`")
    if most is not None and needed > most + _ROUNDING:
        problems.append(f"it holds {needed:g} activations on a rank, at most {most:g} are allowed")
    if problems:
        raise PlanError(
            f"the schedule {schedule.name} cannot be filled with weight gradients",
            problems=problems,
            fix="Give a table of compute alone that stays within the memory bound.",
        )


def _split(row: Iterable[Action]) -> Iterable[Action]:
    """Every backward as I with W right behind it: the tight table, which holds least."""
    for action in row:
        if action.kind == ActionKind.FORWARD:
            yield action
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            yield replace(action, kind=ActionKind.INPUT_GRAD)
            yield replace(action, kind=ActionKind.WEIGHT_GRAD)


class _BubbleFilling:
    """One execution of a split table, in which every rank puts its W where it would wait."""

    def __init__(self, timer: ScheduleTimer, most: float, fit: float) -> None:
        self.wiring = timer.wiring
        self.most = most
        self.fit = fit
        self.activation = timer.costs.activation
        kinds = [action.kind for action in self.wiring.actions]
        self.fixed = [
            [cell for cell in row if kinds[cell] != ActionKind.WEIGHT_GRAD]
            for row in self.wiring.order
        ]
        ranks = range(len(self.fixed))
        self.rows: list[list[int]] = [[] for _ in ranks]
        self.waiting: list[deque[int]] = [deque() for _ in ranks]
        self.clock = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.at = [_NOT_YET] * self.wiring.events

    def order(self) -> Order | None:
        """The rows of cells; None if the given table cannot be executed."""
        position = [0] * len(self.rows)
        moved = True
        while moved:
            moved = False
            for rank, cells in enumerate(self.fixed):
                while position[rank] < len(cells) and self._place(rank, cells[position[rank]]):
                    position[rank] += 1
                    moved = True
        if any(p < len(cells) for p, cells in zip(position, self.fixed, strict=True)):
            return None
        return [[*row, *late] for row, late in zip(self.rows, self.waiting, strict=True)]

    def _place(self, rank: int, cell: int) -> bool:
        """Place F or I when the end of all that it needs is known, behind W that come first."""
        ready = max((self.at[event] for event in self.wiring.needs[cell]), default=0.0)
        if any(self.at[event] < 0 for event in self.wiring.needs[cell]):
            return False
        action = self.wiring.actions[cell]
        needed = self.activation[action.stage] if action.kind == ActionKind.FORWARD else 0.0
        late = self.waiting[rank]
        # With no W left waiting a rank holds what the tight table holds there, which is within the
        # bound: F always fits in the end.
        while late:
            idle = ready - self.clock[rank]
            full = needed > 0 and self.held[rank] + needed > self.most + _ROUNDING
            if not full and idle + _ROUNDING < self.fit * self.wiring.seconds[late[0]]:
                break
            weight_grad = late.popleft()
            self._run(rank, weight_grad, self.clock[rank])
            self.held[rank] -= self.activation[self.wiring.actions[weight_grad].stage]
        self.held[rank] += needed
        self._run(rank, cell, max(ready, self.clock[rank]))
        if action.kind == ActionKind.INPUT_GRAD:
            late.append(cell + 1)  # `_split` put W right behind I
        return True

    def _run(self, rank: int, cell: int, start: float) -> None:
        end = start + self.wiring.seconds[cell]
        self.rows[rank].append(cell)
        self.clock[rank] = self.at[cell] = end
        # Messages that queue on a link are left to the timer, which judges the finished order.
        for message in self.wiring.sends[cell]:
            self.at[message.event] = end + message.wire + message.latency
