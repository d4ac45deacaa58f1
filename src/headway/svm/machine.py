"""A trained machine: the support vectors of several classes, one against one, and its decisions.

In libsvm's layout. Of k classes every pair i < j has a machine of its own, whose value is above 0
where it votes for class i. A support vector of class i has k - 1 coefficients, one for each other
class: that against class j is number j - 1 if j > i, else j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from headway.errors import DataError
from headway.svm.arrays import Array, Indices, Matrix
from headway.svm.kernels import Kernel, Samples, prepare_samples
from headway.svm.threads import CHUNK, over_chunks, threads_over_blocks

_ROWS = 16 * CHUNK
"""Samples that are prepared at a time: the others of a large set are not copied."""


@dataclass(frozen=True)
class PairFacts:
    """How the problem of one pair of classes was solved.

    Attributes:
        violation: Largest violation over all samples of the two classes.
        objective: Of the dual problem.
        finished: Whether the violation is at most the tolerance.
        steps: Of pairs of samples.
        outer: Outer steps.
        values: Kernel values that all ranks have computed.
        reconstructions: How often gamma was reconstructed.
        samples: Of the two classes.
    """

    violation: float
    objective: float
    finished: bool
    steps: int
    outer: int
    values: int
    reconstructions: int
    samples: int


@dataclass(frozen=True)
class Machine:
    """A trained machine.

    Attributes:
        classes: Labels of the classes, in sorted order, [k].
        rows: Support vectors, by class, then by number: float64 [s, m], dense or compressed rows.
        numbers: Which samples they are, of those of all ranks, [s].
        counts: Support vectors of each class, [k].
        coefficients: alpha y, [k - 1, s].
        offsets: Subtracted from the sums (libsvm's rho), one for each pair, [k (k - 1) / 2].
        finished: Whether every pair was solved to the tolerance.
        pairs: How each pair was solved, in the order (0, 1), (0, 2), ..., (k - 2, k - 1); fewer
            than all where training was stopped, none where libsvm's format did not tell.
    """

    classes: NDArray[Any]
    kernel: Kernel
    rows: Matrix
    numbers: Indices
    counts: Indices
    coefficients: Array
    offsets: Array
    finished: bool = True
    pairs: tuple[PairFacts, ...] = ()

    @property
    def violation(self) -> float:
        """The largest violation of all pairs that were looked at."""
        return max((pair.violation for pair in self.pairs), default=np.inf)

    @property
    def objective(self) -> float:
        """The sum of the dual objectives of all pairs."""
        return float(sum(pair.objective for pair in self.pairs))

    @property
    def steps(self) -> int:
        return sum(pair.steps for pair in self.pairs)

    @property
    def values(self) -> int:
        """Kernel values that all ranks have computed."""
        return sum(pair.values for pair in self.pairs)

    def decide(self, rows: Matrix) -> Array:
        """Decision values, one for each pair of classes, [n, k (k - 1) / 2].

        In float64, and of blocks of kernel values: no matrix of all samples and support vectors.

        Args:
            rows: Samples [n, m], dense or compressed rows, as those of the training or not.

        Raises:
            DataError: Their columns are not those of the support vectors.
        """
        if rows.shape[1] != self.rows.shape[1]:
            raise DataError(
                f"the samples have {rows.shape[1]} columns, and the support vectors "
                f"{self.rows.shape[1]}"
            )
        result = np.empty((rows.shape[0], len(self.offsets)))
        rows = _of_kind(rows, self.rows)
        with threads_over_blocks(concurrent=self.kernel.concurrent):
            for first in range(0, rows.shape[0], _ROWS):
                result[first : first + _ROWS] = self._decide_stretch(rows[first : first + _ROWS])
        return result

    def predict(self, rows: Matrix) -> Indices:
        """Places among `classes`, [n]: most votes of pairs, the first one of several."""
        votes = count_votes(self.decide(rows), len(self.classes))
        best: Indices = votes.argmax(axis=1)
        return best

    def _decide_stretch(self, rows: Matrix) -> Array:
        shift = self.rows.mean(axis=0) if self._shifted else None
        samples = prepare_samples(self.kernel, rows, torch.float64, shift)
        result = np.zeros((rows.shape[0], len(self.offsets)))
        pairs = list(pairs_of(len(self.classes)))
        for code, end in enumerate(np.cumsum(self.counts)):
            # The pairs of this class, and their rows of the coefficients.
            mine = [place for place, pair in enumerate(pairs) if code in pair]
            for start in range(end - self.counts[code], end, CHUNK):
                stretch = slice(start, min(start + CHUNK, end))
                vectors = prepare_samples(self.kernel, self.rows[stretch], torch.float64, shift)
                columns = vectors.columns()
                weights = torch.from_numpy(np.ascontiguousarray(self.coefficients[:, stretch].T))
                add = partial(_add_decisions, result, mine, samples, columns, weights)
                over_chunks(len(samples), len(vectors), add, concurrent=self.kernel.concurrent)
        result -= self.offsets
        return result

    @property
    def _shifted(self) -> bool:
        """Whether samples are shifted, so that the rounding errors of distances shrink."""
        return (
            isinstance(self.rows, np.ndarray) and self.kernel.name == "rbf" and len(self.rows) > 0
        )


def _add_decisions(
    result: Array,
    pairs: list[int],
    samples: Samples,
    columns: Any,
    weights: Tensor,
    first: int,
    last: int,
) -> None:
    result[first:last, pairs] += (samples.block(first, last, columns) @ weights).numpy()


def pairs_of(classes: int) -> Iterator[tuple[int, int]]:
    """The pairs of classes, in libsvm's order."""
    for one in range(classes):
        for other in range(one + 1, classes):
            yield one, other


def count_votes(values: Array, classes: int) -> Array:
    """Votes of the pairs for each class, [n, k].

    Args:
        values: Decision values of pairs, [n, k (k - 1) / 2].
    """
    votes = np.zeros((len(values), classes))
    for place, (one, other) in enumerate(pairs_of(classes)):
        first = values[:, place] > 0
        votes[:, one] += first
        votes[:, other] += ~first
    return votes


def _of_kind(rows: Matrix, like: Matrix) -> Matrix:
    """Samples as dense or compressed rows, as others are."""
    if sparse.issparse(like):
        return rows if sparse.issparse(rows) else sparse.csr_matrix(rows)
    return rows.toarray() if sparse.issparse(rows) else rows
