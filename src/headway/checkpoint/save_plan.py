"""The save plan: which rank writes which part of which tensor, balanced by bytes.

Tensors are partitioned among the ranks that hold them. The partition depends on names, shapes,
element types, holders and the number of ranks alone, so that every rank computes the same one
without communication; the parts are disjoint and cover everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

from headway.checkpoint.format import DTYPES
from headway.errors import CheckpointError

WHOLE_BELOW = 2**20
"""Tensors of fewer bytes stay whole: cutting them would not balance anything."""


@dataclass(frozen=True)
class TensorBox:
    """A part of a tensor: where it begins, and how far it goes, one number per dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HeldTensorSpec:
    """Element type (a key of `DTYPES`) and shape of a tensor, and the part that a rank has of it.

    Attributes:
        box: The part; None: all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    box: TensorBox | None = None

    @property
    def part(self) -> TensorBox:
        return self.box or TensorBox((0,) * len(self.shape), self.shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.part.shape) * DTYPES[self.dtype][1]

    @property
    def whole(self) -> HeldTensorSpec:
        return replace(self, box=None)


@dataclass(frozen=True)
class SavePiece:
    """Rows `first` to `stop` of a tensor (its dimension 0) or of a rank's part of it.

    A whole tensor has `first == 0` and `stop == shape[0]`, or (0, 1) for a tensor of no dimension.
    """

    name: str
    spec: HeldTensorSpec
    first: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.spec.part.shape
        return (self.stop - self.first, *shape[1:]) if shape else ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the piece begins in the tensor, one index per dimension."""
        offsets = self.spec.part.offsets
        return (self.first, *offsets[1:]) if offsets else ()

    @property
    def rows(self) -> slice:
        """Of the memory that the rank has."""
        start = self.spec.part.offsets[0] if self.spec.shape else 0
        return slice(self.first - start, self.stop - start)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.spec.dtype][1]


@dataclass(frozen=True)
class Holdings:
    """What all ranks together hold.

    Attributes:
        specs: Logical name -> spec of the whole tensor.
        holders: (logical name, part) -> the ranks that have it, ascending.
    """

    specs: Mapping[str, HeldTensorSpec]
    holders: Mapping[tuple[str, TensorBox | None], tuple[int, ...]]

    @staticmethod
    def everywhere(specs: Mapping[str, HeldTensorSpec], ranks: int) -> Holdings:
        """Every rank has every tensor, whole."""
        return Holdings(specs, {(name, None): tuple(range(ranks)) for name in specs})

    @staticmethod
    def of(found: Sequence[Mapping[str, HeldTensorSpec]]) -> Holdings:
        """From what each rank has.

        Raises:
            CheckpointError: Two ranks have different tensors under one name.
        """
        specs: dict[str, HeldTensorSpec] = {}
        owners: dict[str, int] = {}
        holders: dict[tuple[str, TensorBox | None], tuple[int, ...]] = {}
        for rank, own in enumerate(found):
            for name, spec in own.items():
                if specs.setdefault(name, spec.whole) != spec.whole:
                    raise CheckpointError(
                        "cannot be stored in a checkpoint",
                        where=f"tensor {name}",
                        why=f"it is {specs[name]} on rank {owners[name]}, {spec} on {rank}",
                        fix="give the same tensor on all ranks that have it",
                    )
                owners.setdefault(name, rank)
                if spec.bytes or spec.box is None:  # a rank may have no row of a short tensor
                    holders[name, spec.box] = (*holders.get((name, spec.box), ()), rank)
        return Holdings(specs, holders)

    @property
    def bytes(self) -> int:
        """Of all tensors, each counted once."""
        return sum(spec.bytes for spec in self.specs.values())


def partition_writes(holdings: Holdings, ranks: int) -> tuple[tuple[SavePiece, ...], ...]:
    """The pieces of each rank.

    All tensors with the same holders are laid end to end in the order of their names, and the line
    is cut so that the holders' shares become equal, as far as what they have already allows it; a
    cut that falls inside a large tensor is moved to the nearest row border, one inside a small
    tensor to its nearer end. Few holders come first: they have the least choice.

    Returns:
        One tuple of pieces per rank. A rank has at most one piece of a tensor. Elements of large
        size come first, so that pieces packed one after the other stay aligned.
    """
    lines: dict[tuple[int, ...], list[tuple[str, HeldTensorSpec]]] = {}
    # Sorted, because every rank must lay out the same lines.
    for (name, box), who in sorted(holdings.holders.items(), key=_by_name):
        lines.setdefault(who, []).append((name, replace(holdings.specs[name], box=box)))
    shares: list[list[SavePiece]] = [[] for _ in range(ranks)]
    for holders in sorted(lines, key=lambda who: (len(who), who)):
        specs = lines[holders]
        loads = [sum(piece.bytes for piece in shares[rank]) for rank in holders]
        edges = _partition_bounds(sum(spec.bytes for _, spec in specs), loads)
        position = 0
        for name, spec in specs:
            for place, piece in _partition_tensor(name, spec, position, edges):
                shares[holders[place]].append(piece)
            position += spec.bytes
    return tuple(tuple(sorted(share, key=_file_order)) for share in shares)


def _partition_bounds(total: int, loads: Sequence[int]) -> list[Fraction]:
    """Where a line of `total` bytes is cut, so that the parts fill up `loads` to one level."""
    if not total:
        return []
    # Water-filling: the lowest loads are filled first; those above the level get nothing.
    ordered = sorted(loads)
    level = Fraction(total)
    for count in range(1, len(ordered) + 1):
        level = Fraction(total + sum(ordered[:count]), count)
        if count == len(ordered) or level <= ordered[count]:
            break
    return list(accumulate(max(Fraction(0), level - load) for load in loads))[:-1]


def _partition_tensor(
    name: str, spec: HeldTensorSpec, position: int, edges: Sequence[Fraction]
) -> list[tuple[int, SavePiece]]:
    """The pieces of one tensor that begins at byte `position` of the line, with their places."""
    start, rows = (spec.part.offsets[0], spec.part.shape[0]) if spec.shape else (0, 1)
    if spec.bytes < WHOLE_BELOW or rows < 2:
        # Whole, to the share in which most of it lies.
        middle = position + spec.bytes // 2
        return [(sum(edge <= middle for edge in edges), SavePiece(name, spec, start, start + rows))]
    # In whole numbers: every rank must find the same borders.
    row_bytes = spec.bytes // rows
    borders = [0]
    for edge in edges:
        distance = math.floor(edge) - position
        # floor(distance / row_bytes + 1/2), without floats.
        nearest = (2 * distance + row_bytes) // (2 * row_bytes)
        borders.append(min(rows, max(0, nearest)))
    borders.append(rows)
    return [
        (place, SavePiece(name, spec, start + first, start + stop))
        for place, (first, stop) in enumerate(pairwise(borders))
        if first < stop
    ]


def _by_name(
    entry: tuple[tuple[str, TensorBox | None], tuple[int, ...]],
) -> tuple[str, tuple[int, ...]]:
    name, box = entry[0]
    return name, box.offsets if box else ()


def _file_order(piece: SavePiece) -> tuple[int, str]:
    return -DTYPES[piece.spec.dtype][1], piece.name
