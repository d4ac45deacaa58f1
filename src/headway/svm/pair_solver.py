"""A small dual problem, solved pair by pair: sequential minimal optimisation with its kernel whole.

Over the samples of a working set (Platt 1998), with the second-order choice of the second sample
(Fan, Chen and Lin 2005, section 2), as in libsvm. Compiled by numba: a step takes a few passes over
the working set, far less than an interpreter needs to start one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headway.svm.arrays import Array

SMALLEST_CURVATURE = 1e-12
"""Takes the place of a curvature that is not positive (libsvm's tau)."""


@njit(cache=True)
def solve_pairs(
    kernel: Array,
    labels: Array,
    bounds: Array,
    alpha: Array,
    gamma: Array,
    tolerance: float,
    most: int,
    second_order: bool,
) -> int:
    """Lower the dual objective over one working set, in place, until no pair violates more.

    Args:
        kernel: K of the samples of the set, float64 [q, q].
        labels: +1 or -1, float64 [q].
        bounds: C of each sample, float64 [q].
        alpha: Multipliers, float64 [q]; changed.
        gamma: sum over all j of alpha_j y_j K_jk, minus y_k, float64 [q]; changed.
        tolerance: Largest violation that is left: max of gamma over those that can sink, minus
            min over those that can rise.
        most: Largest number of steps.
        second_order: Choose the second sample by the decrease of the objective; else the pair
            that violates most.

    Returns:
        The number of steps.
    """
    q = len(labels)
    # gamma where y alpha may rise (or sink), and an infinity where it may not.
    rising, sinking = np.empty(q), np.empty(q)
    for k in range(q):
        positive = labels[k] > 0
        can_rise = alpha[k] < bounds[k] if positive else alpha[k] > 0
        can_sink = alpha[k] > 0 if positive else alpha[k] < bounds[k]
        rising[k] = gamma[k] if can_rise else np.inf
        sinking[k] = gamma[k] if can_sink else -np.inf
    for step in range(most):
        i, lowest = -1, np.inf
        for k in range(q):
            if rising[k] < lowest:
                lowest, i = rising[k], k
        if i < 0:
            return step
        row_i = kernel[i]
        j, best, highest = -1, 0.0, -np.inf
        for k in range(q):
            gap = sinking[k] - lowest
            if sinking[k] > highest:
                highest = sinking[k]
                if not second_order:
                    j = k
            if second_order and gap > 0:
                curvature = max(row_i[i] + kernel[k, k] - 2 * row_i[k], SMALLEST_CURVATURE)
                gain = gap * gap / curvature
                if gain > best:
                    best, j = gain, k
        if j < 0 or highest - lowest < tolerance:
            return step
        row_j = kernel[j]
        curvature = max(row_i[i] + row_j[j] - 2 * row_i[j], SMALLEST_CURVATURE)
        room_i = bounds[i] - alpha[i] if labels[i] > 0 else alpha[i]
        room_j = alpha[j] if labels[j] > 0 else bounds[j] - alpha[j]
        size = min((gamma[j] - gamma[i]) / curvature, room_i, room_j)
        # Exactly at the bound, not a rounding beside it: what is at a bound is left out later.
        if size == room_i:
            alpha[i] = bounds[i] if labels[i] > 0 else 0.0
        else:
            alpha[i] += labels[i] * size
        if size == room_j:
            alpha[j] = 0.0 if labels[j] > 0 else bounds[j]
        else:
            alpha[j] -= labels[j] * size
        for t in (i, j):
            positive = labels[t] > 0
            can_rise = alpha[t] < bounds[t] if positive else alpha[t] > 0
            can_sink = alpha[t] > 0 if positive else alpha[t] < bounds[t]
            rising[t] = 0.0 if can_rise else np.inf
            sinking[t] = 0.0 if can_sink else -np.inf
        for k in range(q):
            gamma[k] += size * (row_i[k] - row_j[k])
            # An infinity stays.
            if rising[k] < np.inf:
                rising[k] = gamma[k]
            if sinking[k] > -np.inf:
                sinking[k] = gamma[k]
    return most
