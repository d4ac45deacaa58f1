"""Zero-bubble schedules and DualPipe: the weight gradients fill what would be bubbles.

A backward is split into I (input gradient, which the stage before waits for) and W (weight
gradient, for which nobody waits). D ranks, N micro-batches; F, I, W their times. An activation is
held until its W. Sources: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, ZB-H1) and Qi et al.
2024 (Pipeline Parallelism with Controllable Memory, ZB-V).

DualPipe and DualPipeV run forwards and backwards of two chunks per rank as pairs, by one program of
eight phases; DualPipe feeds it from both ends of D ranks with two copies of the model, DualPipeV
folds one copy to a V. A pair is drawn here as a forward followed by a backward. Source: DeepSeek-AI
2024 (DeepSeek-V3, section 3.2.1, and the DualPipe repository).
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


def dualpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two copies, opposite directions: bubble time (D/2-1)(F&B + B - 3W), D+1 activations.

    F&B is the time of a pair. The formula holds where F and W take no longer than I and a pair is
    one unit, whose messages leave at its end; as two actions a pair delays nobody, and the bubble
    time is shorter: (D/2-1)F where F = I = W.

    Args:
        microbatches: N, even, at least 2D; half of them for each direction.

    Raises:
        PlanError: Odd D or N, or N < 2D.
    """
    even = max(2, ranks + ranks % 2)
    check_sizes(
        "dualpipe",
        ranks,
        microbatches,
        (ranks % 2 == 0, "an odd number of ranks: the directions meet between two ranks"),
        (microbatches % 2 == 0, "an odd number of micro-batches: each direction takes half"),
        (microbatches >= 2 * ranks, "fewer micro-batches than twice the ranks: phase 4 is empty"),
        fix=f"for {even} ranks, use an even number of micro-batches from {2 * even} on",
    )
    half = microbatches // 2
    down = SchedulePipe("d0", tuple(range(ranks)), tuple(range(half)))
    up = SchedulePipe("u0", tuple(reversed(range(ranks))), tuple(range(half, microbatches)))
    orders = []
    for rank in range(ranks):
        near, far = (down, up) if rank < ranks // 2 else (up, down)
        program = RankProgram((near, near.placement.index(rank)), (far, far.placement.index(rank)))
        edge = min(rank, ranks - 1 - rank)  # both halves run the same program, mirrored
        orders.append(_eight_phases(program, edge, ranks // 2, half))
    return PipelineSchedule(
        name="dualpipe", pipes=(down, up), order=tuple(orders), most_activations=ranks + 1
    )


def dualpipe_v(ranks: int, microbatches: int) -> PipelineSchedule:
    """One copy, placed as a V: half of DualPipe's weights, D + 1/2 activations.

    With F = I = W the bubble is (D-1)/(6N+D-1), that of `zbv`.

    Raises:
        PlanError: N < 2D.
    """
    check_sizes(
        "dualpipe-v",
        ranks,
        microbatches,
        (microbatches >= 2 * ranks, "fewer micro-batches than stages: phase 4 is empty"),
        fix=f"use at least {2 * ranks} micro-batches, or zbv",
    )
    pipe = v_pipe(ranks, microbatches)
    programs = [RankProgram((pipe, r), (pipe, 2 * ranks - 1 - r)) for r in range(ranks)]
    return PipelineSchedule(
        name="dualpipe-v",
        pipes=(pipe,),
        order=tuple(
            _eight_phases(program, rank, ranks, microbatches)
            for rank, program in enumerate(programs)
        ),
        most_activations=ranks + 0.5,
    )


def _eight_phases(
    program: RankProgram, edge: int, depth: int, microbatches: int
) -> tuple[Action, ...]:
    """The order of one rank.

    Args:
        program: Chunk 0 is entered from the near end, chunk 1 from the far end.
        edge: Distance of the rank from the near end (h).
        depth: Ranks from the near end to where the chunks meet.
        microbatches: Of each chunk, at least 2 * depth.
    """
    inner = depth - 1 - edge
    for _ in range(2 * inner):  # 1
        program.forward(0)
    for _ in range(edge + 1):  # 2
        program.forward(0)
        program.forward(1)
    for _ in range(inner):  # 3
        program.input_grad(1)
        program.weight_grad()
        program.forward(1)
    # What phases 1 and 2 leave of chunk 0's forwards: N - 2 inner - (edge + 1).
    for _ in range(microbatches - 2 * depth + edge + 1):  # 4
        program.forward(0)
        program.backward(1)
        program.forward(1)
        program.backward(0)
    for _ in range(inner):  # 5
        program.backward(1)
        program.forward(1)
        program.backward(0)
    for turn in range(2 * (edge + 1)):  # 6: the second half leaves its weight gradients for later
        backward = program.input_grad if turn > edge else program.backward
        backward(1 - turn % 2)
    for _ in range(inner):  # 7
        program.weight_grad()
        program.input_grad(0)
    program.weight_grads()  # 8
    return tuple(program.actions)
