"""Fetching that can be differentiated: ranges, sums over ranks, and buffers laid out again.

What a rank computes is its own copy of the loss, and the objective is the sum over all ranks; each
function here has the exact adjoint of that. A loss that is the same number on p ranks therefore
counts p times: divide by p, and add gradients over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from headway.capture.fake import is_stand_in
from headway.errors import RunError
from headway.graph.ranges import Range
from headway.parallel.spatial.exchange import (
    Axis,
    Fetching,
    Need,
    Piece,
    Returning,
    all_sum,
    assemble,
)


class _Fetch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, needs: Sequence[Need], fill: float, kept: list[Piece]) -> Any:
        ctx.needs = needs
        kept += Fetching(x.detach(), needs).finish()
        box = assemble(kept, needs, fill)
        return box.view_as(box) if box is kept[0].part else box

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Returning(gradient, ctx.needs).finish().contiguous(), None, None, None


def fetch_box(x: Tensor, needs: Sequence[Need], fill: float = 0.0) -> Tensor:
    """The box that this rank wants of a tensor that lies in parts on several ranks.

    Args:
        x: The part that this rank owns.
        needs: One for each dimension along which something else than that is wanted. All ranks
            that hold parts call this with the same.
        fill: For padding.
    """
    return x if _nothing(needs) else _fetched(x, needs, fill)[0]


def _nothing(needs: Sequence[Need]) -> bool:
    return all(need.have == need.want for need in needs)


def _fetched(x: Tensor, needs: Sequence[Need], fill: float) -> tuple[Tensor, list[Piece]]:
    kept: list[Piece] = []
    box = _Fetch.apply(x, tuple(needs), fill, kept)  # type: ignore[no-untyped-call]
    return box, kept


def fetch(x: Tensor, dim: int, have: Sequence[Range], want: Sequence[Range], axis: Axis) -> Tensor:
    """The range of one dimension that this rank wants; differentiable.

    Args:
        x: This rank's part: `have[rank]` along `dim`.
        dim: Of the tensor.
        have: By rank, what each owns: in order, without gaps.
        want: By rank, what each wants; what lies beyond the tensor is filled with 0.
        axis: The ranks; all of them call this, also those that want nothing.
    """
    return fetch_box(x, [Need(dim, axis, tuple(have), tuple(want))])


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to lay out a box again, from parts that are alive anyway and thin halos."""

    pieces: list[Piece]
    needs: tuple[Need, ...]
    fill: float
    version: int

    def make(self) -> Tensor:
        if self.pieces[0].part._version != self.version:
            raise RunError(
                "a split activation was changed in place after an operator had saved it",
                why="backward would compute with the changed numbers",
                fix="Use the operator behind it without inplace=True.",
            )
        return assemble(self.pieces, self.needs, self.fill)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a box of which backward needs no entry, as of poolings."""

    like: Tensor
    shape: torch.Size

    def make(self) -> Tensor:
        return self.like.expand(self.shape)


@contextmanager
def fetched(
    x: Tensor, needs: Sequence[Need], fill: float = 0.0, *, values: bool = True
) -> Iterator[Tensor]:
    """As `fetch_box`; what operators in the context save of the box is not a copy of `x`.

    Backward lays the box out again, from `x` and the halos, without messages.

    Args:
        x: As there, like the other arguments.
        needs: What is wanted.
        fill: For padding.
        values: Backward of the operators needs the entries of the box, not its sizes alone.
    """
    if _nothing(needs):
        yield x
        return
    box, pieces = _fetched(x, needs, fill)
    kept: _Recipe | _Sizes = _Recipe(pieces, tuple(needs), fill, x._version)
    if not values:
        kept = _Sizes(x.new_empty(1), box.shape)
    place, shape, stride = _place(box), box.shape, box.stride()

    def pack(saved: Tensor) -> Tensor | _Recipe | _Sizes:
        same = _place(saved) == place and saved.shape == shape and saved.stride() == stride
        return kept if same and saved.numel() else saved

    def unpack(found: Tensor | _Recipe | _Sizes) -> Tensor:
        return found if isinstance(found, Tensor) else found.make()

    with saved_tensors_hooks(pack, unpack):
        yield box


def _place(x: Tensor) -> tuple[int, int]:
    """Where it lies in memory; a stand-in has its storage alone."""
    if is_stand_in(x):
        return id(x.untyped_storage()), int(x.storage_offset())
    return x.data_ptr(), 0


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        ctx.axes = axes
        for axis in axes:
            x = all_sum(x, axis)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for axis in ctx.axes:
            gradient = all_sum(gradient, axis)
        return gradient, None


def summed(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The sum over all ranks of some axes; its adjoint is the sum of the gradients."""
    split = tuple(axis for axis in axes if axis.size > 1)
    return _Sum.apply(x, split) if split else x  # type: ignore[no-untyped-call]
