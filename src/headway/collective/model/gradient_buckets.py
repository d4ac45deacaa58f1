"""Gradient fusion into buckets, and large buckets split into chunks.

Fewer collectives pay less latency but start later. MG-WFBP's question (Shi, Chu and Li, INFOCOM
2019) is where to cut the gradients, in the order in which backward produces them, so that the
last bucket arrives soonest in the a + b n model; it is answered exactly, by dynamic
programming. The priority exchange splits large buckets instead, so that urgent chunks can
overtake bulk ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headway.collective.model.link_fit import LinkFit

Buckets = tuple[tuple[int, ...], ...]
Numbers = NDArray[np.float64]

# The last bucket may arrive later by this share of the backward pass, for the sake of fewer.
SLACK = 0.002
# A link may become so many times slower before it is measured again.
SLOWER = 1.25


def merge_buckets(
    sizes: Sequence[int], ready: Sequence[float], link: LinkFit, *, slack: float = SLACK
) -> Buckets:
    """The fewest buckets whose last one arrives as soon as it can.

    With T(j) the earliest time at which the first j gradients can have arrived,
    `T(j) = min over i < j of max(T(i), ready of j) + a + b * (bytes of i+1 to j)`.
    From the end, each bucket is then made as large as it may be without moving the last arrival, on
    this link and on one that is slower by SLOWER: more buckets would cost the processor work and
    gain nothing.

    Args:
        sizes: Bytes of each gradient.
        ready: When backward has made it; seconds on any clock.
        slack: By how much the last bucket may arrive later, as a share of the time for which
            gradients come.

    Returns:
        Indices, in the order in which backward makes them, bucket by bucket.
    """
    if len(sizes) != len(ready):
        raise ValueError(f"{len(sizes)} sizes but {len(ready)} times")
    order = backward_order(ready)
    if not order:
        return ()
    sums = np.concatenate([[0.0], np.cumsum([float(sizes[i]) for i in order])])
    times = np.array([ready[i] for i in order])
    late = slack * float(times[-1] - times[0])
    # Cuts that also suit a slower link stay good until the link is measured again.
    slower = LinkFit(link.latency * SLOWER, link.seconds_per_byte * SLOWER, 0.0, link.ranks)
    ways = [_ArrivalTimes(way, sums, times) for way in (link, slower)]
    # The relative 1e-12 absorbs the rounding of sums that are formed in another order below.
    ends = [float(way.done[-1]) * (1 + 1e-12) + late for way in ways]
    borders = [len(order)]
    while borders[-1]:
        j = borders[-1]
        fits = [way.fitting(j, end) for way, end in zip(ways, ends, strict=True)]
        both = np.flatnonzero(fits[0] & fits[1])
        # A cut that is best on this link may not be so on the slower one.
        i = int(both[0] if both.size else np.flatnonzero(fits[0])[0])
        # Never earlier than possible, so that the next search finds at least one cut.
        ends = [
            max(end - way.seconds(i, j), float(way.done[i]))
            for way, end in zip(ways, ends, strict=True)
        ]
        borders.append(i)
    borders.reverse()
    return tuple(tuple(order[a:b]) for a, b in pairwise(borders))


class _ArrivalTimes:
    """T of every prefix on one link."""

    def __init__(self, link: LinkFit, sums: Numbers, times: Numbers) -> None:
        self._link, self._sums, self._times = link, sums, times
        # Before the first bucket nothing has to arrive.
        self.done: Numbers = np.full(len(times) + 1, -np.inf)
        for j in range(1, len(times) + 1):
            self.done[j] = self._arrivals(j).min()

    def _arrivals(self, j: int) -> Numbers:
        """When the first j gradients have arrived, for every start i of the last bucket."""
        starts: Numbers = np.maximum(self.done[:j], self._times[j - 1])
        sent: Numbers = self._link.seconds_per_byte * (self._sums[j] - self._sums[:j])
        return starts + self._link.latency + sent

    def fitting(self, j: int, end: float) -> NDArray[np.bool_]:
        """For every i: whether i+1 to j may be the last bucket of those that arrive by `end`."""
        found: NDArray[np.bool_] = self._arrivals(j) <= end
        return found

    def seconds(self, i: int, j: int) -> float:
        """Of the bucket of i+1 to j."""
        return self._link.seconds(float(self._sums[j] - self._sums[i]))


def backward_order(ready: Sequence[float]) -> list[int]:
    """As backward makes them; those of one moment against the order of the forward pass."""
    return sorted(range(len(ready)), key=lambda i: (ready[i], -i))


def fill_buckets_by_key(
    sizes: Sequence[int],
    keys: Sequence[Hashable],
    order: Sequence[int],
    limit: int,
    first: int | None = None,
) -> Buckets:
    """As `fill_buckets`, but only gradients with equal keys share a bucket."""
    place = {i: number for number, i in enumerate(order)}
    found = [
        bucket
        for key in dict.fromkeys(keys[i] for i in order)
        for bucket in fill_buckets(sizes, [i for i in order if keys[i] == key], limit, first)
    ]
    # A bucket is ready with its last gradient, which therefore decides its place.
    return tuple(sorted(found, key=lambda bucket: place[bucket[-1]]))


def split_by_key(buckets: Iterable[Sequence[int]], keys: Sequence[Hashable]) -> Buckets:
    """Buckets that were found without looking at keys, cut further where keys differ."""
    return tuple(
        tuple(i for i in bucket if keys[i] == key)
        for bucket in buckets
        for key in dict.fromkeys(keys[i] for i in bucket)
    )


def fill_buckets(
    sizes: Sequence[int], order: Sequence[int], limit: int, first: int | None = None
) -> Buckets:
    """Buckets of at most `limit` bytes, filled with gradients in the given order of indices.

    Args:
        limit: Largest bucket; a larger gradient has a bucket of its own.
        first: Another largest size until a bucket of half of it is closed. What is less than half
            of it takes in a larger gradient: a message of its own would cost more than it gains.
    """
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    held, most = 0, min(first or limit, limit)
    for i in order:
        allowed = most if held >= most // 2 else limit
        if current and held + sizes[i] > allowed:
            buckets.append(tuple(current))
            # A first bucket that a large gradient behind it has kept nearly empty does not count.
            most = limit if held >= most // 2 else most
            current, held = [], 0
        current.append(i)
        held += sizes[i]
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def ddp_buckets(sizes: Sequence[int], order: Sequence[int], caps: Sequence[int]) -> Buckets:
    """Buckets as DDP makes them, to compare with: closed when a bucket has reached its cap.

    Args:
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


# Large buckets, cut into chunks so that urgent ones can pass bulk.


# Chunks begin at multiples of this many bytes: whole elements of every type, whole cache lines.
CHUNK_ALIGNMENT = 64


def chunk_spans(num_bytes: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """Spans of at most about `chunk` bytes, as equal as alignment allows.

    >>> chunk_spans(640, 250)
    ((0, 192), (192, 384), (384, 640))
    """
    parts = -(-num_bytes // chunk)
    inner = (num_bytes * i // parts // CHUNK_ALIGNMENT for i in range(1, parts))
    borders = [0, *(CHUNK_ALIGNMENT * place for place in inner), num_bytes]
    # Alignment may let borders of small chunks coincide.
    return tuple((a, b) for a, b in pairwise(borders) if b > a)
