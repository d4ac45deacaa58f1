"""Graphs of workers, and the matrices by which neighbours mix their models.

A matrix is doubly stochastic: rows and columns add up to 1, so that the mean of all models is kept,
and the disagreement shrinks by the second largest eigenvalue (in absolute value) per exchange (Lian
et al. 2017, D-PSGD, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.plans.synchrony import Synchrony, Topology


def receives_from(place: Topology, worker: int, workers: int) -> tuple[int, ...]:
    """The workers whose models one gets, without itself, in ascending order.

    Args:
        place: "ring", "torus" (the squarest grid), "exponential" (distances 1, 2, 4, ... in one
            direction; Assran et al. 2019, section 3), "hypercube" or "mesh" (all).

    Raises:
        ValueError: The topology is no graph of workers.
    """
    match place:
        case "ring":
            found = {worker - 1, worker + 1}
        case "torus":
            rows, columns = torus_sides(workers)
            row, column = divmod(worker, columns)
            found = {(row + d) % rows * columns + column for d in (-1, 1)}
            found |= {row * columns + (column + d) % columns for d in (-1, 1)}
        case "exponential":
            found = {worker - (1 << power) for power in range(max(1, (workers - 1).bit_length()))}
        case "hypercube":
            found = {worker ^ (1 << bit) for bit in range((workers - 1).bit_length())}
        case "mesh":
            found = set(range(workers))
        case _:
            raise ValueError(f"{place} is no graph of workers")
    return tuple(sorted({other % workers for other in found} - {worker}))


def torus_sides(workers: int) -> tuple[int, int]:
    """The two sides, the smaller first, that differ least."""
    rows = next(side for side in range(math.isqrt(workers), 0, -1) if workers % side == 0)
    return rows, workers // rows


def mixing_matrix(synchrony: Synchrony, workers: int) -> tuple[tuple[float, ...], ...]:
    """W, row by row: worker i's next model is the sum of W[i][j] times model j.

    Given as `synchrony.weights`, or even over a worker and those that it receives from: all graphs
    are regular, so that this is doubly stochastic.
    """
    if synchrony.weights:
        return synchrony.weights
    rows = []
    for worker in range(workers):
        near = {worker, *receives_from(synchrony.place, worker, workers)}
        rows.append(tuple(1 / len(near) if other in near else 0.0 for other in range(workers)))
    return tuple(rows)


def neighbours(matrix: Sequence[Sequence[float]], worker: int) -> tuple[int, ...]:
    """The workers, without itself, whose models a worker mixes into its own."""
    return tuple(other for other, weight in enumerate(matrix[worker]) if weight and other != worker)


def partners(place: Topology, worker: int, workers: int) -> tuple[int, ...]:
    """With whom a worker may begin a pairwise mean; empty for those that only answer.

    Of the graph, the edges between the two colours of a two-colouring remain: those of one colour
    begin, those of the other only answer, so that no circle of workers can wait for each other
    (Lian et al. 2018, AD-PSGD, section 3.2).
    """
    colours = _colours(place, workers)
    if not colours[worker]:
        return ()
    return tuple(other for other in _either_way(place, worker, workers) if not colours[other])


def _colours(place: Topology, workers: int) -> list[int]:
    """0 or 1 for each worker, breadth first; where a circle is odd, its last edge is not used."""
    colours = {0: 0}
    queue = [0]
    for worker in queue:
        for other in _either_way(place, worker, workers):
            if other not in colours:
                colours[other] = 1 - colours[worker]
                queue.append(other)
    return [colours[worker] for worker in range(workers)]


def _either_way(place: Topology, worker: int, workers: int) -> tuple[int, ...]:
    """The neighbours of a worker, whichever end a link has been named from."""
    return tuple(
        other
        for other in range(workers)
        if other in receives_from(place, worker, workers)
        or worker in receives_from(place, other, workers)
    )


def tree_parent(worker: int) -> int | None:
    """In a binary tree in the order of a heap; None for its root."""
    return (worker - 1) // 2 if worker else None


def tree_children(worker: int, workers: int) -> tuple[int, ...]:
    return tuple(child for child in (2 * worker + 1, 2 * worker + 2) if child < workers)
