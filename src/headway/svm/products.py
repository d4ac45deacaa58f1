"""Products of samples with a few others, row by row, compiled by numba.

The others are packed by column, either as a table of dense rows, one for each column that occurs
in them, or, where that would be mostly zeros, as lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy import sparse

FILLED = 1 / 8
"""Below this share of entries lists are faster than dense rows (16 products in an instruction)."""


@dataclass(frozen=True)
class PackedColumns:
    """q samples by column.

    Attributes:
        start: What a product with each of them begins with, [q].
        slots: Which dense row or list a column has, int32 [m]; -1: it occurs in none.
        table: [slots, q]; empty where there are lists.
        offsets, members, values: Lists, one after the other: list s has the entries from
            offsets[s] to offsets[s + 1].
    """

    start: NDArray[Any]
    slots: NDArray[np.int32]
    table: NDArray[Any]
    offsets: NDArray[np.int64]
    members: NDArray[np.int32]
    values: NDArray[Any]


def pack_columns(rows: sparse.csr_matrix, start: NDArray[Any]) -> PackedColumns:
    """Pack samples by column."""
    count, width = rows.shape
    used = np.unique(rows.indices)
    slots = np.full(width, -1, dtype=np.int32)
    slots[used] = np.arange(len(used), dtype=np.int32)
    small = sparse.csr_matrix(
        (rows.data, slots[rows.indices], rows.indptr), shape=(count, max(len(used), 1))
    )
    empty = np.empty((0, count), dtype=rows.dtype)
    if rows.nnz >= FILLED * count * len(used):
        table = np.ascontiguousarray(small.toarray().T)
        none = np.zeros(1, dtype=np.int64)
        return PackedColumns(
            start, slots, table, none, none.astype(np.int32), none.astype(rows.dtype)
        )
    lists = small.tocsc()
    return PackedColumns(
        start,
        slots,
        empty,
        lists.indptr.astype(np.int64),
        lists.indices.astype(np.int32),
        lists.data,
    )


def scaled_products(
    rows: sparse.csr_matrix,
    halves: NDArray[Any],
    first: int,
    last: int,
    others: PackedColumns,
    out: NDArray[Any],
) -> None:
    """out[r, k] = halves[first + r] + start[k] + x z_k.

    Args:
        out: [last - first, q], of the type of the values.
    """
    if len(others.table):
        _dense_products(
            rows.indptr, rows.indices, rows.data, halves, first, last, others.start, others.slots,
            others.table, out,
        )  # fmt: skip
    else:
        _list_products(
            rows.indptr, rows.indices, rows.data, halves, first, last, others.start, others.slots,
            others.offsets, others.members, others.values, out,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _dense_products(
    indptr: Any, indices: Any, data: Any, halves: Any, first: int, last: int,
    start: Any, slots: Any, table: Any, out: Any,
) -> None:  # fmt: skip
    q = len(start)
    for r in range(first, last):
        row = out[r - first]
        half = halves[r]
        for k in range(q):
            row[k] = start[k] + half
        for entry in range(indptr[r], indptr[r + 1]):
            slot = slots[indices[entry]]
            if slot >= 0:
                value = data[entry]
                factors = table[slot]
                for k in range(q):
                    row[k] += value * factors[k]


@njit(cache=True, nogil=True)
def _list_products(
    indptr: Any, indices: Any, data: Any, halves: Any, first: int, last: int,
    start: Any, slots: Any, offsets: Any, members: Any, values: Any, out: Any,
) -> None:  # fmt: skip
    q = len(start)
    for r in range(first, last):
        row = out[r - first]
        half = halves[r]
        for k in range(q):
            row[k] = start[k] + half
        for entry in range(indptr[r], indptr[r + 1]):
            slot = slots[indices[entry]]
            if slot >= 0:
                value = data[entry]
                for place in range(offsets[slot], offsets[slot + 1]):
                    row[members[place]] += value * values[place]


@njit(cache=True, nogil=True)
def products_by_row(rows: Any, others: Any, out: Any) -> None:
    """out[r, k] = x_r z_k, the terms added one after the other.

    Args:
        rows: [n, m].
        others: [q, m].
    """
    for r in range(len(rows)):
        for k in range(len(others)):
            total = rows[r, 0] * others[k, 0]
            for c in range(1, rows.shape[1]):
                total += rows[r, c] * others[k, c]
            out[r, k] = total


@njit(cache=True, nogil=True)
def scale_rows(rows: Any, shift: Any, scale: float, halves: bool, out: Any) -> None:
    """Samples less `shift`, times `scale`; of "rbf" with two more columns.

    Args:
        rows: float64 [n, m].
        shift: float64 [m].
        halves: Whether `out` has room for -|x|^2 / 2 of what has been rounded (the distance of a
            sample from itself is nothing), its terms added one after the other, and for 1.
        out: [n, m] or [n, m + 2], of the type that is wanted.
    """
    width = rows.shape[1]
    for r in range(len(rows)):
        for c in range(width):
            out[r, c] = (rows[r, c] - shift[c]) * scale
        if halves:
            total = 0.0
            for c in range(width):
                total += np.float64(out[r, c]) * np.float64(out[r, c])
            out[r, width] = total / -2
            out[r, width + 1] = 1.0
