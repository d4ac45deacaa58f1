"""Packing by multiplicative weights, as Blink does it: many trees, near the bound.

The published method (Garg and Könemann 1998; Wang et al. 2020, section 3), to compare with.
"""

from __future__ import annotations

import math

import numpy as np

from headway.collective.packing.constraints import PackingProblem
from headway.collective.packing.pack import TakenTree


def pack_by_multiplicative_weights(
    problem: PackingProblem, epsilon: float = 0.05
) -> tuple[TakenTree, ...]:
    """Trees and weights of at least (1 - 2 epsilon) of the bound.

        len[e] = delta / c_e            delta = (1 + eps) ((1 + eps) m)^(-1 / eps)
        while sum_e c_e len[e] < 1:
            T = shortest tree under len; f = min over e in T of c_e; w_T += f
            len[e] *= 1 + eps f / c_e   for e in T
        w /= log_(1 + eps)((1 + eps) / delta), then by the largest load of an edge

    Args:
        epsilon: The smaller, the closer: the number of trees made grows as m log(m) / eps^2.
    """
    capacity, edges = problem.capacity, len(problem.edges)
    delta = (1 + epsilon) * ((1 + epsilon) * edges) ** (-1 / epsilon)
    length = delta / capacity
    found: dict[bytes, TakenTree] = {}
    while (total := float(capacity @ length)) < 1:
        chosen = problem.cheapest(length / total)
        flow = float(capacity[chosen].min())
        key = chosen.tobytes()
        found[key] = TakenTree(chosen, flow + (found[key].weight if key in found else 0.0))
        length[chosen] *= 1 + epsilon * flow / capacity[chosen]
    scale = math.log((1 + epsilon) / delta) / math.log(1 + epsilon)
    loads = np.zeros(edges)
    for tree in found.values():
        loads[tree.chosen] += tree.weight / scale
    scale *= float((loads / capacity).max())
    return tuple(TakenTree(tree.chosen, tree.weight / scale) for tree in found.values())
