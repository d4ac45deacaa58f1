"""DualPipe and DualPipeV: two chunks per rank whose forwards and backwards run as pairs.

Both are the same program of eight phases; DualPipe feeds it from both ends of D ranks with two
copies of the model, DualPipeV folds one copy to a V. A pair is drawn here as a forward followed by
a backward. Source: DeepSeek-AI 2024 (DeepSeek-V3, section 3.2.1, and the DualPipe repository).
"""

from __future__ import annotations

from headway.schedule.generators.rank_order import RankProgram, check_sizes
from headway.schedule.generators.zero_bubble import v_pipe
from headway.schedule.pipeline_schedule import Action, PipelineSchedule, SchedulePipe


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
