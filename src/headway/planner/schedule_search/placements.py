"""Placements of stages over ranks for a schedule search, and the costs of stages cut to fit.

All placements hold the same model. One copy of the weights: D stages straight over the ranks; 2D
halves as a V (ZB-V) or in a loop (interleaved); 4D quarters as a W, two Vs in a row. Two copies: D
stages in both directions (Chimera), or 2D halves as two opposite Vs. The finer the cut, the more
evenly a slow stage spreads over the ranks, and the more messages there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from headway.documents import nearest
from headway.errors import UsageError
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts

PLACEMENTS = ("straight", "v", "loop", "w", "both-directions", "both-v")
Values = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PipePlacement:
    """Pipes, and what their stages cost.

    Attributes:
        costs: Of one micro-batch at each stage of a pipe.
    """

    placement: str
    ranks: int
    pipes: tuple[SchedulePipe, ...]
    costs: StageCosts

    def plain_table(self) -> PipelineSchedule:
        """All split actions, forwards first: gives every cell a number; holds all activations."""
        rows = []
        for rank in range(self.ranks):
            places = [(p, s) for p in self.pipes for s, at in enumerate(p.placement) if at == rank]
            rows.append(
                tuple(
                    Action(kind, pipe.name, stage, microbatch)
                    for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
                    # Backwards begin at the last stage: on a rank with several the order must be
                    # executable.
                    for pipe, stage in (places if kind == ActionKind.FORWARD else reversed(places))
                    for microbatch in pipe.microbatches
                )
            )
        return PipelineSchedule(name="plain", pipes=self.pipes, order=tuple(rows))


def make_placement(
    placement: str, ranks: int, microbatches: int, costs: StageCosts
) -> PipePlacement:
    """The layout of a name, of N micro-batches on D ranks.

    Args:
        placement: "straight", "v", "loop", "w", "both-directions" or "both-v".
        microbatches: N; both directions take half each, the downward one the odd one.
        costs: Of D, 2D or 4D stages, from which `costs_of` makes those of the layout.

    Raises:
        UsageError: No such placement.
        ValueError: Costs of another number of stages.
    """
    there = tuple(range(ranks))
    back = there[::-1]
    if placement not in PLACEMENTS:
        raise UsageError(f"no placement {placement!r}{nearest(placement, list(PLACEMENTS))}")
    way = PLACEMENTS.index(placement)
    mine = (there, there + back, 2 * there, 2 * (there + back), there, there + back)[way]
    # Two copies: a pipe and its mirror image, entered from the last rank.
    half = (microbatches + 1) // 2 if placement.startswith("both") else microbatches
    down = SchedulePipe("d0", mine, tuple(range(half)))
    mirrored = tuple(ranks - 1 - rank for rank in mine)
    up = SchedulePipe("u0", mirrored, tuple(range(half, microbatches)))
    # One micro-batch leaves nothing for the second pipe.
    pipes = (down, up) if up.microbatches else (down,)
    return PipePlacement(placement, ranks, pipes, costs_of(len(mine), costs))


def costs_of(stages: int, costs: StageCosts) -> StageCosts:
    """The same model cut into another number of stages, by cuts in halves or by joining pairs.

    Raises:
        ValueError: One number of stages is not the other one times a power of two.
    """
    if costs.stages == stages:
        return costs
    if costs.stages < stages and stages % (2 * costs.stages) == 0:
        return costs_of(stages, _in_halves(costs))
    if costs.stages > stages and costs.stages % 2 == 0:
        return costs_of(stages, _in_pairs(costs))
    raise ValueError(f"costs of {costs.stages} stages cannot be cut into {stages}")


def _in_halves(costs: StageCosts) -> StageCosts:
    """Of stages cut in the middle; a message has the size of its stage's, wherever the cut is."""
    return _recut(
        costs,
        lambda values: tuple(value * 0.5 for value in values for _ in range(2)),
        message=tuple(value for value in costs.message for _ in range(2)),
        kept=tuple(value for value in costs.kept for _ in range(2)),
    )


def _in_pairs(costs: StageCosts) -> StageCosts:
    """Two stages in a row become one, which sends what the second one sent."""
    return _recut(
        costs,
        lambda values: tuple(a + b for a, b in list(pairwise(values))[::2]),
        message=costs.message[1::2],
        kept=costs.kept[::2],
    )


def _recut(
    costs: StageCosts, each: Callable[[Values], Values], *, message: Values, kept: Values
) -> StageCosts:
    return replace(
        costs,
        forward=each(costs.forward),
        input_grad=each(costs.input_grad),
        weight_grad=each(costs.weight_grad),
        message=message,
        sync=each(costs.sync),
        activation=each(costs.activation),
        kept=kept,
        weight=each(costs.weight),
    )
