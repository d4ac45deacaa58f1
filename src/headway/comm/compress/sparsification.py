"""Sparsification: top-k, MSTopK, top-k with an adaptive budget, random-k, and HiTopKComm.

Top-k (Aji and Heafield 2017) and its variants: every rank selects the largest values of its own u =
gradient + residual, layer by layer, and sends values and indices; all ranks add up what all have
sent. Selecting by layer makes the result independent of how parameters are fused into buckets. What
is sent leaves the residual. The size of a payload is fixed, so that it can be planned; the adaptive
variant moves the budget between layers and keeps its total, in whole numbers and exactly.

Random-k: random values at the same indices on all ranks, so that the network can sum them. The
indices of a layer depend on the seed, its name and the step only. One is drawn from each of k equal
stretches of the layer, so no index comes twice and values are read in order.

HiTopKComm: dense inside the node, top-k between nodes. Reduce-scatter inside; of its shard each
rank selects the largest elements and exchanges their values and indices with the ranks of the same
position in the other nodes, in n concurrent all-gathers; what arrives is added up and gathered
inside (Shi et al. 2021, section 3.2). Of d elements and density rho on m nodes a node's link
carries (m - 1) rho d (element size + 4) bytes each way. What all nodes send, added to what they
keep, is the sum of all gradients: a residual belongs to the node's sum, shard by shard, and has one
owner per node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.collective.compression import (
    AdaptiveTopKCompression,
    LargestElementsCompression,
    MsTopKCompression,
    RandomKCompression,
    SparseShard,
    kept_elements,
    sparse_bytes,
    sparse_shards,
)
from headway.comm.algorithms.hierarchical import inter_node_group, intra_node_group
from headway.comm.algorithms.method import (
    AllReduce,
    ElementSpan,
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    PendingOperation,
    Route,
    ScratchBuffers,
    all_gather,
    all_reduce,
    check_uniform_nodes,
    first_tag,
    reduce_scatter,
    send_receive,
    split_evenly,
)
from headway.comm.compress.compressor import (
    Compressor,
    PieceMemory,
    gather_payloads,
    seeded_generator,
)
from headway.comm.compress.state import parse_state_key
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


# HiTopKComm: the largest elements of a node's sum travel between nodes.


class HierarchicalTopK(ExchangeMethod):
    """HiTopKComm with error feedback.

    State: "name/offset/residual" -> what was not sent of a parameter from that element on. Any rank
    may take up any of it: the sum of all residuals is what counts.

    Args:
        density: Share of the elements of a shard that is sent, in (0, 1]; at least one.
        sampled: Choose them by MSTopK's thresholds instead of exactly.
    """

    blocking: ClassVar[bool] = True

    def __init__(
        self, density: float, *, sampled: bool = False, scratch: ScratchBuffers | None = None
    ) -> None:
        self._density = density
        self._sampled = sampled
        self._scratch = scratch or ScratchBuffers()
        self._residual: _Residual | None = None
        self._saved: Mapping[str, Tensor] = {}
        self._turn = 0

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        check_uniform_nodes(route.nodes)
        if route.nodes.count == 1:
            # Nothing is slow here; what an earlier run on more nodes kept back is due now.
            self._residual = self._add_strays(fused, slice(0, 0))
            yield from AllReduce().rounds(fused, route)
            return
        tag = first_tag(fused.number, self._turn)
        self._turn += 1
        across = inter_node_group(route)
        inside = intra_node_group(route) if len(route.nodes.members[0]) > 1 else None
        buffer, kind = fused.buffer, fused.buffer.dtype
        cut = sparse_shards(
            buffer.numel(),
            fused.flags.numel(),
            inside.size if inside else 1,
            self._density,
            buffer.element_size(),
        )
        rows = [
            self._scratch.take(across.size * shard.parcel_bytes, buffer, torch.uint8)
            for shard in cut
        ]
        place = inside.place if inside else 0
        spans = [slice(shard.start, shard.stop) for shard in cut]
        # Before the reduce-scatter, which takes the residuals of other shards to their owners.
        self._own_residual(fused, slice(cut[place].start, cut[place].middle))
        if inside:
            yield from reduce_scatter(buffer, spans, inside, tag, self._scratch)
        parcels = _node_payloads(rows[place], cut[place], across.size, kind)
        # Straight into this node's part of the row, which the all-gather sends from where it is.
        self._pack(fused, cut[place], parcels[across.place])
        parts = split_evenly(rows[place].numel(), across.size)
        yield from all_gather(rows[place], parts, across, tag)
        # Inside the node either parcels or what they add up to are gathered; the sums are the same.
        if inside and sum(row.numel() for row in rows) < buffer.nbytes:
            yield send_receive(
                inside,
                [(rows[other], other) for other in inside.others],
                [(rows[place], other) for other in inside.others],
                tag,
            )
            # Every rank of the node has all parcels now: there is nothing more to gather.
            inside = None
        for here, (shard, row) in enumerate(zip(cut, rows, strict=True)):
            if inside is None or here == place:
                _unpack(buffer, shard, _node_payloads(row, shard, across.size, kind))
        if inside:
            yield from all_gather(buffer, spans, inside, tag)
        self._scratch.give(*rows)

    def _pack(self, fused: FusedBuffer, shard: SparseShard, parcel: _NodePayload) -> None:
        """Move the largest elements of residual + shard into a parcel; keep the rest."""
        assert self._residual is not None
        residual = self._residual.values
        if shard.count:
            chosen = self._select(residual, fused.buffer[shard.start : shard.middle], shard.count)
            parcel.indices.copy_(chosen)
            sent = residual[chosen]
            parcel.values.copy_(sent)
            # Not always zero: the wire's type may be coarser than that of the residual.
            residual[chosen] = sent - parcel.values.to(sent.dtype)
        parcel.flags.copy_(fused.buffer[shard.middle : shard.stop])

    def _select(self, residual: Tensor, shard: Tensor, count: int) -> Tensor:
        """Add the shard to the residual and choose from it."""
        if not self._sampled and residual.dtype == shard.dtype:
            return top_k(residual, count, add=shard)
        residual.add_(shard)
        if not self._sampled:
            return top_k(residual, count)
        # Drawn from the content, so that a run that is resumed draws the same.
        draw = np.random.default_rng([count, *residual[:8].float().view(torch.uint8).tolist()])
        return ms_top_k(residual, count, draw).indices

    def _own_residual(self, fused: FusedBuffer, own: ElementSpan) -> None:
        """Make `self._residual` that of exactly this shard."""
        parts = tuple(_parts(fused.pieces, own))
        if self._residual is None or self._residual.parts != parts:
            self._residual = self._add_strays(fused, own)

    def _add_strays(self, fused: FusedBuffer, own: ElementSpan) -> _Residual:
        """Take over a state: what is one's own becomes the residual, the rest goes to its owner.

        It gets there with the gradients, which are summed over the node in a moment. So nothing is
        lost when other ranks or other buckets take over.
        """
        saved = self.state()
        mine = _Residual.load(tuple(_parts(fused.pieces, own)), fused.buffer, saved)
        if saved:
            end = fused.gradients.numel()
            everything = tuple(_parts(fused.pieces, slice(0, end)))
            strays = _Residual.load(everything, fused.buffer, saved).values
            # What belongs to this rank is in `mine` already.
            strays[own] = 0
            fused.gradients.add_(strays)
        self._saved = {}
        return mine

    def state(self) -> dict[str, Tensor]:
        return dict(self._saved) if self._residual is None else self._residual.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._residual, self._saved = None, dict(state)


@dataclass(frozen=True)
class _NodePayload:
    """What one node sends of one shard: views of one piece of memory."""

    values: Tensor
    flags: Tensor
    indices: Tensor


def _node_payloads(
    row: Tensor, shard: SparseShard, nodes: int, dtype: torch.dtype
) -> tuple[_NodePayload, ...]:
    """The parcels of all nodes in a row."""
    numbers_end = (shard.count + shard.stop - shard.middle) * shard.element_bytes
    found = []
    for content in row.view(nodes, shard.parcel_bytes):
        numbers = content[:numbers_end].view(dtype)
        indices = content[shard.index_start :].view(torch.int32)[: shard.count]
        found.append(_NodePayload(numbers[: shard.count], numbers[shard.count :], indices))
    return tuple(found)


def _unpack(flat: Tensor, shard: SparseShard, parcels: Sequence[_NodePayload]) -> None:
    """Write the sum of all nodes' parcels, added in order of the nodes."""
    total = flat[shard.start : shard.middle].zero_()
    flags = flat[shard.middle : shard.stop].zero_()
    for parcel in parcels:
        total.index_add_(0, parcel.indices, parcel.values)
        flags.add_(parcel.flags)


@dataclass(frozen=True)
class _Part:
    """Elements [offset, offset + stop - start) of a parameter lie at [start, stop) of a shard."""

    name: str
    offset: int
    start: int
    stop: int


def _parts(pieces: Sequence[GradientSlice], span: ElementSpan) -> Iterator[_Part]:
    for piece in pieces:
        start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
        if start < stop:
            yield _Part(piece.name, start - piece.start, start - span.start, stop - span.start)


@dataclass(frozen=True)
class _Residual:
    parts: tuple[_Part, ...]
    values: Tensor

    @staticmethod
    def load(parts: tuple[_Part, ...], like: Tensor, saved: Mapping[str, Tensor]) -> _Residual:
        """From saved entries, wherever they overlap these parts; zero elsewhere."""
        # In 16 bits a residual would lose what it is there to keep.
        dtype = like.dtype if like.element_size() >= 4 else torch.float32
        size = parts[-1].stop if parts else 0
        values = torch.zeros(size, dtype=dtype, device=like.device)
        entries: dict[str, list[tuple[int, Tensor]]] = {}
        for key, entry in saved.items():
            name, first, what = parse_state_key(key)
            if what == "residual":
                entries.setdefault(name, []).append((first, entry.reshape(-1)))
        for part in parts:
            shift = part.start - part.offset
            for offset, entry in entries.get(part.name, ()):
                start = max(part.start, offset + shift)
                stop = min(part.stop, offset + shift + entry.numel())
                if start < stop:
                    begin = start - shift - offset
                    values[start:stop] += entry[begin : begin + stop - start].to(values)
        return _Residual(parts, values)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{part.name}/{part.offset}/residual": self.values[part.start : part.stop].clone()
            for part in self.parts
        }
