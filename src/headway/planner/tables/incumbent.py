"""Placements found quickly: greedy ones in several orders, then improved table by table.

They are the first answer of the integer program, and the only one where there are too many tables
and ranks for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.cost.device import Array
from headway.planner.tables.choices import EXACT, Assignment, Held, Option, PlacementProblem

IntArray = NDArray[np.int64]

_SLACK = 1e-12
"""Relative gain below which a step is no improvement: rounding."""


class _Move(NamedTuple):
    """A table, held in some way: what that adds to the ranks that have a piece."""

    held: Held
    ranks: IntArray
    seconds: Array
    bytes: Array
    cause: int | None


def _move(option: Option, number: int, places: IntArray, forms: IntArray) -> _Move:
    """An option on the ranks at some places of its list, in these forms."""
    ranks = np.asarray(option.ranks)[places]
    return _Move(
        held=Held(option=number, forms=dict(zip(ranks.tolist(), forms.tolist(), strict=True))),
        ranks=ranks,
        seconds=option.seconds[forms, places],
        bytes=option.bytes[forms, :, places].T,
        cause=option.exchange,
    )


class _State:
    """A placement of some of the tables, with the room and the time that they leave."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.moves: dict[int, _Move] = {}
        self.load: Array = np.zeros(problem.ranks)
        self.free: Array = problem.capacity * (1 + EXACT)
        self.causes = [0] * len(problem.latencies)

    @staticmethod
    def of(problem: PlacementProblem, assignment: Assignment) -> _State:
        """Of a whole placement."""
        state = _State(problem)
        for table, held in enumerate(assignment):
            option = problem.options[table][held.option]
            places = np.array([option.ranks.index(rank) for rank in held.forms], dtype=np.int64)
            forms = np.array(list(held.forms.values()), dtype=np.int64)
            state.put(table, _move(option, held.option, places, forms))
        return state

    @property
    def assignment(self) -> Assignment:
        return tuple(self.moves[n].held for n in range(len(self.problem.names)))

    @property
    def score(self) -> tuple[float, float]:
        """What is to be small: the step, then the work of all ranks."""
        late = sum(s for s, n in zip(self.problem.latencies, self.causes, strict=True) if n)
        return float(self.load.max(initial=0.0)) + late, float(self.load.sum())

    def put(self, table: int, move: _Move) -> None:
        """Add a table."""
        self.load[move.ranks] += move.seconds
        self.free[:, move.ranks] -= move.bytes
        if move.cause is not None:
            self.causes[move.cause] += 1
        self.moves[table] = move

    def take(self, table: int) -> _Move:
        """Take a table away."""
        move = self.moves.pop(table)
        self.load[move.ranks] -= move.seconds
        self.free[:, move.ranks] += move.bytes
        if move.cause is not None:
            self.causes[move.cause] -= 1
        return move

    def best(self, table: int, allowed: _Allowed | None = None) -> _Move | None:
        """The way to add a table after which the step is shortest; None: none fits."""
        found: tuple[tuple[float, float], int, IntArray, IntArray] | None = None
        highest = float(self.load.max(initial=0.0))
        late = [s if n else 0.0 for s, n in zip(self.problem.latencies, self.causes, strict=True)]
        for number, option in enumerate(self.problem.options[table]):
            if allowed is not None and not allowed(table, option):
                continue
            fitted = self._fitted(option)
            if fitted is None:
                continue
            places, forms, seconds, ends = fitted
            more = 0.0
            if option.exchange is not None and not late[option.exchange]:
                more = self.problem.latencies[option.exchange]
            score = (max(highest, float(ends.max())) + more, float(seconds.sum()))
            if found is None or score < found[0]:
                found = score, number, places, forms
        if found is None:
            return None
        _, number, places, forms = found
        return _move(self.problem.options[table][number], number, places, forms)

    def _fitted(self, option: Option) -> tuple[IntArray, IntArray, Array, Array] | None:
        """The option on those ranks on which it ends first: their places, forms, seconds, and
        when each ends; None: it does not fit."""
        ranks = list(option.ranks)
        fits = (option.bytes <= self.free[:, ranks]).all(axis=1)
        seconds = np.where(fits, option.seconds, np.inf)
        forms = seconds.argmin(axis=0)
        own = seconds[forms, np.arange(len(ranks))]
        ends = self.load[ranks] + own
        if option.pieces < len(ranks):
            places = np.sort(np.argsort(ends, kind="stable")[: option.pieces])
            forms, own, ends = forms[places], own[places], ends[places]
        else:
            places = np.arange(len(ranks))
        return (places, forms, own, ends) if np.isfinite(own).all() else None


def quick_assignments(
    problem: PlacementProblem,
    hints: Iterable[Assignment] = (),
    *,
    picked: Sequence[int] | None = None,
    starts: bool = True,
    until: float,
    target: float = 0.0,
) -> Assignment | None:
    """The best placement that greedy and local search find; None: none that fits.

    Args:
        hints: Placements of others, to improve on; those that do not fit are left out.
        picked: Of each table the number of the option to begin with.
        starts: Begin with greedy placements, too.
        until: `perf_counter` at which to stop improving.
        target: Seconds of a step below which no placement can be.
    """
    best: tuple[tuple[float, float], Assignment] | None = None
    # The best start first: there may be time for one only.
    for state in sorted(_starts(problem, hints, picked, starts), key=lambda state: state.score):
        if best is not None and perf_counter() > until:
            break
        _improve(state, until=until, target=target)
        if best is None or state.score < best[0]:
            best = state.score, state.assignment
    return best[1] if best else None


def _starts(
    problem: PlacementProblem,
    hints: Iterable[Assignment],
    picked: Sequence[int] | None,
    greedy: bool,
) -> Iterator[_State]:
    for hint in hints:
        if problem.fits(hint):
            yield _State.of(problem, hint)
    if not greedy:
        return
    tables = range(len(problem.names))
    least = [min(_total(option) for option in options) for options in problem.options]
    smallest = [min(_bytes(option) for option in options) for options in problem.options]
    ways = dict.fromkeys(option.way for options in problem.options for option in options)
    longest = sorted(tables, key=lambda n: -least[n])
    largest = sorted(tables, key=lambda n: -smallest[n])
    plans: list[tuple[Sequence[int], _Allowed]] = []
    if picked is not None:
        own = [options[number] for options, number in zip(problem.options, picked, strict=True)]
        plans += [(order, lambda n, option: option is own[n]) for order in (longest, largest)]
    # The longest first evens out the ends; the largest first finds room; then, as TorchRec's
    # planner proposes, each table in the way of the shortest pieces, and all in one way.
    short = [min(options, key=_longest_piece) for options in problem.options]
    plans += [(order, lambda n, option: option is short[n]) for order in (longest, largest)]
    plans += [(order, _anything) for order in (longest, largest)]
    plans += [(longest, _one_way(way)) for way in ways]
    for order, allowed in plans:
        state = _State(problem)
        if _fill(state, order, allowed):
            yield state


_Allowed = Callable[[int, Option], bool]
"""Whether a table, by its number, may be held in a way."""


def _anything(table: int, option: Option) -> bool:
    return True


def _one_way(way: str) -> _Allowed:
    return lambda table, option: option.way == way


def _fill(state: _State, order: Sequence[int], allowed: _Allowed = _anything) -> bool:
    """Add tables in this order, where nothing else fits in any way."""
    for table in order:
        move = state.best(table, allowed) or state.best(table)
        if move is None:
            return False
        state.put(table, move)
    return True


def _longest_piece(option: Option) -> float:
    return float(np.sort(option.best[list(option.ranks)])[option.pieces - 1])


def _total(option: Option) -> float:
    """Of all ranks, at best."""
    return float(np.sort(option.best[list(option.ranks)])[: option.pieces].sum())


def _bytes(option: Option) -> float:
    return min(float(form.bytes.sum(axis=0).max()) for form in option.forms) * option.pieces


def _improve(state: _State, *, until: float, target: float = 0.0) -> None:
    """Place tables anew, one and two at a time, as long as the step, or all work, gets less."""
    while perf_counter() < until and state.score[0] > target:
        if not (_move_one(state, until) or _move_two(state, until)):
            return


def _better(new: tuple[float, float], old: tuple[float, float]) -> bool:
    if new[0] < old[0] * (1 - _SLACK):
        return True
    return new[0] <= old[0] and new[1] < old[1] * (1 - _SLACK)


def _move_one(state: _State, until: float) -> bool:
    moved = False
    for table in range(len(state.problem.names)):
        if perf_counter() > until:
            break
        before = state.score
        old = state.take(table)
        new = state.best(table) or old
        state.put(table, new)
        if _better(state.score, before):
            moved = True
        elif new is not old:
            state.take(table)
            state.put(table, old)
    return moved


def _move_two(state: _State, until: float) -> bool:
    slowest = int(state.load.argmax())
    heavy = [n for n, move in state.moves.items() if slowest in move.held.forms]
    before = state.score
    for one in heavy:
        for other in range(len(state.problem.names)):
            if other == one:
                continue
            if perf_counter() > until:
                return False
            old = {n: state.take(n) for n in (one, other)}
            for order in ((one, other), (other, one)):
                if _fill(state, order) and _better(state.score, before):
                    return True
                for n in order:
                    if n in state.moves:
                        state.take(n)
            for n, move in old.items():
                state.put(n, move)
    return False


def shaken(
    problem: PlacementProblem, start: Assignment, *, until: float, target: float = 0.0
) -> Assignment:
    """The best placement of a search that takes a few tables out at random, again and again."""
    draw = random.Random(0)
    best = _State.of(problem, start)
    tables = range(len(problem.names))
    while perf_counter() < until and best.score[0] > target:
        state = _State.of(problem, best.assignment)
        moved = draw.sample(tables, min(len(tables), draw.randint(2, 6)))
        for table in moved:
            state.take(table)
        if _fill(state, moved):
            _improve(state, until=until, target=target)
            if _better(state.score, best.score):
                best = state
    return best.assignment
