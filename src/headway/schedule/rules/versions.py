"""Rules about versions of the weights, in schedules whose weights change without a flush.

A version is the number of STEPs of the stage behind it. Invariant: the backward of a micro-batch
uses the weights that its forward used, they are there, and a gradient is at most D - 1 steps old
when it is made (1 for D = 1): PipeDream's first stage, the oldest of all known schedules.
Source: Narayanan et al., PipeDream, SOSP 2019, weight stashing.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.schedule.action import NONE, OF_STAGE, Kind
from headway.schedule.rules.cells import Cell, Table, Violation, offence


def wrong_versions(table: Table) -> Iterator[Violation]:
    """Versions that are not said, not there yet, too old, or not those of the forward."""
    if table.schedule.flush:
        yield from _superfluous(table)
        return
    for cells in table.of_stage.values():
        steps = 0  # of this stage on this rank, so far
        for cell in cells:
            if cell.action.kind in OF_STAGE:
                yield from _wrong_number(cell, steps + 1)
                steps += cell.action.kind == Kind.STEP
            elif cell.action.version == NONE:
                text = f"weights change without a flush; say which are used: @{steps} or older"
                yield offence("version", cell, text)
            elif cell.action.kind == Kind.FORWARD:
                yield from _not_there(cell, steps)
            else:
                yield from _not_that_of_the_forward(cell, table) or _too_old(
                    cell, steps, table.schedule.stages
                )


def _superfluous(table: Table) -> Iterator[Violation]:
    for cells in table.of_stage.values():
        for cell in cells:
            if cell.action.version != NONE:
                text = "with a flush there is one version of the weights; remove the @"
                yield offence("version", cell, text)


def _wrong_number(cell: Cell, number: int) -> Iterator[Violation]:
    """A STEP may say which version it makes, its SYNC and WAIT too."""
    if cell.action.version not in (NONE, number):
        yield offence("version", cell, f"the version made here is {number}; write @{number}")


def _not_there(cell: Cell, steps: int) -> Iterator[Violation]:
    if cell.action.version > steps:
        text = f"version {cell.action.version} is not there after {steps} STEPs of the stage"
        yield offence("version", cell, f"{text}; use @{steps} or older")


def _not_that_of_the_forward(cell: Cell, table: Table) -> list[Violation]:
    action = cell.action
    forward = table.forward(action.pipe, action.stage, action.microbatch)
    if forward and forward.action.version not in (NONE, action.version):
        version = forward.action.version
        return [offence("version", cell, f"its forward used version {version}; write @{version}")]
    return []


def _too_old(cell: Cell, steps: int, stages: int) -> list[Violation]:
    age, most = steps - cell.action.version, max(1, stages - 1)
    if age <= most:
        return []
    text = f"its weights are {age} steps old, the most is {most}; use a newer version"
    return [offence("version", cell, text)]
