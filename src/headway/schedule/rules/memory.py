"""The rule about memory: the declared bound on live activations holds on every rank.

A forward of a stage adds its share of a rank's model, ranks / stages; B, or W where the backward is
split, frees it. Invariant: only the order of the row counts, not durations.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.schedule.action import Kind
from headway.schedule.rules.cells import Cell, Table, Violation, offence

_ROUNDING = 1e-9


def too_many_activations(table: Table) -> Iterator[Violation]:
    """The first cell of each rank that goes beyond the bound."""
    schedule, most = table.schedule, table.schedule.most_activations
    if most is None:
        return
    share = schedule.ranks / schedule.stages
    for rank, row in enumerate(schedule.order):
        live = 0
        for position, action in enumerate(row):
            if action.kind == Kind.FORWARD:
                live += 1
                if live * share > most + _ROUNDING:
                    text = (
                        f"{live * share:g} activations are held from here on, at most {most:g} "
                        "are declared; put a backward before it"
                    )
                    yield offence("memory", Cell(rank, position, action), text)
                    break
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                live -= 1
