"""Which gradients travel together: fewer collectives pay less latency, but leave later.

MG-WFBP's question (Shi, Chu and Li, INFOCOM 2019): where to cut the gradients, in the order in
which backward makes them, so that the last bucket arrives soonest in the a + b n model; answered
exactly, by dynamic programming. (Fusion for the priority exchange: `chunks`.) Invariant: every
gradient is in exactly one bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from headway.collective.link import LinkFit

Buckets = tuple[tuple[int, ...], ...]


def merge_buckets(sizes: Sequence[int], ready: Sequence[float], link: LinkFit) -> Buckets:
    """The buckets whose last one arrives soonest; of equally fast ones the fewest.

    With T(j) the earliest time at which the first j gradients can have arrived,
    `T(j) = min over i < j of max(T(i), ready of j) + a + b * (bytes of i+1 to j)`.

    Args:
        sizes: Bytes of each gradient.
        ready: When backward has made it; seconds on any clock.
        link: Price of one collective; one runs after the other.

    Returns:
        Indices, in the order in which backward makes them, bucket by bucket.
    """
    _check(sizes, ready)
    order = backward_order(ready)
    n = len(order)
    if n == 0:
        return ()
    sums = np.concatenate([[0.0], np.cumsum([float(sizes[i]) for i in order])])
    times = np.array([ready[i] for i in order])
    # T of a prefix, its number of buckets, and the start of its last bucket.
    done, count, cut = np.full(n + 1, -np.inf), np.zeros(n + 1, int), np.zeros(n + 1, int)
    for j in range(1, n + 1):
        ends = np.maximum(done[:j], times[j - 1]) + link.latency
        ends += link.seconds_per_byte * (sums[j] - sums[:j])
        best = ends.min()
        equal = np.flatnonzero(ends <= best + 1e-12 * abs(best))
        cut[j] = equal[np.argmin(count[equal])]
        done[j], count[j] = ends[cut[j]], count[cut[j]] + 1
    borders = [n]
    while borders[-1]:
        borders.append(int(cut[borders[-1]]))
    borders.reverse()
    return tuple(tuple(order[a:b]) for a, b in itertools.pairwise(borders))


def arrival(buckets: Buckets, sizes: Sequence[int], ready: Sequence[float], link: LinkFit) -> float:
    """When the last bucket has arrived, sent one after the other in this order."""
    clock = -np.inf
    for bucket in buckets:
        clock = max(clock, max(ready[i] for i in bucket))
        clock += link.seconds(sum(sizes[i] for i in bucket))
    return float(clock)


def backward_order(ready: Sequence[float]) -> list[int]:
    """As backward makes them; those of one moment against the order of the forward pass."""
    return sorted(range(len(ready)), key=lambda i: (ready[i], -i))


def fill_buckets(
    sizes: Sequence[int], order: Sequence[int], limit: int, first: int | None = None
) -> Buckets:
    """Buckets of at most `limit` bytes, as `comm` fuses where sizes are given.

    Args:
        sizes: Bytes of each gradient.
        order: Indices, in the order in which they are put into buckets.
        limit: Largest bucket; a larger gradient has a bucket of its own.
        first: Another largest size until a bucket of half of it is closed.
    """
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    held, most = 0, min(first or limit, limit)
    for i in order:
        if current and held + sizes[i] > most:
            buckets.append(tuple(current))
            most = limit if held >= most // 2 else most
            current, held = [], 0
        current.append(i)
        held += sizes[i]
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def capped_buckets(sizes: Sequence[int], order: Sequence[int], caps: Sequence[int]) -> Buckets:
    """Buckets as DDP makes them, to compare with: closed when a bucket has reached its cap.

    Args:
        sizes: Bytes of each gradient.
        order: Indices, in the order of backward.
        caps: Bytes at which the first, second, ... bucket is closed; the last one repeats.
    """
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    for i in order:
        current.append(i)
        if sum(sizes[k] for k in current) >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(tuple(current))
            current = []
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def _check(sizes: Sequence[int], ready: Sequence[float]) -> None:
    if len(sizes) != len(ready):
        raise ValueError(f"{len(sizes)} sizes but {len(ready)} times")
