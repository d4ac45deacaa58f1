"""One machine, jobs with heads and tails: in which order is the last tail over soonest?

A job may start after its head, occupies the machine for its body without interruption, and then has
a tail to run on its own. This is the problem behind priority on a link (`order`). Schrage's rule
is the priority queue: of the jobs that may start, that with the longest tail. Carlier's branch and
bound (European Journal of Operational Research 11, 1982) mends its mistakes: it finds the order
that is best of all, which may leave the machine idle for an urgent job, or stops at its budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

_GAP = 1e-9
"""Relative distance from the lower bound at which an order counts as best."""


@dataclass(frozen=True, slots=True)
class Job:
    """Seconds before it may start, on the machine, and after the machine."""

    head: float
    body: float
    tail: float


@dataclass(frozen=True, slots=True)
class Found:
    """An order of job indices, when its last tail is over, and a proven lower bound of that."""

    order: tuple[int, ...]
    end: float
    bound: float


def span(jobs: Sequence[Job], order: Sequence[int]) -> float:
    """When the last tail is over."""
    clock = end = 0.0
    for i in order:
        clock = max(clock, jobs[i].head) + jobs[i].body
        end = max(end, clock + jobs[i].tail)
    return end


def schrage(jobs: Sequence[Job], margin: float = 0.0) -> tuple[int, ...]:
    """The order of a priority queue that never idles while a job may start.

    Args:
        jobs: Of any order.
        margin: A job may overtake another one only if it was there this many seconds before.
    """
    coming = sorted(range(len(jobs)), key=lambda i: (jobs[i].head, -jobs[i].tail, i))
    waiting: list[tuple[float, float, int]] = []
    order: list[int] = []
    clock, place = 0.0, 0
    while len(order) < len(jobs):
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


def preemptive_end(jobs: Sequence[Job]) -> float:
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
        until = jobs[coming[place]].head if place < len(coming) else float("inf")
        if clock + left <= until:
            clock += left
            end = max(end, clock - tail)
        else:
            heapq.heappush(waiting, (tail, i, left - (until - clock)))
            clock = until
    return end


def carlier(jobs: Sequence[Job], budget: int = 200) -> Found:
    """The best order; or the best found after `budget` nodes of the search, with its bound."""
    if not jobs:
        return Found((), 0.0, 0.0)
    root = preemptive_end(jobs)
    best = schrage(jobs)
    end = span(jobs, best)
    nodes: list[tuple[float, int, list[Job]]] = [(root, 0, list(jobs))]
    made = 0
    while nodes and made < budget:
        bound, _, node = nodes[0]
        if bound >= end * (1 - _GAP):
            break
        heapq.heappop(nodes)
        order = schrage(node)
        reached = span(jobs, order)  # the node only tightens heads and tails: judge by the truth
        if reached < end:
            best, end = order, reached
        for child in _branches(node, order):
            made += 1
            low = max(bound, preemptive_end(child))
            if low < end * (1 - _GAP):
                heapq.heappush(nodes, (low, made, child))
    return Found(best, end, min([end, *(bound for bound, _, _ in nodes)]))


def _branches(jobs: Sequence[Job], order: Sequence[int]) -> list[list[Job]]:
    """The interfering job before all jobs of its critical set, or after all of them.

    Empty if the order is the best one for these jobs.
    """
    starts, clock, end, last = [], 0.0, 0.0, 0
    for place, i in enumerate(order):
        starts.append(max(clock, jobs[i].head))
        clock = starts[-1] + jobs[i].body
        if clock + jobs[i].tail > end:
            end, last = clock + jobs[i].tail, place
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
    return [child for child in (early, late) if child[interfering] != jobs[interfering]]
