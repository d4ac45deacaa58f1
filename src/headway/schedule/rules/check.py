"""Check a table: it can be executed and makes, sums and applies every gradient exactly once.

All problems are collected, cell by cell, by the rules beside this module; nothing here knows
which generator made the table. The declared bound on live activations counts for every forward
the share of a rank's model (ranks / stages) until B, or W where the backward is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from headway.errors import PlanError
from headway.schedule.pipeline_schedule import NO_NUMBER, ActionKind, PipelineSchedule
from headway.schedule.rules.cells import (
    CellIndex,
    TableCell,
    Violation,
    cell_violation,
    find_incomplete,
    find_misordered,
    index_cells,
)
from headway.schedule.rules.communication import (
    find_deadlocks,
    find_misordered_messages,
    find_unmatched_messages,
)
from headway.schedule.rules.weights import find_wrong_updates, find_wrong_versions

_ROUNDING = 1e-9


def find_excess_activations(table: CellIndex) -> Iterator[Violation]:
    """The first cell of each rank that goes beyond the bound."""
    schedule, most = table.schedule, table.schedule.most_activations
    if most is None:
        return
    share = schedule.ranks / schedule.stages
    for rank, row in enumerate(schedule.order):
        live = 0
        for position, action in enumerate(row):
            if action.kind == ActionKind.FORWARD:
                live += 1
                if live * share > most + _ROUNDING:
                    text = (
                        f"{live * share:g} activations are held from here on, at most {most:g} "
                        "are declared; put a backward before it"
                    )
                    yield cell_violation("memory", TableCell(rank, position, action), text)
                    break
            elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
                live -= 1


# Whether a table can be carried out and gives every gradient once: all problems, by cell.


__all__ = ["SCHEDULE_RULES", "Violation", "check_schedule", "schedule_violations"]

SCHEDULE_RULES: Mapping[str, str] = MappingProxyType(
    {
        "pipes": "pipes have one length, ranks that are there, and micro-batches of their own",
        "malformed": "an action has the parts of its kind",
        "unknown-pipe": "the pipe of an action is there",
        "unknown-stage": "its stage is there",
        "unknown-microbatch": "its micro-batch goes through its pipe",
        "wrong-rank": "it stands on the rank of its stage",
        "duplicate": "it is there once",
        "missing": "nothing lacks: F, and B or I and W; messages; SYNC and STEP of all copies",
        "mixed-backward": "a backward is one B, or one I and one W",
        "order": "an action stands behind what it needs of its own rank",
        "deadlock": "ranks do not wait for each other in a circle",
        "message-edge": "messages go between stages on two ranks that pass something",
        "message-order": "SEND behind its result; POST, RECV and use in this order",
        "lane-order": "messages are posted in the order sent (for transports without tags)",
        "sync": "SYNC behind the last gradient, WAIT behind it; copies are summed",
        "step": "STEP behind everything of its stage, and one for every gradient",
        "version": "weights are there, not too old, and those of the forward",
        "memory": "at most `most_activations` are held on a rank",
    }
)
"""Name of each rule, and what it demands."""
_MOST = 12
"""Problems that one message shows."""


def schedule_violations(
    schedule: PipelineSchedule, *, transport_has_tags: bool = True
) -> tuple[Violation, ...]:
    """Everything that is wrong with a table, by the RULES.

    Messages are looked at where the table has any; SYNC, WAIT and STEP likewise.

    Args:
        transport_has_tags: Messages between two ranks are told apart by a tag, so that they may be
            posted in another order than sent.

    Returns:
        By rank and position; empty: the table is good.
    """
    shape = tuple(_wrong_pipes(schedule))
    if shape:
        return shape
    table, found = index_cells(schedule)
    found += [*find_incomplete(table), *find_misordered(table)]
    if table.lowered:
        found += find_unmatched_messages(table)
        found += () if transport_has_tags else find_misordered_messages(table)
    found += [
        *find_wrong_updates(table),
        *find_wrong_versions(table),
        *find_excess_activations(table),
    ]
    found += find_deadlocks(table, {(violation.rank, violation.position) for violation in found})
    return tuple(sorted(found, key=lambda violation: (violation.rank, violation.position)))


def check_schedule(schedule: PipelineSchedule, *, transport_has_tags: bool = True) -> None:
    """Refuse a table that is wrong.

    Args:
        transport_has_tags: As for `schedule_violations`.

    Raises:
        PlanError: With the problems; of more than 12 the first ones and how many more there are.
    """
    found = schedule_violations(schedule, transport_has_tags=transport_has_tags)
    if not found:
        return
    problems = [f"{violation.rule}: {violation.text}" for violation in found[:_MOST]]
    if len(found) > _MOST:
        problems.append(f"and {len(found) - _MOST} more")
    raise PlanError(
        f"the schedule {schedule.name} cannot be carried out",
        problems=problems,
        fix="Mend the named cells (ranks and cells count from 0).",
    )


def _wrong_pipes(schedule: PipelineSchedule) -> Iterator[Violation]:
    """What makes the rest of the rules meaningless."""
    for text in _shape(schedule):
        yield Violation("pipes", NO_NUMBER, NO_NUMBER, None, text)


def _shape(schedule: PipelineSchedule) -> Iterator[str]:
    pipes, ranks = schedule.pipes, schedule.ranks
    if not pipes or not ranks:
        yield "the schedule has no pipes or no ranks"
        return
    for name, number in Counter(pipe.name for pipe in pipes).items():
        if number > 1:
            yield f"{number} pipes are called {name}; give each a name of its own"
    for pipe in pipes:
        length = len(pipe.placement)
        if length != schedule.stages or not length:
            yield f"pipe {pipe.name} has {length} stages and pipe {pipes[0].name} {schedule.stages}"
        for stage, rank in enumerate(pipe.placement):
            if not 0 <= rank < ranks:
                yield (
                    f"stage {stage} of pipe {pipe.name} is on rank {rank}; there are ranks 0 to "
                    f"{ranks - 1}"
                )
    for microbatch, number in Counter(m for pipe in pipes for m in pipe.microbatches).items():
        if number > 1:
            yield f"micro-batch {microbatch} goes through pipes {number} times; once is enough"
    for earlier, later in schedule.skips:
        if not 0 <= earlier < later < schedule.stages:
            yield f"the skip {earlier} > {later} does not lead to a later stage"
    for stage in schedule.recompute:
        if not 0 <= stage < schedule.stages:
            yield f"stage {stage} recomputes; there are stages 0 to {schedule.stages - 1}"
