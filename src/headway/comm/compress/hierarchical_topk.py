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

from headway.collective.compression import SparseShard, sparse_shards
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
    check_uniform_nodes,
    first_tag,
    reduce_scatter,
    send_receive,
    split_evenly,
)
from headway.comm.compress.state import parse_state_key
from headway.comm.compress.topk_selection import ms_top_k, top_k


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
