"""The send order of the priority exchange: fixed before the step, the same on all ranks.

A load that arrives too late delays the next forward pass by its lateness, and the largest
lateness is the whole wait of the step. The best order is therefore that of one machine with
heads and tails: most urgent first, where urgency is the first *use* in the forward pass. That
is not last come, first served (MLSL): a layer that skips ahead or shares its weights may come
late and be needed late.

Schrage's rule is the priority queue: of the jobs that may start, the one with the longest tail.
Carlier's branch and bound (European Journal of Operational Research 11, 1982) improves on it:
it finds the optimal order, which may leave the machine idle for an urgent job, or stops at its
budget.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.collective.model.link_fit import LinkFit
from headway.collective.model.overlap import LinkLoad, simulate_link

# Relative distance from the lower bound at which an order counts as best.
_GAP = 1e-9


@dataclass(frozen=True, slots=True)
class SequencedJob:
    """Seconds before it may start, on the machine, and after the machine."""

    head: float
    body: float
    tail: float


@dataclass(frozen=True, slots=True)
class JobSequence:
    """An order of job indices, when its last tail is over, and a proven lower bound of that."""

    order: tuple[int, ...]
    end: float
    bound: float


def sequence_end(jobs: Sequence[SequencedJob], order: Sequence[int]) -> float:
    """When the last tail is over."""
    clock = end = 0.0
    for i in order:
        clock = max(clock, jobs[i].head) + jobs[i].body
        end = max(end, clock + jobs[i].tail)
    return end


def schrage(jobs: Sequence[SequencedJob], margin: float = 0.0) -> tuple[int, ...]:
    """The order of a priority queue that never idles while a job may start.

    Args:
        margin: A job may overtake another one only if it was there this many seconds before.
    """
    coming = sorted(range(len(jobs)), key=lambda i: (jobs[i].head, -jobs[i].tail, i))
    waiting: list[tuple[float, float, int]] = []
    order: list[int] = []
    clock, place = 0.0, 0
    while len(order) < len(jobs):
        # The margin is for overtaking only: an idle machine takes the next job as soon as it comes.
        if not waiting:
            first = coming[place]
            clock = max(clock, jobs[first].head)
            place += 1
            heapq.heappush(waiting, (-jobs[first].tail, jobs[first].head, first))
        while place < len(coming) and jobs[coming[place]].head + margin <= clock:
            job = jobs[coming[place]]
            heapq.heappush(waiting, (-job.tail, job.head, coming[place]))
            place += 1
        _, _, taken = heapq.heappop(waiting)
        order.append(taken)
        clock += jobs[taken].body
    return tuple(order)


def preemptive_end(jobs: Sequence[SequencedJob]) -> float:
    """When the last tail would be over if jobs could be interrupted: no order can be better."""
    coming = sorted(range(len(jobs)), key=lambda i: jobs[i].head)
    waiting: list[tuple[float, int, float]] = []  # minus tail, job, seconds left
    clock, place, end = 0.0, 0, 0.0
    while place < len(coming) or waiting:
        if not waiting:
            clock = max(clock, jobs[coming[place]].head)
        while place < len(coming) and jobs[coming[place]].head <= clock:
            heapq.heappush(
                waiting, (-jobs[coming[place]].tail, coming[place], jobs[coming[place]].body)
            )
            place += 1
        tail, i, left = heapq.heappop(waiting)
        # Only an arrival can change which job is the most urgent.
        until = jobs[coming[place]].head if place < len(coming) else float("inf")
        if clock + left <= until:
            clock += left
            end = max(end, clock - tail)
        else:
            heapq.heappush(waiting, (tail, i, left - (until - clock)))
            clock = until
    return end


def carlier(jobs: Sequence[SequencedJob], budget: int = 200) -> JobSequence:
    """The best order; or the best found after `budget` nodes of the search, with its bound."""
    if not jobs:
        return JobSequence((), 0.0, 0.0)
    root = preemptive_end(jobs)
    best = schrage(jobs)
    end = sequence_end(jobs, best)
    nodes: list[tuple[float, int, list[SequencedJob]]] = [(root, 0, list(jobs))]
    made = 0
    while nodes and made < budget:
        bound, _, node = nodes[0]
        # The nodes come in the order of their bounds, so that none of the others is better either.
        if bound >= end * (1 - _GAP):
            break
        heapq.heappop(nodes)
        order = schrage(node)
        # A node only has larger heads and tails: its order is judged by the original jobs.
        reached = sequence_end(jobs, order)
        if reached < end:
            best, end = order, reached
        for child in _branches(node, order):
            made += 1
            # A child is never better than its parent, whose bound may be the closer one.
            low = max(bound, preemptive_end(child))
            if low < end * (1 - _GAP):
                heapq.heappush(nodes, (low, made, child))
    return JobSequence(best, end, min([end, *(bound for bound, _, _ in nodes)]))


def _branches(jobs: Sequence[SequencedJob], order: Sequence[int]) -> list[list[SequencedJob]]:
    """The interfering job before all jobs of its critical set, or after all of them.

    Empty if the order is the best one for these jobs.
    """
    starts, clock, end, last = [], 0.0, 0.0, 0
    for place, i in enumerate(order):
        starts.append(max(clock, jobs[i].head))
        clock = starts[-1] + jobs[i].body
        if clock + jobs[i].tail > end:
            end, last = clock + jobs[i].tail, place
    # The critical path begins with the last job before it that did not wait for the machine.
    first = last
    while first > 0 and starts[first] > jobs[order[first]].head:
        first -= 1
    tail = jobs[order[last]].tail
    found = next((p for p in range(last - 1, first - 1, -1) if jobs[order[p]].tail < tail), None)
    if found is None:
        return []
    interfering = order[found]
    critical = [jobs[i] for i in order[found + 1 : last + 1]]
    work = sum(job.body for job in critical)
    late, early = list(jobs), list(jobs)
    head = max(jobs[interfering].head, min(job.head for job in critical) + work)
    late[interfering] = replace(jobs[interfering], head=head)
    longer = max(jobs[interfering].tail, work + tail)
    early[interfering] = replace(jobs[interfering], tail=longer)
    # A child equal to its parent would only use up the budget.
    return [child for child in (early, late) if child[interfering] != jobs[interfering]]


# The planned order of the priority exchange: fixed before the step, the same on all ranks.


LATENCY_SHARE = 0.03
"""Share of a chunk's time that may be latency."""
# Below this the work of the processor for each chunk costs more than urgency gains.
SMALLEST_CHUNK = 256 * 2**10
# Chunks are whole numbers of this many bytes, so that elements of all types fit.
_GRAIN = 4096
# By how much of a step a gradient may come later than planned.
JITTER = 0.01
# Robust orders may be this much slower than the best one, if all goes as planned.
_GOOD = 1.01
_DELAYS = 8
"""Patterns of delays in which an order is tried."""


def chunk_size(link: LinkFit, *, largest: int) -> int:
    """The smallest chunk whose time is latency by less than LATENCY_SHARE.

    Args:
        largest: The size of the largest bucket: chunks need not be larger.

    Returns:
        Bytes; at least SMALLEST_CHUNK and a multiple of 4 KiB, or `largest` if that is smaller.
    """
    if link.seconds_per_byte == 0:
        return largest
    # latency / (latency + seconds of the bytes) = LATENCY_SHARE, solved for the bytes.
    enough = link.latency * (1 - LATENCY_SHARE) / LATENCY_SHARE / link.seconds_per_byte
    grains = math.ceil(max(enough, SMALLEST_CHUNK) / _GRAIN)
    return min(grains * _GRAIN, largest)


def planned_order(
    loads: Sequence[LinkLoad], link: LinkFit, *, credit: int, jitter: float = JITTER
) -> tuple[int, ...]:
    """Indices into `loads`, in sending order.

    Several orders are made: that of a priority queue, with and without a margin of safety, and the
    best one for the planned times. Of those that are within 1 % of the best step, the one that
    suffers least from delays is taken: the progress thread keeps to the order, so that one late
    load holds up all behind it.

    Args:
        credit: Loads on their way at the same time.
        jitter: Delays to be expected, as a share of the time of the last gradient; 0: none.
    """
    if len(loads) < 2:
        return tuple(range(len(loads)))
    jobs = _jobs(loads, link, credit)
    delay = jitter * max(load.ready for load in loads)
    # A dict drops equal orders and, unlike a set, keeps their sequence.
    orders = {schrage(jobs): None, schrage(jobs, delay): None, carlier(jobs).order: None}
    steps = {order: simulate_link(loads, link, order=order, credit=credit).step for order in orders}
    limit = min(steps.values()) * (_GOOD if jitter else 1.0)
    good = [order for order, step in steps.items() if step <= limit]
    return min(good, key=lambda order: (_delayed(loads, link, order, credit, delay), steps[order]))


def _jobs(loads: Sequence[LinkLoad], link: LinkFit, credit: int) -> list[SequencedJob]:
    """Head: its gradients come; body: the link is busy; tail: how early it is needed."""
    last = max(load.needed for load in loads)
    jobs = []
    for load in loads:
        time = link.seconds_per_byte * load.num_bytes
        # With `credit` loads in flight a new one leaves every (latency + time) / credit at most.
        body = max(time, (link.latency + time) / credit)
        rest = link.latency + time - body + load.decode
        jobs.append(
            SequencedJob(load.ready + load.encode, body, max(rest, 0.0) + last - load.needed)
        )
    return jobs


def _delayed(
    loads: Sequence[LinkLoad], link: LinkFit, order: Sequence[int], credit: int, delay: float
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
        total += simulate_link(late, link, order=order, credit=credit, compute=end).step
    return total


def _spread(number: int) -> float:
    """Numbers in [0, 1) without a pattern: multiples of the golden ratio."""
    return number * 0.6180339887498949 % 1.0
