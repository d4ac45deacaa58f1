"""Placements found quickly: greedy ones in several orders, then improved table by table.

They are the first answer of the integer program, and the only one where there are too many tables
and ranks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter

import numpy as np

from headway.cost.device import Array
from headway.planner.tables.choices import EXACT, Assignment, Held, Option, PlacementProblem

_SLACK = 1e-12
"""Relative gain below which a step is no improvement: rounding."""


class _State:
    """A placement of some of the tables, with the room and the time that they leave."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.held: dict[int, Held] = {}
        self.load: Array = np.zeros(problem.ranks)
        self.free: Array = problem.capacity * (1 + EXACT)
        self.causes = [0] * len(problem.latencies)

    @property
    def score(self) -> tuple[float, float]:
        """What is to be small: the step, then the work of all ranks."""
        late = sum(s for s, n in zip(self.problem.latencies, self.causes, strict=True) if n)
        return float(self.load.max(initial=0.0)) + late, float(self.load.sum())

    def put(self, table: int, held: Held, sign: int = 1) -> None:
        """Add a table, or take it away."""
        option = self.problem.options[table][held.option]
        for rank, number in held.forms.items():
            form = option.forms[number]
            self.load[rank] += sign * form.seconds[rank]
            self.free[:, rank] -= sign * form.bytes[:, rank]
        if option.exchange is not None:
            self.causes[option.exchange] += sign
        if sign > 0:
            self.held[table] = held
        else:
            del self.held[table]

    def take(self, table: int) -> Held:
        held = self.held[table]
        self.put(table, held, -1)
        return held

    def best(self, table: int, allowed: _Allowed | None = None) -> Held | None:
        """The way to add a table after which the step is shortest; None: none fits."""
        found: tuple[tuple[float, float], Held] | None = None
        for number, option in enumerate(self.problem.options[table]):
            if allowed is not None and not allowed(table, option):
                continue
            held = self._fitted(number, option)
            if held is None:
                continue
            # Only what the option adds is computed: putting it on trial costs ten times as much.
            ranks = list(held.forms)
            seconds = np.array([option.forms[f].seconds[r] for r, f in held.forms.items()])
            late = sum(
                s
                for n, s in enumerate(self.problem.latencies)
                if self.causes[n] or n == option.exchange
            )
            most = max(float(self.load.max(initial=0.0)), float((self.load[ranks] + seconds).max()))
            score = (most + late, float(seconds.sum()))
            if found is None or score < found[0]:
                found = score, held
        return found[1] if found else None

    def _fitted(self, number: int, option: Option) -> Held | None:
        """The option on those ranks on which it ends first; None: it does not fit."""
        ranks = np.asarray(option.ranks)
        seconds = np.full((len(option.forms), len(ranks)), np.inf)
        for row, form in enumerate(option.forms):
            fits = (form.bytes[:, ranks] <= self.free[:, ranks]).all(axis=0)
            seconds[row, fits] = form.seconds[ranks[fits]]
        forms = seconds.argmin(axis=0)
        own = seconds[forms, np.arange(len(ranks))]
        order = np.argsort(self.load[ranks] + own, kind="stable")[: option.pieces]
        if len(order) < option.pieces or not np.isfinite(own[order]).all():
            return None
        return Held(option=number, forms={int(ranks[n]): int(forms[n]) for n in sorted(order)})


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
    for state in _starts(problem, hints, picked, starts):
        if best is not None and perf_counter() > until:
            break
        improve(state, until=until, target=target)
        found = tuple(state.held[n] for n in range(len(problem.names)))
        if best is None or state.score < best[0]:
            best = state.score, found
    return best[1] if best else None


def _starts(
    problem: PlacementProblem,
    hints: Iterable[Assignment],
    picked: Sequence[int] | None,
    greedy: bool,
) -> Iterator[_State]:
    for hint in hints:
        if problem.fits(hint):
            state = _State(problem)
            for number, held in enumerate(hint):
                state.put(number, held)
            yield state
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
    # planner proposes, all tables in one way where they can be.
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
        held = state.best(table, allowed) or state.best(table)
        if held is None:
            return False
        state.put(table, held)
    return True


def _total(option: Option) -> float:
    """Of all ranks, at best."""
    return float(np.sort(option.best[list(option.ranks)])[: option.pieces].sum())


def _bytes(option: Option) -> float:
    return min(float(form.bytes.sum(axis=0).max()) for form in option.forms) * option.pieces


def improve(state: _State, *, until: float, target: float = 0.0) -> None:
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
    heavy = [n for n, held in state.held.items() if slowest in held.forms]
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
                    if n in state.held:
                        state.take(n)
            for n, held in old.items():
                state.put(n, held)
    return False
