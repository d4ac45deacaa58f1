"""Rules about single cells: legal, on the right rank, present exactly once, after their inputs.

`index_cells` reads a table once, and all other rules look up what it found. A cell that breaks
a rule here is not looked at by later rules, so that one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.schedule.pipeline_schedule import (
    MESSAGE_KINDS,
    NO_NUMBER,
    STAGE_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
    SchedulePipe,
)

Key = tuple[ActionKind, str, int, int, int]
"""(kind, pipe, stage, micro-batch, stage at the other end)"""
_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRAD,
    ActionKind.WEIGHT_GRAD,
)


class TableCell(NamedTuple):
    """An action in its place; positions in a row count from 0."""

    rank: int
    position: int
    action: Action

    def __str__(self) -> str:
        return f"rank {self.rank}, cell {self.position} ({self.action})"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        rank: Of the offending cell, or the rank where an action is missing; NONE: no single one.
        position: Of the cell in the rank's row, from 0; NONE where an action is missing.
        action: What stands there, or is missing.
        text: What is wrong there and what to do.
    """

    rule: str
    rank: int
    position: int
    action: Action | None
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class CellIndex:
    """Where everything stands.

    Attributes:
        at: The first cell of every action of compute and of every message.
        elsewhere: Actions that stand on a wrong rank only.
        of_stage: By (rank, stage): its cells of compute, SYNC, WAIT and STEP in the row's order.
    """

    schedule: PipelineSchedule
    at: dict[Key, TableCell] = field(default_factory=dict)
    elsewhere: set[Key] = field(default_factory=set)
    of_stage: dict[tuple[int, int], list[TableCell]] = field(default_factory=dict)
    lowered: bool = False

    def has(self, key: Key) -> bool:
        """Whether an action stands anywhere."""
        return key in self.at or key in self.elsewhere

    def forward(self, pipe: str, stage: int, microbatch: int) -> TableCell | None:
        return self.at.get((_F, pipe, stage, microbatch, NO_NUMBER))

    def gradient(self, pipe: str, stage: int, microbatch: int) -> TableCell | None:
        """The cell that makes what earlier stages wait for: B, or I."""
        at = self.at
        whole = at.get((_B, pipe, stage, microbatch, NO_NUMBER))
        return whole or at.get((_I, pipe, stage, microbatch, NO_NUMBER))


def cell_violation(rule: str, cell: TableCell, text: str) -> Violation:
    """A violation by a cell; its text begins with the place."""
    return Violation(rule, cell.rank, cell.position, cell.action, f"{cell}: {text}")


def missing_violation(rank: int, action: Action, text: str) -> Violation:
    """A violation by an action that is not there."""
    return Violation("missing", rank, NO_NUMBER, action, f"rank {rank} has no {action}: {text}")


def index_cells(schedule: PipelineSchedule) -> tuple[CellIndex, list[Violation]]:
    """Read a table; cells that cannot be, or are there before, are reported and left out."""
    lowered = any(action.kind in MESSAGE_KINDS for row in schedule.order for action in row)
    table = CellIndex(schedule, lowered=lowered)
    legal = {pipe.name: (pipe, frozenset(pipe.microbatches)) for pipe in schedule.pipes}
    edges = frozenset(schedule.edges)
    found = []
    for rank, row in enumerate(schedule.order):
        for position, action in enumerate(row):
            cell = TableCell(rank, position, action)
            problem = (
                _malformed(cell)
                or _unknown(cell, legal)
                or _misplaced(cell, table, legal[action.pipe][0])
                or _no_edge(cell, edges, legal[action.pipe][0])
                or _enter(cell, table)
            )
            if problem:
                found.append(problem)
    return table, found


def _malformed(cell: TableCell) -> Violation | None:
    """What no text form could say."""
    action = cell.action
    if (action.kind in MESSAGE_KINDS) != (action.other != NO_NUMBER):
        text = "messages, and nothing else, name the stage at the other end"
    elif (action.kind in STAGE_KINDS) != (action.microbatch == NO_NUMBER):
        text = "SYNC, WAIT and STEP, and nothing else, are without a micro-batch"
    else:
        return None
    return cell_violation("malformed", cell, text)


def _unknown(
    cell: TableCell, legal: dict[str, tuple[SchedulePipe, frozenset[int]]]
) -> Violation | None:
    action = cell.action
    if action.pipe not in legal:
        names = ", ".join(legal)
        return cell_violation("unknown-pipe", cell, f"no pipe {action.pipe}; there are {names}")
    pipe, microbatches = legal[action.pipe]
    for stage in (action.stage, action.other) if action.other != NO_NUMBER else (action.stage,):
        if not 0 <= stage < len(pipe.placement):
            last = len(pipe.placement) - 1
            return cell_violation(
                "unknown-stage", cell, f"no stage {stage}; the last one is {last}"
            )
    if action.kind not in STAGE_KINDS and action.microbatch not in microbatches:
        numbers = _shortened(pipe.microbatches)
        text = f"no micro-batch {action.microbatch} in pipe {pipe.name}, which has {numbers}"
        return cell_violation("unknown-microbatch", cell, text)
    return None


def _shortened(numbers: tuple[int, ...]) -> str:
    few = [str(number) for number in numbers]
    if len(few) > 6:
        few = [*few[:3], "...", few[-1]]
    return ", ".join(few) or "none"


def _misplaced(cell: TableCell, table: CellIndex, pipe: SchedulePipe) -> Violation | None:
    action = cell.action
    place = pipe.placement[action.stage]
    if place == cell.rank:
        return None
    table.elsewhere.add(key_of(action))
    text = f"stage {action.stage} of pipe {pipe.name} is on rank {place}; move the action there"
    return cell_violation("wrong-rank", cell, text)


def _no_edge(
    cell: TableCell, edges: frozenset[tuple[int, int]], pipe: SchedulePipe
) -> Violation | None:
    action = cell.action
    if action.kind not in MESSAGE_KINDS:
        return None
    ends = (min(action.stage, action.other), max(action.stage, action.other))
    if ends not in edges:
        text = f"stages {ends[0]} and {ends[1]} pass nothing to each other; remove the action"
        return cell_violation("message-edge", cell, text)
    if pipe.placement[ends[0]] == pipe.placement[ends[1]]:
        text = f"stages {ends[0]} and {ends[1]} are on the same rank; remove the action"
        return cell_violation("message-edge", cell, text)
    return None


def _enter(cell: TableCell, table: CellIndex) -> Violation | None:
    """Into the table, unless the same action is there already."""
    action = cell.action
    if action.kind not in MESSAGE_KINDS:
        table.of_stage.setdefault((cell.rank, action.stage), []).append(cell)
    if action.kind in STAGE_KINDS:
        return None
    key = key_of(action)
    first = table.at.setdefault(key, cell)
    if first is cell:
        return None
    return cell_violation("duplicate", cell, f"stands in cell {first.position} already; remove one")


def key_of(action: Action) -> Key:
    """What an action is, whatever version of the weights it uses."""
    return (action.kind, action.pipe, action.stage, action.microbatch, action.other)


def find_incomplete(table: CellIndex) -> Iterator[Violation]:
    """F exactly once for each (pipe, stage, micro-batch), and either B, or I and W."""
    for pipe in table.schedule.pipes:
        for stage, rank in enumerate(pipe.placement):
            for microbatch in pipe.microbatches:
                rest = (pipe.name, stage, microbatch, NO_NUMBER)
                kinds = [kind for kind in (_F, _B, _I, _W) if table.has((kind, *rest))]
                if kinds in ([_F, _B], [_F, _I, _W]):
                    continue
                yield from _unfinished(table, kinds, rank, Action(_F, pipe.name, stage, microbatch))


def _unfinished(
    table: CellIndex, kinds: list[ActionKind], rank: int, forward: Action
) -> Iterator[Violation]:
    pipe, stage, microbatch = forward.pipe, forward.stage, forward.microbatch
    if _F not in kinds:
        yield missing_violation(
            rank, forward, "every stage computes every micro-batch of its pipe; add it"
        )
    split = [kind for kind in (_I, _W) if kind in kinds]
    if _B in kinds:
        for kind in split:
            cell = table.at.get((kind, pipe, stage, microbatch, NO_NUMBER))
            if cell:
                text = "there is a whole backward B too; keep B, or I and W"
                yield cell_violation("mixed-backward", cell, text)
    elif not split:
        text = "its backward is missing; add B, or I and W"
        yield missing_violation(rank, Action(_B, pipe, stage, microbatch), text)
    elif len(split) == 1:
        missing = _I if split == [_W] else _W
        text = f"there is {split[0]}, which is half of a backward; add it, or make both one B"
        yield missing_violation(rank, Action(missing, pipe, stage, microbatch), text)


def find_misordered(table: CellIndex) -> Iterator[Violation]:
    """What needs something of its own rank stands behind it: F, then B or I, then W; stages."""
    at = table.at
    for (kind, pipe, stage, microbatch, _), cell in at.items():
        if kind in (_B, _I):
            yield from _behind(cell, table.forward(pipe, stage, microbatch))
        elif kind == _W:
            yield from _behind(cell, at.get((_I, pipe, stage, microbatch, NO_NUMBER)))
    for earlier, later, chain in _neighbours(table.schedule):
        name = chain.name
        for microbatch in chain.microbatches:
            yield from _behind(
                table.forward(name, later, microbatch), table.forward(name, earlier, microbatch)
            )
            yield from _behind(
                table.gradient(name, earlier, microbatch), table.gradient(name, later, microbatch)
            )


def _neighbours(schedule: PipelineSchedule) -> Iterator[tuple[int, int, SchedulePipe]]:
    """Pairs of stages that pass something to each other on one rank."""
    for pipe in schedule.pipes:
        for earlier, later in schedule.edges:
            if pipe.placement[earlier] == pipe.placement[later]:
                yield earlier, later, pipe


def _behind(cell: TableCell | None, needed: TableCell | None) -> Iterator[Violation]:
    if cell and needed and needed.position > cell.position:
        yield cell_violation(
            "order", cell, f"needs {needed.action} in cell {needed.position}; swap them"
        )


def cells_of_kinds(cells: Sequence[TableCell], *wanted: ActionKind) -> list[TableCell]:
    """Those of some kinds."""
    return [cell for cell in cells if cell.action.kind in wanted]
