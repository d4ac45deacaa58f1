"""The arrays of the support vector machines: numpy's, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
NOTHING: Array = np.zeros(0)
Matrix = Any
"""Samples by columns: a float64 array, or a `scipy.sparse.csr_matrix` of float64."""


def stack_rows(parts: Sequence[Matrix]) -> Matrix:
    """Samples of several matrices of one kind, one after the other."""
    if sparse.issparse(parts[0]):
        return sparse.vstack(parts, format="csr")
    return np.concatenate(parts)
