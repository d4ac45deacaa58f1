"""What all compressors with memory have in common: layout, residuals, the step, state by name.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): u = gradient + residual is compressed
to C(u), and u - C(u) is the next residual. Invariant, on every rank and for every element: what was
sent so far plus the residual is the sum of the gradients so far. The residual belongs to the
parameter by its logical name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from headway.comm.compress.layout import Dense, Layout, make_layout
from headway.comm.method import Fused, Method, Piece, Route, Waiting, all_reduce
from headway.errors import RunError

LARGEST_BUCKET = 2**31
"""Elements; places in a bucket are sent as 32-bit numbers."""


class Compressor(Method):
    """Base of the compressors that work on whole buckets.

    Args:
        seed: Of what is drawn at random; the same on all ranks.
    """

    name: ClassVar[str]
    feedback: ClassVar[bool] = True
    only_cpu: ClassVar[bool] = False
    align: ClassVar[int] = 1

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._step = 0
        self._pieces: tuple[Piece, ...] | None = None
        self._layout = Layout((), (), 0, ())
        self._dense = Dense(())
        self._residual = torch.empty(0)
        self._restored: dict[str, Tensor] = {}

    # -- what a compressor is ------------------------------------------------------------------

    @abstractmethod
    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape is compressed; the others are summed whole."""

    @abstractmethod
    def _open(self, buffer: Tensor, route: Route) -> None:
        """Allocate for a new layout that compresses something; `self._residual` is there."""

    @abstractmethod
    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        """Exchange a bucket whose layout is `self._layout`, which compresses something."""

    def _piece_state(self, number: int, piece: Piece) -> dict[str, Tensor]:
        """State of one compressed parameter: what -> tensor."""
        found = {"step": torch.tensor(self._step)}
        if self.feedback:
            found["residual"] = self._residual_of(piece)
        return found

    def _restore_piece(self, number: int, piece: Piece, state: Mapping[str, Tensor]) -> None:
        """Take up what `_piece_state` gave, of a layout that is new."""
        if "step" in state:
            self._step = max(self._step, int(state["step"]))
        if self.feedback and "residual" in state:
            self._residual_of(piece).copy_(state["residual"].reshape(piece.shape))

    # -- Method --------------------------------------------------------------------------------

    def rounds(self, fused: Fused, route: Route) -> Iterator[Waiting]:
        if self._pieces is not fused.pieces:
            self._prepare(fused, route)
        if self._layout.sources:
            yield from self._exchange(fused.buffer, route)
        else:
            yield all_reduce(fused.buffer, route)
        self._step += 1

    def state(self) -> dict[str, Tensor]:
        if self._pieces is None:
            return dict(self._restored)
        return {
            f"{piece.name}/{what}": value.detach().clone()
            for number, piece in enumerate(self._layout.packed)
            for what, value in self._piece_state(number, piece).items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._restored = dict(state)
        self._pieces = None
        self._step = 0

    # -- for the compressors -------------------------------------------------------------------

    def _start_dense(self, buffer: Tensor, route: Route) -> tuple[dist.Work | None, Tensor]:
        """Sum the dense part whole, beside the compressed exchange."""
        if not self._dense.spans:
            return None, buffer[:0]
        whole = self._dense.collect(buffer)
        return all_reduce(whole, route), whole

    def _residual_of(self, piece: Piece) -> Tensor:
        """A view in the parameter's shape."""
        return self._residual[piece.start : piece.stop].view(piece.shape)

    def _clear(self, buffer: Tensor) -> None:
        """Zero the compressed part of a bucket."""
        for source in self._layout.sources:
            buffer[source.start : source.stop].zero_()

    def _prepare(self, fused: Fused, route: Route) -> None:
        """A new bucket, or another cut of the parameters: state moves over by name."""
        if self._pieces == fused.pieces:
            self._pieces = fused.pieces
            return
        buffer = fused.buffer
        self._check(fused)
        known = self.state()
        self._layout = make_layout(fused.pieces, buffer.numel(), self.compresses, align=self.align)
        self._dense = Dense(self._layout.dense)
        if self.feedback:
            wide = torch.promote_types(buffer.dtype, torch.float32)
            self._residual = torch.zeros(self._layout.size, dtype=wide, device=buffer.device)
        if self._layout.sources:
            self._open(buffer, route)
        self._pieces = fused.pieces
        self._restored = {}
        for number, piece in enumerate(self._layout.packed):
            prefix = f"{piece.name}/"
            own = {
                key.removeprefix(prefix): value
                for key, value in known.items()
                if key.startswith(prefix)
            }
            self._restore_piece(number, piece, own)

    def _check(self, fused: Fused) -> None:
        buffer = fused.buffer
        if not fused.pieces:
            raise RunError(
                f"{self.name} cannot exchange a chunk of a bucket",
                why="It needs to know where each parameter begins.",
                fix="Exchange whole buckets, or use none, fp16 or bf16.",
            )
        if not buffer.is_floating_point():
            raise RunError(
                f"{self.name} cannot compress gradients of type {buffer.dtype}",
                where=f"the bucket of {fused.pieces[0].name}",
                fix='Give these parameters compress = "none" in exchange.parts.',
            )
        if self.only_cpu and not buffer.is_cpu:
            raise RunError(
                f"{self.name} works in the memory of the CPU, and the gradients are on "
                f"{buffer.device}",
                where=f"the bucket of {fused.pieces[0].name}",
                fix="Use none, fp16, bf16, topk, mstopk, randomk or powersgd there.",
            )
        if buffer.numel() >= LARGEST_BUCKET:
            raise RunError(
                f"a bucket of {buffer.numel()} elements is too large for {self.name}",
                why=f"Places in it are 32-bit numbers, so it may have {LARGEST_BUCKET - 1}.",
                fix="Use smaller buckets.",
            )
