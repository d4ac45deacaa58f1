"""Who writes what: replicated tensors cut into one share per rank, balanced by bytes.

Invariant: the cut depends on names, shapes, element types and the number of ranks alone, so that
every rank finds the same one without talking; the shares are disjoint and cover everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.checkpoint.manifest import DTYPES

WHOLE_BELOW = 2**20
"""Tensors of fewer bytes stay whole: cutting them would not balance anything."""


@dataclass(frozen=True)
class Spec:
    """Element type (a key of `DTYPES`) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Piece:
    """Rows `first` to `stop` of a tensor (its dimension 0), or all of it.

    A whole tensor has `first == 0` and `stop == shape[0]`, or (0, 1) for a tensor of no dimension.
    """

    name: str
    spec: Spec
    first: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        shape = self.spec.shape
        return (self.stop - self.first, *shape[1:]) if shape else ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the piece begins in the tensor, one index per dimension."""
        shape = self.spec.shape
        return (self.first, *(0 for _ in shape[1:])) if shape else ()

    @property
    def bytes(self) -> int:
        """Bytes of the piece."""
        return math.prod(self.shape) * DTYPES[self.spec.dtype][1]


def cut(specs: Mapping[str, Spec], ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank.

    All tensors are laid end to end in the order of their names and the line is cut into `ranks`
    equal parts; a cut that falls inside a large tensor is moved to the nearest row border, one
    inside a small tensor to its nearer end.

    Args:
        specs: Logical name -> spec.
        ranks: Number of shares.

    Returns:
        One tuple of pieces per rank. A rank has at most one piece of a tensor. Elements of large
        size come first, so that pieces packed one after the other stay aligned.
    """
    total = sum(spec.bytes for spec in specs.values())
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    position = 0
    for name in sorted(specs):
        spec = specs[name]
        for rank, piece in _cut_one(name, spec, position, total, ranks):
            shares[rank].append(piece)
        position += spec.bytes
    return tuple(tuple(sorted(share, key=_file_order)) for share in shares)


def _cut_one(
    name: str, spec: Spec, position: int, total: int, ranks: int
) -> list[tuple[int, Piece]]:
    """The pieces of one tensor that begins at byte `position` of the line, with their ranks."""
    rows = spec.shape[0] if spec.shape else 1
    if spec.bytes < WHOLE_BELOW or rows < 2:
        middle = position + spec.bytes // 2
        owner = min(ranks - 1, middle * ranks // total) if total else 0
        return [(owner, Piece(name, spec, 0, rows))]
    row_bytes = spec.bytes // rows
    borders = [0]
    for rank in range(1, ranks):
        distance = total * rank // ranks - position
        nearest = (2 * distance + row_bytes) // (2 * row_bytes)
        borders.append(min(rows, max(0, nearest)))
    borders.append(rows)
    return [
        (rank, Piece(name, spec, borders[rank], borders[rank + 1]))
        for rank in range(ranks)
        if borders[rank] < borders[rank + 1]
    ]


def _file_order(piece: Piece) -> tuple[int, str]:
    return -DTYPES[piece.spec.dtype][1], piece.name
