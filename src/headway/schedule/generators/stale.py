"""Schedules without a flush: PipeDream and PipeDream-2BW, 1F1B with weight versions.

The weights change while other micro-batches are under way; a backward uses the version that its
forward used. The table covers N micro-batches and runs empty at its end. A version is the number
of STEPs of the stage behind it; STEP carries the version that it makes. Sources: Narayanan et al.
2019 (PipeDream, weight stashing) and 2021 (PipeDream-2BW).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from headway.schedule.action import Action, Kind
from headway.schedule.generators.flush import one_f_one_b
from headway.schedule.generators.sizes import check_sizes
from headway.schedule.pipeline import PipelineSchedule


def pipedream(ranks: int, microbatches: int) -> PipelineSchedule:
    """A STEP after every backward; stage s keeps D - s versions.

    Micro-batch m is computed at stage s with version max(0, m - (D-1-s)): the gradient is D-1-s
    steps old when it is applied.

    Args:
        ranks: D, one stage each.
        microbatches: N, any.

    Raises:
        PlanError: No rank or no micro-batch.
    """
    check_sizes("pipedream", ranks, microbatches)

    def version(stage: int, microbatch: int) -> int:
        return max(0, microbatch - (ranks - 1 - stage))

    return _without_flush("pipedream", ranks, microbatches, version, group=1)


def pipedream_2bw(ranks: int, microbatches: int, *, group: int | None = None) -> PipelineSchedule:
    """A STEP after every group of m micro-batches; two versions, whatever the depth.

    All micro-batches of group k are computed with version max(0, k-1) on every stage, so that
    W(k+1) = W(k) - step(gradient at W(k-1)). A last group that is not full makes a step too.

    Args:
        ranks: D, one stage each.
        microbatches: N, any.
        group: m, D if not given; at least D-1 (the paper asks for D).

    Raises:
        PlanError: m < D-1: the first stage would need a version that is not there yet.
    """
    size = ranks if group is None else group
    least = max(1, ranks - 1)
    text = f"groups of {size} micro-batches: the first stage needs a version before it is made"
    check = (size >= least, text)
    check_sizes("pipedream-2bw", ranks, microbatches, check, fix=f"use groups of {least} or more")

    def version(_stage: int, microbatch: int) -> int:
        return max(0, microbatch // size - 1)

    return _without_flush("pipedream-2bw", ranks, microbatches, version, group=size)


def _without_flush(
    name: str,
    ranks: int,
    microbatches: int,
    version: Callable[[int, int], int],
    *,
    group: int,
) -> PipelineSchedule:
    """The order of 1F1B, with versions, and a STEP behind the last backward of each group."""

    def order(actions: Iterable[Action]) -> Iterable[Action]:
        for action in actions:
            stage, done = action.stage, action.microbatch + 1
            yield replace(action, version=version(stage, action.microbatch))
            ends = done % group == 0 or done == microbatches
            if action.kind == Kind.BACKWARD and ends:
                yield Action(Kind.STEP, action.pipe, stage, version=-(-done // group))

    whole = one_f_one_b(ranks, microbatches)
    return replace(
        whole,
        name=name,
        order=tuple(tuple(order(actions)) for actions in whole.order),
        flush=False,
    )
