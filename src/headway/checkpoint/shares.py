"""Who writes what: tensors cut into one share per rank, balanced by bytes among their holders.

Invariant: the cut depends on names, shapes, element types, holders and the number of ranks alone,
so that every rank finds the same one without talking; the shares are disjoint and cover everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from headway.checkpoint.manifest import DTYPES
from headway.errors import CheckpointError

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


@dataclass(frozen=True)
class Holdings:
    """What all ranks together hold.

    Attributes:
        specs: Logical name -> spec.
        holders: Logical name -> the ranks that have the tensor, ascending.
    """

    specs: Mapping[str, Spec]
    holders: Mapping[str, tuple[int, ...]]

    @staticmethod
    def everywhere(specs: Mapping[str, Spec], ranks: int) -> Holdings:
        """Every rank has every tensor."""
        return Holdings(specs, dict.fromkeys(specs, tuple(range(ranks))))

    @staticmethod
    def of(found: Sequence[Mapping[str, Spec]]) -> Holdings:
        """From what each rank has.

        Raises:
            CheckpointError: Two ranks have different tensors under one name.
        """
        specs: dict[str, Spec] = {}
        holders: dict[str, tuple[int, ...]] = {}
        for rank, own in enumerate(found):
            for name, spec in own.items():
                if specs.setdefault(name, spec) != spec:
                    raise CheckpointError(
                        "cannot be stored in a checkpoint",
                        where=f"tensor {name}",
                        why=f"it is {specs[name]} on rank {holders[name][0]}, {spec} on {rank}",
                        fix="give the same tensor on all ranks that have it",
                    )
                holders[name] = (*holders.get(name, ()), rank)
        return Holdings(specs, holders)

    @property
    def bytes(self) -> int:
        """Of all tensors, each counted once."""
        return sum(spec.bytes for spec in self.specs.values())


def cut(holdings: Holdings, ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank.

    All tensors with the same holders are laid end to end in the order of their names, and the line
    is cut so that the holders' shares become equal, as far as what they have already allows it; a
    cut that falls inside a large tensor is moved to the nearest row border, one inside a small
    tensor to its nearer end. Few holders come first: they have the least choice.

    Args:
        holdings: What there is.
        ranks: Number of shares.

    Returns:
        One tuple of pieces per rank. A rank has at most one piece of a tensor. Elements of large
        size come first, so that pieces packed one after the other stay aligned.
    """
    lines: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(holdings.specs):
        lines.setdefault(holdings.holders[name], []).append(name)
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    for holders in sorted(lines, key=lambda who: (len(who), who)):
        specs = {name: holdings.specs[name] for name in lines[holders]}
        loads = [sum(piece.bytes for piece in shares[rank]) for rank in holders]
        edges = _edges(sum(spec.bytes for spec in specs.values()), loads)
        position = 0
        for name, spec in specs.items():
            for place, piece in _cut_one(name, spec, position, edges):
                shares[holders[place]].append(piece)
            position += spec.bytes
    return tuple(tuple(sorted(share, key=_file_order)) for share in shares)


def _edges(total: int, loads: Sequence[int]) -> list[Fraction]:
    """Where a line of `total` bytes is cut, so that the parts fill up `loads` to one level."""
    if not total:
        return []
    ordered = sorted(loads)
    level = Fraction(total)
    for count in range(1, len(ordered) + 1):
        level = Fraction(total + sum(ordered[:count]), count)
        if count == len(ordered) or level <= ordered[count]:
            break
    return list(accumulate(max(Fraction(0), level - load) for load in loads))[:-1]


def _cut_one(
    name: str, spec: Spec, position: int, edges: Sequence[Fraction]
) -> list[tuple[int, Piece]]:
    """The pieces of one tensor that begins at byte `position` of the line, with their places."""
    rows = spec.shape[0] if spec.shape else 1
    if spec.bytes < WHOLE_BELOW or rows < 2:
        middle = position + spec.bytes // 2
        return [(sum(edge <= middle for edge in edges), Piece(name, spec, 0, rows))]
    row_bytes = spec.bytes // rows
    borders = [0]
    for edge in edges:
        distance = math.floor(edge) - position
        nearest = (2 * distance + row_bytes) // (2 * row_bytes)
        borders.append(min(rows, max(0, nearest)))
    borders.append(rows)
    return [
        (place, Piece(name, spec, first, stop))
        for place, (first, stop) in enumerate(pairwise(borders))
        if first < stop
    ]


def _file_order(piece: Piece) -> tuple[int, str]:
    return -DTYPES[piece.spec.dtype][1], piece.name
