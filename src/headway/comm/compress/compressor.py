"""Base of the compressors: error feedback, the layout of a bucket, payload collectives.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): u = gradient + residual is compressed
to C(u), and u - C(u) is the next residual. On every rank and for every element, what was sent so
far plus the residual is the sum of the gradients so far. A residual belongs to its parameter by
logical name.

`BucketLayout` divides a bucket: the compressed parameters stand one after the other in a packed
array, where residuals live; the rest and the flags are summed whole. Every element is in exactly
one of the two. `seeded_generator` depends on seed, name, step and rank only, so that ranks agree
without communication and a resumed run continues the same sequence. Payload collectives use only
operations with a future, because a lane with several buckets in flight must not block in one of
them.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.compression import (
    COMPRESSORS,
    ELEMENTWISE_NAMES,
    Compression,
    gathered_parts,
)
from headway.comm.algorithms.method import (
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    PendingOperation,
    Route,
    all_reduce,
)
from headway.errors import RunError


def seeded_generator(seed: int, name: str, step: int = 0, rank: int = 0) -> np.random.Generator:
    """A generator of its own for one parameter (or bucket) in one step on one rank."""
    # Not hash(name), which differs from process to process.
    words = (seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(name.encode()), step, rank)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(words)))


def gather_payloads(rows: Tensor, payload: Tensor, route: Route) -> list[dist.Work]:
    """Start to gather every rank's payload; all of the operations have to be waited for.

    Args:
        rows: uint8[ranks, bytes]; row r is that of `route.ranks[r]`.
        payload: uint8[bytes].
    """
    # Gloo between two ranks first sends and then receives: the notice that one is ready to receive
    # queues behind the payload. In parts both directions are busy: 6 MiB at 100 Mbit/s take 0.54
    # instead of 0.74 s, where 0.50 are possible.
    sizes = list(gathered_parts(payload.numel(), route.size)) if payload.is_cpu else []
    if len(sizes) > 1:
        parts = zip(payload.split(sizes), rows[0].split(sizes), rows[1].split(sizes), strict=True)
        return [
            dist.all_gather([first, second], own, group=route.group, async_op=True)
            for own, first, second in parts
        ]
    # torch 2.13 has a new name for the function and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return [gather(rows.view(-1), payload, group=route.group, async_op=True)]


def exchange_payloads(rows: Tensor, payloads: Tensor, route: Route) -> dist.Work:
    """Start to send row r of `payloads` to rank r, and to receive its row for this rank.

    Args:
        rows: uint8[ranks, bytes]; row r comes from rank r.
        payloads: uint8[ranks, bytes].
    """
    out, own = rows.view(-1), payloads.view(-1)
    work: dist.Work = dist.all_to_all_single(out, own, group=route.group, async_op=True)
    return work


# Which parts of a bucket a compressor works on, and which are summed whole.


PackedSpan = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What of a bucket is compressed and what is summed whole.

    Attributes:
        sources: The compressed parameters, where they lie in the bucket.
        packed: The same, where they lie in the packed array.
        dense: What is summed whole, in elements of the bucket.
    """

    sources: tuple[GradientSlice, ...]
    packed: tuple[GradientSlice, ...]
    size: int
    dense: tuple[PackedSpan, ...]

    @property
    def dense_size(self) -> int:
        return sum(stop - start for start, stop in self.dense)


def make_bucket_layout(
    pieces: Sequence[GradientSlice],
    elements: int,
    compresses: Callable[[tuple[int, ...]], bool],
    *,
    align: int = 1,
) -> BucketLayout:
    """Divide a bucket of so many elements, flags included.

    Args:
        compresses: Whether a parameter of this shape is compressed.
        align: In the packed array parameters start at multiples of this.
    """
    sources = tuple(piece for piece in pieces if compresses(piece.shape))
    packed, size = [], 0
    for piece in sources:
        stop = size + piece.stop - piece.start
        packed.append(GradientSlice(piece.name, size, stop, piece.shape))
        size = -(-stop // align) * align
    borders = [(0, 0), *((p.start, p.stop) for p in sources), (elements, elements)]
    gaps = [(before[1], after[0]) for before, after in pairwise(borders)]
    dense = tuple((start, stop) for start, stop in gaps if stop > start)
    return BucketLayout(sources, tuple(packed), size, dense)


@dataclass(slots=True)
class UncompressedPart:
    """The dense part of a bucket as one tensor."""

    spans: tuple[PackedSpan, ...]
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
        # Collected as a view of the bucket: the sums are there already.
        if len(self.spans) == 1 and summed.data_ptr() == buffer[self.spans[0][0] :].data_ptr():
            return
        for start, stop in self.spans:
            buffer[start:stop] = summed[place : place + stop - start]
            place += stop - start


# What all compressors with memory have in common: layout, residuals, the step, state by name.


# Elements; places in a bucket are sent as 32-bit numbers.
LARGEST_BUCKET = 2**31


@dataclass(frozen=True)
class PieceMemory:
    """What a compressor keeps of each parameter beside its residual.

    Attributes:
        name: In checkpoints.
        save: From the number of a compressed parameter and its place; None: nothing now.
        load: Takes up what `save` gave, of a layout that is new.
    """

    name: str
    save: Callable[[int, GradientSlice], Tensor | None]
    load: Callable[[int, GradientSlice, Tensor], None]


class Compressor(ExchangeMethod):
    """Base of the compressors that work on whole buckets; `memory` is kept beside residuals."""

    align: ClassVar[int] = 1
    dense_in_payload: ClassVar[bool] = False
    """What is summed whole travels in the payload; else as an all-reduce beside it."""

    def __init__(
        self, compression: Compression, *, seed: int = 0, memory: PieceMemory | None = None
    ) -> None:
        self.compression = compression
        self._memory = memory
        self._seed = seed
        self._step = 0
        self._pieces: tuple[GradientSlice, ...] | None = None
        self._layout = BucketLayout((), (), 0, ())
        self._dense = UncompressedPart(())
        self._residual = torch.empty(0)
        self._restored: dict[str, Tensor] = {}

    @abstractmethod
    def _open(self, buffer: Tensor, route: Route) -> None:
        """Allocate for a new layout that compresses something; `self._residual` is there."""

    @abstractmethod
    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[PendingOperation]:
        """Exchange a bucket whose layout is `self._layout`, which compresses something."""

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        if self._pieces is not fused.pieces:
            self._prepare(fused, route)
        buffer = fused.buffer
        if not self._layout.sources:
            yield all_reduce(buffer, route)
        elif self._dense.spans and not self.dense_in_payload:
            # Begun first, so that it overlaps with the compression.
            whole = self._dense.collect(buffer)
            summing = all_reduce(whole, route)
            yield from self._exchange(buffer, route)
            yield summing
            self._dense.spread(whole, buffer)
        else:
            yield from self._exchange(buffer, route)
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

    def _piece_state(self, number: int, piece: GradientSlice) -> dict[str, Tensor]:
        found = {"step": torch.tensor(self._step)}
        if self.compression.feedback:
            found["residual"] = self._residual_of(piece)
        kept = self._memory.save(number, piece) if self._memory else None
        if self._memory and kept is not None:
            found[self._memory.name] = kept
        return found

    def _restore_piece(
        self, number: int, piece: GradientSlice, state: Mapping[str, Tensor]
    ) -> None:
        """Inverse of `_piece_state`, for a new layout."""
        if "step" in state:
            self._step = max(self._step, int(state["step"]))
        if self.compression.feedback and "residual" in state:
            self._residual_of(piece).copy_(state["residual"].reshape(piece.shape))
        if self._memory and self._memory.name in state:
            self._memory.load(number, piece, state[self._memory.name])

    def _residual_of(self, piece: GradientSlice) -> Tensor:
        """A view in the parameter's shape."""
        return self._residual[piece.start : piece.stop].view(piece.shape)

    def _clear(self, buffer: Tensor) -> None:
        """Zero the compressed part of a bucket."""
        for source in self._layout.sources:
            buffer[source.start : source.stop].zero_()

    def _prepare(self, fused: FusedBuffer, route: Route) -> None:
        """A new bucket, or another layout of the parameters: state moves over by name."""
        # Another tuple of the same layout: nothing has moved.
        if self._pieces == fused.pieces:
            self._pieces = fused.pieces
            return
        buffer = fused.buffer
        self._check(fused)
        # By the old layout, before it is replaced.
        known = self.state()
        self._layout = make_bucket_layout(
            fused.pieces, buffer.numel(), self.compression.compresses, align=self.align
        )
        self._dense = UncompressedPart(self._layout.dense)
        if self.compression.feedback:
            # In 16 bits a residual would lose the small values that it is there to keep.
            wide = torch.promote_types(buffer.dtype, torch.float32)
            self._residual = torch.zeros(self._layout.size, dtype=wide, device=buffer.device)
        if self._layout.sources:
            self._open(buffer, route)
        self._pieces = fused.pieces
        self._restored = {}
        for number, piece in enumerate(self._layout.packed):
            split = ((key.rpartition("/"), value) for key, value in known.items())
            own = {what: value for (name, _, what), value in split if name == piece.name}
            self._restore_piece(number, piece, own)

    def _check(self, fused: FusedBuffer) -> None:
        buffer, name = fused.buffer, self.compression.name
        if not fused.pieces:
            raise RunError(
                f"{name} cannot exchange a chunk of a bucket",
                why="It needs to know where each parameter begins.",
                fix=f"Exchange whole buckets, or use one of {', '.join(ELEMENTWISE_NAMES)}.",
            )
        if not buffer.is_floating_point():
            raise RunError(
                f"{name} cannot compress gradients of type {buffer.dtype}",
                where=f"the bucket of {fused.pieces[0].name}",
                fix='Give these parameters compress = "none" in exchange.parts.',
            )
        if self.compression.host_only and not buffer.is_cpu:
            others = ", ".join(known for known, kind in COMPRESSORS.items() if not kind.host_only)
            raise RunError(
                f"{name} works in the memory of the CPU, and the gradients are on {buffer.device}",
                where=f"the bucket of {fused.pieces[0].name}",
                fix=f"Use one of {others} there.",
            )
        if buffer.numel() >= LARGEST_BUCKET:
            raise RunError(
                f"a bucket of {buffer.numel()} elements is too large for {name}",
                why=f"Places in it are 32-bit numbers, so it may have {LARGEST_BUCKET - 1}.",
                fix="Use smaller buckets.",
            )
