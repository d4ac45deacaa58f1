"""Buckets of the priority exchange, cut into chunks so that urgent ones can pass bulk.

A bucket holds neighbours in the order of the forward pass; a chunk is a span of its bytes. All
chunks of a bucket are ready with its last gradient and needed with its first parameter, because
the runtime hands over and applies whole buckets. Invariant: the chunks of a bucket cover it without
gap or overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.collective.fusion import Buckets
from headway.collective.link import LinkFit
from headway.collective.order import queue_order
from headway.collective.play import Load, play

ALIGNED = 64
"""Chunks begin at multiples of this many bytes: whole elements of every type, whole cache lines."""
_CLIMBS = 60
"""Places at which a cut is tried."""
_SWEEPS = 3
"""How often all places are tried."""


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
    return tuple((a, b) for a, b in itertools.pairwise(borders) if b > a)


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
    single cuts of the best one are taken out or put in while that helps. Of equally fast ones the
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

    def price(cuts: frozenset[int]) -> tuple[float, int]:
        chunks = make_chunks(_groups(order, cuts), sizes, ready, needed, chunk=chunk)
        loads = [c.load for c in chunks]
        sent = queue_order(loads, link, credit=credit)
        return play(loads, link, order=sent, credit=credit).step, len(cuts)

    limits = [chunk * share / 8 for share in (0, 2, 4, 8, 16, 32, 64)]
    tried = {cuts: price(cuts) for cuts in {_by_size(order, sizes, limit) for limit in limits}}
    best = min(tried, key=lambda cuts: (_rounded(tried[cuts]), sorted(cuts)))
    return _groups(order, _climb(best, tried[best], price, len(order)))


def _climb(
    cuts: frozenset[int],
    cost: tuple[float, int],
    price: Callable[[frozenset[int]], tuple[float, int]],
    n: int,
) -> frozenset[int]:
    """Toggle single cuts while that helps; three times over all places."""
    places = range(1, n) if n <= _CLIMBS else range(1, n, -(-n // _CLIMBS))
    for _ in range(_SWEEPS):
        before = cuts
        for place in places:
            other = cuts ^ {place}
            found = price(other)
            if _rounded(found) < _rounded(cost):
                cuts, cost = other, found
        if cuts == before:
            break
    return cuts


def _rounded(cost: tuple[float, int]) -> tuple[float, int]:
    """Steps that differ by less than a ten thousandth count as equal."""
    return float(f"{cost[0]:.4g}"), cost[1]


def _by_size(order: Sequence[int], sizes: Sequence[int], limit: float) -> frozenset[int]:
    """Close a bucket when it has reached the limit; a cut is a place in `order`."""
    cuts, held = set(), 0
    for place, i in enumerate(order):
        if place and held >= limit:
            cuts.add(place)
            held = 0
        held += sizes[i]
    return frozenset(cuts)


def _groups(order: Sequence[int], cuts: frozenset[int]) -> Buckets:
    borders = [0, *sorted(cuts), len(order)]
    return tuple(tuple(order[a:b]) for a, b in itertools.pairwise(borders))
