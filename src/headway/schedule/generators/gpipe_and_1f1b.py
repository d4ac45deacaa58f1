"""One stage per rank and whole backwards: GPipe, 1F1B, GEMS, PipeDream and PipeDream-2BW.

D ranks, N micro-batches; formulas of Table 2 of Li and Hoefler 2021 (Chimera). GPipe (Huang et
al. 2019), 1F1B (DAPPLE, Fan et al. 2021) and GEMS (Jain et al. 2020) flush the pipeline before
the update.

PipeDream (Narayanan et al. 2019, weight stashing) and PipeDream-2BW (2021) do not: the weights
change while other micro-batches are in flight, and a backward uses the version that its forward
used. Their table covers N micro-batches and drains at its end. A version is the number of STEPs
of the stage behind it; STEP carries the version that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from headway.schedule.generators.rank_order import alternate, check_sizes, visits
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards: bubble (D-1)/(N+D-1), N activations."""
    check_sizes("gpipe", ranks, microbatches)
    return PipelineSchedule(
        name="gpipe",
        pipes=(SchedulePipe("d0", tuple(range(ranks)), tuple(range(microbatches))),),
        # All forwards ahead: then the other phase has backwards alone.
        order=tuple(_alternating(s, microbatches, microbatches) for s in range(ranks)),
        most_activations=microbatches,
    )


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    """Early backwards (DAPPLE): bubble (D-1)/(N+D-1), D - s activations on stage s."""
    check_sizes("1f1b", ranks, microbatches)
    return PipelineSchedule(
        name="1f1b",
        pipes=(SchedulePipe("d0", tuple(range(ranks)), tuple(range(microbatches))),),
        order=tuple(_alternating(s, microbatches, ranks - 1 - s) for s in range(ranks)),
        most_activations=min(ranks, microbatches),
    )


def _alternating(stage: int, microbatches: int, ahead: int) -> tuple[Action, ...]:
    forwards = visits(ActionKind.FORWARD, stage, range(microbatches))
    return alternate(forwards, visits(ActionKind.BACKWARD, stage, range(microbatches)), ahead)


def gems(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two opposite copies take turns: one activation per rank, two copies of the weights.

    The next micro-batch's forward follows the backward of the one before through the ranks, so that
    at most two are active. With B = 2F the makespan is N(2D+1) + D-1 forwards, the bubble tends to
    (D-1)/(D+1/2).

    Args:
        microbatches: N, any; the down copy takes the odd one, and a single one leaves out the up
            copy.

    Raises:
        PlanError: Odd D.
    """
    odd = "an odd number of ranks: the middle one would hold both copies of one stage"
    fix = f"use {ranks - 1} or {ranks + 1} ranks" if ranks > 1 else "use an even number of ranks"
    check_sizes("gems", ranks, microbatches, (ranks % 2 == 0, odd), fix=fix)
    numbers, half = range(microbatches), (microbatches + 1) // 2
    down = SchedulePipe("d0", tuple(range(ranks)), tuple(numbers[:half]))
    up = SchedulePipe("u0", tuple(reversed(range(ranks))), tuple(numbers[half:]))
    return PipelineSchedule(
        name="gems",
        pipes=(down, up) if microbatches > 1 else (down,),
        order=tuple(tuple(_in_turn(rank, down, up)) for rank in range(ranks)),
        most_activations=1,
    )


def _in_turn(rank: int, down: SchedulePipe, up: SchedulePipe) -> Iterable[Action]:
    """Forward and backward of the first micro-batch down, of the first one up, and so on."""
    for turn in range(len(down.microbatches)):
        for pipe in (down, up):
            # A slice, because the up pipe may have one micro-batch less.
            for microbatch in pipe.microbatches[turn : turn + 1]:
                stage = pipe.placement.index(rank)
                yield Action(ActionKind.FORWARD, pipe.name, stage, microbatch)
                yield Action(ActionKind.BACKWARD, pipe.name, stage, microbatch)


# Schedules without a flush: PipeDream and PipeDream-2BW, 1F1B with weight versions.


def pipedream(ranks: int, microbatches: int) -> PipelineSchedule:
    """A STEP after every backward; stage s keeps D - s versions.

    Micro-batch m is computed at stage s with version max(0, m - (D-1-s)): the gradient is D-1-s
    steps old when it is applied.
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
            # The last group may not be full; its gradients would be lost without a STEP.
            ends = done % group == 0 or done == microbatches
            if action.kind == ActionKind.BACKWARD and ends:
                yield Action(ActionKind.STEP, action.pipe, stage, version=-(-done // group))

    whole = one_f_one_b(ranks, microbatches)
    return replace(
        whole,
        name=name,
        order=tuple(tuple(order(actions)) for actions in whole.order),
        flush=False,
    )
