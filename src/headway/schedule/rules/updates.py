"""Rules about whole stages: SYNC, WAIT and STEP, on every rank that holds a copy.

Behind the last gradient of a stage on a rank come SYNC, WAIT (where copies are summed) and STEP;
without a flush this repeats, and the STEPs cut the gradients into groups. Invariant: every gradient
is summed and applied exactly once, and all copies of a stage take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.schedule.action import Action, Kind
from headway.schedule.rules.cells import (
    Cell,
    Table,
    Violation,
    absence,
    key_of,
    kinds,
    offence,
)

GRADIENTS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})


def wrong_updates(table: Table) -> Iterator[Violation]:
    """SYNC, WAIT or STEP missing, too many, too early, or not the same on all copies."""
    schedule = table.schedule
    every = [cell for cells in table.of_stage.values() for cell in cells]
    steps = not schedule.flush or bool(kinds(every, Kind.STEP))
    for stage in range(schedule.stages):
        holders = schedule.holders(stage)
        for rank in holders:
            for group in _groups(table, rank, stage):
                yield from _wrong_group(group, flush=schedule.flush)
        yield from _uneven(table, stage, Kind.SYNC, 0)
        yield from _uneven(table, stage, Kind.STEP, 1 if steps else 0)
        yield from _unsummed(table, stage)


def _groups(table: Table, rank: int, stage: int) -> list[list[Cell]]:
    """A stage's cells on a rank: up to each STEP, and what is left; with a flush all together."""
    cells = table.of_stage.get((rank, stage), [])
    if table.schedule.flush:
        return [cells]
    groups: list[list[Cell]] = [[]]
    for cell in cells:
        groups[-1].append(cell)
        if cell.action.kind == Kind.STEP:
            groups.append([])
    return groups


def _wrong_group(cells: list[Cell], *, flush: bool) -> Iterator[Violation]:
    gradients = kinds(cells, *GRADIENTS)
    syncs, waits, steps = (kinds(cells, k) for k in (Kind.SYNC, Kind.WAIT, Kind.STEP))
    for several in (syncs, waits, steps):
        for again in several[1:]:
            text = f"stands in cell {several[0].position} already; remove one"
            yield offence("duplicate", again, text)
    if syncs:
        yield from _early("sync", syncs[0], gradients)
    if waits:
        yield from _wrong_wait(waits[0], syncs)
    elif syncs:
        yield offence("sync", syncs[0], "nothing waits for its end; add WAIT before the STEP")
    if steps:
        yield from _early("step", steps[0], [c for c in cells if c.action.kind != Kind.STEP])
        if not (flush or gradients):
            yield offence("step", steps[0], "there is no gradient since the STEP before; remove it")
    elif gradients and not flush:
        text = "no STEP of its stage comes behind it; add one, or its gradient is lost"
        yield offence("step", gradients[-1], text)


def _early(rule: str, cell: Cell, others: list[Cell]) -> Iterator[Violation]:
    late = [other for other in others if other.position > cell.position]
    if late:
        last = late[-1]
        text = f"comes before {last.action} in cell {last.position}; move it behind"
        yield offence(rule, cell, text)


def _wrong_wait(wait: Cell, syncs: list[Cell]) -> Iterator[Violation]:
    if not syncs:
        yield offence("sync", wait, "there is no SYNC to wait for; add one behind the gradients")
    else:
        yield from _early("sync", wait, syncs[:1])


def _uneven(table: Table, stage: int, kind: Kind, least: int) -> Iterator[Violation]:
    """Copies with fewer SYNCs or STEPs than another one, or than there must be."""
    numbers = {
        rank: len(kinds(table.of_stage.get((rank, stage), []), kind))
        for rank in table.schedule.holders(stage)
    }
    most = max(numbers.values())
    wanted = min(most, 1) if table.schedule.flush else most
    for rank, number in numbers.items():
        action = Action(kind, _pipe_of(table, rank, stage), stage)
        if number < max(wanted, least) and key_of(action) not in table.elsewhere:
            why = "every stage must be updated"
            if most:
                fullest = next(r for r, n in numbers.items() if n == most)
                why = f"it has {number} for this stage, and rank {fullest} {most}"
            yield absence(rank, action, f"{why}; add it behind the gradients of the stage")


def _pipe_of(table: Table, rank: int, stage: int) -> str:
    """The first pipe whose copy of a stage is on a rank."""
    pipes = table.schedule.pipes
    return next(pipe.name for pipe in pipes if pipe.placement[stage] == rank)


def _unsummed(table: Table, stage: int) -> Iterator[Violation]:
    """STEPs of a stage with several copies whose gradients nobody sums."""
    holders = table.schedule.holders(stage)
    cells = [cell for rank in holders for cell in table.of_stage.get((rank, stage), [])]
    steps = kinds(cells, Kind.STEP)
    if len(holders) > 1 and steps and not kinds(cells, Kind.SYNC):
        ranks = ", ".join(map(str, holders))
        text = f"the copies on ranks {ranks} would drift apart; add SYNC and WAIT before each STEP"
        yield offence("sync", steps[0], text)
