"""What a buffer holds, symbolically: runs of elements that are sums of the same contributions.

Invariant: runs next to each other differ, so that a buffer that was filled in a thousand chunks is
one run again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headway.collective.task import Terms

Run = tuple[int, Terms | None]
"""Length, and what each element is the sum of; None: nothing was ever written there."""


class Contents:
    """A buffer of some size; at the start all of it is one run."""

    def __init__(self, size: int, terms: Terms | None) -> None:
        self._starts = [0]
        self._terms = [terms]
        self._size = size

    def read(self, start: int, stop: int) -> list[Run]:
        """The runs of a span, offsets relative to its start."""
        first = bisect_right(self._starts, start) - 1
        found: list[Run] = []
        at = start
        while at < stop:
            last = first + 1 == len(self._starts)
            end = min(stop, self._size if last else self._starts[first + 1])
            found.append((end - at, shifted(self._terms[first], start)))
            at, first = end, first + 1
        return found

    def write(self, start: int, runs: Iterable[Run]) -> None:
        """Put runs, as `read` gives them, to another place."""
        fresh: list[tuple[int, Terms | None]] = []
        at = start
        for length, terms in runs:
            fresh.append((at, shifted(terms, -start)))
            at += length
        self._replace(start, at, fresh)

    def _replace(self, start: int, stop: int, fresh: list[tuple[int, Terms | None]]) -> None:
        low = bisect_right(self._starts, start) - 1
        high = bisect_right(self._starts, stop - 1) - 1
        if self._starts[low] < start:
            fresh.insert(0, (self._starts[low], self._terms[low]))
        elif low:
            low -= 1
            fresh.insert(0, (self._starts[low], self._terms[low]))
        end = self._starts[high + 1] if high + 1 < len(self._starts) else self._size
        if stop < end:
            fresh.append((stop, self._terms[high]))
        elif high + 1 < len(self._starts):
            high += 1
            fresh.append((self._starts[high], self._terms[high]))
        merged = [fresh[0]]
        for one in fresh[1:]:
            if one[1] != merged[-1][1]:
                merged.append(one)
        self._starts[low : high + 1] = [at for at, _ in merged]
        self._terms[low : high + 1] = [terms for _, terms in merged]


def shifted(terms: Terms | None, by: int) -> Terms | None:
    """The same elements seen from a place `by` further on."""
    if terms is None or not by:
        return terms
    return tuple((rank, offset + by) for rank, offset in terms)


def summed(first: list[Run], second: list[Run]) -> list[Run]:
    """Element by element the sum of two spans of one length; None where either is None."""
    found: list[Run] = []
    left, right = list(reversed(first)), list(reversed(second))
    while left and right:
        (size, terms), (other, more) = left.pop(), right.pop()
        length = min(size, other)
        both = None if terms is None or more is None else tuple(sorted(terms + more))
        found.append((length, both))
        if size > length:
            left.append((size - length, terms))
        if other > length:
            right.append((other - length, more))
    return found
