"""powersgd: two factors of low rank instead of a matrix, summed by the network.

Vogels et al. 2019, algorithm 1, for u = gradient + residual as a matrix M (n x m) on each rank:

    P = sum over ranks of M Q        orthonormalise the columns of P
    Q = M^T P                        residual = M - P Q^T (this rank's own Q)
    result = P (sum over ranks of Q)^T

The summed Q is the start of the next step's power iteration. All matrices of a bucket share the two
all-reduces, and what is sent whole travels with the first. Invariant: P is the same on all ranks,
so the results and residuals of all ranks add up to the sum of their matrices exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.collective.compression import PowerSgdCompression, matrix_shape
from headway.comm.algorithms.method import GradientSlice, PendingOperation, Route, all_reduce
from headway.comm.compress.compressor import Compressor, PieceMemory, seeded_generator


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One parameter: views of the residual (M), of the first payload (P), of the second (Q^T)."""

    piece: GradientSlice
    m_nm: Tensor
    p_nr: Tensor
    q_rm: Tensor


class PowerSgd(Compressor):
    """Matrices that would not become half as large, vectors and small tensors are summed whole."""

    dense_in_payload = True

    def __init__(self, compression: PowerSgdCompression, *, seed: int = 0) -> None:
        memory = PieceMemory("q", lambda number, _: self._matrices[number].q_rm, self._load)
        super().__init__(compression, seed=seed, memory=memory)
        self._rank = compression.rank
        self._left = self._right = torch.empty(0)
        self._matrices: list[_Matrix] = []
        self._rest = torch.empty(0)

    def _open(self, buffer: Tensor, route: Route) -> None:
        rank = self._rank
        shapes = [matrix_shape(piece.shape) for piece in self._layout.packed]
        rows = [rank * n for n, _ in shapes]
        columns = [rank * m for _, m in shapes]
        self._left = self._residual.new_zeros(sum(rows) + self._layout.dense_size)
        self._right = self._residual.new_zeros(sum(columns))
        self._rest = self._left[sum(rows) :]
        self._matrices = [
            _Matrix(piece, self._residual_of(piece).view(n, m), p.view(n, rank), q.view(rank, m))
            # Not strict: the last part of `_left` holds what is sent whole.
            for piece, (n, m), p, q in zip(
                self._layout.packed,
                shapes,
                self._left.split([*rows, self._layout.dense_size]),
                self._right.split(columns),
                strict=False,
            )
        ]
        for matrix in self._matrices:
            # From seed and name only: the first Q is the same on all ranks without communication.
            draw = seeded_generator(self._seed, matrix.piece.name)
            start = draw.standard_normal(tuple(matrix.q_rm.shape))
            matrix.q_rm.copy_(torch.from_numpy(start))

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[PendingOperation]:
        for matrix, source in zip(self._matrices, self._layout.sources, strict=True):
            gradient = buffer[source.start : source.stop].view(matrix.m_nm.shape)
            matrix.m_nm.add_(gradient)
            torch.mm(matrix.m_nm, matrix.q_rm.t(), out=matrix.p_nr)
        self._dense.copy(buffer, self._rest)
        yield all_reduce(self._left, route)
        for matrix in self._matrices:
            # Householder reflections: orthonormal to rounding even where columns are parallel or
            # zero, where Gram and Schmidt would divide by almost nothing.
            matrix.p_nr.copy_(torch.linalg.qr(matrix.p_nr).Q)
            # (P^T M) instead of (M^T P)^T: three times as fast, M is read in its own order.
            torch.mm(matrix.p_nr.t(), matrix.m_nm, out=matrix.q_rm)
        # The all-reduce overwrites this rank's own Q, which its residual still needs.
        own = self._right.clone()
        work = all_reduce(self._right, route)
        self._leave(own)  # overlaps with the all-reduce
        yield work
        for matrix, source in zip(self._matrices, self._layout.sources, strict=True):
            result = buffer[source.start : source.stop].view(matrix.m_nm.shape)
            _product(matrix.p_nr, matrix.q_rm, result)
        self._dense.spread(self._rest, buffer)

    def _leave(self, own: Tensor) -> None:
        """Residual: M - P Q^T, with this rank's own Q."""
        start = 0
        for matrix in self._matrices:
            q_rm = own[start : start + matrix.q_rm.numel()].view_as(matrix.q_rm)
            matrix.m_nm.addmm_(matrix.p_nr, q_rm, alpha=-1)
            start += matrix.q_rm.numel()

    def _load(self, number: int, piece: GradientSlice, q_rm: Tensor) -> None:
        own = self._matrices[number].q_rm
        if q_rm.shape == own.shape:  # else it was saved with another rank: start afresh
            own.copy_(q_rm)


def _product(p_nr: Tensor, q_rm: Tensor, out: Tensor) -> None:
    if out.dtype == p_nr.dtype:
        torch.mm(p_nr, q_rm, out=out)
    else:
        out.copy_(p_nr @ q_rm)
