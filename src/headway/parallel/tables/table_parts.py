"""What of a table this rank has, and which rank has a row: `TablePlacement` on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headway.channel.mapped_memory import drop, into_file, mapped_tensor, row_chunks
from headway.plans.tables import TablePlacement

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of splitmix64 as signed numbers."""


def mixed_hashes(keys: Tensor) -> Tensor:
    """`headway.plans.tables.mixed_hash` of each key; bits of 64 unsigned ones as int64."""
    value = keys.to(torch.int64) + _GOLDEN
    if value.device.type == "cpu":
        _mix_unsigned(value.numpy().view(np.uint64))
        return value
    # int64 wraps as 64 unsigned bits do; only a shift must not copy the sign.
    value.bitwise_xor_(_shifted(value, 30)).mul_(_FIRST)
    value.bitwise_xor_(_shifted(value, 27)).mul_(_SECOND)
    return value.bitwise_xor_(_shifted(value, 31))


def _mix_unsigned(value: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
    """The same in place; NumPy takes half the time, as it has unsigned shifts."""
    scratch = np.empty_like(value)
    value ^= np.right_shift(value, 30, out=scratch)
    value *= np.uint64(_FIRST % 2**64)
    value ^= np.right_shift(value, 27, out=scratch)
    value *= np.uint64(_SECOND % 2**64)
    value ^= np.right_shift(value, 31, out=scratch)


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def hashed_parts(keys: Tensor, parts: int) -> Tensor:
    """Of each key, `mixed_hash(key) % parts`, unsigned."""
    value = mixed_hashes(keys)
    return (_shifted(value, 1) % parts * 2 + (value & 1)) % parts


def parts_of_rows(placement: TablePlacement, number: int, keys: Tensor) -> Tensor:
    """Which part of the n-th range of columns has the row of each key; int64, as keys."""
    parts = len(placement.owners[number])
    if placement.cut == "hash":
        return hashed_parts(keys, parts)
    ends = [placement.row_range(number, part).stop for part in range(parts - 1)]
    return torch.bucketize(
        keys.contiguous(), torch.tensor(ends, dtype=keys.dtype, device=keys.device), right=True
    )


def rows_of_part(placement: TablePlacement, number: int, part: int) -> Tensor:
    """Logical numbers of the rows of a part, ascending, int64; only of tables of fixed size."""
    if placement.cut == "none":
        return torch.arange(placement.rows)
    if placement.cut == "range":
        own = placement.row_range(number, part)
        return torch.arange(own.start, own.stop)
    every = torch.arange(placement.rows)
    return every[hashed_parts(every, len(placement.owners[number])) == part]


def rows_of(placement: TablePlacement, rank: int) -> Tensor:
    """Logical numbers of the rows that a rank has, ascending, int64; of a table of fixed size."""
    piece = placement.piece_of(rank)
    return torch.arange(0) if piece is None else rows_of_part(placement, *piece)


class RowRound(Protocol):
    """The rows of a part while one batch goes through the model, forward and backward."""

    def places(self, keys: Tensor) -> Tensor:
        """Where in `values()` the rows of keys are [as keys]."""

    def values(self) -> Tensor:
        """The rows [any number, columns here], without gradients."""

    def gradient(self, places: Tensor, gradients: Tensor) -> Tensor | None:
        """Take the gradients of the rows that were used.

        Args:
            places: int64 [used], ascending, each once.
            gradients: [used, columns here].

        Returns:
            That of the source's leaf, dense or sparse; None: it has been taken otherwise.
        """


class RowSource(Protocol):
    """Where the rows of a part are: in a parameter, over memory tiers, in a table that grows.

    Attributes:
        name: Of the table, for messages.
    """

    name: str

    @property
    def leaf(self) -> Tensor:
        """What autograd is told that results depend on; `RowRound.gradient` is its gradient."""

    def open(self) -> RowRound:
        """For the lookups of one batch; the same object, if several may be open as one."""


@dataclass(eq=False)
class TablePart:
    """What this rank has of a table of fixed size; a `RowSource`.

    Attributes:
        name: Logical name of the parameter.
        parameter: [rows here, columns here]; no rows where it has no piece.
        piece: Which it is (range of columns, part of rows); None: this rank has none.
        sparse: The gradient is left sparse and coalesced, with the rows that were used; it may
            change between steps.
    """

    name: str
    placement: TablePlacement
    parameter: nn.Parameter
    piece: tuple[int, int] | None
    sparse: bool = False

    def __post_init__(self) -> None:
        # Gradients that are on their way into the parameter, and whether it had none.
        self._given: list[tuple[Tensor, bool]] = []
        self._numbers: Tensor | None = None
        self._first = 0
        if self.piece is None:
            return
        if self.placement.cut == "range":
            self._first = self.placement.row_range(*self.piece).start
        elif self.placement.cut == "hash" and len(self.parameter) < self.placement.rows:
            # From logical to own numbers: four bytes for each row of the table.
            rows = self.rows
            self._numbers = torch.zeros(self.placement.rows, dtype=torch.int32)
            self._numbers[rows] = torch.arange(len(rows), dtype=torch.int32)
            self._numbers = self._numbers.to(self.parameter.device)

    @property
    def rows(self) -> Tensor:
        """Logical numbers of the rows here, ascending, int64; made anew, as each takes 8 bytes."""
        if self.piece is None:
            return torch.arange(0)
        return rows_of_part(self.placement, *self.piece)

    @property
    def columns(self) -> range:
        """Those here; an empty range where it has no piece."""
        return range(0) if self.piece is None else self.placement.column_range(self.piece[0])

    @property
    def leaf(self) -> Tensor:
        return self.parameter

    def open(self) -> TablePart:
        return self

    def values(self) -> Tensor:
        return self.parameter.detach()

    def places(self, keys: Tensor) -> Tensor:
        if self._numbers is not None:
            return self._numbers[keys.long()].to(keys.dtype)
        return keys - self._first if self._first else keys

    def gradient(self, places: Tensor, gradients: Tensor) -> Tensor | None:
        if self.sparse:
            given = torch.sparse_coo_tensor(
                places.unsqueeze(0),
                gradients,
                self.parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            self._given.append((given, self.parameter.grad is None))
            return given
        return torch.zeros_like(self.parameter).index_copy_(0, places, gradients)

    def arrived(self, parameter: Tensor) -> None:
        """Autograd has put the gradient into the parameter; it forgets that it is coalesced."""
        given, self._given = self._given, []
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse or gradient.is_coalesced():
            return
        alone = len(given) == 1 and given[0][1]
        parameter.grad = given[0][0] if alone else gradient.coalesce()

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of [rows, columns], or of numbers of rows, [rows]; copied."""
        by_rows = whole.ndim < 2 or whole.shape[1] != self.placement.columns
        columns = None if by_rows else self.columns
        return _cut_out(whole.detach(), self.placement, self.rows, columns)


def part_of_table(
    name: str, placement: TablePlacement, rank: int, whole: nn.Parameter, sparse: bool
) -> TablePart:
    """Cut out the part of a table that a rank has; `whole` is left as it is."""
    piece = placement.piece_of(rank)
    columns = range(0) if piece is None else placement.column_range(piece[0])
    own = _cut_out(whole.detach(), placement, rows_of(placement, rank), columns)
    parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
    part = TablePart(name, placement, parameter, piece, sparse)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(part.arrived)
    return part


def _cut_out(
    whole: Tensor, placement: TablePlacement, rows: Tensor, columns: range | None
) -> Tensor:
    """Rows and columns (None: all there are), in memory of their own.

    Where memory is not to hold all of a piece, in a mapped file: that in which the whole lies, if
    the piece is all of it.
    """
    every = slice(None) if columns is None else slice(columns.start, columns.stop)
    narrow = columns is not None and len(columns) < placement.columns
    cut = narrow or len(rows) < placement.rows
    if not placement.hot:
        own = whole[rows.to(whole.device)] if cut else whole
        return (own[:, every] if narrow else own).clone(memory_format=torch.contiguous_format)
    if not cut:
        return into_file(whole, placement.cold, what=placement.table)
    tail = whole.shape[1:] if columns is None else (len(columns),)
    found = mapped_tensor((len(rows), *tail), whole.dtype, placement.cold, what=placement.table)
    for part in row_chunks(found):
        own = whole.index_select(0, rows[part])
        found[part] = own if columns is None else own[:, every]
        drop(whole)
        drop(found)
    return found
