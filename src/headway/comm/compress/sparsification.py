"""Sparsification: top-k, MSTopK, top-k with an adaptive budget, and random-k.

Top-k (Aji and Heafield 2017) and its variants: every rank selects the largest values of its own u =
gradient + residual, layer by layer, and sends values and indices; all ranks add up what all have
sent. Selecting by layer makes the result independent of how parameters are fused into buckets. What
is sent leaves the residual. The size of a payload is fixed, so that it can be planned; the adaptive
variant moves the budget between layers and keeps its total, in whole numbers and exactly.

Random-k: random values at the same indices on all ranks, so that the network can sum them. The
indices of a layer depend on the seed, its name and the step only. One is drawn from each of k equal
stretches of the layer, so no index comes twice and values are read in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.collective.compression import (
    AdaptiveTopKCompression,
    LargestElementsCompression,
    MsTopKCompression,
    RandomKCompression,
    kept_elements,
    sparse_bytes,
)
from headway.comm.algorithms.method import GradientSlice, PendingOperation, Route, all_reduce
from headway.comm.compress.compressor import (
    Compressor,
    PieceMemory,
    gather_payloads,
    seeded_generator,
)
from headway.comm.compress.topk_selection import ms_top_k, top_k
from headway.errors import RunError

SMALLEST_SHARE, LARGEST_SHARE = 0.25, 4.0
"""Of a layer's even share."""
LARGEST_SHARE_CHANGE = 2.0
"""By which a share changes in one step at most."""


def allocate_budget(wanted: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """Whole numbers in about these proportions (largest remainders).

    Args:
        sizes: The most that each may have.
        total: Their sum; from the number of layers to the sum of `sizes`.
    """
    counts = [1] * len(wanted)
    left = total - len(wanted)
    while left:  # again where a layer is full: at most once per layer
        open_ = [i for i, size in enumerate(sizes) if counts[i] < size]
        weight = math.fsum(wanted[i] for i in open_)
        shares = {i: wanted[i] / weight * left for i in open_}
        for i in open_:
            counts[i] += min(math.floor(shares[i]), sizes[i] - counts[i])
        rest = total - sum(counts)
        if rest < len(open_):
            by_remainder = sorted(open_, key=lambda i: (math.floor(shares[i]) - shares[i], i))
            for i in by_remainder[:rest]:
                counts[i] += counts[i] < sizes[i]
        left = total - sum(counts)
    return counts


def adapt_budget(
    shares: Sequence[float], even: Sequence[int], smallest: Sequence[float]
) -> list[float]:
    """New shares, from the smallest magnitude that each layer has sent.

    Args:
        even: The even shares, which weigh the mean.
        smallest: Zero where a layer had fewer values than its share.
    """
    known = [i for i, value in enumerate(smallest) if 0 < value < math.inf]
    if not known:
        return list(shares)
    weight = sum(even[i] for i in known)
    mean = math.fsum(even[i] * math.log(smallest[i]) for i in known) / weight
    # The square root of value / geometric mean; a layer that sent zeros had values to spare.
    factors = [
        math.exp((math.log(value) - mean) / 2) if 0 < value < math.inf else 1 / LARGEST_SHARE_CHANGE
        for value in smallest
    ]
    moved = [
        share * min(max(factor, 1 / LARGEST_SHARE_CHANGE), LARGEST_SHARE_CHANGE)
        for share, factor in zip(shares, factors, strict=True)
    ]
    # Back to the total of topk; what the limits take from it, `allocate_budget` makes up for.
    scale = sum(even) / math.fsum(e * share for e, share in zip(even, moved, strict=True))
    return [min(max(share * scale, SMALLEST_SHARE), LARGEST_SHARE) for share in moved]


class AdaptiveBudget:
    """The budget of topk, moved to the layers that need it; its total stays the same.

    The energy that a given number of values leaves unsent is least if the smallest value sent is
    the same in every layer. So after each step a layer whose smallest sent value lies above that of
    the others gets a larger share of the next budget, and one below a smaller share: by the square
    root of the ratio, at most by 2 a step, and within a quarter to four times its share under topk,
    so that no layer starves. Every rank follows its own gradients.
    """

    def __init__(self) -> None:
        self._even: list[int] = []
        self._shares: list[float] = []
        self._smallest: list[float] = []

    def open(self, even: Sequence[int]) -> None:
        """A new layout, with the even budget of each layer."""
        self._even = list(even)
        self._shares = [1.0] * len(self._even)
        self._smallest = [math.nan] * len(self._even)

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """How many values each layer sends in this step."""
        wanted = [even * share for even, share in zip(self._even, self._shares, strict=True)]
        return allocate_budget(wanted, sizes, sum(self._even))

    def note(self, number: int, sent: Tensor) -> None:
        """The values that were sent of a layer."""
        self._smallest[number] = float(sent.abs().min())

    def adapt(self) -> None:
        """All layers of a step have been noted."""
        self._shares = adapt_budget(self._shares, self._even, self._smallest)

    def save(self, number: int, piece: GradientSlice) -> Tensor:
        return torch.tensor(self._shares[number], dtype=torch.float64)

    def load(self, number: int, piece: GradientSlice, share: Tensor) -> None:
        self._shares[number] = float(share)


# The largest values only: topk, mstopk, adaptive.


class LargestElements(Compressor):
    """Selects the largest magnitudes of each layer, gathers those of all ranks, adds them up."""

    def __init__(self, compression: LargestElementsCompression, *, seed: int = 0) -> None:
        adaptive = isinstance(compression, AdaptiveTopKCompression)
        self._budget = AdaptiveBudget() if adaptive else None
        memory = None
        if self._budget is not None:
            memory = PieceMemory("share", self._budget.save, self._budget.load)
        super().__init__(compression, seed=seed, memory=memory)
        self._sampled = isinstance(compression, MsTopKCompression)
        self._rank = 0
        self._counts: list[int] = []
        self._payload = self._rows = torch.empty(0, dtype=torch.uint8)
        self._own = (torch.empty(0), torch.empty(0))
        self._gathered: list[tuple[Tensor, Tensor]] = []

    def _select(self, number: int, values: Tensor, k: int, add: Tensor | None) -> Tensor:
        """int64[k]: places among `values`, after `add` has been added to them."""
        if not self._sampled:
            return top_k(values, k, add=add)
        name = self._layout.packed[number].name
        draw = seeded_generator(self._seed, name, self._step, self._rank)
        return ms_top_k(values, k, draw, add=add).indices

    def _open(self, buffer: Tensor, route: Route) -> None:
        density = self.compression.amount
        self._rank = route.rank
        self._counts = [kept_elements(p.stop - p.start, density) for p in self._layout.packed]
        if self._budget is not None:
            self._budget.open(self._counts)
        total = sum(self._counts)
        num_bytes = sparse_bytes(total, buffer.element_size())
        self._payload = buffer.new_zeros(num_bytes, dtype=torch.uint8)
        self._rows = buffer.new_empty((route.size, num_bytes), dtype=torch.uint8)
        self._own = _payload_views(self._payload, total, buffer.dtype)
        self._gathered = [_payload_views(row, total, buffer.dtype) for row in self._rows]

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[PendingOperation]:
        if self._budget is not None:
            self._counts = self._budget.counts([p.stop - p.start for p in self._layout.packed])
        self._encode(buffer)
        yield from gather_payloads(self._rows, self._payload, route)
        self._clear(buffer)
        # In the order of the ranks, so that all ranks get the same bits.
        for values, places in self._gathered:
            buffer.index_add_(0, places, values)
        if self._budget is not None:
            self._budget.adapt()

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
            # The selection adds the gradient on its way if that has the same type.
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
            if self._budget is not None:
                self._budget.note(number, sent)
            first += count


def _payload_views(row: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and places in a row of bytes; the wider ones stand first, so that both align."""
    width = dtype.itemsize
    if width >= 4:
        values, places = row[: count * width], row[count * width : count * (width + 4)]
    else:
        places, values = row[: count * 4], row[count * 4 : count * (4 + width)]
    return values.view(dtype), places.view(torch.int32)


# randomk: random values, at the same places on all ranks, so that the network can sum them.


def random_indices(seed: int, name: str, step: int, size: int, k: int) -> Tensor:
    """int64[k]: ascending places in a layer of `size` elements."""
    borders = np.arange(k + 1, dtype=np.int64) * size // k
    widths = np.diff(borders)
    offsets = (seeded_generator(seed, name, step).random(k) * widths).astype(np.int64)
    # The product of the largest random number may round up to the width itself.
    return torch.from_numpy(borders[:-1] + np.minimum(offsets, widths - 1))


class RandomK(Compressor):
    """One all-reduce: the drawn values, then what is sent whole."""

    dense_in_payload = True

    def __init__(self, compression: RandomKCompression, *, seed: int = 0) -> None:
        super().__init__(compression, seed=seed)
        self._payload = torch.empty(0)
        self._shift = torch.empty(0, dtype=torch.int64)

    def _open(self, buffer: Tensor, route: Route) -> None:
        sizes = [piece.stop - piece.start for piece in self._layout.packed]
        counts = [kept_elements(size, self.compression.amount) for size in sizes]
        total = sum(counts) + self._layout.dense_size
        self._payload = torch.empty(total, dtype=buffer.dtype, device=buffer.device)
        # From a place in the bucket to that of the same element in the packed array.
        shifts = [
            torch.full((count,), packed.start - source.start, device=buffer.device)
            for count, source, packed in zip(
                counts, self._layout.sources, self._layout.packed, strict=True
            )
        ]
        self._shift = torch.cat(shifts)

    def _exchange(self, buffer: Tensor, route: Route) -> Iterator[PendingOperation]:
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
            count = kept_elements(size, self.compression.amount)
            found.append(
                random_indices(self._seed, piece.name, self._step, size, count) + piece.start
            )
        return torch.cat(found)
