"""Which parts of a bucket a compressor works on, and which are summed whole.

The compressed parameters stand one after the other in an array of the compressor's own ("packed"),
where residuals live; the rest of the bucket and its flags is "dense". Invariant: every element of
the bucket is in exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from headway.comm.method import Piece

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """One bucket, taken apart.

    Attributes:
        sources: The compressed parameters, where they lie in the bucket.
        packed: The same, where they lie in the packed array.
        size: Elements of the packed array.
        dense: What is summed whole, in elements of the bucket.
    """

    sources: tuple[Piece, ...]
    packed: tuple[Piece, ...]
    size: int
    dense: tuple[Span, ...]

    @property
    def dense_size(self) -> int:
        return sum(stop - start for start, stop in self.dense)


def make_layout(
    pieces: Sequence[Piece],
    elements: int,
    compresses: Callable[[tuple[int, ...]], bool],
    *,
    align: int = 1,
) -> Layout:
    """Take a bucket apart.

    Args:
        pieces: Of the bucket.
        elements: Of the bucket, with its flags.
        compresses: Whether a parameter of this shape is compressed.
        align: In the packed array parameters start at multiples of this.
    """
    sources = tuple(piece for piece in pieces if compresses(piece.shape))
    packed, size = [], 0
    for piece in sources:
        stop = size + piece.stop - piece.start
        packed.append(Piece(piece.name, size, stop, piece.shape))
        size = -(-stop // align) * align
    borders = [(0, 0), *((p.start, p.stop) for p in sources), (elements, elements)]
    gaps = [(before[1], after[0]) for before, after in pairwise(borders)]
    dense = tuple((start, stop) for start, stop in gaps if stop > start)
    return Layout(sources, tuple(packed), size, dense)


@dataclass(slots=True)
class Dense:
    """The dense part of a bucket as one tensor."""

    spans: tuple[Span, ...]
    _copy: Tensor | None = field(default=None, init=False)

    def collect(self, buffer: Tensor) -> Tensor:
        """The part as one tensor; a view of the bucket where it is in one place."""
        if len(self.spans) == 1:
            return buffer[slice(*self.spans[0])]
        if self._copy is None:
            size = sum(stop - start for start, stop in self.spans)
            self._copy = torch.empty(size, dtype=buffer.dtype, device=buffer.device)
        self.copy(buffer, self._copy)
        return self._copy

    def copy(self, buffer: Tensor, out: Tensor) -> None:
        """The part into another tensor."""
        place = 0
        for start, stop in self.spans:
            out[place : place + stop - start] = buffer[start:stop]
            place += stop - start

    def spread(self, summed: Tensor, buffer: Tensor) -> None:
        """Put the sums back, wherever they have been collected."""
        place = 0
        if len(self.spans) == 1 and summed.data_ptr() == buffer[self.spans[0][0] :].data_ptr():
            return
        for start, stop in self.spans:
            buffer[start:stop] = summed[place : place + stop - start]
            place += stop - start
