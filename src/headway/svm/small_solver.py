"""The dual problem of a few samples, with a table of all their kernel values.

Of several classes most problems are small, and their time would be that of the steps around the
arithmetic (`solver.py`). Here every rank has all samples of the problem and solves it alone, alike:
kernel values of all pairs in float32, one call of `solve_pairs`, gamma from the multipliers in
float64. Where that is not the solution, the table is made again in float64.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cost.support_vectors import TABLE_WORKING_SETS
from headway.svm.arrays import Array
from headway.svm.elimination import ADAPTIVE, NONE
from headway.svm.kernels import FEW, Samples, prepare_samples, weighted_sums
from headway.svm.pair_solver import solve_pairs
from headway.svm.peers import Peers
from headway.svm.solver import (
    STOP,
    Progress,
    Share,
    Solution,
    SolverOptions,
    sides,
    solution_sums,
    steps_limit,
)

_BLOCK = 128
"""Rows of a block: 1 MiB of float32 at most, which the second cache holds."""
_STEPS = 100_000
"""After which votes are looked at: a tenth of a second."""
_NARROWEST = 1e-5
"""Below this tolerance the table is made in float64 at once."""
_MARGIN = 15 / 16
"""Of the tolerance: what is left to the rounding of the table."""


def is_small(total: int, options: SolverOptions) -> bool:
    """Whether a problem is solved with a table, by all ranks alike.

    With working sets of 512 it may have 2,048 samples, and its table 16 MiB or, in float64, 32.
    Not where somebody asks for pairs (working sets of a few) or for one of the published rules.
    """
    return (
        options.working_set > FEW
        and total <= TABLE_WORKING_SETS * options.working_set
        and options.rule in (ADAPTIVE, NONE)
    )


class SmallSolver:
    """Solves a small problem; as `Solver`, whose attributes and methods it has."""

    def __init__(
        self, share: Share, options: SolverOptions, peers: Peers, alpha: Array | None = None
    ) -> None:
        self.vote = 0
        self._options, self._peers = options, peers
        self._own = slice(share.first, share.first + len(share.labels))
        start = np.zeros(len(share.labels)) if alpha is None else alpha
        facts = peers.gather_arrays(np.array([share.labels, share.bounds, start]).T, "the labels")
        self._labels, self._bounds, self._alpha = np.concatenate(facts).T.copy()
        self._rows, _ = peers.gather_rows(share.rows, "the samples of a small problem")
        self._shift = self._rows.mean(axis=0) if isinstance(self._rows, np.ndarray) else None
        self._exact_samples = self._prepare(torch.float64)
        self._values = self._steps = self._outer = self._reconstructions = 0
        self._gamma, self._exact = -self._labels, True
        if self._alpha.any():
            self._reconstruct()

    def run(self) -> Iterator[Progress]:
        """Solve; a progress after every call of `solve_pairs`."""
        options, began = self._options, time.monotonic()
        facts = (self._labels, self._bounds, self._alpha)
        most = steps_limit(options, len(self._labels))
        narrow = options.tolerance >= _NARROWEST
        table, diagonal = self._fill(torch.float32 if narrow else torch.float64)
        while True:
            votes = np.bitwise_or.reduce(self._peers.gather(np.array([self.vote]), "the votes"))
            rising, sinking = sides(*facts, self._gamma)
            violation = float(sinking.max() - rising.min())
            if votes[0] & STOP or self._steps >= most:
                return
            if violation <= options.tolerance:
                if self._exact:
                    return
                self._reconstruct()
                continue
            if self._outer and table.dtype == np.float32:
                # Too coarse, or so hard a problem that its time does not matter.
                table, diagonal = self._fill(torch.float64)
                self._reconstruct()
                continue
            self._steps += solve_pairs(
                table, diagonal, *facts, self._gamma, options.tolerance * _MARGIN,
                min(most - self._steps, _STEPS), options.second_order,
            )  # fmt: skip
            self._outer += 1
            self._exact = False
            yield Progress(
                violation=violation,
                active=len(self._labels),
                support=int(np.count_nonzero(self._alpha)),
                values=self._values,
                steps=self._steps,
                outer=self._outer,
                seconds=time.monotonic() - began,
                remaining=0.0,
                votes=int(votes[0]),
            )

    def solution(self) -> Solution:
        """The multipliers now."""
        if not self._exact:
            self._reconstruct()
        facts = (self._labels, self._bounds, self._alpha, self._gamma)
        rising, sinking = sides(*facts)
        lowest, highest = float(rising.min()), float(sinking.max())
        free, count, objective = solution_sums(*facts).tolist()
        return Solution(
            alpha=self.state(),
            gamma=self._gamma[self._own],
            offset=free / count if count else (lowest + highest) / 2,
            violation=highest - lowest,
            objective=objective,
            finished=highest - lowest <= self._options.tolerance,
            steps=self._steps,
            outer=self._outer,
            values=self._values,
            reconstructions=self._reconstructions,
            predictions=(),
        )

    def state(self) -> Array:
        """Multipliers of this rank's samples: all that a run needs to go on."""
        alpha: Array = self._alpha[self._own].copy()
        return alpha

    def _prepare(self, dtype: torch.dtype) -> Samples:
        return prepare_samples(self._options.kernel, self._rows, dtype, self._shift)

    def _fill(self, dtype: torch.dtype) -> tuple[NDArray[Any], Array]:
        """Kernel values of all samples with all, [n, n], and those of each with itself."""
        samples = self._exact_samples if dtype == torch.float64 else self._prepare(dtype)
        columns, count = samples.columns(), len(samples)
        table = torch.empty(count, count, dtype=dtype)
        for first in range(0, count, _BLOCK):
            last = min(first + _BLOCK, count)
            samples.block(first, last, columns, table[first:last])
        self._count(count, count)
        return table.numpy(), table.diagonal().double().contiguous().numpy()

    def _reconstruct(self) -> None:
        """Gamma of all samples from their multipliers."""
        moved = np.flatnonzero(self._alpha)
        samples, weights = self._exact_samples, (self._alpha * self._labels)[moved]
        self._gamma = weighted_sums(samples, samples.take(moved), weights) - self._labels
        self._count(len(moved), len(samples))
        self._reconstructions += 1
        self._exact = True

    def _count(self, rows: int, columns: int) -> None:
        self._values += rows * columns * self._peers.ranks
