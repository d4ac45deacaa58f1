"""What lookups have found lies in parts on the ranks that have the rows; here it is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from headway.parallel.tables.rounds import (
    LookedUp,
    Round,
    pooled_here,
    rows_here,
    stretches,
)
from headway.parallel.tables.wire import Shape, Wire


@dataclass(frozen=True, eq=False)
class Block:
    """A part that a rank has for all ranks.

    Attributes:
        sizes: By rank, the rows of it that belong to that rank; only the owner, and each rank for
            itself, knows them.
    """

    owner: int
    sizes: tuple[int, ...]
    width: int
    dtype: torch.dtype
    table: str


def carry(
    wire: Wire,
    blocks: Sequence[Block],
    token: Tensor,
    parts: Sequence[Tensor],
    sent: Counter[Any],
    kind: str,
) -> list[Tensor]:
    """Give each rank its rows of all blocks; collective, and so is backward.

    Args:
        token: What autograd comes to in backward on ranks that have no block.
        parts: Of the blocks that this rank has [sum of sizes, width], in their order.

    Returns:
        This rank's rows [size, width] of each block.
    """
    found = _Carried.apply(wire, tuple(blocks), sent, kind, token, *parts)  # type: ignore[no-untyped-call]
    return list(found)


class _Carried(Function):
    @staticmethod
    def forward(
        ctx: Any,
        wire: Wire,
        blocks: tuple[Block, ...],
        sent: Counter[Any],
        kind: str,
        token: Tensor,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.wire, ctx.blocks, ctx.sent = wire, blocks, sent
        mine = [block for block in blocks if block.owner == wire.rank]
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for block, part in zip(mine, parts, strict=True):
            for rank, rows in enumerate(part.split(block.sizes)):
                outgoing[rank].append(rows)
                if rank != wire.rank:
                    sent[block.table, kind] += rows.nbytes
        for block in blocks:
            expected[block.owner].append(((block.sizes[wire.rank], block.width), block.dtype))
        came = [iter(listed) for listed in wire.swap(outgoing, expected)]
        return tuple(next(came[block.owner]) for block in blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
        wire: Wire = ctx.wire
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for block, gradient in zip(ctx.blocks, given, strict=True):
            outgoing[block.owner].append(gradient)
            if block.owner != wire.rank:
                ctx.sent[block.table, "gradients"] += gradient.nbytes
            else:
                for rank, size in enumerate(block.sizes):
                    expected[rank].append(((size, block.width), block.dtype))
        came = [iter(listed) for listed in wire.swap(outgoing, expected)]
        found = [
            torch.cat([next(rank) for rank in came])
            for block in ctx.blocks
            if block.owner == wire.rank
        ]
        return None, None, None, None, given[0].new_empty(0), *found


def result_of(made: Round, each: LookedUp, sent: Counter[Any]) -> Tensor:
    """What a lookup gives for this rank's samples; collective."""
    lookup, wire, source = each.lookup, made.wire, each.table.source
    dtype = source.values().dtype
    weights, token = None, made.token
    if lookup.weights is not None and lookup.weights.requires_grad:
        weights, token = weights_here(made, each, sent)
    if each.table.is_here:
        if lookup.mode == "rows":
            return rows_here(made, each).view(lookup.shape)
        return pooled_here(made, each, weights)
    pooled = lookup.mode != "rows"
    blocks = [
        Block(p.owner, each.samples if pooled else p.sizes, len(p.columns), dtype, lookup.table)
        for p in each.pieces
    ]
    parts = []
    if each.asked is not None:
        parts = [pooled_here(made, each, weights) if pooled else rows_here(made, each)]
    came = carry(wire, blocks, token, parts, sent, "sums" if pooled else "rows")
    ranges: dict[range, list[Tensor]] = {}
    for piece, order, part in zip(each.pieces, each.order, came, strict=True):
        if not pooled and order is not None:
            empty = part.new_zeros(len(lookup.ids), len(piece.columns))
            part = empty.index_copy(0, order, part)
        ranges.setdefault(piece.columns, []).append(part)
    sums = []
    for listed in ranges.values():
        total = listed[0]
        for part in listed[1:]:
            total = total + part
        sums.append(total)
    return (sums[0] if len(sums) == 1 else torch.cat(sums, 1)).reshape(lookup.shape)


def weights_here(made: Round, each: LookedUp, sent: Counter[Any]) -> tuple[Tensor, Tensor]:
    """The weights of the ids that were asked of this rank; their gradients go back.

    Returns:
        Them, and the token of what they are used for: a rank that is asked nothing must come here
        in backward all the same.
    """
    own = each.lookup.weights
    assert own is not None
    if each.table.is_here:
        return own, made.token
    return _Spread.apply(made, each, sent, made.token, own)  # type: ignore[no-untyped-call, no-any-return]


class _Spread(Function):
    """A number for each id of this rank, to the owners of their rows."""

    @staticmethod
    def forward(
        ctx: Any, made: Round, each: LookedUp, sent: Counter[Any], token: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.made, ctx.each, ctx.sent, ctx.shape = made, each, sent, own.shape
        wire = made.wire
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for piece, order in zip(each.pieces, each.order, strict=True):
            outgoing[piece.owner].append(own if order is None else own[order])
            if piece.owner != wire.rank:
                sent[each.lookup.table, "ids"] += outgoing[piece.owner][-1].nbytes
            else:
                for rank, size in enumerate(piece.sizes):
                    expected[rank].append(((size,), own.dtype))
        came = [part for listed in wire.swap(outgoing, expected) for part in listed]
        return torch.cat(came) if came else own.new_empty(0), token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, token: Tensor) -> tuple[Any, ...]:
        wire: Wire = ctx.made.wire
        each: LookedUp = ctx.each
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for piece in each.pieces:
            expected[piece.owner].append(((piece.sizes[wire.rank],), given.dtype))
            if piece.owner == wire.rank:
                for rank, part in enumerate(given.split(piece.sizes)):
                    outgoing[rank].append(part)
                    if rank != wire.rank:
                        ctx.sent[each.lookup.table, "gradients"] += part.nbytes
        came = [iter(listed) for listed in wire.swap(outgoing, expected)]
        total = given.new_zeros(ctx.shape)
        for piece, order in zip(each.pieces, each.order, strict=True):
            part = next(came[piece.owner])
            total = total + part if order is None else total.index_add(0, order, part)
        return None, None, None, given.new_empty(0), total


__all__ = ["Block", "carry", "result_of", "stretches", "weights_here"]
