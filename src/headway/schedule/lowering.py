"""From a table of compute to one that a runtime obeys: messages, and all-reduces of gradients.

SEND stands right after what makes the message, RECV right before what takes it, POST some actions
earlier. Invariant: compute keeps its order, so that without latency and overhead the lowered table
takes as long as the table. Placement of all-reduces: Chimera (SC'21), section 3.2 (eager-sync-opt).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from headway.schedule.action import COMPUTE, MESSAGES, OF_STAGE, Action, Kind
from headway.schedule.costs import StageCosts
from headway.schedule.messages import add_messages
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.timing import Timing, time_schedule

SyncPlacement = Literal["none", "post", "eager", "eager-opt"]
"""Where the all-reduce of a stage's gradients starts."""
_GRADIENTS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
_IDLE = 1e-9
"""Idle time below this share of the makespan is rounding."""


def lower(
    schedule: PipelineSchedule,
    *,
    sync: SyncPlacement = "none",
    costs: StageCosts | None = None,
    lookahead: int = 4,
    tags: bool = True,
) -> PipelineSchedule:
    """Add messages, and SYNC, WAIT and STEP where wanted.

    A message is made for every edge of `schedule.edges` in both directions whose stages lie on
    different ranks. Messages that are there already are placed anew.

    Args:
        schedule: A valid table.
        sync: "none": leave SYNC, WAIT and STEP as they are. Otherwise they are placed anew, one of
            each for every stage of a rank: all SYNCs in stage order after the last compute, then
            all WAITs, then all STEPs ("post"); SYNC right after the stage's last backward on that
            rank ("eager"); the same, but only where the rank idles between that moment and the
            end of its compute ("eager-opt"). Without a flush, SYNC and WAIT stand before each STEP,
            whichever way is chosen.
        costs: By which "eager-opt" finds idle time; the habitual costs if not given.
        lookahead: A message is posted at most this many computes before its consumer, and, where
            the table declares `most_activations`, not while what it brings would be one too many.
        tags: The transport tells messages of one pair of ranks apart. Without, both ranks of a pair
            SEND and POST all their messages to each other in one common order, see `add_messages`.

    Raises:
        PlanError: "eager-opt" of a table that cannot be carried out.
        ValueError: An unknown placement, or a negative lookahead.
    """
    if sync not in get_args(SyncPlacement) or lookahead < 0:
        raise ValueError(f"sync={sync!r}, lookahead={lookahead}")
    plain = _without(schedule, MESSAGES)
    if sync != "none":
        plain = _with_syncs(plain, sync, costs)
    return add_messages(plain, lookahead=lookahead, tags=tags)


def _without(schedule: PipelineSchedule, kinds: frozenset[Kind]) -> PipelineSchedule:
    rows = (tuple(a for a in actions if a.kind not in kinds) for actions in schedule.order)
    return replace(schedule, order=tuple(rows))


def _with_syncs(
    schedule: PipelineSchedule, sync: SyncPlacement, costs: StageCosts | None
) -> PipelineSchedule:
    if not schedule.flush:
        bare = _without(schedule, frozenset({Kind.SYNC, Kind.WAIT}))
        return replace(schedule, order=tuple(map(_before_steps, bare.order)))
    bare = _without(schedule, OF_STAGE)
    eager = eager_stages(bare, sync, costs)
    rows = (
        _around(actions, _hosted(bare, rank), eager[rank])
        for rank, actions in enumerate(bare.order)
    )
    return replace(schedule, order=tuple(rows))


def _before_steps(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    row: list[Action] = []
    for action in actions:
        if action.kind == Kind.STEP:
            row += [replace(action, kind=Kind.SYNC), replace(action, kind=Kind.WAIT)]
        row.append(action)
    return tuple(row)


def _hosted(schedule: PipelineSchedule, rank: int) -> dict[int, str]:
    """The stages of a rank in order, each with the first pipe that brings it there."""
    found: dict[int, str] = {}
    for pipe, stage in schedule.hosted(rank):
        found.setdefault(stage, pipe)
    return dict(sorted(found.items()))


def _around(
    actions: tuple[Action, ...], hosted: dict[int, str], eager: frozenset[int]
) -> tuple[Action, ...]:
    """A rank's row with the all-reduces of its stages."""
    last = _last_gradients(actions)
    row: list[Action] = []
    for position, action in enumerate(actions):
        row.append(action)
        if action.stage in eager and last[action.stage] == position:
            row.append(Action(Kind.SYNC, hosted[action.stage], action.stage))
    row += [Action(Kind.SYNC, pipe, stage) for stage, pipe in hosted.items() if stage not in eager]
    for kind in (Kind.WAIT, Kind.STEP):
        row += [Action(kind, pipe, stage) for stage, pipe in hosted.items()]
    return tuple(row)


def _last_gradients(actions: tuple[Action, ...]) -> dict[int, int]:
    """Where in its row the gradients of each stage are complete."""
    return {a.stage: i for i, a in enumerate(actions) if a.kind in _GRADIENTS}


def eager_stages(
    schedule: PipelineSchedule, sync: SyncPlacement, costs: StageCosts | None = None
) -> tuple[frozenset[int], ...]:
    """For each rank the stages whose all-reduce starts before the end of the rank's compute.

    A stage without any backward on a rank is never eager.

    Raises:
        PlanError: "eager-opt" of a table that cannot be carried out.
    """
    if sync in ("none", "post"):
        return (frozenset(),) * schedule.ranks
    last = [_last_gradients(actions) for actions in schedule.order]
    if sync == "eager":
        return tuple(map(frozenset, last))
    given = costs or StageCosts.of(schedule.stages, ranks=schedule.ranks)
    timing = time_schedule(schedule, given)
    return tuple(
        frozenset(stage for stage in stages if idle_after_gradients(timing, rank, stage) > 0)
        for rank, stages in enumerate(last)
    )


def idle_after_gradients(timing: Timing, rank: int, stage: int) -> float:
    """Idle time of a rank between a stage's gradients being complete and its last compute's end.

    The all-reduce of the stage can hide in it (Chimera, SC'21, figure 4: free regions).

    Args:
        timing: Of a table without messages.
        rank: Which has a backward of the stage.
        stage: Whose gradients.
    """
    ends = timing.ends[rank]
    after = _last_gradients(timing.order[rank])[stage]
    idle, before = 0.0, ends[after]
    for position in range(after + 1, len(ends)):
        if timing.order[rank][position].kind in COMPUTE:
            idle += timing.starts[rank][position] - before
            before = ends[position]
    return idle if idle > _IDLE * timing.makespan else 0.0
