"""Rules about weights: every gradient is summed and applied once, with legal weight versions.

After the last gradient of a stage on a rank come SYNC, WAIT (where copies are summed) and STEP;
without a flush this repeats, and the STEPs cut the gradients into groups. All copies of a stage
take the same steps.

Versions: the number of STEPs of the stage behind the weights. The backward of a micro-batch
uses the version that its forward used, that version is still held, and a gradient is at most D
- 1 steps old when it is made (1 for D = 1), as on PipeDream's first stage (Narayanan et al.,
SOSP 2019, weight stashing).
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.schedule.pipeline_schedule import NO_NUMBER, STAGE_KINDS, Action, ActionKind
from headway.schedule.rules.cells import (
    CellIndex,
    TableCell,
    Violation,
    cell_violation,
    cells_of_kinds,
    key_of,
    missing_violation,
)

GRADIENTS = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD})


def find_wrong_updates(table: CellIndex) -> Iterator[Violation]:
    """SYNC, WAIT or STEP missing, too many, too early, or not the same on all copies."""
    schedule = table.schedule
    every = [cell for cells in table.of_stage.values() for cell in cells]
    steps = not schedule.flush or bool(cells_of_kinds(every, ActionKind.STEP))
    for stage in range(schedule.stages):
        holders = schedule.holders(stage)
        for rank in holders:
            for group in _groups(table, rank, stage):
                yield from _wrong_group(group, flush=schedule.flush)
        yield from _uneven(table, stage, ActionKind.SYNC, 0)
        yield from _uneven(table, stage, ActionKind.STEP, 1 if steps else 0)
        yield from _unsummed(table, stage)


def _groups(table: CellIndex, rank: int, stage: int) -> list[list[TableCell]]:
    """A stage's cells on a rank: up to each STEP, and what is left; with a flush all together."""
    cells = table.of_stage.get((rank, stage), [])
    if table.schedule.flush:
        return [cells]
    groups: list[list[TableCell]] = [[]]
    for cell in cells:
        groups[-1].append(cell)
        if cell.action.kind == ActionKind.STEP:
            groups.append([])
    return groups


def _wrong_group(cells: list[TableCell], *, flush: bool) -> Iterator[Violation]:
    gradients = cells_of_kinds(cells, *GRADIENTS)
    syncs, waits, steps = (
        cells_of_kinds(cells, k) for k in (ActionKind.SYNC, ActionKind.WAIT, ActionKind.STEP)
    )
    for several in (syncs, waits, steps):
        for again in several[1:]:
            text = f"stands in cell {several[0].position} already; remove one"
            yield cell_violation("duplicate", again, text)
    if syncs:
        yield from _early("sync", syncs[0], gradients)
    if waits:
        yield from _wrong_wait(waits[0], syncs)
    elif syncs:
        yield cell_violation(
            "sync", syncs[0], "nothing waits for its end; add WAIT before the STEP"
        )
    if steps:
        yield from _early("step", steps[0], [c for c in cells if c.action.kind != ActionKind.STEP])
        if not (flush or gradients):
            yield cell_violation(
                "step", steps[0], "there is no gradient since the STEP before; remove it"
            )
    elif gradients and not flush:
        text = "no STEP of its stage comes behind it; add one, or its gradient is lost"
        yield cell_violation("step", gradients[-1], text)


def _early(rule: str, cell: TableCell, others: list[TableCell]) -> Iterator[Violation]:
    late = [other for other in others if other.position > cell.position]
    if late:
        last = late[-1]
        text = f"comes before {last.action} in cell {last.position}; move it behind"
        yield cell_violation(rule, cell, text)


def _wrong_wait(wait: TableCell, syncs: list[TableCell]) -> Iterator[Violation]:
    if not syncs:
        yield cell_violation(
            "sync", wait, "there is no SYNC to wait for; add one behind the gradients"
        )
    else:
        yield from _early("sync", wait, syncs[:1])


def _uneven(table: CellIndex, stage: int, kind: ActionKind, least: int) -> Iterator[Violation]:
    """Copies with fewer SYNCs or STEPs than another one, or than there must be."""
    numbers = {
        rank: len(cells_of_kinds(table.of_stage.get((rank, stage), []), kind))
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
            yield missing_violation(
                rank, action, f"{why}; add it behind the gradients of the stage"
            )


def _pipe_of(table: CellIndex, rank: int, stage: int) -> str:
    """The first pipe whose copy of a stage is on a rank."""
    pipes = table.schedule.pipes
    return next(pipe.name for pipe in pipes if pipe.placement[stage] == rank)


def _unsummed(table: CellIndex, stage: int) -> Iterator[Violation]:
    """STEPs of a stage with several copies whose gradients nobody sums."""
    holders = table.schedule.holders(stage)
    cells = [cell for rank in holders for cell in table.of_stage.get((rank, stage), [])]
    steps = cells_of_kinds(cells, ActionKind.STEP)
    if len(holders) > 1 and steps and not cells_of_kinds(cells, ActionKind.SYNC):
        ranks = ", ".join(map(str, holders))
        text = f"the copies on ranks {ranks} would drift apart; add SYNC and WAIT before each STEP"
        yield cell_violation("sync", steps[0], text)


# Rules about versions of the weights, in schedules whose weights change without a flush.


def find_wrong_versions(table: CellIndex) -> Iterator[Violation]:
    """Versions that are not said, not there yet, too old, or not those of the forward."""
    if table.schedule.flush:
        yield from _superfluous(table)
        return
    for cells in table.of_stage.values():
        steps = 0  # of this stage on this rank, so far
        for cell in cells:
            if cell.action.kind in STAGE_KINDS:
                yield from _wrong_number(cell, steps + 1)
                steps += cell.action.kind == ActionKind.STEP
            elif cell.action.version == NO_NUMBER:
                text = f"weights change without a flush; say which are used: @{steps} or older"
                yield cell_violation("version", cell, text)
            elif cell.action.kind == ActionKind.FORWARD:
                yield from _not_there(cell, steps)
            else:
                yield from _not_that_of_the_forward(cell, table) or _too_old(
                    cell, steps, table.schedule.stages
                )


def _superfluous(table: CellIndex) -> Iterator[Violation]:
    for cells in table.of_stage.values():
        for cell in cells:
            if cell.action.version != NO_NUMBER:
                text = "with a flush there is one version of the weights; remove the @"
                yield cell_violation("version", cell, text)


def _wrong_number(cell: TableCell, number: int) -> Iterator[Violation]:
    """A STEP may say which version it makes, its SYNC and WAIT too."""
    if cell.action.version not in (NO_NUMBER, number):
        yield cell_violation("version", cell, f"the version made here is {number}; write @{number}")


def _not_there(cell: TableCell, steps: int) -> Iterator[Violation]:
    if cell.action.version > steps:
        text = f"version {cell.action.version} is not there after {steps} STEPs of the stage"
        yield cell_violation("version", cell, f"{text}; use @{steps} or older")


def _not_that_of_the_forward(cell: TableCell, table: CellIndex) -> list[Violation]:
    action = cell.action
    forward = table.forward(action.pipe, action.stage, action.microbatch)
    if forward and forward.action.version not in (NO_NUMBER, action.version):
        version = forward.action.version
        return [
            cell_violation("version", cell, f"its forward used version {version}; write @{version}")
        ]
    return []


def _too_old(cell: TableCell, steps: int, stages: int) -> list[Violation]:
    age, most = steps - cell.action.version, max(1, stages - 1)
    if age <= most:
        return []
    text = f"its weights are {age} steps old, the most is {most}; use a newer version"
    return [cell_violation("version", cell, text)]
