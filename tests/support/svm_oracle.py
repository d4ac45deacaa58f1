"""Support vector machines by brute force: all kernel values of a pair of classes, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.spatial.distance import cdist

from headway.svm.kernels import Kernel
from headway.svm.machine import Machine


def kernel_values(kernel: Kernel, rows: Any, others: Any) -> np.ndarray:
    """K of all pairs, by the textbook."""
    rows, others = (m.toarray() if sparse.issparse(m) else np.asarray(m) for m in (rows, others))
    if kernel.name == "rbf":
        return np.exp(-kernel.gamma * cdist(rows, others, "sqeuclidean"))
    products = rows @ others.T
    if kernel.name == "linear":
        return products
    if kernel.name == "poly":
        return (kernel.gamma * products + kernel.coef0) ** kernel.degree
    assert kernel.name == "sigmoid"
    return np.tanh(kernel.gamma * products + kernel.coef0)


@dataclass(frozen=True)
class Checked:
    """What is true of multipliers, all samples looked at."""

    gamma: np.ndarray
    violation: float
    objective: float


def checked(
    kernel: Kernel, rows: Any, labels: np.ndarray, alpha: np.ndarray, bounds: np.ndarray
) -> Checked:
    """Gamma, the largest violation and the dual objective, from scratch."""
    assert (alpha >= 0).all()
    assert (alpha <= bounds).all()
    assert abs((alpha * labels).sum()) <= 1e-9 * max(bounds.sum(), 1)
    values = kernel_values(kernel, rows, rows)
    gamma = values @ (alpha * labels) - labels
    positive = labels > 0
    rises = np.where(positive, alpha < bounds, alpha > 0)
    sinks = np.where(positive, alpha > 0, alpha < bounds)
    weights = alpha * labels
    return Checked(
        gamma=gamma,
        violation=float(gamma[sinks].max() - gamma[rises].min()),
        objective=float(weights @ values @ weights / 2 - alpha.sum()),
    )


def checked_machine(
    machine: Machine, rows: Any, y: np.ndarray, bounds: np.ndarray, kernel: Kernel | None = None
) -> list[Checked]:
    """Each pair of classes of a machine.

    Args:
        bounds: C of each sample, [n] (times the weights of its class).
    """
    found = []
    ends = np.cumsum(machine.counts)
    count = len(machine.classes)
    for one in range(count):
        for other in range(one + 1, count):
            signed = np.zeros(len(y))
            for code, place in ((one, other - 1), (other, one)):
                stretch = slice(ends[code] - machine.counts[code], ends[code])
                signed[machine.numbers[stretch]] = machine.coefficients[place, stretch]
            mine = np.flatnonzero(np.isin(y, machine.classes[[one, other]]) & (bounds > 0))
            labels = np.where(y[mine] == machine.classes[one], 1.0, -1.0)
            alpha = signed[mine] * labels
            found.append(checked(kernel or machine.kernel, rows[mine], labels, alpha, bounds[mine]))
    return found
