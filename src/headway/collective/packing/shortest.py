"""The shortest spanning tree for given lengths: with directions from a root, and without.

With directions: Chu and Liu 1965, Edmonds 1967, by contraction of cycles, O(n^2) for each level of
contraction. Without: Prim 1957. Both work on a full matrix, for some dozen ranks. Lengths may be
tiny: they are only compared and subtracted from each other, never offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def arborescence(length: Matrix, root: int) -> list[int]:
    """The parent of each rank in the shortest tree away from a root.

    Args:
        length: Row i, column j: of the arc from i to j; infinite: there is none. Not negative.
        root: Its own parent in the result.

    Raises:
        ValueError: No tree reaches all ranks.
    """
    n = len(length)
    columns = [[length[i][j] if i != j else math.inf for i in range(n)] for j in range(n)]
    return _shortest(columns, root)


def _shortest(into: list[list[float]], root: int) -> list[int]:
    """`into[j][i]`: length of the arc from i to j."""
    n = len(into)
    parent = [min(range(n), key=column.__getitem__) for column in into]
    parent[root] = root
    for j in range(n):
        if j != root and math.isinf(into[j][parent[j]]):
            raise ValueError(f"no arc into {j}")
    cycle = _cycle(parent, root)
    return parent if not cycle else _opened(into, root, parent, cycle)


def _cycle(parent: Sequence[int], root: int) -> list[int]:
    """The ranks of one cycle; empty: there is none."""
    state = [0] * len(parent)
    state[root] = -1
    for start in range(1, len(parent) + 1):
        rank = start - 1
        while state[rank] == 0:
            state[rank] = start
            rank = parent[rank]
        if state[rank] == start:
            found = [rank]
            while (rank := parent[rank]) != found[0]:
                found.append(rank)
            return found
    return []


def _opened(into: list[list[float]], root: int, parent: list[int], cycle: list[int]) -> list[int]:
    """Contract a cycle to one rank, solve, and open it where the solution enters it."""
    n, inside = len(into), set(cycle)
    kept = [rank for rank in range(n) if rank not in inside]
    entry, leave = [0] * n, [0] * n
    entering = []  # into the cycle, from each kept rank, less the arc that it replaces
    for i in kept:
        entry[i] = min(cycle, key=lambda j: into[j][i] - into[j][parent[j]])
        entering.append(into[entry[i]][i] - into[entry[i]][parent[entry[i]]])
    smaller = []
    for j in kept:
        leave[j] = min(cycle, key=into[j].__getitem__)
        smaller.append([into[j][i] for i in kept] + [into[j][leave[j]]])
    smaller.append([*entering, math.inf])
    below = _shortest(smaller, kept.index(root))
    whole = list(parent)
    for place, j in enumerate(kept):
        whole[j] = leave[j] if below[place] == len(kept) else kept[below[place]]
    whole[root] = root
    source = kept[below[-1]]
    whole[entry[source]] = source
    return whole


def spanning_tree(length: Matrix) -> list[int]:
    """The parent of each rank in the shortest tree without directions, hung up at rank 0.

    Args:
        length: Symmetric; infinite: there is no link.

    Raises:
        ValueError: No tree reaches all ranks.
    """
    n = len(length)
    best, parent = list(length[0]), [0] * n
    left = list(range(1, n))
    while left:
        rank = min(left, key=best.__getitem__)
        if math.isinf(best[rank]):
            raise ValueError(f"no link to {rank}")
        left.remove(rank)
        row = length[rank]
        for other in left:
            if row[other] < best[other]:
                best[other], parent[other] = row[other], rank
    return parent
