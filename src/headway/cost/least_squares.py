"""Damped Gauss-Newton (Levenberg-Marquardt) with a soft-L1 loss, in numpy.

Invariant: the sum of losses never grows from step to step, and equal input gives equal output.
Source: Marquardt 1963; soft-L1 as in Barron 2019, alpha = 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headway.cost.device import Array

ROUNDS = 200
ENOUGH = 1e-12
"""Relative gain of a round below which it ends."""


def minimise(
    residuals: Callable[[Array], Array],
    slopes: Callable[[Array], Array],
    start: Array,
    *,
    robust: int,
) -> Array:
    """The unknowns that minimise the sum of squared residuals, of the first `robust` ones the sum
    of 2 (sqrt(1 + z^2) - 1).

    Args:
        residuals: Of the unknowns.
        slopes: Their derivatives, (residuals, unknowns).
        start: Unknowns to begin with; all should be about 1 in size.
        robust: How many residuals, from the first, may be wild.
    """
    x, damping = start, 1e-2
    z = residuals(x)
    here = _soft(z, robust)
    for _ in range(ROUNDS):
        jacobian = slopes(x) * _bend(z, here, robust)[:, None]
        normal, slope = jacobian.T @ jacobian, jacobian.T @ here
        gained = 0.0
        while damping < 1e8:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope)
            moved = residuals(x + move)
            there = _soft(moved, robust)
            gained = float(here @ here - there @ there)
            if np.isfinite(gained) and gained > 0:
                x, z, here, damping = x + move, moved, there, damping / 5.0
                break
            damping *= 4.0
        if gained <= ENOUGH * float(here @ here):
            break
    return x


def _soft(residuals: Array, robust: int) -> Array:
    """Residuals whose squares are the loss."""
    bent = residuals.copy()
    z = residuals[:robust]
    bent[:robust] = np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0))
    return bent


def _bend(residuals: Array, bent: Array, robust: int) -> Array:
    """Derivative of `_soft`."""
    slope = np.ones_like(residuals)
    z, f = residuals[:robust], bent[:robust]
    known = np.abs(z) > 1e-6
    slope[:robust][known] = z[known] / np.sqrt(1.0 + z[known] ** 2) / f[known]
    return slope
