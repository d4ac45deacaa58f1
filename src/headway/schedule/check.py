"""Whether a table can be carried out and gives every gradient once: all problems, by cell.

Invariant: a table without violations runs to its end on ranks that follow their rows, and every
micro-batch's gradient of every stage is made, summed and applied exactly once. Nothing here knows
which generator made the table. The rules are in `headway.schedule.rules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from headway.errors import PlanError
from headway.schedule.action import NONE
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.rules.cells import Violation, incomplete, index, out_of_order
from headway.schedule.rules.memory import too_many_activations
from headway.schedule.rules.messages import out_of_step, unmatched
from headway.schedule.rules.updates import wrong_updates
from headway.schedule.rules.versions import wrong_versions
from headway.schedule.rules.waiting import deadlocks

__all__ = ["RULES", "Violation", "check_schedule", "violations"]

RULES: Mapping[str, str] = MappingProxyType(
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


def violations(
    schedule: PipelineSchedule, *, transport_has_tags: bool = True
) -> tuple[Violation, ...]:
    """Everything that is wrong with a table, by the RULES.

    Messages are looked at where the table has any; SYNC, WAIT and STEP likewise.

    Args:
        schedule: Any table.
        transport_has_tags: Messages between two ranks are told apart by a tag, so that they may be
            posted in another order than sent.

    Returns:
        By rank and position; empty: the table is good.
    """
    shape = tuple(_wrong_pipes(schedule))
    if shape:
        return shape
    table, found = index(schedule)
    found += [*incomplete(table), *out_of_order(table)]
    if table.lowered:
        found += unmatched(table)
        found += () if transport_has_tags else out_of_step(table)
    found += [*wrong_updates(table), *wrong_versions(table), *too_many_activations(table)]
    found += deadlocks(table, {(violation.rank, violation.position) for violation in found})
    return tuple(sorted(found, key=lambda violation: (violation.rank, violation.position)))


def check_schedule(schedule: PipelineSchedule, *, transport_has_tags: bool = True) -> None:
    """Refuse a table that is wrong.

    Args:
        schedule: Any table.
        transport_has_tags: As for `violations`.

    Raises:
        PlanError: With the problems; of more than 12 the first ones and how many more there are.
    """
    found = violations(schedule, transport_has_tags=transport_has_tags)
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
        yield Violation("pipes", NONE, NONE, None, text)


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
