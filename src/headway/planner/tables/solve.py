"""The shortest step of a placement problem: an integer program, or local search and a bound.

Of few tables and ranks, scipy's HiGHS proves the optimum, with the best quick placement as a
cutoff. Beyond that, and where its time runs out, the answer is the best placement found and a lower
bound: of the program's own search, or of the same program with all like ranks as one large one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from headway.cost.device import Array
from headway.planner.tables.choices import EXACT, Assignment, Held, Option, PlacementProblem
from headway.planner.tables.incumbent import quick_assignments, shaken

EXACT_TABLES, EXACT_RANKS = 64, 16
"""Of a problem that is left to the integer program."""
SOLVE_SECONDS = 3.5
"""Of the whole search, by default."""
PROVEN = 1e-6
"""A relative gap that counts as none: HiGHS takes 0.999999 for 1."""
_REACHED = 1e-9
"""A relative gap at which nothing more is searched."""
_SCALE = 1e4
# HiGHS stops at an absolute gap of 1e-6 and lets a row be violated by as much: times are scaled so
# that this is 1e-10 of the step.
_QUICK_SHARE = 0.3
_BOUND_SHARE = 0.15
_PROGRAM_SHARE = 0.3
_POLISH_SHARE = 0.05
# Of the time: searching in small steps, the bound, the program, what is left over after it.


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A placement, and how far it can be from the best one.

    Attributes:
        seconds: Of a step.
        bound: No placement has a shorter step.
    """

    assignment: Assignment
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Of `seconds`, what a better placement could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds > 0 else 0.0

    @property
    def proven(self) -> bool:
        return self.gap <= PROVEN


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What memory is missing, at least, by tier and rank; in the slowest tier where that helps."""

    missing: Array
    proven: bool


def solve(
    problem: PlacementProblem,
    *,
    hints: Iterable[Assignment] = (),
    seconds: float = SOLVE_SECONDS,
) -> Solution | Shortage:
    """The placement of the shortest step, or what memory is missing.

    Args:
        hints: Placements that somebody else has found: the answer is no worse than those that fit.
        seconds: Of searching; what is found after that depends on the machine, its bound holds.
    """
    begin = perf_counter()
    bound, picked = _even_bound(problem, _BOUND_SHARE * seconds)
    bound = max(bound, _simple_bound(problem))
    target = bound * (1 + _REACHED)
    until = perf_counter() + _QUICK_SHARE * seconds
    best = quick_assignments(problem, hints, picked=picked, until=until, target=target)
    small = len(problem.names) <= EXACT_TABLES and problem.ranks <= EXACT_RANKS
    if best is None:
        found = _least_shortage(problem, seconds if small else 4 * seconds)
        if isinstance(found, Shortage):
            return found
        until = perf_counter() + _QUICK_SHARE * seconds
        best = quick_assignments(problem, (found,), until=until, target=target)
        assert best is not None  # what was found fits
    left = begin + seconds - perf_counter()
    if small and problem.seconds(best) > target and left > 0:
        answer, proof = _exact(problem, problem.seconds(best), _PROGRAM_SHARE * seconds)
        bound = max(bound, proof)
        if answer is not None and problem.seconds(answer) <= problem.seconds(best):
            # The program only sees the slowest rank; what is left over is to be little, too.
            until = perf_counter() + _POLISH_SHARE * seconds
            best = quick_assignments(problem, (answer,), until=until, starts=False) or answer
    target = bound * (1 + _REACHED)
    if bound < problem.seconds(best) * (1 - PROVEN):
        best = shaken(problem, best, until=begin + seconds, target=target)
    time = problem.seconds(best)
    return Solution(assignment=best, seconds=time, bound=min(bound, time))


# -- bounds ------------------------------------------------------------------------------------


def _simple_bound(problem: PlacementProblem) -> float:
    """The longest of any table alone, and an even share of all work."""
    alone, work = 0.0, 0.0
    for options in problem.options:
        own = [np.sort(option.best[list(option.ranks)])[: option.pieces] for option in options]
        alone = max(alone, min(float(one[-1]) for one in own))
        work += min(float(one.sum()) for one in own)
    return max(alone, work / problem.ranks)


def _even_bound(problem: PlacementProblem, seconds: float) -> tuple[float, tuple[int, ...] | None]:
    """A bound, and the option of each table behind it: ranks of equal memory count as one that is
    so many times as large, on which pieces can be divided as one likes. Of unequal pieces the
    least counts."""
    from scipy import optimize

    classes: dict[bytes, list[int]] = {}
    for rank in range(problem.ranks):
        classes.setdefault(problem.capacity[:, rank].tobytes(), []).append(rank)
    scale = max(_simple_bound(problem), 1e-300)
    rows, size = _Rows(), 1 + len(problem.latencies)
    load: list[dict[int, float]] = [{} for _ in classes]
    room: list[dict[int, float]] = [{} for _ in range(len(classes) * len(problem.tiers))]
    binaries: list[list[int]] = []
    for options in problem.options:
        binaries.append(list(range(size, size + len(options))))
        size += len(options)
        rows.add(dict.fromkeys(binaries[-1], 1.0), 1.0, 1.0)
        for option, x in zip(options, binaries[-1], strict=True):
            if option.exchange is not None:
                rows.add({x: 1.0, 1 + option.exchange: -1.0}, -np.inf, 0.0)
            pieces = {x: -float(option.pieces)}
            for number, members in enumerate(classes.values()):
                own = sorted({*members} & {*option.ranks})
                if not own:
                    continue
                held = {x: -float(min(len(own), option.pieces))}
                for form in option.forms:
                    least = float(form.seconds[own].min())
                    if not np.isfinite(least):
                        continue
                    pieces[size] = held[size] = 1.0
                    load[number][size] = least / scale / len(members)
                    for tier, bytes_ in enumerate(form.bytes[:, own].min(axis=1)):
                        room[number * len(problem.tiers) + tier][size] = float(bytes_)
                    size += 1
                rows.add(held, -np.inf, 0.0)
            rows.add(pieces, 0.0, 0.0)
    for number, members in enumerate(classes.values()):
        rows.add({0: -1.0} | load[number], -np.inf, 0.0)
        for tier, sizes in enumerate(room[number * len(problem.tiers) :][: len(problem.tiers)]):
            most = len(members) * float(problem.capacity[tier, members[0]]) * (1 + EXACT)
            unit = max(most, *sizes.values()) if sizes else 1.0
            rows.add({c: v / unit for c, v in sizes.items() if v}, -np.inf, most / max(unit, 1.0))
    whole, high = np.zeros(size), np.full(size, float(problem.ranks))
    chosen = [x for own in binaries for x in own]
    whole[chosen] = high[chosen] = 1.0
    high[0] = np.inf
    cost = np.zeros(size)
    cost[0] = 1.0
    cost[1 : 1 + len(problem.latencies)] = np.array(problem.latencies) / scale
    result = _milp(
        cost,
        integrality=whole,
        bounds=optimize.Bounds(np.zeros(size), high),
        constraints=rows.constraint(size),
        seconds=seconds,
        gap=1e-4,
    )
    bound = float(result.mip_dual_bound) * scale if result.mip_dual_bound is not None else 0.0
    if result.x is None:
        return max(0.0, bound), None
    # HiGHS' tolerance is 1e-6 of `scale`.
    picked = tuple(int(np.argmax(result.x[own])) for own in binaries)
    return max(0.0, bound - 2e-6 * scale), picked


# -- the integer program -----------------------------------------------------------------------


def _exact(
    problem: PlacementProblem, cutoff: float, seconds: float
) -> tuple[Assignment | None, float]:
    """The optimum below a cutoff, or None; and a lower bound."""
    begin = perf_counter()
    # A row may be violated by HiGHS' tolerance: an answer that exceeds a tier is asked for again
    # with a little less room.
    for margin in (0.0, 1e-6, 1e-4):
        program = _Program(problem, cutoff=cutoff, margin=margin)
        left = begin + seconds - perf_counter()
        if left <= 0:
            break
        result = program.run(left)
        proof = 0.0
        if result.mip_dual_bound is not None and margin == 0.0:
            proof = float(result.mip_dual_bound) * cutoff / _SCALE
        if result.status == 2 and margin == 0.0:
            return None, cutoff  # nothing is better than the cutoff
        if result.x is None:
            return None, proof
        found = program.assignment(result.x)
        if problem.fits(found):
            return found, proof
    return None, 0.0


def _least_shortage(problem: PlacementProblem, seconds: float) -> Assignment | Shortage:
    """A placement that fits, or what is missing."""
    widest = np.zeros(problem.capacity.shape, dtype=bool)
    widest[-1] = True
    for where in (widest, np.ones_like(widest)):
        program = _Program(problem, slack=where)
        result = program.run(seconds)
        if result.x is None:
            continue  # no room in the slowest tier helps
        found = program.assignment(result.x)
        if problem.fits(found):
            return found
        missing = np.maximum(problem.used(found) - problem.capacity * (1 + EXACT), 0.0)
        return Shortage(missing=missing, proven=result.status == 0)
    # Not even with all memory: a form that no rank can have.
    return Shortage(missing=np.full(problem.capacity.shape, np.inf), proven=True)


@dataclass
class _Rows:
    """Rows of a sparse matrix, with their limits."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, entries: Mapping[int, float], low: float, high: float) -> None:
        for column, value in entries.items():
            self.row.append(len(self.low))
            self.column.append(column)
            self.value.append(value)
        self.low.append(low)
        self.high.append(high)

    def constraint(self, columns: int) -> Any:
        """For scipy, of so many variables."""
        from scipy import optimize, sparse  # where something is solved: it takes 0.2 s

        shape = (len(self.low), columns)
        matrix = sparse.csr_matrix((self.value, (self.row, self.column)), shape=shape)
        return optimize.LinearConstraint(matrix, self.low, self.high)


class _Program:
    """min T with binaries x[table, option] and y[table, option, form, rank]."""

    def __init__(
        self,
        problem: PlacementProblem,
        *,
        cutoff: float | None = None,
        margin: float = 0.0,
        slack: Array | None = None,
    ) -> None:
        """
        Args:
            cutoff: Seconds; what is slower is left out. None: the time does not matter.
            margin: Relative share of each capacity that stays free.
            slack: Of which tiers and ranks more memory than there is may be used; that is then
                what is minimised.
        """
        self.problem = problem
        self.cutoff = cutoff
        self.slack = slack
        self.size = 1 + len(problem.latencies)  # T, and whether each latency is caused
        self.whole: dict[tuple[int, int], int] = {}
        self.piece: dict[tuple[int, int, int, int], int] = {}
        self.rows = _Rows()
        self.load: list[dict[int, float]] = [{} for _ in range(problem.ranks)]
        self.memory: dict[tuple[int, int], dict[int, float]] = {}
        for table in range(len(problem.names)):
            self._add_table(table)
        self._add_latencies()
        self._add_ranks(margin)

    def _add_table(self, table: int) -> None:
        one: dict[int, float] = {}
        for number, option in enumerate(self.problem.options[table]):
            kept = {rank: list(self._kept(option, rank)) for rank in option.ranks}
            if sum(bool(forms) for forms in kept.values()) < option.pieces:
                continue
            x = self.whole[table, number] = self._new()
            one[x] = 1.0
            pieces: dict[int, float] = {x: -float(option.pieces)}
            for rank, forms in kept.items():
                own = {}
                for form in forms:
                    y = self.piece[table, number, form, rank] = self._new()
                    own[y] = pieces[y] = 1.0
                    self._weigh(option, form, rank, y)
                if own:
                    self.rows.add(own | {x: -1.0}, -np.inf, 0.0)  # one form of a chosen option
            self.rows.add(pieces, 0.0, 0.0)
        self.rows.add(one, 1.0, 1.0)

    def _kept(self, option: Option, rank: int) -> Iterator[int]:
        """The forms that a rank could have and that no other one beats in time and all memory."""
        better: list[tuple[float, Array]] = []
        limit = np.inf if self.cutoff is None else self.cutoff
        room = self.problem.capacity[:, rank] * (1 + EXACT)
        order = sorted(range(len(option.forms)), key=lambda n: float(option.forms[n].seconds[rank]))
        for number in order:
            form = option.forms[number]
            time, size = float(form.seconds[rank]), form.bytes[:, rank]
            if not np.isfinite(time) or time > limit:
                continue
            if self.slack is None and (size > room).any():
                continue
            if any(t <= time and (s <= size).all() for t, s in better):
                continue
            better.append((time, size))
            yield number

    def _weigh(self, option: Option, number: int, rank: int, column: int) -> None:
        form = option.forms[number]
        self.load[rank][column] = float(form.seconds[rank])
        for tier, size in enumerate(form.bytes[:, rank]):
            if size:
                self.memory.setdefault((tier, rank), {})[column] = float(size)

    def _new(self) -> int:
        self.size += 1
        return self.size - 1

    def _add_latencies(self) -> None:
        for (table, number), x in self.whole.items():
            cause = self.problem.options[table][number].exchange
            if cause is not None:
                self.rows.add({x: 1.0, 1 + cause: -1.0}, -np.inf, 0.0)

    def _add_ranks(self, margin: float) -> None:
        if self.cutoff is not None:
            scale = _SCALE / self.cutoff
            late = {1 + n: s * scale for n, s in enumerate(self.problem.latencies)}
            for load in self.load:
                row = {column: value * scale for column, value in load.items()}
                self.rows.add({0: -1.0} | late | row, -np.inf, 0.0)
        self.over: list[int] = []
        for (tier, rank), sizes in self.memory.items():
            room = float(self.problem.capacity[tier, rank]) * (1 - margin)
            scale = 1.0 / max(room, max(sizes.values()))
            row = {column: size * scale for column, size in sizes.items()}
            if self.slack is not None and self.slack[tier, rank]:
                extra = self._new()
                self.over.append(extra)
                row[extra] = -scale * self._unit
            self.rows.add(row, -np.inf, room * scale)

    @property
    def _unit(self) -> float:
        """Bytes of one unit of slack."""
        return max(1.0, float(self.problem.capacity.max()))

    def run(self, seconds: float) -> Any:
        """scipy's result."""
        from scipy import optimize

        cost = np.zeros(self.size)
        low, high = np.zeros(self.size), np.ones(self.size)
        whole = np.ones(self.size)
        # Latencies are whole by themselves where time is minimised: each is 1 as soon as any of
        # its causes is, and 0 otherwise.
        free = [0, *range(1, 1 + len(self.problem.latencies)), *self.over]
        whole[free] = 0
        high[self.over] = np.inf
        high[0] = np.inf
        if self.slack is not None:
            cost[self.over] = 1.0
        else:
            cost[0] = 1.0
            high[0] = _SCALE * (1 + 1e-12)
        return _milp(
            cost,
            integrality=whole,
            bounds=optimize.Bounds(low, high),
            constraints=self.rows.constraint(self.size),
            seconds=seconds,
        )

    def assignment(self, x: Array) -> Assignment:
        """Of a result."""
        chosen = {t: number for (t, number), column in self.whole.items() if x[column] > 0.5}
        forms: dict[int, dict[int, int]] = {table: {} for table in chosen}
        for (table, number, form, rank), column in self.piece.items():
            if x[column] > 0.5 and chosen[table] == number:
                forms[table][rank] = form
        return tuple(Held(option=chosen[t], forms=forms[t]) for t in sorted(chosen))


def _milp(cost: Array, *, seconds: float, gap: float = 0.0, **problem: Any) -> Any:
    """scipy's answer. HiGHS 1.8 neither keeps to its time limit in some presolved programs nor
    keeps quiet on the standard output, where a command's JSON goes."""
    from scipy import optimize

    options = {"time_limit": max(0.1, seconds), "mip_rel_gap": gap, "presolve": False}
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        return optimize.milp(cost, options=options, **problem)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
