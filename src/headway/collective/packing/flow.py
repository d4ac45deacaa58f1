"""Minimum cuts by maximum flows: Dinic 1970, blocking flows on shortest paths.

Invariant: the value returned is the sum of the capacities that leave the side returned, so that a
cut is exact even where the flow was rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_CRUMB = 1e-12
"""Of the largest capacity: less than this is no capacity."""


def min_cut(capacity: Sequence[Sequence[float]], source: int, sink: int) -> tuple[float, set[int]]:
    """The least capacity whose removal parts a sink from a source.

    Args:
        capacity: Row i, column j: from i to j; 0: no arc.
        source: On the side that is returned.
        sink: Not on it.

    Returns:
        The capacity of the cut, and the smallest such side.
    """
    n = len(capacity)
    rest = [list(row) for row in capacity]
    near = [[j for j in range(n) if rest[i][j] > 0 or rest[j][i] > 0] for i in range(n)]
    crumb = _CRUMB * max(map(max, rest))
    while True:
        level = _levels(rest, near, source, crumb)
        if level[sink] < 0:
            break
        _block(rest, near, level, source, sink, crumb)
    side = {i for i in range(n) if level[i] >= 0}
    return sum(capacity[i][j] for i in side for j in near[i] if j not in side), side


def _levels(rest: list[list[float]], near: list[list[int]], source: int, crumb: float) -> list[int]:
    """Arcs from the source over what is left; -1: not reached."""
    level = [-1] * len(rest)
    level[source] = 0
    for i in (todo := [source]):
        row = rest[i]
        for j in near[i]:
            if level[j] < 0 and row[j] > crumb:
                level[j] = level[i] + 1
                todo.append(j)
    return level


def _block(
    rest: list[list[float]],
    near: list[list[int]],
    level: list[int],
    source: int,
    sink: int,
    crumb: float,
) -> None:
    """Fill shortest paths until each has a full arc."""
    tried = [0] * len(rest)
    path = [source]
    while path:
        i = path[-1]
        if i == sink:
            _fill(rest, path)
            path = [source]
            continue
        while tried[i] < len(near[i]):
            j = near[i][tried[i]]
            if level[j] == level[i] + 1 and rest[i][j] > crumb:
                path.append(j)
                break
            tried[i] += 1
        else:
            path.pop()
            if path:
                tried[path[-1]] += 1


def _fill(rest: list[list[float]], path: list[int]) -> None:
    arcs = list(pairwise(path))
    least = min(rest[i][j] for i, j in arcs)
    for i, j in arcs:
        rest[i][j] -= least
        rest[j][i] += least
