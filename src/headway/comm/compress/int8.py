"""int8: 8 bits per value with a scale per 256 values, rounded at random without bias.

With the scale s = max|x| / 127 of its block, x becomes q = floor(x / s + r) with r uniform between
0 and 1, so that the mean of q s over r is x (Alistarh et al. 2017, QSGD, section 3; MLSL sends
8-bit dynamic fixed point). No residual is needed. Two ranks gather each other's bytes; more ranks
each reduce one part of the bucket and send it round encoded again, which moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headway.collective.payload import BLOCK, BLOCK_BYTES, blocks_per_rank, gathers_whole
from headway.comm.compress.compressor import Compressor
from headway.comm.compress.draws import generator
from headway.comm.compress.wire import all_gather, all_to_all
from headway.comm.method import Route, Waiting

STRIDE = 2**16
"""Elements that are worked on at a time: they stay in the second-level cache."""
LEVELS = 126.9999
"""A hair below 127, so that x / s + r never rounds up to 128."""
TINIEST = 1e-30
"""A block whose largest magnitude is below this counts as zero: its scale would have no inverse."""


class Int8(Compressor):
    """Flags are summed as they are; everything else is rounded, small tensors too."""

    name = "int8"
    feedback = False
    only_cpu = True

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._payload = self._rows = self._parts = torch.empty(0, dtype=torch.uint8)
        self._sum = torch.empty(0)
        self._rounder = _Rounder()

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return True

    def _open(self, buffer: Tensor, route: Route) -> None:
        blocks = blocks_per_rank(self._layout.size, route.size)
        self._payload = torch.empty(blocks * BLOCK_BYTES, dtype=torch.uint8)
        self._rows = torch.empty((route.size, blocks * BLOCK_BYTES), dtype=torch.uint8)
        if not gathers_whole(route.size):
            self._parts = torch.empty_like(self._rows)
            self._sum = torch.empty(blocks * BLOCK)

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        summing, dense = self._start_dense(buffer, route)
        size = self._layout.size
        name = self._layout.packed[0].name
        draw = generator(self._seed, name, self._step, route.rank)
        self._rounder.throw(draw)
        if gathers_whole(route.size):
            self._rounder.encode(buffer[:size], self._payload)
            yield from all_gather(self._rows, self._payload, route)
            decode_sum(self._rows, buffer[:size])
        else:
            span = self._sum.numel()
            for number, row in enumerate(self._parts):
                self._rounder.encode(buffer[:size][number * span : (number + 1) * span], row)
            yield all_to_all(self._rows, self._parts, route)
            decode_sum(self._rows, self._sum)
            # New numbers: with those of the first rounding the errors would not be independent.
            self._rounder.throw(draw)
            self._rounder.encode(self._sum, self._payload)
            yield from all_gather(self._rows, self._payload, route)
            for number, row in enumerate(self._rows):
                decode_sum(row[None], buffer[:size][number * span : (number + 1) * span])
        if summing is not None:
            yield summing
            self._dense.spread(dense, buffer)


def _scales_and_levels(row: Tensor) -> tuple[Tensor, Tensor]:
    """A row of bytes: float32[blocks], then int8[blocks * BLOCK]."""
    blocks = row.numel() // BLOCK_BYTES
    return row[: 4 * blocks].view(torch.float32), row[4 * blocks :].view(torch.int8)


class _Rounder:
    """Encodes; keeps its working memory.

    The random numbers are one table per step, used again for every stretch of the bucket: each
    value is still rounded without bias, and two values share a number only if they lie a multiple
    of `STRIDE` apart.
    """

    def __init__(self) -> None:
        self._work = torch.empty(STRIDE)
        self._table = torch.empty(STRIDE)

    def throw(self, draw: np.random.Generator) -> None:
        """New random numbers."""
        draw.random(out=self._table.numpy(), dtype=np.float32)

    def encode(self, values: Tensor, row: Tensor) -> None:
        """Round values into a row of bytes; blocks beyond them become zero."""
        scales, levels = _scales_and_levels(row)
        for start in range(0, levels.numel(), STRIDE):
            count = min(STRIDE, levels.numel() - start)
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
    work, total = torch.empty(STRIDE), torch.empty(STRIDE)
    for start in range(0, out.numel(), STRIDE):
        count = min(STRIDE, out.numel() - start)
        padded = -(-count // BLOCK) * BLOCK
        first = start // BLOCK
        blocks, sums = work[:padded].view(-1, BLOCK), total[:padded].zero_().view(-1, BLOCK)
        for scales, levels in decoded:
            work[:padded].copy_(levels[start : start + padded])
            sums.addcmul_(blocks, scales[first : first + len(blocks), None])
        out[start : start + count].copy_(total[:count])
