"""A time that no table of a layout can beat: work of a rank, and idle time that it cannot avoid.

Invariant: the bound holds for every order, with whole or split backwards, also for tables that
recompute. For rank r it is max(head + work, first + work - early), where nothing reaches r before
`head`, no gradient before `first`, and at most `early` of forward work fits into the memory
before the first gradient (activations are not freed before it). Source: headway.
"""

from __future__ import annotations

import math

from headway.planner.layouts import Layout
from headway.schedule import Action, Kind, Pipe

_ROUNDING = 1e-9
Piece = tuple[float, float, int]
"""Of a stage on a rank: time and activations of a forward, and how many micro-batches come."""


def lower_bound(layout: Layout, most_activations: float) -> float:
    """The least makespan that is possible by these arguments; infinite if nothing fits.

    Args:
        layout: Pipes and costs.
        most_activations: That a rank may hold, in the unit of the costs.
    """
    chains = max(_one_microbatch(layout, pipe) for pipe in layout.pipes if pipe.microbatches)
    return max(chains, *(_of_rank(layout, rank, most_activations) for rank in range(layout.ranks)))


def _seconds(layout: Layout, kind: Kind, pipe: Pipe, stage: int) -> float:
    action = Action(kind, pipe.name, stage, 0)
    return layout.costs.seconds(action, pipe.placement[stage], recompute=False)


def _hop(layout: Layout, pipe: Pipe, giver: int, taker: int) -> float:
    """From the end of a stage to the arrival of its result at a neighbouring one."""
    if pipe.placement[giver] == pipe.placement[taker]:
        return 0.0
    wire = layout.costs.message
    return layout.costs.latency + (wire[min(giver, taker)] if wire else 0.0)


def _arrivals(layout: Layout, pipe: Pipe) -> tuple[list[float], list[float]]:
    """Earliest starts of a forward and of an input gradient at each stage, alone on the ranks."""
    stages = range(len(pipe.placement))
    forward, gradient, time = [0.0 for _ in stages], [0.0 for _ in stages], 0.0
    for stage in stages:
        time += _hop(layout, pipe, stage - 1, stage) if stage else 0.0
        forward[stage] = time
        time += _seconds(layout, Kind.FORWARD, pipe, stage)
    for stage in reversed(stages):
        time += _hop(layout, pipe, stage + 1, stage) if stage + 1 < len(stages) else 0.0
        gradient[stage] = time
        time += _seconds(layout, Kind.INPUT_GRAD, pipe, stage)
    return forward, gradient


def _one_microbatch(layout: Layout, pipe: Pipe) -> float:
    """There and back, and the last weight gradient."""
    last = _seconds(layout, Kind.INPUT_GRAD, pipe, 0) + _work_of_weights(layout, pipe, 0)
    return _arrivals(layout, pipe)[1][0] + last


def _work_of_weights(layout: Layout, pipe: Pipe, stage: int) -> float:
    """W without its overhead: a whole backward has but one."""
    return _seconds(layout, Kind.WEIGHT_GRAD, pipe, stage) - layout.costs.overhead


def _of_rank(layout: Layout, rank: int, most: float) -> float:
    work, head, first = 0.0, math.inf, math.inf
    pieces: list[Piece] = []
    for pipe in layout.pipes:
        forward, gradient = _arrivals(layout, pipe)
        for stage, place in enumerate(pipe.placement):
            if place != rank:
                continue
            number = len(pipe.microbatches)
            ahead = _seconds(layout, Kind.FORWARD, pipe, stage)
            back = _seconds(layout, Kind.INPUT_GRAD, pipe, stage)
            work += number * (ahead + back + _work_of_weights(layout, pipe, stage))
            head, first = min(head, forward[stage]), min(first, gradient[stage])
            pieces.append((ahead, layout.costs.activation[stage], number))
    return max(head + work, first + work - _early(pieces, most)) if pieces else 0.0


def _early(pieces: list[Piece], most: float) -> float:
    """Most forward work that fits into memory: whole micro-batches of the best ratio, or parts."""
    if all(piece[:2] == pieces[0][:2] for piece in pieces):
        time, size, _ = pieces[0]
        fitting = math.floor(most / size + _ROUNDING) if size else math.inf
        return time * min(fitting, sum(number for _, _, number in pieces))
    total, left = 0.0, most
    for time, size, number in sorted(pieces, key=lambda p: p[0] / p[1] if p[1] else math.inf)[::-1]:
        fitting = min(float(number), left / size) if size else float(number)
        total += fitting * time
        left -= fitting * size
    return total
