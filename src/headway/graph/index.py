"""Indices as texts: "b s h*k" to ((b,), (s,), (h, k)) and back, and the factors of a reshape.

A dimension that counts several axes counts the last one fastest, as a contiguous tensor does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dimension its axes, the slowest first; () for a dimension that no axis counts."""


@lru_cache(maxsize=4096)
def parse(index: str) -> Dims:
    """The dimensions of an index."""
    return tuple(() if word == "1" else tuple(word.split("*")) for word in index.split())


def text(dims: Iterable[Sequence[str]]) -> str:
    """The index of dimensions."""
    return " ".join("*".join(axes) or "1" for axes in dims)


def find(index: Dims, axis: str, sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """Where an axis stands: its dimension, and how many times the dimension runs through it.

    Returns:
        (dimension, product of the sizes of slower axes in it), or None.
    """
    for dim, axes in enumerate(index):
        if axis in axes:
            return dim, math.prod(sizes[slower] for slower in axes[: axes.index(axis)])
    return None


def common_factors(first: Sequence[int], second: Sequence[int]) -> list[int] | None:
    """The coarsest factors, slowest first, of which both groupings of one number consist.

    [6, 4] and [2, 12] give [2, 3, 4]; [4, 6] and [3, 8] have none: None.
    """
    steps = {1}
    for group in (first, second):
        product = 1
        for size in reversed(group):
            product *= size
            steps.add(product)
    ordered = sorted(steps)
    pairs = list(pairwise(ordered))
    if any(larger % smaller for smaller, larger in pairs):
        return None
    return [larger // smaller for smaller, larger in reversed(pairs)]


def take(factors: list[int], names: list[str], size: int) -> list[str]:
    """Take the names of the slowest factors whose product is `size` off both lists."""
    taken: list[str] = []
    while size > 1:
        size //= factors.pop(0)
        taken.append(names.pop(0))
    return taken


def segments(first: Sequence[int], second: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes of equal size whose products agree; sizes of 1 left out.

    Returns:
        Pairs of lists of dimensions.
    """
    left = [dim for dim, size in enumerate(first) if size != 1]
    right = [dim for dim, size in enumerate(second) if size != 1]
    found = []
    while left or right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (x := math.prod(first[d] for d in a)) != (y := math.prod(second[d] for d in b)):
            if x < y:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        found.append((a, b))
    return found
