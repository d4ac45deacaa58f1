"""Which micro-batches each weight update of a stage is made of, in schedules without a flush.

The STEPs of a stage cut its gradients into groups. Copies of a stage make their steps together,
so the k-th group is that of all of them.
"""

from __future__ import annotations

from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule

Groups = tuple[tuple[int, ...], ...]
"""For each STEP the micro-batches behind it, in the order of their gradients."""
_LAST = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})
"""What makes the gradients of the weights complete."""


def update_groups(schedule: PipelineSchedule, stage: int) -> Groups:
    """The groups of a stage.

    Args:
        schedule: A valid table without a flush.
    """
    found: list[list[int]] = []
    for rank in schedule.holders(stage):
        number = 0
        waiting: list[int] = []
        for action in schedule.order[rank]:
            if action.stage == stage and action.kind in _LAST:
                waiting.append(action.microbatch)
            elif action.stage == stage and action.kind == ActionKind.STEP:
                if number == len(found):
                    found.append([])
                found[number] += waiting
                waiting, number = [], number + 1
    return tuple(map(tuple, found))


def common_update_groups(schedule: PipelineSchedule) -> Groups | None:
    """Those of all stages; None where two stages put different micro-batches together."""
    groups = [update_groups(schedule, stage) for stage in range(schedule.stages)]
    sets = [list(map(frozenset, of_stage)) for of_stage in groups]
    return groups[0] if all(one == sets[0] for one in sets) else None
