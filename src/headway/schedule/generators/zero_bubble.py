"""Zero-bubble schedules: the weight gradients fill what would be bubbles.

A backward is split into I (input gradient, which the stage before waits for) and W (weight
gradient, for which nobody waits). D ranks, N micro-batches; F, I, W their times. An activation is
held until its W. Sources: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, ZB-H1) and Qi et al.
2024 (Pipeline Parallelism with Controllable Memory, ZB-V).
"""

from __future__ import annotations

from dataclasses import replace

from headway.schedule.generators.gpipe_and_1f1b import one_f_one_b
from headway.schedule.generators.interleaved import (
    check_looped,
    interleaved_order,
    looped_chain,
    microbatch_groups,
)
from headway.schedule.generators.rank_order import RankProgram, check_sizes, split_backwards
from headway.schedule.pipeline_schedule import Action, PipelineSchedule, SchedulePipe


def zb_h1(ranks: int, microbatches: int) -> PipelineSchedule:
    """1F1B with W behind I: no more memory than 1F1B's first rank, a third of its bubble.

    On rank r, W runs r backwards behind I: a later rank spends on it the memory that 1F1B leaves
    free there. With F = I = W and N >= D the bubble is (D-1)/(3N+D-1).
    """
    check_sizes("zb-h1", ranks, microbatches)
    whole = one_f_one_b(ranks, microbatches)
    orders = tuple(split_backwards(order, rank) for rank, order in enumerate(whole.order))
    return replace(whole, name="zb-h1", order=orders)


def interleaved_zero_bubble(ranks: int, microbatches: int, *, virtual: int = 2) -> PipelineSchedule:
    """Interleaved 1F1B with W behind I, and one forward less ahead for each hop.

    With F = I = W and N >= D the bubble is (D-1)/(3vN+D-1), in D activations if D divides N.

    Args:
        microbatches: N, any; groups as in `interleaved`.

    Raises:
        PlanError: v < 2.
    """
    name = "interleaved-zero-bubble"
    check_looped(name, ranks, microbatches, virtual, single="zb-h1")
    orders = [
        split_backwards(interleaved_order(rank, ranks, microbatches, virtual, hop=1), rank)
        for rank in range(ranks)
    ]
    first = microbatch_groups(ranks, microbatches)[0]
    # Rank 0 holds most: its forwards ahead and the one after, each 1/v of a rank's share.
    most = ((virtual - 1) * len(first) + ranks) / virtual
    return looped_chain(name, ranks, microbatches, orders, most=most)


def zbv(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two stages per rank, placed as a V: rank r holds stages r and 2D-1-r (ZB-V).

    With F = I = W and N >= 2D-1 no rank has a bubble between its first and its last action; the
    ranks begin and end one after another, which makes the bubble (D-1)/(6N+D-1). At most D
    activations on every rank. The program needs 2D-1 micro-batches; for fewer, the cells of those
    that do not exist are left out.
    """
    check_sizes("zbv", ranks, microbatches)
    pipe = v_pipe(ranks, microbatches)
    # The phases need 2D-1 micro-batches; `RankProgram` leaves out the cells of those beyond N.
    planned = max(microbatches, 2 * ranks - 1)
    return PipelineSchedule(
        name="zbv",
        pipes=(pipe,),
        order=tuple(_zbv_order(rank, ranks, pipe, planned) for rank in range(ranks)),
        most_activations=min(ranks, microbatches),
    )


def v_pipe(ranks: int, microbatches: int) -> SchedulePipe:
    """Down the ranks and up again: the first and the last stage share rank 0."""
    return SchedulePipe("d0", (*range(ranks), *reversed(range(ranks))), tuple(range(microbatches)))


def _zbv_order(rank: int, ranks: int, pipe: SchedulePipe, planned: int) -> tuple[Action, ...]:
    """The program of `planned` micro-batches; chunk 0 is on the way down, chunk 1 on the way up."""
    program = RankProgram((pipe, rank), (pipe, 2 * ranks - 1 - rank))
    down, up = 0, 1
    behind = ranks - 1 - rank
    for _ in range(2 * behind + 1):
        program.forward(down)
    for _ in range(rank):
        program.forward(up)
        program.forward(down)
    for _ in range(behind + 1):
        program.forward(up)
        _both_grads(program, up)
    for _ in range(planned - ranks):
        program.forward(down)
        _both_grads(program, down)
        program.forward(up)
        _both_grads(program, up)
    for _ in range(rank):
        program.input_grad(down)
        program.input_grad(up)
    for _ in range(behind + 1):
        program.input_grad(down)
        program.weight_grad()
    program.weight_grads()
    return tuple(program.actions)


def _both_grads(program: RankProgram, chunk: int) -> None:
    # Two actions, so that the stage before can go on after the first one.
    program.input_grad(chunk)
    program.weight_grad()
