"""Schedules with whole backwards and a flush: GPipe, 1F1B, GEMS.

Every rank's order is written directly. D ranks, N micro-batches, F and B the times of a forward
and a backward of one stage. Sources: Huang et al. 2019 (GPipe); Fan et al. 2021 (DAPPLE, 1F1B with
a flush); Jain et al. 2020 (GEMS); formulas of Table 2 of Li and Hoefler 2021 (Chimera).
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.schedule.action import Action, Kind
from headway.schedule.generators.rank_order import alternate, visits
from headway.schedule.generators.sizes import check_sizes
from headway.schedule.pipeline import Pipe, PipelineSchedule


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards: bubble (D-1)/(N+D-1), N activations.

    Args:
        ranks: D, one stage each.
        microbatches: N, any.

    Raises:
        PlanError: No rank or no micro-batch.
    """
    check_sizes("gpipe", ranks, microbatches)
    return PipelineSchedule(
        name="gpipe",
        pipes=(Pipe("d0", tuple(range(ranks)), tuple(range(microbatches))),),
        order=tuple(_alternating(s, microbatches, microbatches) for s in range(ranks)),
        most_activations=microbatches,
    )


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    """As early a backward as possible (DAPPLE): bubble (D-1)/(N+D-1), D - s activations at stage s.

    Args:
        ranks: D, one stage each.
        microbatches: N, any.

    Raises:
        PlanError: No rank or no micro-batch.
    """
    check_sizes("1f1b", ranks, microbatches)
    return PipelineSchedule(
        name="1f1b",
        pipes=(Pipe("d0", tuple(range(ranks)), tuple(range(microbatches))),),
        order=tuple(_alternating(s, microbatches, ranks - 1 - s) for s in range(ranks)),
        most_activations=min(ranks, microbatches),
    )


def _alternating(stage: int, microbatches: int, ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one forward and one backward in turn."""
    forwards = visits(Kind.FORWARD, stage, range(microbatches))
    return alternate(forwards, visits(Kind.BACKWARD, stage, range(microbatches)), ahead)


def gems(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two opposite copies take turns: one activation per rank, two copies of the weights.

    The next micro-batch's forward follows the backward of the one before through the ranks, so that
    at most two are active. With B = 2F the makespan is N(2D+1) + D-1 forwards, the bubble tends to
    (D-1)/(D+1/2).

    Args:
        ranks: D, even.
        microbatches: N, any; the down copy takes the odd one, and a single one leaves out the up
            copy.

    Raises:
        PlanError: Odd D.
    """
    odd = "an odd number of ranks: the middle one would hold both copies of one stage"
    fix = f"use {ranks - 1} or {ranks + 1} ranks" if ranks > 1 else "use an even number of ranks"
    check_sizes("gems", ranks, microbatches, (ranks % 2 == 0, odd), fix=fix)
    numbers, half = range(microbatches), (microbatches + 1) // 2
    down = Pipe("d0", tuple(range(ranks)), tuple(numbers[:half]))
    up = Pipe("u0", tuple(reversed(range(ranks))), tuple(numbers[half:]))
    return PipelineSchedule(
        name="gems",
        pipes=(down, up) if microbatches > 1 else (down,),
        order=tuple(tuple(_in_turn(rank, down, up)) for rank in range(ranks)),
        most_activations=1,
    )


def _in_turn(rank: int, down: Pipe, up: Pipe) -> Iterable[Action]:
    """Forward and backward of the first micro-batch down, of the first one up, and so on."""
    for turn in range(len(down.microbatches)):
        for pipe in (down, up):
            for microbatch in pipe.microbatches[turn : turn + 1]:
                stage = pipe.placement.index(rank)
                yield Action(Kind.FORWARD, pipe.name, stage, microbatch)
                yield Action(Kind.BACKWARD, pipe.name, stage, microbatch)
