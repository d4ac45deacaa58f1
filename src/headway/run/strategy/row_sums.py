"""Numbers of whole rows where a table is cut by columns: row-wise Adagrad's mean of squares.

Each rank has the squares of its columns; the rank that has the same rows of another range of
columns has the rest. They exchange the sums of the rows that were used, a number each, and add them
in the order of the columns, so that all make the same of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.optim import RowWiseAdagrad
from headway.parallel.tables.wire import Shape, Wire
from headway.plans.tables import TablePlacement


def shares_row_sums(optimizer: Optimizer, placement: TablePlacement) -> bool:
    """Whether what an optimiser keeps of rows can be had although a table is cut by columns."""
    # Else a rank has rows that no single other one has.
    alike = len({len(parts) for parts in placement.owners}) == 1
    return isinstance(optimizer, RowWiseAdagrad) and alike


def share_row_sums(
    optimizer: Optimizer,
    wire: Wire,
    placements: Mapping[str, TablePlacement],
    name_of: Callable[[Tensor], str | None],
) -> None:
    """Let a row-wise optimiser take means over all columns; its step is collective then."""
    if not isinstance(optimizer, RowWiseAdagrad):
        return
    own = optimizer.row_squares

    def row_squares(parameter: Tensor, squares: Tensor) -> Tensor:
        placed = placements.get(name_of(parameter) or "")
        if placed is None or len(placed.owners) == 1:
            return own(parameter, squares)
        return _sums(wire, placed, squares.flatten(1).sum(1)) / placed.columns

    setattr(optimizer, "row_squares", row_squares)  # noqa: B010 - mypy knows it as a method


def _sums(wire: Wire, placement: TablePlacement, own: Tensor) -> Tensor:
    """The sums over all ranges of columns, for the rows that this rank has; collective."""
    piece = placement.piece_of(wire.rank)
    ranks = [] if piece is None else [parts[piece[1]] for parts in placement.owners]
    parts: list[list[Tensor]] = [[own] if rank in ranks else [] for rank in range(wire.size)]
    shape: Shape = (tuple(own.shape), own.dtype)
    expected = [[shape] if rank in ranks else [] for rank in range(wire.size)]
    came = wire.swap(parts, expected)
    total = torch.zeros_like(own)
    for rank in ranks:
        total += came[rank][0]
    return total


def whole_of_rows(wire: Wire, placement: TablePlacement, own: Tensor) -> Tensor:
    """A number for each row of a table that is cut in ranges, of which the ranks of each range of
    columns have the same; on every rank, collective."""
    first = placement.owners[0]
    sizes = [len(placement.row_range(0, part)) for part in range(len(first))]
    mine = [own] if wire.rank in first else []
    expected: list[list[Shape]] = [[] for _ in range(wire.size)]
    for rank, size in zip(first, sizes, strict=True):
        expected[rank] = [((size,), own.dtype)]
    came = wire.swap([mine] * wire.size, expected)
    return torch.cat([came[rank][0] for rank in first])
