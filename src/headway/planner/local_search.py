"""Local search on the rows of a table: actions on the critical path move to other places in a row.

Only a change within a run of actions that follow each other without a gap on the critical path can
shorten a table (the blocks of job-shop scheduling: Grabowski, Nowicki and Smutnicki). Invariant: a
row never holds more than the bound, and the micro-batches of a stage stay in ascending order.
Acceptance: late acceptance hill climbing (Burke and Bykov).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headway.schedule import Action, Kind
from headway.schedule.timing import Order, Run, Timer

_ROUNDING = 1e-9
_MEMORY = 30
"""Steps after which a value is forgotten by the acceptance rule."""
_FARTHEST = 6
"""Places that an action moves at most."""
_TIE = 1e-4
"""Weight of the ends of the ranks beside the makespan, which alone is flat."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table as an order of the cells of a timer."""

    makespan: float
    timer: Timer
    order: Order

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        actions = self.timer.wiring.actions
        return tuple(tuple(actions[cell] for cell in row) for row in self.order)


class Move(NamedTuple):
    """The cell at `source` of a rank's row goes to `target`."""

    rank: int
    source: int
    target: int


def improve(
    candidate: Candidate,
    most_activations: float,
    *,
    moves: int,
    draw: random.Random,
    target: float = 0.0,
    enough: Callable[[], bool] = lambda: False,
) -> Candidate:
    """The best table that a number of moves find; the given one if they find none.

    Args:
        candidate: Within the bound.
        most_activations: That a rank may hold.
        moves: How many are tried.
        draw: The random numbers.
        target: Makespan at which to stop.
        enough: Asked after each move.
    """
    return _Climb(candidate, most_activations, draw).run(moves, target, enough)


class _Climb:
    def __init__(self, candidate: Candidate, most: float, draw: random.Random) -> None:
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

    def run(self, moves: int, target: float, enough: Callable[[], bool]) -> Candidate:
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
                self._shift(Move(move.rank, move.target, move.source))
            past[turn % _MEMORY] = self.current
        return self.best

    def _value(self) -> tuple[float, Run]:
        run = self.timer.run(self.order)
        if run.stuck:
            return math.inf, run
        ends = sum(run.at[row[-1]] for row in self.order if row)
        return max(run.at) + _TIE * ends / len(self.order), run

    def _keep_if_no_worse(self) -> None:
        """Of equally long tables the last one, from which another search goes on."""
        makespan = max(self.run_now.at)
        if makespan <= self.best.makespan + _ROUNDING:
            self.best = Candidate(makespan, self.timer, [list(row) for row in self.order])

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
        """Whether a cell starts at the moment of an event."""
        return self.run_now.at[event] >= self.run_now.starts[cell] - _ROUNDING

    def _draw_move(self, tight: list[tuple[int, int]]) -> Move | None:
        if tight and self.draw.random() < 0.9:
            rank, position = self.draw.choice(tight)
        else:
            rank = self.draw.randrange(len(self.order))
            position = self.draw.randrange(1, max(2, len(self.order[rank])))
        far = self.draw.randint(1, _FARTHEST)
        if self.draw.random() < 0.5:
            move = Move(rank, position, max(0, position - far))
        else:
            move = Move(rank, position - 1, min(len(self.order[rank]) - 1, position - 1 + far))
        return move if position < len(self.order[rank]) and self._keeps_order(move) else None

    def _keeps_order(self, move: Move) -> bool:
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

    def _apply(self, move: Move) -> bool:
        """Whether the row stays within the memory bound; if not, it is left as it was."""
        self._shift(move)
        held = 0.0
        for cell in self.order[move.rank]:
            held += self.memory[cell]
            if held > self.most + _ROUNDING:
                self._shift(Move(move.rank, move.target, move.source))
                return False
        return True

    def _shift(self, move: Move) -> None:
        row = self.order[move.rank]
        row.insert(move.target, row.pop(move.source))


def _change_of_memory(action: Action, timer: Timer) -> float:
    match action.kind:
        case Kind.FORWARD:
            return timer.costs.activation[action.stage]
        case Kind.BACKWARD | Kind.WEIGHT_GRAD:
            return -timer.costs.activation[action.stage]
        case _:
            return 0.0
