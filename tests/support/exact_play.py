"""A second simulator of pipeline tables: small, in whole numbers, and independent of headway's.

It plays plain cells (kind, pipe, stage, micro-batch), so that tables of other libraries can be
played too. A rank's order is a list of units; a unit is a tuple of cells that start together, when
all their inputs are there, and end together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Cell = tuple[str, str, int, int]
"""(kind, pipe, stage, micro-batch)"""


@dataclass(frozen=True)
class Played:
    """The makespan is in the unit of the costs of a whole rank's share, peaks in whole shares."""

    makespan: Fraction
    bubble: Fraction
    peaks: tuple[Fraction, ...]
    spans: Mapping[Cell, tuple[int, int]]
    """Start and end of each cell, in the unit of the costs of one stage."""


def cells(schedule):
    """The compute cells of a headway schedule, one per unit."""
    return [
        [((a.kind.value, a.pipe, a.stage, a.microbatch),) for a in order]
        for order in schedule.compute
    ]


def _inputs(cell: Cell, last: int) -> list[Cell]:
    kind, pipe, stage, microbatch = cell
    if kind == "F":
        return [("F", pipe, stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [("I", pipe, stage, microbatch)]
    later = [("I", pipe, stage + 1, microbatch)] if stage < last else []
    return [("F", pipe, stage, microbatch), *later]


def _peak(order: Sequence[tuple[Cell, ...]]) -> int:
    live = peak = 0
    for unit in order:
        for cell in unit:
            live += cell[0] == "F"
            peak = max(peak, live)
            live -= cell[0] in "BW"
    return peak


def play(orders, stages: int, cost: tuple[int, int, int] = (1, 1, 1)) -> Played:
    """Play a table: every rank in its order, each unit as soon as its inputs are there.

    Args:
        orders: Of each rank, its units.
        stages: Of each pipe.
        cost: Of forward, input gradient, weight gradient of a rank's share: v = stages / ranks
            stages of a pipe, each of which costs 1/v of it.
    """
    forward, inputs, weights = cost
    length = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
    ends: dict[Cell, int] = {}
    spans: dict[Cell, tuple[int, int]] = {}
    clocks = [0] * len(orders)
    waiting: dict[Cell, list[int]] = {}
    left = [iter(order) for order in orders]
    standing = [next(units, None) for units in left]
    able = list(range(len(orders)))
    while able:
        rank = able.pop()
        while (unit := standing[rank]) is not None:
            needs = [need for cell in unit for need in _inputs(cell, stages - 1)]
            missing = [need for need in needs if need not in ends]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            start = max([clocks[rank], *(ends[need] for need in needs)])
            clocks[rank] = start + sum(length[cell[0]] for cell in unit)
            for cell in unit:
                spans[cell] = (start, clocks[rank])
                result = ("I", *cell[1:]) if cell[0] == "B" else cell
                ends[result] = clocks[rank]
                able += waiting.pop(result, [])
            standing[rank] = next(left[rank], None)
    assert not any(standing), f"the table cannot go on: {standing}"
    busy = sum(length[cell[0]] for order in orders for unit in order for cell in unit)
    virtual = Fraction(stages, len(orders))
    return Played(
        makespan=max(clocks) / virtual,
        bubble=1 - Fraction(busy, max(clocks) * len(orders)),
        peaks=tuple(_peak(order) / virtual for order in orders),
        spans=spans,
    )


def play_schedule(schedule, cost: tuple[int, int, int] = (1, 1, 1)) -> Played:
    """Play a headway schedule."""
    return play(cells(schedule), schedule.stages, cost)
