"""Several stages per rank in a loop, stage s on rank s mod D: interleaved 1F1B, LoopedBFS.

Interleaved 1F1B walks through the stages with groups of micro-batches (depth first), LoopedBFS
with all of them (breadth first). D ranks, N micro-batches, v stages per rank. Sources:
Narayanan et al. 2021 (Megatron-LM, section 2.2.2); Lamy-Poirier 2023 (Breadth-First Pipeline
Parallelism).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from headway.schedule.generators.rank_order import alternate, check_sizes, visits
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe


def interleaved(ranks: int, microbatches: int, *, virtual: int = 2) -> PipelineSchedule:
    """1F1B over the stages in a loop: for N >= D the bubble is (D-1)/(vN+D-1).

    Rank r runs (v-1)g + 2(D-1-r) forwards ahead, where g is the size of the first group: D in
    Megatron-LM, which asks for a multiple of D micro-batches. Here any N is spread over
    max(1, N // D) groups as evenly as possible, the larger ones first: no rank then waits for a
    group to come round, and the bubble is that of the formula for every N >= D.

    Raises:
        PlanError: v < 2.
    """
    check_looped("interleaved", ranks, microbatches, virtual, single="1f1b")
    first = microbatch_groups(ranks, microbatches)[0]
    return looped_chain(
        "interleaved",
        ranks,
        microbatches,
        [interleaved_order(rank, ranks, microbatches, virtual, hop=2) for rank in range(ranks)],
        # Rank 0 holds most: its forwards ahead and the one after, each 1/v of a rank's share.
        most=((virtual - 1) * len(first) + 2 * ranks - 1) / virtual,
    )


def breadth_first(ranks: int, microbatches: int, *, virtual: int = 2) -> PipelineSchedule:
    """All micro-batches through one stage of a rank after another (LoopedBFS): N activations.

    The bubble is that of `interleaved`; with data parallelism the gradients of most stages are
    ready, and can travel, long before the step ends.

    Raises:
        PlanError: v < 2.
    """
    check_looped("breadth-first", ranks, microbatches, virtual, single="gpipe")
    orders = []
    for rank in range(ranks):
        forwards, backwards = _loops([range(microbatches)], range(rank, ranks * virtual, ranks))
        orders.append((*forwards, *backwards))
    return looped_chain("breadth-first", ranks, microbatches, orders, most=microbatches)


def interleaved_order(
    rank: int, ranks: int, microbatches: int, virtual: int, *, hop: int
) -> tuple[Action, ...]:
    """The order of a rank, with whole backwards.

    Args:
        hop: How many more forwards a rank runs ahead than the next rank.
    """
    groups = microbatch_groups(ranks, microbatches)
    forwards, backwards = _loops(groups, range(rank, ranks * virtual, ranks))
    return alternate(forwards, backwards, (virtual - 1) * len(groups[0]) + hop * (ranks - 1 - rank))


def microbatch_groups(ranks: int, microbatches: int) -> list[range]:
    """max(1, N // D) runs of micro-batches, of sizes that differ by one at most, larger first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    # The larger ones first: no rank then waits for a group to come round.
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(*ends) for ends in pairwise(starts)]


def _loops(groups: Iterable[range], stages: Sequence[int]) -> tuple[list[Action], list[Action]]:
    """Each group through all stages forwards; each group through all of them backwards."""
    forwards, backwards = [], []
    for group in groups:
        for stage in stages:
            forwards += visits(ActionKind.FORWARD, stage, group)
        for stage in reversed(stages):
            backwards += visits(ActionKind.BACKWARD, stage, group)
    return forwards, backwards


def looped_chain(
    name: str,
    ranks: int,
    microbatches: int,
    orders: Sequence[tuple[Action, ...]],
    *,
    most: float,
) -> PipelineSchedule:
    """The schedule of orders over stages that lie on the ranks in a loop.

    Args:
        most: Bound on live activations, in units of a whole rank's share; N bounds it too.
    """
    stages = 1 + max(action.stage for order in orders for action in order)
    placement = tuple(stage % ranks for stage in range(stages))
    return PipelineSchedule(
        name=name,
        pipes=(SchedulePipe("d0", placement, tuple(range(microbatches))),),
        order=tuple(orders),
        most_activations=min(most, microbatches),
    )


def check_looped(name: str, ranks: int, microbatches: int, virtual: int, *, single: str) -> None:
    """Refuse fewer than two stages per rank, in favour of the schedule that is meant for one.

    Raises:
        PlanError: v < 2, no rank, or no micro-batch.
    """
    text = f"{virtual} stages per rank: a loop needs at least 2"
    fix = f"set virtual to 2 or more, or use {single}"
    check_sizes(name, ranks, microbatches, (virtual >= 2, text), fix=fix)
