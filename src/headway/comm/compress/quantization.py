"""Quantization: fp16 and bf16, int8 with stochastic rounding, 1-bit sign.

fp16, bf16: rounded to 16 bits and summed by the network. Elementwise, so that any slice of a bucket
may be exchanged alone. A flag of 1.0 becomes a power of two, and the sum of flags stays above zero.

int8: a scale s = max|x| / 127 per 256 values; x becomes q = floor(x / s + r) with r uniform in [0,
1), so that the mean of q s over r is x (Alistarh et al. 2017, QSGD, section 3). It needs no
residual. Two ranks gather each other's bytes; of more ranks each reduces one part of the bucket and
sends it on encoded again, which moves fewer bytes.

sign: u = gradient + residual is sent as s sign(u) with s = mean|u| of the layer (Seide et al. 2014;
Karimireddy et al. 2019, section 4). Two ranks gather each other's bits. Of more ranks each serves
one part: it sums the decoded bits of all, adds the residual of its own second rounding, and sends
one bit per value again (the two-sided form of Tang et al. 2021). A value counts as negative if its
sign bit is set, minus zero included, both in packing and in the residual; otherwise the two would
not add up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.collective.compression import (
    BLOCK,
    BLOCK_BYTES,
    Bf16Compression,
    Compression,
    Fp16Compression,
    Int8Compression,
    SignCompression,
    blocks_per_rank,
    gathers_whole,
    sign_bytes_per_rank,
)
from headway.comm.algorithms.method import (
    FusedBuffer,
    GradientSlice,
    PendingOperation,
    Route,
    StatelessMethod,
    all_reduce,
)
from headway.comm.compress.compressor import (
    Compressor,
    PieceMemory,
    exchange_payloads,
    gather_payloads,
    seeded_generator,
)
from headway.errors import RunError


class _SixteenBit(StatelessMethod):
    """A bucket is rounded to 16 bits, summed, and widened again."""

    elementwise = True
    compression: ClassVar[Compression]
    wire: ClassVar[torch.dtype]

    def __init__(self) -> None:
        # Wire buffers are kept for the next step: memory that is touched for the first time costs
        # ten times as much as the rounding itself.
        self._free: dict[int, list[Tensor]] = {}

    @abstractmethod
    def factor(self, ranks: int) -> float:
        """Values are multiplied by this before they are summed, and divided by it afterwards."""

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        buffer = fused.buffer
        if not buffer.is_floating_point():
            raise RunError(
                f"{self.compression.name} cannot round gradients of type {buffer.dtype}",
                why="They are not real numbers.",
                fix='Give these parameters compress = "none" in exchange.parts.',
            )
        factor = self.factor(route.size)
        if factor != 1.0:
            buffer.mul_(factor)
        # Several chunks may be under way at once, each in a buffer of its own.
        free = self._free.setdefault(buffer.numel(), [])
        half = free.pop() if free else torch.empty_like(buffer, dtype=self.wire)
        half.copy_(buffer)
        yield all_reduce(half, route)
        buffer.copy_(half)
        if factor != 1.0:
            buffer.mul_(1.0 / factor)
        free.append(half)


class Fp16(_SixteenBit):
    """11 significant bits, but a largest number of 65,504, which a sum over ranks may pass.

    So values are divided before the sum by the smallest power of two that is not below the number
    of ranks: if every rank's gradient fits, so does the sum. A power of two costs no rounding, only
    the numbers below 6e-8 times the ranks.
    """

    compression = Fp16Compression()
    wire = torch.float16

    def factor(self, ranks: int) -> float:
        return 2.0 ** -(ranks - 1).bit_length()


class Bf16(_SixteenBit):
    """8 significant bits with the range of float32: no scaling."""

    compression = Bf16Compression()
    wire = torch.bfloat16

    def factor(self, ranks: int) -> float:
        return 1.0


# int8: 8 bits per value with a scale per 256 values, rounded at random without bias.


# Elements that are worked on at a time: they stay in the second-level cache.
INT8_STRIDE = 2**16
# Slightly below 127, so that x / s + r never rounds up to 128.
LEVELS = 126.9999
# A block whose largest magnitude is below this counts as zero: its scale would have no inverse.
TINIEST = 1e-30


class Int8(Compressor):
    """Flags are summed as they are; everything else is rounded, small tensors too."""

    def __init__(self, compression: Int8Compression, *, seed: int = 0) -> None:
        super().__init__(compression, seed=seed)
        self._payload = self._rows = self._parts = torch.empty(0, dtype=torch.uint8)
        self._sum = torch.empty(0)
        self._rounder = _StochasticRounder()

    def _open(self, buffer: Tensor, route: Route) -> None:
        blocks = blocks_per_rank(self._layout.size, route.size)
        self._payload = torch.empty(blocks * BLOCK_BYTES, dtype=torch.uint8)
        self._rows = torch.empty((route.size, blocks * BLOCK_BYTES), dtype=torch.uint8)
        if not gathers_whole(route.size):
            self._parts = torch.empty_like(self._rows)
            self._sum = torch.empty(blocks * BLOCK)

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[PendingOperation]:
        size = self._layout.size
        name = self._layout.packed[0].name
        draw = seeded_generator(self._seed, name, self._step, route.rank)
        self._rounder.draw(draw)
        if gathers_whole(route.size):
            self._rounder.encode(buffer[:size], self._payload)
            yield from gather_payloads(self._rows, self._payload, route)
            decode_sum(self._rows, buffer[:size])
        else:
            span = self._sum.numel()
            for number, row in enumerate(self._parts):
                self._rounder.encode(buffer[:size][number * span : (number + 1) * span], row)
            yield exchange_payloads(self._rows, self._parts, route)
            decode_sum(self._rows, self._sum)
            # New numbers: with those of the first rounding the errors would not be independent.
            self._rounder.draw(draw)
            self._rounder.encode(self._sum, self._payload)
            yield from gather_payloads(self._rows, self._payload, route)
            for number, row in enumerate(self._rows):
                decode_sum(row[None], buffer[:size][number * span : (number + 1) * span])


def _scales_and_levels(row: Tensor) -> tuple[Tensor, Tensor]:
    """A row of bytes: float32[blocks], then int8[blocks * BLOCK]."""
    blocks = row.numel() // BLOCK_BYTES
    return row[: 4 * blocks].view(torch.float32), row[4 * blocks :].view(torch.int8)


class _StochasticRounder:
    """Encodes; keeps its working memory.

    The random numbers are one table per step, used again for every stretch of the bucket: each
    value is still rounded without bias, and two values share a number only if they lie a multiple
    of `INT8_STRIDE` apart.
    """

    def __init__(self) -> None:
        self._work = torch.empty(INT8_STRIDE)
        self._table = torch.empty(INT8_STRIDE)

    def draw(self, generator: np.random.Generator) -> None:
        """New random numbers."""
        generator.random(out=self._table.numpy(), dtype=np.float32)

    def encode(self, values: Tensor, row: Tensor) -> None:
        """Round values into a row of bytes; blocks beyond them become zero."""
        scales, levels = _scales_and_levels(row)
        for start in range(0, levels.numel(), INT8_STRIDE):
            count = min(INT8_STRIDE, levels.numel() - start)
            here = values[start : start + count]
            work = self._work[:count]
            work[: here.numel()].copy_(here)
            work[here.numel() :].zero_()
            blocks = work.view(-1, BLOCK)
            first = start // BLOCK
            scale = scales[first : first + len(blocks)]
            torch.amax(blocks.abs(), 1, out=scale)
            scale.div_(LEVELS)
            inverse = scale.reciprocal().masked_fill_(scale < TINIEST / LEVELS, 0.0)
            blocks.mul_(inverse[:, None])
            work.add_(self._table[:count]).floor_()
            levels[start : start + count].copy_(work)


def decode_sum(rows: Tensor, out: Tensor) -> None:
    """The sum of what rows of bytes stand for, added in order of the rows.

    Args:
        rows: uint8[ranks, bytes].
        out: 1-D; at most as many values as a row holds.
    """
    decoded = [_scales_and_levels(row) for row in rows]
    work, total = torch.empty(INT8_STRIDE), torch.empty(INT8_STRIDE)
    for start in range(0, out.numel(), INT8_STRIDE):
        count = min(INT8_STRIDE, out.numel() - start)
        padded = -(-count // BLOCK) * BLOCK
        first = start // BLOCK
        blocks, sums = work[:padded].view(-1, BLOCK), total[:padded].zero_().view(-1, BLOCK)
        for scales, levels in decoded:
            work[:padded].copy_(levels[start : start + padded])
            sums.addcmul_(blocks, scales[first : first + len(blocks), None])
        out[start : start + count].copy_(total[:count])


Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

# Values that are worked on at a time: they stay in the second-level cache.
SIGN_STRIDE = 2**16


@dataclass(frozen=True, slots=True)
class BitRange:
    """Values `start` (a multiple of 8) to `stop` of a part of the packed array, of one layer.

    Attributes:
        offset: Where the range begins in the layer.
    """

    layer: int
    start: int
    stop: int
    offset: int


def bit_ranges(pieces: Sequence[GradientSlice], number: int, part: int) -> list[BitRange]:
    """What part `number` of `part` values contains of each layer."""
    first = number * part
    found = []
    for layer, piece in enumerate(pieces):
        start, stop = max(piece.start, first), min(piece.stop, first + part)
        if start < stop:
            found.append(BitRange(layer, start - first, stop - first, start - piece.start))
    return found


def pack_signs(values: Floats, scale: float, bits: Bytes) -> None:
    """Write one bit per value (1: not negative) and subtract what it stands for from the value.

    Args:
        values: float32 or float64; replaced by value - scale sign(value).
        bits: One byte for 8 values; the last one is filled up with zeros.
    """
    integer = np.dtype(f"i{values.itemsize}")
    sign = np.iinfo(integer).min
    magnitude = np.asarray(scale, values.dtype).view(integer)
    for start in range(0, values.size, SIGN_STRIDE):
        here = values[start : start + SIGN_STRIDE]
        keys: NDArray[np.int64] = here.view(integer)
        packed = np.packbits(keys >= 0)
        bits[start // 8 : start // 8 + packed.size] = packed
        # The scale with the sign of the value: what its bit will stand for.
        error = keys & sign
        error |= magnitude
        here -= error.view(values.dtype)


def mean_magnitude(values: Floats) -> float:
    """The scale of a layer: the mean of |value|, summed block by block in double precision."""
    block = np.empty(min(SIGN_STRIDE, values.size), values.dtype)
    total = 0.0
    for start in range(0, values.size, SIGN_STRIDE):
        here = values[start : start + SIGN_STRIDE]
        total += float(np.abs(here, out=block[: here.size]).sum())
    return total / values.size


def sum_signs(rows: Sequence[tuple[Bytes, float]], out: Floats) -> None:
    """Replace `out`, 8 values per byte, by the sum of scale for a set bit and -scale for others.

    Args:
        rows: Bits and scale of each rank, added in this order.
    """
    # One look-up decodes a byte, hence eight values.
    tables = [_signs() * np.asarray(scale, out.dtype) for _, scale in rows]
    step = SIGN_STRIDE // 8
    work = np.empty((step, 8), out.dtype)
    wide = out.reshape(-1, 8)
    for start in range(0, len(wide), step):
        here = wide[start : start + step]
        for number, ((bits, _), table) in enumerate(zip(rows, tables, strict=True)):
            decoded = work[: len(here)] if number else here
            # With mode="raise", the default, numpy copies through a buffer so that it can undo.
            np.take(table, bits[start : start + step], axis=0, out=decoded, mode="clip")
            if number:
                here += decoded


def _signs() -> NDArray[np.int8]:
    """int8[256, 8]: what each byte stands for."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    return np.unpackbits(every, axis=1).astype(np.int8) * np.int8(2) - np.int8(1)


# sign: one bit per value and one scale per layer, with error feedback.


class Sign(Compressor):
    """A row on the wire is float32[layers] scales, then bits; each layer begins on a byte."""

    align = 8

    def __init__(self, compression: SignCompression, *, seed: int = 0) -> None:
        memory = PieceMemory("server", self._save, self._load)
        super().__init__(compression, seed=seed, memory=memory)
        self._payload = self._rows = self._parts = torch.empty(0, dtype=torch.uint8)
        self._part = 0
        self._first = 0
        self._server = self._total = torch.empty(0)
        self._ranges: list[list[BitRange]] = []
        self._place = 0

    def _open(self, buffer: Tensor, route: Route) -> None:
        sizes = [piece.stop - piece.start for piece in self._layout.packed]
        num_bytes = sign_bytes_per_rank(sizes, route.size)
        width = 4 * len(sizes) + num_bytes
        parts = 1 if gathers_whole(route.size) else route.size
        self._part, self._place = 8 * num_bytes, route.ranks.index(route.rank)
        self._first = self._place * self._part if parts > 1 else 0
        self._total = torch.empty(self._part, dtype=self._residual.dtype)
        self._ranges = [bit_ranges(self._layout.packed, i, self._part) for i in range(parts)]
        self._payload = torch.zeros(width, dtype=torch.uint8)
        self._rows = torch.zeros((route.size, width), dtype=torch.uint8)
        if parts > 1:
            self._parts = torch.zeros((parts, width), dtype=torch.uint8)
            self._server = torch.zeros(self._part, dtype=self._residual.dtype)
        else:
            # Two ranks round only once: there is no second residual.
            self._server = self._residual[:0]

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[PendingOperation]:
        for source, piece in zip(self._layout.sources, self._layout.packed, strict=True):
            self._residual[piece.start : piece.stop] += buffer[source.start : source.stop]
        scales = self._scales()
        if gathers_whole(route.size):
            self._encode(self._residual, scales, self._ranges[0], self._payload)
            yield from gather_payloads(self._rows, self._payload, route)
            total = self._decoded(self._rows, self._ranges[0])
            self._put(total, self._ranges[0], buffer)
        else:
            yield from self._scatter_gather(scales, buffer, route)

    def _scatter_gather(
        self, scales: Tensor, buffer: Tensor, route: Route
    ) -> Iterator[PendingOperation]:
        # Not strict: with few values the last ranks serve no part of the residual.
        for spans, row, part in zip(
            self._ranges, self._parts, self._residual.split(self._part), strict=False
        ):
            self._encode(part, scales, spans, row)
        yield exchange_payloads(self._rows, self._parts, route)
        own = self._ranges[self._place]
        decoded = self._decoded(self._rows, own)
        for span in own:  # padding between the layers is left out
            self._server[span.start : span.stop] += decoded[span.start : span.stop]
        again = torch.zeros_like(scales)
        for span in own:
            again[span.layer] = mean_magnitude(self._server[span.start : span.stop].numpy())
        self._encode(self._server, again, own, self._payload)
        yield from gather_payloads(self._rows, self._payload, route)
        for spans, row in zip(self._ranges, self._rows, strict=True):
            self._put(self._decoded(row[None], spans), spans, buffer)

    def _scales(self) -> Tensor:
        """float32[layers]: s of each layer."""
        return torch.tensor(
            [mean_magnitude(self._residual[p.start : p.stop].numpy()) for p in self._layout.packed]
        )

    def _encode(self, values: Tensor, scales: Tensor, spans: list[BitRange], row: Tensor) -> None:
        """Write scales and bits of values into a row; the rounding error stays in the values."""
        head = 4 * scales.numel()
        row[:head].view(torch.float32).copy_(scales)
        bits = row[head:].numpy()
        for span in spans:
            pack_signs(
                values[span.start : span.stop].numpy(),
                float(scales[span.layer]),
                bits[span.start // 8 : -(-span.stop // 8)],
            )

    def _decoded(self, rows: Tensor, spans: list[BitRange]) -> Tensor:
        """[part]: the sum of the decoded rows, in their order; valid until the next call."""
        head = 4 * len(self._layout.packed)
        scales = [row[:head].view(torch.float32).tolist() for row in rows]
        bits = [row[head:].numpy() for row in rows]
        total = self._total.numpy()
        for span in spans:
            first, last = span.start // 8, -(-span.stop // 8)
            signs = [
                (own[first:last], scale[span.layer])
                for own, scale in zip(bits, scales, strict=True)
            ]
            sum_signs(signs, total[8 * first : 8 * last])
        return self._total

    def _put(self, total: Tensor, spans: list[BitRange], buffer: Tensor) -> None:
        for span in spans:
            start = self._layout.sources[span.layer].start + span.offset
            buffer[start : start + span.stop - span.start] = total[span.start : span.stop]

    def _overlap(self, piece: GradientSlice) -> tuple[slice, slice]:
        """Which part of a packed parameter this rank serves, there and in `self._server`."""
        start = max(piece.start, self._first)
        stop = max(start, min(piece.stop, self._first + self._server.numel()))
        return (
            slice(start - piece.start, stop - piece.start),
            slice(start - self._first, stop - self._first),
        )

    def _save(self, number: int, piece: GradientSlice) -> Tensor | None:
        if not self._server.numel():
            return None
        whole = torch.zeros(piece.stop - piece.start, dtype=self._residual.dtype)
        there, here = self._overlap(piece)
        whole[there] = self._server[here]
        return whole.view(piece.shape)

    def _load(self, number: int, piece: GradientSlice, server: Tensor) -> None:
        left = server.flatten().to(self._residual.dtype, copy=True)
        if self._server.numel():
            there, here = self._overlap(piece)
            self._server[here] = left[there]
            left[there] = 0
        # What another rank serves now goes there as part of this rank's next payload.
        self._residual[piece.start : piece.stop] += left
