"""The best weights of given trees: maximise sum w subject to A w <= c, w >= 0, with c >= 0.

The simplex method on the condensed tableau (Dantzig 1951), with Bland's rule (1977) so that it
ends. Dense: for some dozen trees on some hundred edges.
Invariant: the weights returned are feasible.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
_NEAR = 1e-11


def best_weights(uses: Vector, capacity: Vector) -> Vector:
    """Weights with the highest sum.

    Args:
        uses: Row: edge, column: tree; 1: the tree has the edge.
        capacity: Of each edge, not negative.
    """
    edges, trees = uses.shape
    scale = float(capacity.max()) or 1.0
    table = np.zeros((edges + 1, trees + 1))
    table[:-1, :-1], table[:-1, -1], table[-1, :-1] = uses, capacity / scale, -1.0
    outside, inside = list(range(trees)), list(range(trees, trees + edges))
    while True:
        falling = [s for s in range(trees) if table[-1, s] < -_NEAR]
        if not falling:
            break
        column = min(falling, key=outside.__getitem__)
        row = _leaving(table, column, inside)
        _pivot(table, row, column)
        outside[column], inside[row] = inside[row], outside[column]
    weights = np.zeros(trees)
    for row, name in enumerate(inside):
        if name < trees:
            weights[name] = max(0.0, table[row, -1] * scale)
    return weights


def _leaving(table: Vector, column: int, inside: list[int]) -> int:
    """The row that reaches its limit first; every tree has an edge, so that there is one."""
    rows = [r for r in range(len(inside)) if table[r, column] > _NEAR]
    least = min(table[r, -1] / table[r, column] for r in rows)
    ties = [r for r in rows if table[r, -1] / table[r, column] <= least + _NEAR]
    return min(ties, key=inside.__getitem__)


def _pivot(table: Vector, row: int, column: int) -> None:
    pivot = table[row, column]
    across, down = table[row] / pivot, table[:, column].copy()
    table -= np.outer(down, across)
    table[row], table[:, column] = across, -down / pivot
    table[row, column] = 1 / pivot
