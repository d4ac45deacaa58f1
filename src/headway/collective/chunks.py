"""Large buckets, cut into chunks so that urgent ones can pass bulk.

Invariant: the chunks of a bucket cover it without gap or overlap.
"""

from __future__ import annotations

from itertools import pairwise

ALIGNED = 64
"""Chunks begin at multiples of this many bytes: whole elements of every type, whole cache lines."""


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
