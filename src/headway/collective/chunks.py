"""Buckets of the priority exchange, cut into chunks so that urgent ones can pass bulk.

A bucket holds neighbours in the order of the forward pass; a chunk is a span of its bytes. All
chunks of a bucket are ready with its last gradient and needed with its first parameter, because
the runtime hands over and applies whole buckets. Invariant: the chunks of a bucket cover it without
gap or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from headway.collective.fusion import SLOWER, Buckets, fill_buckets
from headway.collective.link import LinkFit
from headway.collective.order import planned_order, queue_order
from headway.collective.play import Load, play

ALIGNED = 64
"""Chunks begin at multiples of this many bytes: whole elements of every type, whole cache lines."""
_CLIMBS = 40
"""Groupings that are played in search of a better one; all of it takes a third of a second."""


class Planner(Protocol):
    """Makes a sending order."""

    def __call__(self, loads: Sequence[Load], link: LinkFit, *, credit: int) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `start` to `stop` of a bucket, and what the planner knows of them."""

    bucket: int
    start: int
    stop: int
    load: Load


def cut(num_bytes: int, chunk: int, aligned: int = ALIGNED) -> tuple[tuple[int, int], ...]:
    """Spans of at most about `chunk` bytes, as equal as alignment allows.

    >>> cut(640, 250, aligned=64)
    ((0, 192), (192, 384), (384, 640))
    """
    parts = -(-num_bytes // chunk)
    borders = [
        0,
        *(num_bytes * i // parts // aligned * aligned for i in range(1, parts)),
        num_bytes,
    ]
    return tuple((a, b) for a, b in pairwise(borders) if b > a)


def make_chunks(
    buckets: Buckets,
    sizes: Sequence[int],
    ready: Sequence[float],
    needed: Sequence[float],
    *,
    chunk: int,
) -> tuple[Chunk, ...]:
    """All chunks, bucket by bucket.

    Args:
        buckets: Indices of the gradients of each bucket, in the order of its memory.
        sizes: Bytes of each gradient.
        ready: When backward has made it; seconds after the start of the step.
        needed: When it is first used; seconds after the start of the next forward pass.
        chunk: About how many bytes a chunk has.
    """
    made = []
    for number, bucket in enumerate(buckets):
        come, used = max(ready[i] for i in bucket), min(needed[i] for i in bucket)
        for start, stop in cut(sum(sizes[i] for i in bucket), chunk):
            load = Load(f"{number}:{start}", stop - start, come, used)
            made.append(Chunk(number, start, stop, load))
    return tuple(made)


def priority_buckets(
    sizes: Sequence[int],
    ready: Sequence[float],
    needed: Sequence[float],
    link: LinkFit,
    *,
    chunk: int,
    credit: int = 2,
) -> Buckets:
    """Neighbours in the forward order, fused so that the step across the border is shortest.

    Groupings by size are played, from one gradient per bucket to buckets of some chunks; then
    single cuts of the best one are taken out or put in while that helps. Each is played on the link
    as measured and on a slower one, which large buckets do not forgive. Of equally fast ones the
    one with the fewest buckets is taken, because each costs the processor some work.

    Args:
        sizes: Bytes of each gradient.
        ready: When backward has made it.
        needed: When it is first used in the forward pass.
        link: Price of one collective.
        chunk: Bytes of a chunk.
        credit: Chunks on their way at the same time.

    Returns:
        Indices bucket by bucket, in the order of the forward pass.
    """
    order = sorted(range(len(sizes)), key=lambda i: (needed[i], -ready[i], i))
    if not order:
        return ()

    slower = LinkFit(link.latency * SLOWER, link.seconds_per_byte * SLOWER, 0.0, link.ranks)

    def price(cuts: frozenset[int], plan: Planner = queue_order) -> tuple[float, int]:
        chunks = make_chunks(_groups(order, cuts), sizes, ready, needed, chunk=chunk)
        loads = [c.load for c in chunks]
        sent = plan(loads, link, credit=credit)
        steps = [play(loads, way, order=sent, credit=credit).step for way in (link, slower)]
        return sum(steps) / 2, len(cuts)

    limits = [max(1, chunk * share // 64) for share in (1, 4, 16, 32, 64, 128, 512)]
    groupings = {_cuts(fill_buckets(sizes, order, limit)) for limit in (1, *limits)}
    tried = {cuts: price(cuts) for cuts in groupings}
    best = min(tried, key=lambda cuts: (_rounded(tried[cuts]), sorted(cuts)))
    found = _climb(best, tried[best], price, len(order))
    # The search goes by the quick order; what will be sent is the planned one.
    simple = _cuts(fill_buckets(sizes, order, chunk))
    return _groups(order, min((found, simple), key=lambda cuts: price(cuts, planned_order)))


def _climb(
    cuts: frozenset[int],
    cost: tuple[float, int],
    price: Callable[[frozenset[int]], tuple[float, int]],
    n: int,
) -> frozenset[int]:
    """Toggle single cuts while that helps and the budget lasts."""
    places = range(1, n) if n <= _CLIMBS else range(1, n, -(-n // _CLIMBS))
    left = _CLIMBS
    while left > 0:
        before = cuts
        for place in places:
            other = cuts ^ {place}
            found = price(other)
            if _rounded(found) < _rounded(cost):
                cuts, cost = other, found
        left -= len(places)
        if cuts == before:
            break
    return cuts


def _rounded(cost: tuple[float, int]) -> tuple[float, int]:
    """Steps that differ by less than a ten thousandth count as equal."""
    return float(f"{cost[0]:.4g}"), cost[1]


def _cuts(buckets: Buckets) -> frozenset[int]:
    """Where a sequence was cut."""
    return frozenset(accumulate(len(bucket) for bucket in buckets[:-1]))


def _groups(order: Sequence[int], cuts: frozenset[int]) -> Buckets:
    borders = [0, *sorted(cuts), len(order)]
    return tuple(tuple(order[a:b]) for a, b in pairwise(borders))
