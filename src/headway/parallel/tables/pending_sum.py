"""Pending sums: on every rank a part for the samples of all ranks, whose sum is still to be taken.

What a sample gives is the sum of blocks, each with an owner and with places in the flattened
sample; all ranks know all blocks, and an owner has the entries of its own for all samples. A table
on one rank gives one block, one cut by columns has blocks at other places, one cut by rows has
blocks at the same places. Functions that are linear in a sample act on blocks where they lie.
`take` sends each rank the entries of its samples and adds them up: a reduce-scatter over samples,
as one exchange and a local sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from headway.parallel.tables.places import (
    Places,
    add_at,
    are_apart,
    entries_at,
    numbers_of,
    picked,
    put_at,
    same_places,
)
from headway.parallel.tables.rounds import LookedUp
from headway.parallel.tables.row_gradients import (
    BatchUse,
    ComingUses,
    pooled_here,
    pooled_values,
    rows_here,
)
from headway.parallel.tables.wire import Flight, Shape, Wire

OWN = -1
"""In the place of an owner: each rank has the entries of its own samples."""


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a pending sum.

    Attributes:
        owner: Its rank, or `OWN`.
        tables: From which it comes, for the count of bytes.
        local: [samples of all ranks, places] on the owner, elsewhere None; of `OWN` [own samples,
            places].
        source: The lookup whose sums these are, as they were found.
        mark: The same of blocks with the same entries, wherever they lie.
    """

    owner: int
    places: Places
    tables: tuple[str, ...]
    local: Tensor | None
    source: LookedUp | None = None
    mark: object = field(default_factory=object)

    @property
    def width(self) -> int:
        return len(self.places)

    def mapped(self, function: Callable[[Tensor], Tensor], places: Places | None = None) -> Block:
        """A function of its entries."""
        local = None if self.local is None else function(self.local)
        places = self.places if places is None else places
        return replace(self, places=places, local=local, source=None, mark=object())

    def at(self, places: Places) -> Block:
        """The same entries at other places."""
        return replace(self, places=places)


@dataclass(frozen=True, eq=False)
class PendingSum:
    """A tensor [own samples, *tail] as blocks.

    Attributes:
        batch: To which its lookups belong.
        samples: By rank.
        tail: Shape of a sample.
        token: What depends on it takes this, so that all ranks go the same way backward.
    """

    batch: BatchUse
    samples: tuple[int, ...]
    tail: tuple[int, ...]
    blocks: tuple[Block, ...]
    dtype: torch.dtype
    token: Tensor

    @property
    def own_samples(self) -> int:
        return self.samples[self.batch.exchange.wire.rank]

    @property
    def size(self) -> int:
        """Entries of a sample."""
        return prod(self.tail)

    @property
    def traffic(self) -> int:
        """Entries of a sample that are sent when it is taken."""
        return sum(block.width for block in self.blocks if block.owner != OWN)

    @property
    def is_apart(self) -> bool:
        """Whether each entry is whole on one rank: functions of entries act on blocks, too."""
        return are_apart(self.size, tuple(block.places for block in self.blocks))

    def with_blocks(
        self,
        blocks: Sequence[Block],
        tail: Sequence[int] | None = None,
        token: Tensor | None = None,
    ) -> PendingSum:
        return replace(
            self,
            blocks=_merged(blocks),
            tail=self.tail if tail is None else tuple(tail),
            token=self.token if token is None else token,
        )

    def moved(self, source: Tensor, tail: Sequence[int]) -> PendingSum:
        """Entries in another order, some of them or some repeatedly.

        Args:
            source: For each entry of the result, flat, the one it is.
        """
        found = []
        for block in self.blocks:
            places, chosen = picked(block.places, source, self.size)
            if chosen is None:
                found.append(block.at(places))
            elif len(places):
                found.append(block.mapped(partial(entries_at, places=chosen), places))
        return self.with_blocks(found, tail)


def _merged(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Those of one owner at the same places as one."""
    found: list[Block] = []
    for block in blocks:
        for number, other in enumerate(found):
            if other.owner == block.owner and same_places(other.places, block.places):
                both = None
                if other.local is not None and block.local is not None:
                    both = other.local + block.local
                names = tuple(dict.fromkeys(other.tables + block.tables))
                found[number] = Block(other.owner, other.places, names, both)
                break
        else:
            found.append(block)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class OwnedRows:
    """Rows of ids that were looked up one by one, [*shape of ids, columns]; each lies on one rank.

    Attributes:
        local: The rows of the ids that were asked here, in the order in which they came [ids,
            columns here]; None: as the table has them, or none were asked.
        flat: A table of one column, without the dimension of columns.
        as_found: Nothing has been done to the rows, on any rank.
    """

    batch: BatchUse
    each: LookedUp
    dtype: torch.dtype
    token: Tensor
    local: Tensor | None = None
    flat: bool = False
    as_found: bool = True

    @property
    def shape(self) -> torch.Size:
        shape = self.each.lookup.shape
        return shape[:-1] if self.flat else shape

    def rows(self) -> Tensor | None:
        """`local`, read from the table if need be; None: none were asked here."""
        if self.each.asked is None or self.local is not None:
            return self.local
        return rows_here(self.batch, self.each, self.token)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> OwnedRows:
        """A function of each row."""
        local = self.rows()
        local = None if local is None else function(local)
        return replace(self, local=local, as_found=False)


# Taking: each rank sends every other one the entries of its samples.


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a block for each rank, and where they come to lie in a result."""

    owner: int
    sizes: tuple[int, ...]
    places: Places
    order: Tensor | None
    tables: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Result:
    """What an exchange makes [rows, entries]: the sum of parts, and of what a rank has itself."""

    rows: int
    entries: int
    dtype: torch.dtype
    kind: str
    parts: tuple[_Part, ...]
    own: tuple[Places, ...] = ()

    @property
    def is_covered(self) -> bool:
        """Whether each entry is written once."""
        end = 0
        places = [*(part.places for part in self.parts), *self.own]
        if any(part.order is not None for part in self.parts):
            return False
        for each in sorted(places, key=lambda p: p.start if isinstance(p, range) else -1):
            if not isinstance(each, range) or each.start != end:
                return False
            end = each.stop
        return end == self.entries


def _result_of(value: PendingSum | OwnedRows | LookedUp, dtype: torch.dtype, wire: Wire) -> _Result:
    if isinstance(value, PendingSum):
        apart = [block for block in value.blocks if block.owner != OWN]
        parts = tuple(_Part(b.owner, value.samples, b.places, None, b.tables) for b in apart)
        own = tuple(block.places for block in value.blocks if block.owner == OWN)
        return _Result(value.own_samples, value.size, dtype, "sums", parts, own)
    each = value if isinstance(value, LookedUp) else value.each
    name, columns = (each.lookup.table,), each.lookup.shape[-1]
    if isinstance(value, LookedUp) and not each.travel_rows:
        parts = tuple(_Part(p.owner, each.samples, p.columns, None, name) for p in each.pieces)
        return _Result(each.samples[wire.rank], columns, dtype, "sums", parts)
    parts = tuple(_Part(p.owner, p.sizes, p.columns, p.order, name) for p in each.pieces)
    return _Result(len(each.keys), columns, dtype, "rows", parts)


@dataclass(eq=False)
class Taking:
    """An exchange that is under way.

    Attributes:
        raw: This rank's lookups that it sends as they were found: their gradients go to the batch
            without waiting; None: autograd has made the parts.
    """

    batch: BatchUse
    results: tuple[_Result, ...]
    flight: Flight
    raw: tuple[LookedUp, ...] | None = None

    def finish(self, tokens: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Wait for it.

        Args:
            inputs: This rank's parts, unless they are raw, and what it has itself, by result.
        """
        found = _Taken.apply(self, len(tokens), *tokens, *inputs)  # type: ignore[no-untyped-call]
        return list(found)


def _depart(
    batch: BatchUse,
    results: tuple[_Result, ...],
    parts: Sequence[Tensor],
    raw: tuple[LookedUp, ...] | None = None,
) -> Taking:
    wire, sent = batch.exchange.wire, batch.exchange.sent
    outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
    expected: list[list[Shape]] = [[] for _ in range(wire.size)]
    mine = iter(parts)
    for result in results:
        for part in result.parts:
            shape = (part.sizes[wire.rank], len(part.places))
            expected[part.owner].append((shape, result.dtype))
            if part.owner == wire.rank:
                for rank, rows in enumerate(next(mine).detach().split(part.sizes)):
                    outgoing[rank].append(rows)
                    if rank != wire.rank:
                        sent[" + ".join(part.tables), result.kind] += rows.nbytes
    return Taking(batch, results, wire.start(outgoing, expected), raw)


class _Taken(Function):
    @staticmethod
    def forward(ctx: Any, taking: Taking, tokens: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.taking, ctx.tokens, ctx.dtypes = taking, tokens, [x.dtype for x in inputs]
        wire = taking.batch.exchange.wire
        came = [iter(listed) for listed in taking.flight.wait()]
        owned = sum(part.owner == wire.rank for r in taking.results for part in r.parts)
        own = iter(inputs[tokens + (0 if taking.raw is not None else owned) :])
        return tuple(
            _assembled(
                result, [next(came[part.owner]) for part in result.parts],
                [next(own) for _ in result.own], wire.device,
            )
            for result in taking.results
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Any, ...]:
        taking: Taking = ctx.taking
        batch, wire = taking.batch, taking.batch.exchange.wire
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        owned = 0
        for result, gradient in zip(taking.results, given, strict=True):
            for part in result.parts:
                batch.reached.update(part.tables)
                rows = gradient if part.order is None else gradient.index_select(0, part.order)
                rows = entries_at(rows, part.places)
                outgoing[part.owner].append(rows)
                if part.owner != wire.rank:
                    batch.exchange.sent[" + ".join(part.tables), "gradients"] += rows.nbytes
                    continue
                owned += 1
                for rank, size in enumerate(part.sizes):
                    expected[rank].append(((size, len(part.places)), result.dtype))
        flight = wire.start(outgoing, expected)
        own = [
            entries_at(gradient, places)
            for result, gradient in zip(taking.results, given, strict=True)
            for places in result.own
        ]
        found: list[Tensor] = []
        if taking.raw is not None:
            batch.used.append(ComingUses(flight, taking.raw))
        else:
            came = [iter(listed) for listed in flight.wait()]
            found = [torch.cat([next(rank) for rank in came]) for _ in range(owned)]
        none = [given[0].new_empty(0, dtype=dtype) for dtype in ctx.dtypes[: ctx.tokens]]
        return None, None, *none, *found, *own


def _assembled(
    result: _Result, came: Sequence[Tensor], own: Sequence[Tensor], device: torch.device
) -> Tensor:
    shape = result.rows, result.entries
    covered = result.is_covered
    total = (torch.empty if covered else torch.zeros)(shape, dtype=result.dtype, device=device)
    add = put_at if covered else add_at
    for part, rows in zip(result.parts, came, strict=True):
        if part.order is None:
            add(total, part.places, rows)
        else:
            # Each row lies on one rank, so that nothing is there yet.
            assert isinstance(part.places, range)
            total[:, part.places.start : part.places.stop].index_copy_(0, part.order, rows)
    for places, entries in zip(result.own, own, strict=True):
        add(total, places, entries)
    return total


def take(values: Sequence[PendingSum | OwnedRows]) -> list[Tensor]:
    """The entries of this rank's samples, all in one exchange; collective, as backward is.

    Args:
        values: Of one batch.
    """
    batch = values[0].batch
    wire = batch.exchange.wire
    sums = [value for value in values if isinstance(value, PendingSum)]
    marks = [block.mark for value in sums for block in value.blocks]
    if len(set(map(id, marks))) < len(marks):
        return _taken_once(values, sums)
    parts: list[Tensor] = []
    own: list[Tensor] = []
    for value in values:
        if isinstance(value, OwnedRows):
            rows = value.rows()
            parts += [] if rows is None else [rows]
            continue
        here = [block for block in value.blocks if block.owner == wire.rank]
        parts += [block.local for block in here if block.local is not None]
        own += [b.local for b in value.blocks if b.owner == OWN and b.local is not None]
    results = tuple(_result_of(value, value.dtype, wire) for value in values)
    found = _depart(batch, results, parts).finish([v.token for v in values], [*parts, *own])
    shapes = [
        value.shape if isinstance(value, OwnedRows) else (value.own_samples, *value.tail)
        for value in values
    ]
    return [x.view(shape) for x, shape in zip(found, shapes, strict=True)]


def _taken_once(
    values: Sequence[PendingSum | OwnedRows], sums: Sequence[PendingSum]
) -> list[Tensor]:
    """As `take`, of sums that have blocks in common: these are sent once."""
    blocks = list({id(block.mark): block for value in sums for block in value.blocks}.values())
    ends = list(accumulate(block.width for block in blocks))
    begins = {id(b.mark): end - b.width for b, end in zip(blocks, ends, strict=True)}
    apart = [b.at(range(e - b.width, e)) for b, e in zip(blocks, ends, strict=True)]
    tokens = list({id(value.token): value.token for value in sums}.values())
    token = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
    every = replace(sums[0], blocks=tuple(apart), tail=(ends[-1],), token=token)
    rest = [value for value in values if isinstance(value, OwnedRows)]
    entries, *others = take([every, *rest])
    came = iter(others)
    found = []
    for value in values:
        if isinstance(value, OwnedRows):
            found.append(next(came))
            continue
        total = entries.new_zeros(value.own_samples, value.size)
        for block in value.blocks:
            begin = begins[id(block.mark)]
            part = entries[:, begin : begin + block.width]
            total = total.index_add(1, numbers_of(block.places).to(total.device), part)
        found.append(total.view(value.own_samples, *value.tail))
    return found


def take_raw(batch: BatchUse, found: Sequence[LookedUp]) -> Taking:
    """Begin to send what lookups have found as it is; collective, as backward is."""
    mine = tuple(each for each in found if each.asked is not None)
    parts = [
        each.rows.values().index_select(0, asked.places)
        if each.travel_rows
        else pooled_values(each)
        for each in mine
        if (asked := each.asked) is not None
    ]
    wire = batch.exchange.wire
    results = tuple(_result_of(each, each.rows.values().dtype, wire) for each in found)
    return _depart(batch, results, parts, mine)


def pending_of(
    batch: BatchUse, each: LookedUp, token: Tensor, weights: Tensor | None
) -> PendingSum:
    """The sums that a lookup has found, where they lie.

    Args:
        weights: Of the ids that were asked here, where their gradient is wanted.
    """
    wire, columns = batch.exchange.wire, each.lookup.shape[-1]
    local = None if each.asked is None else pooled_here(batch, each, token, weights)
    name = (each.lookup.table,)
    blocks = tuple(
        Block(p.owner, p.columns, name, local if p.owner == wire.rank else None, each)
        for p in each.pieces
    )
    dtype = each.rows.values().dtype
    return PendingSum(batch, each.samples, (columns,), blocks, dtype, token)


# What goes to the owners: a number for each id, or entries of each sample.


def spread_over_ids(batch: BatchUse, each: LookedUp, own: Tensor) -> tuple[Tensor, Tensor]:
    """A number for each id, to the owners of their rows; collective, as backward is.

    Args:
        own: [ids of this rank].

    Returns:
        Those of the ids that were asked here; and the token of what they are used for: a rank that
        was asked nothing must come here in backward all the same.
    """
    found, token = _OverIds.apply(batch, each, batch.token, own)  # type: ignore[no-untyped-call]
    return found, token


class _OverIds(Function):
    @staticmethod
    def forward(
        ctx: Any, batch: BatchUse, each: LookedUp, token: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.batch, ctx.each, ctx.shape = batch, each, own.shape
        wire = batch.exchange.wire
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for piece in each.pieces:
            outgoing[piece.owner].append(own if piece.order is None else own[piece.order])
            if piece.owner != wire.rank:
                size = outgoing[piece.owner][-1].nbytes
                batch.exchange.sent[each.lookup.table, "ids"] += size
            else:
                for rank, count in enumerate(piece.sizes):
                    expected[rank].append(((count,), own.dtype))
        came = [part for listed in wire.swap(outgoing, expected) for part in listed]
        return torch.cat(came) if came else own.new_empty(0), token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, token: Tensor) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[3]:  # alike on all ranks
            return None, None, token.new_empty(0), None
        batch, each = ctx.batch, ctx.each
        wire = batch.exchange.wire
        outgoing: list[list[Tensor]] = [[] for _ in range(wire.size)]
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for piece in each.pieces:
            expected[piece.owner].append(((piece.sizes[wire.rank],), given.dtype))
            if piece.owner == wire.rank:
                for rank, part in enumerate(given.split(piece.sizes)):
                    outgoing[rank].append(part)
                    if rank != wire.rank:
                        batch.exchange.sent[each.lookup.table, "gradients"] += part.nbytes
        came = [iter(listed) for listed in wire.swap(outgoing, expected)]
        total = given.new_zeros(ctx.shape)
        for piece in each.pieces:
            part = next(came[piece.owner])
            order = piece.order
            total = total + part if order is None else total.index_add(0, order, part)
        return None, None, given.new_empty(0), total


def spread_over_samples(
    pending: PendingSum, own: Tensor, wanted: Sequence[Places]
) -> tuple[Tensor, Tensor]:
    """Entries of all samples of all ranks, to the ranks that want them; collective, as backward is.

    Args:
        own: [own samples, entries].
        wanted: By rank.

    Returns:
        [samples of all ranks, entries that this rank wants], and a token as of `spread_over_ids`.
    """
    found, token = _OverSamples.apply(pending, tuple(wanted), pending.token, own)  # type: ignore[no-untyped-call]
    return found, token


class _OverSamples(Function):
    @staticmethod
    def forward(
        ctx: Any, pending: PendingSum, wanted: tuple[Places, ...], token: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.pending, ctx.wanted, ctx.shape = pending, wanted, own.shape
        batch = pending.batch
        wire = batch.exchange.wire
        outgoing = [[entries_at(own, places)] for places in wanted]
        width = len(wanted[wire.rank])
        for rank, (part,) in enumerate(outgoing):
            if rank != wire.rank:
                batch.exchange.sent["", "samples"] += part.nbytes
        came = wire.swap(outgoing, [[((n, width), own.dtype)] for n in pending.samples])
        return torch.cat([part for (part,) in came]), token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, token: Tensor) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[3]:
            return None, None, token.new_empty(0), None
        pending: PendingSum = ctx.pending
        batch = pending.batch
        wire = batch.exchange.wire
        outgoing = [[part] for part in given.split(pending.samples)]
        for rank, (part,) in enumerate(outgoing):
            if rank != wire.rank:
                batch.exchange.sent["", "samples"] += part.nbytes
        rows = pending.own_samples
        came = wire.swap(outgoing, [[((rows, len(p)), given.dtype)] for p in ctx.wanted])
        total = given.new_zeros(ctx.shape)
        for places, (part,) in zip(ctx.wanted, came, strict=True):
            add_at(total, places, part)
        return None, None, given.new_empty(0), total
