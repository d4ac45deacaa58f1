"""HiTopKComm: dense inside the node, top-k between nodes, with error feedback.

Reduce-scatter inside; of its shard each rank selects the largest elements and exchanges their
values and indices with the ranks of the same position in the other nodes, in n concurrent
all-gathers; what arrives is added up and gathered inside (Shi et al. 2021, section 3.2). Of d
elements and density rho on m nodes a node's link carries (m - 1) rho d (element size + 4) bytes
each way. What all nodes send, added to what they keep, is the sum of all gradients: a residual
belongs to the node's sum, shard by shard, and has one owner per node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.comm.algorithms.hierarchical import inter_node_group, intra_node_group
from headway.comm.algorithms.method import (
    AllReduce,
    ElementSpan,
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    PeerGroup,
    PendingOperation,
    Route,
    ScratchBuffers,
    all_gather,
    check_uniform_nodes,
    first_tag,
    reduce_scatter,
    send_receive,
    span_length,
    split_evenly,
)
from headway.comm.compress.state import parse_state_key
from headway.comm.compress.topk_selection import ms_top_k, top_k

INDEX_BYTES = 4


class HierarchicalTopK(ExchangeMethod):
    """HiTopKComm with error feedback.

    State: "name/offset/residual" -> what was not sent of a parameter from that element on. Any rank
    may take up any of it: the sum of all residuals is what counts.

    Args:
        density: Share of the elements of a shard that is sent, in (0, 1]; at least one.
        sampled: Choose them by MSTopK's thresholds instead of exactly.
        scratch: Shared by methods of one thread; None: its own.
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
        cut = _cut(fused, inside.size if inside else 1, self._density)
        rows = [self._take_row(shard, across.size, fused.buffer) for shard in cut]
        place = inside.place if inside else 0
        spans = [shard.span for shard in cut]
        self._own_residual(fused, cut[place])
        if inside:
            yield from reduce_scatter(fused.buffer, spans, inside, tag, self._scratch)
        kind = fused.buffer.dtype
        parcels = _node_payloads(rows[place], cut[place], across.size, kind)
        self._pack(fused, cut[place], parcels[across.place])
        yield from _gather_across_nodes(rows[place], across, tag)
        if inside and _payloads_are_smaller(rows, fused.buffer):
            yield from _gather_inside_node(rows, inside, tag)
            inside = None
        for here, (shard, row) in enumerate(zip(cut, rows, strict=True)):
            if inside is None or here == place:
                _unpack(fused.buffer, shard, _node_payloads(row, shard, across.size, kind))
        if inside:
            yield from all_gather(fused.buffer, spans, inside, tag)
        self._scratch.give(*rows)

    def _take_row(self, shard: _Shard, nodes: int, like: Tensor) -> Tensor:
        return self._scratch.take(nodes * shard.parcel_bytes, like, torch.uint8)

    def _pack(self, fused: FusedBuffer, shard: _Shard, parcel: _NodePayload) -> None:
        """Move the largest elements of residual + shard into a parcel; keep the rest."""
        assert self._residual is not None
        residual = self._residual.values
        if shard.count:
            chosen = self._select(residual, fused.buffer[shard.gradients], shard.count)
            parcel.indices.copy_(chosen)
            sent = residual[chosen]
            parcel.values.copy_(sent)
            # Not always zero: the wire's type may be coarser than that of the residual.
            residual[chosen] = sent - parcel.values.to(sent.dtype)
        parcel.flags.copy_(fused.buffer[shard.flags])

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

    def _own_residual(self, fused: FusedBuffer, shard: _Shard) -> None:
        """Have the residual of exactly this shard."""
        parts = tuple(_parts(fused.pieces, shard.gradients))
        if self._residual is None or self._residual.parts != parts:
            self._residual = self._add_strays(fused, shard.gradients)

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
            strays[own] = 0
            fused.gradients.add_(strays)
        self._saved = {}
        return mine

    def state(self) -> dict[str, Tensor]:
        return dict(self._saved) if self._residual is None else self._residual.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._residual, self._saved = None, dict(state)


@dataclass(frozen=True)
class _Shard:
    """One rank's part of a buffer.

    Attributes:
        flags: Its flags; most shards have none.
        count: How many of the gradients are sent.
    """

    gradients: ElementSpan
    flags: ElementSpan
    count: int
    element_bytes: int

    @property
    def span(self) -> ElementSpan:
        return slice(self.gradients.start, self.flags.stop)

    @property
    def parcel_bytes(self) -> int:
        """Values and flags, indices behind them; rounded up, as types need aligned addresses."""
        return self.index_start + -(-self.count * INDEX_BYTES // 8) * 8

    @property
    def index_start(self) -> int:
        return -(-(self.count + span_length(self.flags)) * self.element_bytes // 8) * 8


def _cut(fused: FusedBuffer, places: int, density: float) -> tuple[_Shard, ...]:
    """The shards of a buffer, flags included, so that they need no messages of their own."""
    end = fused.gradients.numel()
    found = []
    for span in split_evenly(fused.buffer.numel(), places):
        middle = min(max(end, span.start), span.stop)
        gradients = slice(span.start, middle)
        count = max(1, round(density * span_length(gradients))) if span_length(gradients) else 0
        flags = slice(middle, span.stop)
        found.append(_Shard(gradients, flags, count, fused.buffer.element_size()))
    return tuple(found)


@dataclass(frozen=True)
class _NodePayload:
    """What one node sends of one shard: views of one piece of memory."""

    values: Tensor
    flags: Tensor
    indices: Tensor


def _node_payloads(
    row: Tensor, shard: _Shard, nodes: int, dtype: torch.dtype
) -> tuple[_NodePayload, ...]:
    """The parcels of all nodes in a row."""
    numbers_end = (shard.count + span_length(shard.flags)) * shard.element_bytes
    found = []
    for content in row.view(nodes, shard.parcel_bytes):
        numbers = content[:numbers_end].view(dtype)
        indices = content[shard.index_start :].view(torch.int32)[: shard.count]
        found.append(_NodePayload(numbers[: shard.count], numbers[shard.count :], indices))
    return tuple(found)


def _gather_across_nodes(row: Tensor, circle: PeerGroup, tag: int) -> Iterator[PendingOperation]:
    """Every node gets the parcels of all nodes."""
    yield from all_gather(row, split_evenly(row.numel(), circle.size), circle, tag)


def _gather_inside_node(
    rows: Sequence[Tensor], circle: PeerGroup, tag: int
) -> Iterator[PendingOperation]:
    """Every rank of the node gets the rows of all shards."""
    yield send_receive(
        circle,
        [(rows[place], place) for place in circle.others],
        [(rows[circle.place], place) for place in circle.others],
        tag,
    )


def _payloads_are_smaller(rows: Sequence[Tensor], flat: Tensor) -> bool:
    """Whether to gather parcels or what they add up to inside a node; the sums are the same."""
    return sum(row.numel() for row in rows) < flat.numel() * flat.element_size()


def _unpack(flat: Tensor, shard: _Shard, parcels: Sequence[_NodePayload]) -> None:
    """Write the sum of all nodes' parcels, added in order of the nodes."""
    total = flat[shard.gradients].zero_()
    flags = flat[shard.flags].zero_()
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
    """What has not been sent of one shard."""

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
