"""sign: one bit per value and one scale per layer, with error feedback.

u = gradient + residual is sent as s sign(u) with s = mean|u| of the layer (Seide et al. 2014;
Karimireddy et al. 2019, section 4; Tang et al. 2021 for the two-sided form). Two ranks gather each
other's bits. Of more ranks each is the server of one part: it sums the decoded bits of all, adds
the residual of its own second rounding, and sends round one bit per value again. Invariant: what
all ranks got, plus the residuals of all ranks as workers and as servers, is the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from headway.collective.payload import gathers_whole, is_dense, sign_bytes_per_rank
from headway.comm.compress.bits import BitRange, mean_magnitude, pack_signs, ranges, sum_signs
from headway.comm.compress.compressor import Compressor
from headway.comm.compress.wire import all_gather, all_to_all, place
from headway.comm.method import Piece, Route, Waiting


class Sign(Compressor):
    """A row on the wire is float32[layers] scales, then bits; each layer begins on a byte."""

    name = "sign"
    only_cpu = True
    align = 8

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._payload = self._rows = self._parts = torch.empty(0, dtype=torch.uint8)
        self._part = 0
        self._first = 0
        self._server = self._total = torch.empty(0)
        self._ranges: list[list[BitRange]] = []
        self._place = 0

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return not is_dense(shape)

    def _open(self, buffer: Tensor, route: Route) -> None:
        sizes = [piece.stop - piece.start for piece in self._layout.packed]
        num_bytes = sign_bytes_per_rank(sizes, route.size)
        width = 4 * len(sizes) + num_bytes
        parts = 1 if gathers_whole(route.size) else route.size
        self._part, self._place = 8 * num_bytes, place(route)
        self._first = self._place * self._part if parts > 1 else 0
        self._total = torch.empty(self._part, dtype=self._residual.dtype)
        self._ranges = [ranges(self._layout.packed, i, self._part) for i in range(parts)]
        self._payload = torch.zeros(width, dtype=torch.uint8)
        self._rows = torch.zeros((route.size, width), dtype=torch.uint8)
        if parts > 1:
            self._parts = torch.zeros((parts, width), dtype=torch.uint8)
            self._server = torch.zeros(self._part, dtype=self._residual.dtype)
        else:
            self._server = self._residual[:0]

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        summing, dense = self._start_dense(buffer, route)
        for source, piece in zip(self._layout.sources, self._layout.packed, strict=True):
            self._residual[piece.start : piece.stop] += buffer[source.start : source.stop]
        scales = self._scales()
        if gathers_whole(route.size):
            self._encode(self._residual, scales, self._ranges[0], self._payload)
            yield from all_gather(self._rows, self._payload, route)
            total = self._decoded(self._rows, self._ranges[0])
            self._put(total, self._ranges[0], buffer)
        else:
            yield from self._scatter_gather(scales, buffer, route)
        if summing is not None:
            yield summing
            self._dense.spread(dense, buffer)

    def _scatter_gather(self, scales: Tensor, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        for spans, row, part in zip(
            self._ranges, self._parts, self._residual.split(self._part), strict=False
        ):
            self._encode(part, scales, spans, row)
        yield all_to_all(self._rows, self._parts, route)
        own = self._ranges[self._place]
        decoded = self._decoded(self._rows, own)
        for span in own:  # between the layers there is nothing
            self._server[span.start : span.stop] += decoded[span.start : span.stop]
        again = torch.zeros_like(scales)
        for span in own:
            again[span.layer] = mean_magnitude(self._server[span.start : span.stop].numpy())
        self._encode(self._server, again, own, self._payload)
        yield from all_gather(self._rows, self._payload, route)
        for spans, row in zip(self._ranges, self._rows, strict=True):
            self._put(self._decoded(row[None], spans), spans, buffer)

    def _scales(self) -> Tensor:
        """float32[layers]: s of each layer."""
        return torch.tensor(
            [mean_magnitude(self._residual[p.start : p.stop].numpy()) for p in self._layout.packed]
        )

    def _encode(self, values: Tensor, scales: Tensor, spans: list[BitRange], row: Tensor) -> None:
        """Write scales and bits of values into a row; leave what they do not say in the values."""
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
        """[part]: the sum over rows of what they say, in order of the rows; until the next call."""
        head = 4 * len(self._layout.packed)
        scales = [row[:head].view(torch.float32).tolist() for row in rows]
        bits = [row[head:].numpy() for row in rows]
        total = self._total.numpy()
        for span in spans:
            first, last = span.start // 8, -(-span.stop // 8)
            told = [
                (own[first:last], scale[span.layer])
                for own, scale in zip(bits, scales, strict=True)
            ]
            sum_signs(told, total[8 * first : 8 * last])
        return self._total

    def _put(self, total: Tensor, spans: list[BitRange], buffer: Tensor) -> None:
        for span in spans:
            start = self._layout.sources[span.layer].start + span.offset
            buffer[start : start + span.stop - span.start] = total[span.start : span.stop]

    # -- the residual of the server ------------------------------------------------------------

    def _overlap(self, piece: Piece) -> tuple[slice, slice]:
        """Which part of a packed parameter this rank serves, there and in `self._server`."""
        start = max(piece.start, self._first)
        stop = max(start, min(piece.stop, self._first + self._server.numel()))
        return (
            slice(start - piece.start, stop - piece.start),
            slice(start - self._first, stop - self._first),
        )

    def _piece_state(self, number: int, piece: Piece) -> dict[str, Tensor]:
        found = super()._piece_state(number, piece)
        if self._server.numel():
            whole = torch.zeros(piece.stop - piece.start, dtype=self._residual.dtype)
            there, here = self._overlap(piece)
            whole[there] = self._server[here]
            found["server"] = whole.view(piece.shape)
        return found

    def _restore_piece(self, number: int, piece: Piece, state: Mapping[str, Tensor]) -> None:
        super()._restore_piece(number, piece, state)
        if "server" not in state:
            return
        left = state["server"].flatten().to(self._residual.dtype, copy=True)
        if self._server.numel():
            there, here = self._overlap(piece)
            self._server[here] = left[there]
            left[there] = 0
        # Of a part that another rank serves now: this rank sends it on as a worker.
        self._residual[piece.start : piece.stop] += left
