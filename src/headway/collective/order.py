"""The planned order of the priority exchange: fixed before the step, the same on all ranks.

A load that comes late enough to be waited for delays the next forward pass by how late it is, and
the largest lateness is the step's whole wait. So the order that makes the step shortest is that of
one machine with heads and tails (`sequence`): most urgent first, where urgency is the first
*use* in the forward pass. That is not last-come-first-served (MLSL): a layer that skips ahead, or
shares its weights, comes late and is needed late, or the other way round. Invariant: pure, and the
same result for the same numbers on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from headway.collective.link import LinkFit
from headway.collective.play import Load, Played, Trip, play, ready_order
from headway.collective.sequence import Job, carlier, schrage

__all__ = [
    "Load",
    "Played",
    "Trip",
    "chunk_size",
    "planned_order",
    "play",
    "queue_order",
    "ready_order",
]

LATENCY_SHARE = 0.03
"""Share of a chunk's time that may be latency."""
SMALLEST_CHUNK = 256 * 2**10
"""Below this the work of the processor for each chunk costs more than urgency gains."""
_GRAIN = 4096
"""Chunks are whole numbers of this many bytes, so that elements of all types fit."""
JITTER = 0.01
"""By how much of a step a gradient may come later than planned."""
_GOOD = 1.01
"""Robust orders may be this much slower than the best one, if all goes as planned."""
_DELAYS = 8
"""Patterns of delays in which an order is tried."""


def chunk_size(link: LinkFit, *, largest: int) -> int:
    """The smallest chunk whose time is latency by less than LATENCY_SHARE.

    Args:
        link: As measured.
        largest: The size of the largest bucket: chunks need not be larger.

    Returns:
        Bytes; at least SMALLEST_CHUNK and a multiple of 4 KiB, or `largest` if that is smaller.
    """
    if link.seconds_per_byte == 0:
        return largest
    enough = link.latency * (1 - LATENCY_SHARE) / LATENCY_SHARE / link.seconds_per_byte
    grains = math.ceil(max(enough, SMALLEST_CHUNK) / _GRAIN)
    return min(grains * _GRAIN, largest)


def planned_order(
    loads: Sequence[Load], link: LinkFit, *, credit: int, jitter: float = JITTER
) -> tuple[int, ...]:
    """Indices into `loads`, in sending order.

    Several orders are made: that of a priority queue, with and without a margin of safety, and the
    best one for the planned times. Of those that are within 1 % of the best step, that one is taken
    which stands delays best: the progress thread keeps to the order, so that one late load holds up
    all behind it.

    Args:
        loads: What is sent in each step.
        link: Its price.
        credit: Loads on their way at the same time.
        jitter: Delays to be expected, as a share of the time of the last gradient; 0: none.
    """
    if len(loads) < 2:
        return tuple(range(len(loads)))
    jobs = _jobs(loads, link, credit)
    delay = jitter * max(load.ready for load in loads)
    orders = {schrage(jobs): None, schrage(jobs, delay): None, carlier(jobs).order: None}
    steps = {order: play(loads, link, order=order, credit=credit).step for order in orders}
    limit = min(steps.values()) * (_GOOD if jitter else 1.0)
    good = [order for order, step in steps.items() if step <= limit]
    return min(good, key=lambda order: (_delayed(loads, link, order, credit, delay), steps[order]))


def queue_order(loads: Sequence[Load], link: LinkFit, *, credit: int) -> tuple[int, ...]:
    """The order of a plain priority queue: quick, and what `planned_order` starts from."""
    return schrage(_jobs(loads, link, credit)) if loads else ()


def _jobs(loads: Sequence[Load], link: LinkFit, credit: int) -> list[Job]:
    """Head: its gradients come; body: the link is busy; tail: how early it is needed."""
    last = max(load.needed for load in loads)
    jobs = []
    for load in loads:
        time = link.seconds_per_byte * load.num_bytes
        body = max(time, (link.latency + time) / credit)
        rest = link.latency + time - body + load.decode
        jobs.append(Job(load.ready + load.encode, body, max(rest, 0.0) + last - load.needed))
    return jobs


def _delayed(
    loads: Sequence[Load], link: LinkFit, order: Sequence[int], credit: int, delay: float
) -> float:
    """Sum of the steps in which loads come up to `delay` later than planned."""
    if delay == 0:
        return 0.0
    end = max(load.ready for load in loads)
    total = 0.0
    for pattern in range(_DELAYS):
        late = [
            replace(load, ready=load.ready + delay * _spread(pattern * len(loads) + i))
            for i, load in enumerate(loads)
        ]
        total += play(late, link, order=order, credit=credit, compute=end).step
    return total


def _spread(number: int) -> float:
    """Numbers in [0, 1) without a pattern: multiples of the golden ratio."""
    return number * 0.6180339887498949 % 1.0
