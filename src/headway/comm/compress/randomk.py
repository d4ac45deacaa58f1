"""randomk: random values, at the same places on all ranks, so that the network can sum them.

The places of a layer depend on the seed, its name and the step only. They are drawn one from each
of k equal stretches of the layer (to one element), so no place comes twice and the values are read
in order. What was not drawn stays in the residual.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from headway.collective.payload import is_dense, kept
from headway.comm.compress.compressor import Compressor
from headway.comm.compress.draws import generator
from headway.comm.method import Route, Waiting, all_reduce


def drawn(seed: int, name: str, step: int, size: int, k: int) -> Tensor:
    """int64[k]: ascending places in a layer of `size` elements."""
    borders = np.arange(k + 1, dtype=np.int64) * size // k
    widths = np.diff(borders)
    offsets = (generator(seed, name, step).random(k) * widths).astype(np.int64)
    # The product of the largest random number may round up to the width itself.
    return torch.from_numpy(borders[:-1] + np.minimum(offsets, widths - 1))


class RandomK(Compressor):
    """One all-reduce: the drawn values, then what is sent whole."""

    name = "randomk"

    def __init__(self, density: float, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._density = density
        self._payload = torch.empty(0)
        self._shift = torch.empty(0, dtype=torch.int64)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return not is_dense(shape)

    def _open(self, buffer: Tensor, route: Route) -> None:
        sizes = [piece.stop - piece.start for piece in self._layout.packed]
        counts = [kept(size, self._density) for size in sizes]
        total = sum(counts) + self._layout.dense_size
        self._payload = torch.empty(total, dtype=buffer.dtype, device=buffer.device)
        shifts = [
            torch.full((count,), packed.start - source.start, device=buffer.device)
            for count, source, packed in zip(
                counts, self._layout.sources, self._layout.packed, strict=True
            )
        ]
        self._shift = torch.cat(shifts)

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        places = self._places().to(buffer.device)
        packed = places + self._shift
        for source, piece in zip(self._layout.sources, self._layout.packed, strict=True):
            self._residual[piece.start : piece.stop] += buffer[source.start : source.stop]
        values, dense = self._payload[: len(places)], self._payload[len(places) :]
        taken = self._residual[packed]
        values.copy_(taken)
        self._dense.copy(buffer, dense)
        self._residual[packed] = taken.sub_(values)  # zero, but for what 16 bits cannot hold
        yield all_reduce(self._payload, route)
        self._clear(buffer)
        buffer[places] = values
        self._dense.spread(dense, buffer)

    def _places(self) -> Tensor:
        """Places in the bucket, layer by layer."""
        found = []
        for piece in self._layout.sources:
            size = piece.stop - piece.start
            count = kept(size, self._density)
            found.append(drawn(self._seed, piece.name, self._step, size, count) + piece.start)
        return torch.cat(found)
