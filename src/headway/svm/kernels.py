"""Kernels, and blocks of kernel values between the samples of a rank and a few others.

No matrix of all pairs is ever made. A block [chunk, q] is one matrix product and one or two
functions of its entries, small enough to stay in the processor's cache (the layout of ThunderSVM's
working sets, Wen et al. 2018, without their table of kernel rows).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from headway.svm.arrays import Array, Indices, Matrix
from headway.svm.products import (
    PackedColumns,
    pack_columns,
    products_by_row,
    scale_rows,
    scaled_products,
)
from headway.svm.threads import CHUNK, over_chunks

KernelName = Literal["linear", "poly", "rbf", "sigmoid", "callable"]
KernelFunction = Callable[[Matrix, Matrix], Array]

_SMALLEST_EXPONENTS = {torch.float32: -60.0, torch.float64: -600.0}
"""Exponents below these count as these: kernel values of 10^-26 and 10^-261, so that their products
with multipliers do not underflow either."""
FEW = 8
"""Columns up to which products are made row by row, alike wherever a row lies."""


@dataclass(frozen=True)
class Kernel:
    """K(x, z): one of libsvm's four, or a function of two matrices of samples.

    Attributes:
        name: linear x z; poly (gamma x z + coef0)^degree; rbf exp(-gamma |x - z|^2);
            sigmoid tanh(gamma x z + coef0).
        function: Of "callable": [n, m] and [k, m] to [n, k].
    """

    name: KernelName
    gamma: float = 1.0
    degree: float = 3
    coef0: float = 0.0
    function: KernelFunction | None = None

    @property
    def concurrent(self) -> bool:
        """Whether several threads may compute it at once: not a function of the user's."""
        return self.function is None

    @property
    def scale(self) -> float:
        """What both samples are multiplied by before the product of the two."""
        if self.name == "linear":
            return 1.0
        return float(np.sqrt(2 * self.gamma if self.name == "rbf" else self.gamma))

    def of_products(self, products: Tensor) -> Tensor:
        """Kernel values of products of scaled samples, in place.

        Args:
            products: x z of scaled samples; of "rbf" less half of the squares of both.
        """
        if self.name == "rbf":
            # What underflows takes torch 2.13 fifty times as long as what does not (AVX-512).
            return products.clamp_min_(_SMALLEST_EXPONENTS[products.dtype]).exp_()
        if self.name == "poly":
            return products.add_(self.coef0).pow_(self.degree)
        if self.name == "sigmoid":
            return products.add_(self.coef0).tanh_()
        return products


class Samples(Protocol):
    """Samples prepared for a kernel, in one precision: the rows or the columns of blocks."""

    kernel: Kernel

    def __len__(self) -> int: ...

    def take(self, which: Indices) -> Samples:
        """A copy of some of them, in this order."""
        ...

    def block(self, first: int, last: int, others: Any, out: Tensor | None = None) -> Tensor:
        """Kernel values [last - first, others].

        Args:
            others: What `columns` of such samples has returned.
            out: Where they are written, contiguous; None: where they are valid until the next
                block is asked for.
        """
        ...

    def columns(self) -> Any:
        """These samples as the columns of blocks."""
        ...


class _Room(threading.local):
    """Memory of a block, used again for the next one of the same thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._values = torch.empty(0, dtype=dtype)

    def of(self, rows: int, columns: int) -> Tensor:
        """Values [rows, columns], not initialised."""
        if self._values.numel() < rows * columns:
            self._values = torch.empty(rows * columns, dtype=self._values.dtype)
        return self._values[: rows * columns].view(rows, columns)


class DenseSamples:
    """Scaled samples [n, m]; of "rbf" with two more columns, so that a product is the exponent."""

    def __init__(self, kernel: Kernel, values: Tensor) -> None:
        self.kernel = kernel
        self.values = values
        self._room = _Room(values.dtype)

    @classmethod
    def prepare(
        cls, kernel: Kernel, rows: Array, dtype: torch.dtype, shift: Array | None
    ) -> DenseSamples:
        """Scale samples.

        Args:
            rows: float64 [n, m].
            shift: Subtracted from each, [m]: distances stay, and their rounding errors shrink.
        """
        count, width = rows.shape
        squares = kernel.name == "rbf"
        values = torch.empty(count, width + 2 if squares else width, dtype=dtype)
        shift = np.zeros(width) if shift is None else shift
        scale_rows(rows, shift, kernel.scale, squares, values.numpy())
        return cls(kernel, values)

    def __len__(self) -> int:
        return len(self.values)

    def take(self, which: Indices) -> DenseSamples:
        # A third of the time of an index in brackets.
        return DenseSamples(self.kernel, self.values.index_select(0, torch.from_numpy(which)))

    def columns(self) -> Tensor:
        if self.kernel.name != "rbf":
            return self.values.T
        return torch.cat([self.values[:, :-2], self.values[:, -2:].flip(1)], dim=1).T

    def block(self, first: int, last: int, others: Tensor, out: Tensor | None = None) -> Tensor:
        out = self._room.of(last - first, others.shape[1]) if out is None else out
        if others.shape[1] <= FEW:
            products_by_row(
                self.values[first:last].numpy(), others.T.contiguous().numpy(), out.numpy()
            )
        else:
            torch.mm(self.values[first:last], others, out=out)
        return self.kernel.of_products(out)


class SparseSamples:
    """Scaled samples in compressed rows."""

    def __init__(self, kernel: Kernel, rows: sparse.csr_matrix, dtype: torch.dtype) -> None:
        self.kernel = kernel
        self.rows = rows
        self.dtype = dtype
        squares = np.asarray(rows.multiply(rows).sum(axis=1), dtype=np.float64).ravel()
        self._halves = (squares / -2).astype(rows.dtype)
        if kernel.name != "rbf":
            self._halves[:] = 0
        self._room = _Room(dtype)

    @classmethod
    def prepare(cls, kernel: Kernel, rows: sparse.csr_matrix, dtype: torch.dtype) -> SparseSamples:
        kind = np.float32 if dtype == torch.float32 else np.float64
        scaled = sparse.csr_matrix(
            ((rows.data * kernel.scale).astype(kind), rows.indices, rows.indptr), shape=rows.shape
        )
        return cls(kernel, scaled, dtype)

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def take(self, which: Indices) -> SparseSamples:
        return SparseSamples(self.kernel, self.rows[which], self.dtype)

    def columns(self) -> PackedColumns:
        return pack_columns(self.rows, self._halves)

    def block(
        self, first: int, last: int, others: PackedColumns, out: Tensor | None = None
    ) -> Tensor:
        out = self._room.of(last - first, len(others.start)) if out is None else out
        scaled_products(self.rows, self._halves, first, last, others, out.numpy())
        return self.kernel.of_products(out)


class CallableKernelSamples:
    """Samples of a kernel that is the user's own function."""

    def __init__(self, kernel: Kernel, rows: Matrix) -> None:
        self.kernel = kernel
        self.rows = rows

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def take(self, which: Indices) -> CallableKernelSamples:
        return CallableKernelSamples(self.kernel, self.rows[which])

    def columns(self) -> Matrix:
        return self.rows

    def block(self, first: int, last: int, others: Matrix, out: Tensor | None = None) -> Tensor:
        assert self.kernel.function is not None
        found = self.kernel.function(self.rows[first:last], others)
        values = torch.from_numpy(np.ascontiguousarray(found, dtype=np.float64))
        return values if out is None else out.copy_(values)


def prepare_samples(
    kernel: Kernel, rows: Matrix, dtype: torch.dtype, shift: Array | None = None
) -> Samples:
    """Samples as rows or columns of blocks of kernel values.

    Args:
        rows: [n, m], dense or compressed rows, float64.
        dtype: Of the blocks; a function of the user's gets and returns float64.
        shift: Of dense samples under "rbf": what is subtracted from each, [m].
    """
    if kernel.name == "callable":
        return CallableKernelSamples(kernel, rows)
    if sparse.issparse(rows):
        return SparseSamples.prepare(kernel, rows, dtype)
    return DenseSamples.prepare(kernel, rows, dtype, shift if kernel.name == "rbf" else None)


def weighted_sums(samples: Samples, others: Samples, weights: Array) -> Array:
    """sum over k of weights_k K(x, z_k) for each x of `samples`, float64 [n].

    Of a few others (`FEW`) every sum is that of its own sample, operation by operation: no other
    sample, and no rank that has more or fewer of them, changes a bit of it.
    """
    result = np.zeros(len(samples))
    for start in range(0, len(weights), CHUNK):
        some = (
            others
            if len(weights) <= CHUNK
            else others.take(np.arange(start, min(start + CHUNK, len(weights))))
        )
        add = partial(_add_sums, result, samples, some.columns(), weights[start : start + CHUNK])
        over_chunks(len(samples), len(some), add, concurrent=samples.kernel.concurrent)
    return result


def _add_sums(
    result: Array, samples: Samples, columns: Any, weights: Array, first: int, last: int
) -> None:
    result[first:last] += _sums(samples.block(first, last, columns), weights)


def _sums(block: Tensor, weights: Array) -> Array:
    if len(weights) > FEW:
        return torch.mv(block, torch.from_numpy(weights).to(block.dtype)).double().numpy()
    total = torch.zeros(len(block), dtype=torch.float64)
    for values, weight in zip(block.T, weights, strict=True):
        total += values * weight
    return total.numpy()


def exact_sums(samples: Samples, others: Samples, weights: Array, grids: Array) -> Array:
    """Sums as `weighted_sums`, in two parts that can be added up in any order, [2, n].

    Each term is rounded to a multiple of the first grid, what is left of it to one of the second,
    so that sums are exact (Demmel and Nguyen 2013, with two levels): no order of samples or ranks
    changes a bit of them.

    Args:
        grids: What `sum_grids` has returned for the terms of all ranks.
    """
    result = np.zeros((2, len(samples)))
    for start in range(0, len(weights), FEW):
        which = np.arange(start, min(start + FEW, len(weights)))
        add = partial(
            _add_exact_sums, result, samples, others.take(which).columns(), weights[which], grids
        )
        over_chunks(len(samples), len(which), add, concurrent=samples.kernel.concurrent)
    return result


def _add_exact_sums(
    result: Array,
    samples: Samples,
    columns: Any,
    weights: Array,
    grids: Array,
    first: int,
    last: int,
) -> None:
    terms = samples.block(first, last, columns).numpy() * weights
    coarse = np.rint(terms / grids[0]) * grids[0]
    result[0, first:last] += coarse.sum(axis=1)
    result[1, first:last] += (np.rint((terms - coarse) / grids[1]) * grids[1]).sum(axis=1)


def sum_grids(largest: float, count: int) -> Array:
    """Two powers of two, so that sums of so many of their multiples are exact in float64.

    Args:
        largest: No term is larger.
    """
    more = np.frexp(max(count, 1))[1]
    coarse = np.frexp(largest)[1] + more - 52
    grids: Array = np.ldexp(1.0, np.array([coarse, coarse + more - 52]))
    return grids


def largest_value(kernel: Kernel, rows: Matrix) -> float:
    """No kernel value among these samples is larger; infinity: nobody knows."""
    if kernel.name in ("rbf", "sigmoid"):
        return 1.0
    if kernel.name == "callable":
        return np.inf
    squares = rows.multiply(rows) if sparse.issparse(rows) else np.square(rows)
    square = float(np.asarray(squares.sum(axis=1)).max(initial=0.0))
    if kernel.name == "linear":
        return square
    return float((kernel.gamma * square + abs(kernel.coef0)) ** kernel.degree)


def kernel_values(samples: Samples, others: Samples, out: Array | None = None) -> Array:
    """Kernel values of a few samples with a few others, float64 [n, k], contiguous."""
    result = np.empty((len(samples), len(others))) if out is None else out
    columns = others.columns()
    for first in range(0, len(samples), CHUNK):
        last = min(first + CHUNK, len(samples))
        samples.block(first, last, columns, torch.from_numpy(result[first:last]))
    return result
