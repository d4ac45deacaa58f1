"""Placements of stages over ranks for a schedule search, and the costs of stages cut to fit.

All placements hold the same model. One copy of the weights: D stages straight over the ranks; 2D
halves as a V (ZB-V) or in a loop (interleaved); 4D quarters as a W, two Vs in a row. Two copies: D
stages in both directions (Chimera), or 2D halves as two opposite Vs. The finer the cut, the more
evenly a slow stage spreads over the ranks, and the more messages there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from headway.documents import nearest
from headway.errors import UsageError
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts


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
    if placement not in PLACEMENTS:
        raise UsageError(f"no placement {placement!r}{nearest(placement, list(PLACEMENTS))}")
    pipes = PLACEMENTS[placement](ranks, microbatches)
    return PipePlacement(placement, ranks, pipes, costs_of(len(pipes[0].placement), costs))


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


def _straight(ranks: int, microbatches: int) -> tuple[SchedulePipe, ...]:
    return (SchedulePipe("d0", tuple(range(ranks)), tuple(range(microbatches))),)


def _v(ranks: int, microbatches: int) -> tuple[SchedulePipe, ...]:
    there = tuple(range(ranks))
    return (SchedulePipe("d0", there + there[::-1], tuple(range(microbatches))),)


def _loop(ranks: int, microbatches: int) -> tuple[SchedulePipe, ...]:
    return (SchedulePipe("d0", 2 * tuple(range(ranks)), tuple(range(microbatches))),)


def _w(ranks: int, microbatches: int) -> tuple[SchedulePipe, ...]:
    there = tuple(range(ranks))
    return (SchedulePipe("d0", 2 * (there + there[::-1]), tuple(range(microbatches))),)


def _both_directions(ranks: int, microbatches: int) -> tuple[SchedulePipe, ...]:
    return _two_copies(tuple(range(ranks)), microbatches)


def _both_v(ranks: int, microbatches: int) -> tuple[SchedulePipe, ...]:
    there = tuple(range(ranks))
    return _two_copies(there + there[::-1], microbatches)


def _two_copies(placement: tuple[int, ...], microbatches: int) -> tuple[SchedulePipe, ...]:
    """A pipe and its mirror image, entered from the last rank."""
    half = (microbatches + 1) // 2
    last = max(placement)
    mirrored = tuple(last - rank for rank in placement)
    down = SchedulePipe("d0", placement, tuple(range(half)))
    up = SchedulePipe("u0", mirrored, tuple(range(half, microbatches)))
    return (down, up) if up.microbatches else (down,)


PLACEMENTS: Mapping[str, Callable[[int, int], tuple[SchedulePipe, ...]]] = MappingProxyType(
    {
        "straight": _straight,
        "v": _v,
        "loop": _loop,
        "w": _w,
        "both-directions": _both_directions,
        "both-v": _both_v,
    }
)
"""Name to pipes, for ranks and micro-batches."""


def _in_halves(costs: StageCosts) -> StageCosts:
    """Of stages cut in the middle; a message has the size of its stage's, wherever the cut is."""

    def cut(values: tuple[float, ...], share: float = 0.5) -> tuple[float, ...]:
        return tuple(value * share for value in values for _ in range(2))

    return replace(
        costs,
        forward=cut(costs.forward),
        input_grad=cut(costs.input_grad),
        weight_grad=cut(costs.weight_grad),
        message=cut(costs.message, 1.0),
        sync=cut(costs.sync),
        activation=cut(costs.activation),
        kept=cut(costs.kept, 1.0),
        weight=cut(costs.weight),
    )


def _in_pairs(costs: StageCosts) -> StageCosts:
    """Two stages in a row become one, which sends what the second one sent."""

    def add(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(a + b for a, b in list(pairwise(values))[::2])

    return replace(
        costs,
        forward=add(costs.forward),
        input_grad=add(costs.input_grad),
        weight_grad=add(costs.weight_grad),
        message=costs.message[1::2],
        sync=add(costs.sync),
        activation=add(costs.activation),
        kept=costs.kept[::2],
        weight=add(costs.weight),
    )
