"""The largest values only: topk, mstopk, adaptive.

Every rank selects among its own u = gradient + residual, layer by layer, and sends values and
places; everybody adds up what all ranks sent. Selecting by layer makes the result independent of
how parameters are fused into buckets. Invariant: what is sent leaves the residual, so the two
always make up u; the size of a payload is fixed, so that it can be planned.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headway.collective.payload import is_dense, kept, sparse_bytes
from headway.comm.compress.budget import adapt, allocate
from headway.comm.compress.compressor import Compressor
from headway.comm.compress.draws import generator
from headway.comm.compress.mstopk import ms_top_k
from headway.comm.compress.selection import top_k
from headway.comm.compress.wire import all_gather
from headway.comm.method import Piece, Route, Waiting
from headway.errors import RunError


class _Sparse(Compressor):
    """Selects, gathers from all ranks, adds up."""

    def __init__(self, density: float, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._density = density
        self._counts: list[int] = []
        self._payload = self._rows = torch.empty(0, dtype=torch.uint8)
        self._own = (torch.empty(0), torch.empty(0))
        self._gathered: list[tuple[Tensor, Tensor]] = []

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return not is_dense(shape)

    @abstractmethod
    def _select(self, number: int, values: Tensor, k: int, add: Tensor | None) -> Tensor:
        """int64[k]: places among `values`, to which `add` has to be added before."""

    def _note(self, number: int, sent: Tensor) -> None:
        """The values that were sent of a parameter; for those who learn from them."""

    def _open(self, buffer: Tensor, route: Route) -> None:
        self._counts = [kept(p.stop - p.start, self._density) for p in self._layout.packed]
        total = sum(self._counts)
        num_bytes = sparse_bytes(total, buffer.element_size())
        self._payload = buffer.new_zeros(num_bytes, dtype=torch.uint8)
        self._rows = buffer.new_empty((route.size, num_bytes), dtype=torch.uint8)
        self._own = _views(self._payload, total, buffer.dtype)
        self._gathered = [_views(row, total, buffer.dtype) for row in self._rows]

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        summing, dense = self._start_dense(buffer, route)
        self._encode(buffer)
        yield from all_gather(self._rows, self._payload, route)
        self._clear(buffer)
        for values, places in self._gathered:
            buffer.index_add_(0, places, values)
        if summing is not None:
            yield summing
            self._dense.spread(dense, buffer)

    def _encode(self, buffer: Tensor) -> None:
        """Select layer by layer into the payload; what is sent leaves the residual."""
        values, places = self._own
        first = 0
        for number, (source, piece) in enumerate(
            zip(self._layout.sources, self._layout.packed, strict=True)
        ):
            kept_back = self._residual[piece.start : piece.stop]
            gradient = buffer[source.start : source.stop]
            count = self._counts[number]
            if gradient.dtype != kept_back.dtype:
                kept_back.add_(gradient)
            same = gradient if gradient.dtype == kept_back.dtype else None
            try:
                chosen = self._select(number, kept_back, count, same)
            except RunError as error:
                error.where = error.where or f"gradient of {piece.name}"
                raise
            taken = kept_back[chosen]
            sent = values[first : first + count]
            sent.copy_(taken)
            torch.add(chosen, source.start, out=places[first : first + count])
            # Not simply zero: what a 16-bit gradient cannot hold stays behind.
            kept_back[chosen] = taken.sub_(sent) if same is None else 0
            self._note(number, sent)
            first += count


def _views(row: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and places in a row of bytes; the wider ones stand first, so that both align."""
    width = dtype.itemsize
    if width >= 4:
        values, places = row[: count * width], row[count * width : count * (width + 4)]
    else:
        places, values = row[: count * 4], row[count * 4 : count * (4 + width)]
    return values.view(dtype), places.view(torch.int32)


class TopK(_Sparse):
    """The largest magnitudes of each layer, exactly (Aji and Heafield 2017)."""

    name = "topk"

    def _select(self, number: int, values: Tensor, k: int, add: Tensor | None) -> Tensor:
        return top_k(values, k, add=add)


class MsTopK(_Sparse):
    """About the largest magnitudes of each layer, by a bisected threshold (Shi et al. 2021)."""

    name = "mstopk"

    def __init__(self, density: float, *, seed: int = 0) -> None:
        super().__init__(density, seed=seed)
        self._rank = 0

    def _open(self, buffer: Tensor, route: Route) -> None:
        super()._open(buffer, route)
        self._rank = route.rank

    def _select(self, number: int, values: Tensor, k: int, add: Tensor | None) -> Tensor:
        name = self._layout.packed[number].name
        draw = generator(self._seed, name, self._step, self._rank)
        return ms_top_k(values, k, draw, add=add).indices


class Adaptive(_Sparse):
    """topk whose budget wanders to the layers that need it; the total stays that of topk.

    The energy that a given number of values leaves unsent is least if the smallest value sent is
    the same in every layer. So after each step a layer whose smallest sent value lies above that of
    the others gets a larger share of the next budget, and one below a smaller share: by the square
    root of the ratio, at most by 2 a step, and within a quarter to four times its share under topk,
    so that no layer starves. Every rank follows its own gradients.
    """

    name = "adaptive"
    memory: ClassVar[str] = "share"

    def __init__(self, density: float, *, seed: int = 0) -> None:
        super().__init__(density, seed=seed)
        self._even: list[int] = []
        self._shares: list[float] = []
        self._smallest: list[float] = []

    def _open(self, buffer: Tensor, route: Route) -> None:
        super()._open(buffer, route)
        self._even = list(self._counts)
        self._shares = [1.0] * len(self._even)
        self._smallest = [math.nan] * len(self._even)

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[Waiting]:
        sizes = [piece.stop - piece.start for piece in self._layout.packed]
        wanted = [even * share for even, share in zip(self._even, self._shares, strict=True)]
        self._counts = allocate(wanted, sizes, sum(self._even))
        yield from super()._exchange(buffer, route)
        self._shares = adapt(self._shares, self._even, self._smallest)

    def _select(self, number: int, values: Tensor, k: int, add: Tensor | None) -> Tensor:
        return top_k(values, k, add=add)

    def _note(self, number: int, sent: Tensor) -> None:
        self._smallest[number] = float(sent.abs().min())

    def _piece_state(self, number: int, piece: Piece) -> dict[str, Tensor]:
        share = torch.tensor(self._shares[number], dtype=torch.float64)
        return super()._piece_state(number, piece) | {self.memory: share}

    def _restore_piece(self, number: int, piece: Piece, state: Mapping[str, Tensor]) -> None:
        super()._restore_piece(number, piece, state)
        if self.memory in state:
            self._shares[number] = float(state[self.memory])
