"""One round of lookups: all that ranks ask of each other's tables, in one exchange of ids.

Every rank first says how many samples and ids it has for each lookup, and a fingerprint of what it
looks up where; a rank that does something else, or has been given bad ids, is found here, on all
ranks. Then each id goes to the rank that has its row (to one of each range of columns), with the
lengths of bags where they do not follow from what was said. Backward, autograd comes to the round
last, and it hands each table the gradients of the rows that were used, each row once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from headway.errors import PlanError
from headway.parallel.tables.lookups import Lookup, lookup_error, samples_of_ids
from headway.parallel.tables.table_parts import RowSource, parts_of_rows
from headway.parallel.tables.wire import Shape, Wire
from headway.plans.tables import TablePlacement

_HEAD = 4
_INT32_ROWS = 2**31


@dataclass(frozen=True, eq=False)
class SplitTable:
    """A table and this rank's part of it."""

    placement: TablePlacement
    source: RowSource

    @property
    def wire_ids(self) -> torch.dtype:
        """The type in which ids travel."""
        narrow = 0 < self.placement.rows < _INT32_ROWS
        return torch.int32 if narrow else torch.int64

    @property
    def is_here(self) -> bool:
        """Every rank has all of it, and nobody asks anybody."""
        return self.placement.cut == "none"


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a table as all ranks see it in a round.

    Attributes:
        owner: The rank that has it.
        columns: Of the table, those of the piece.
        sizes: By asking rank, the ids that it has sent there; only its owner, and each rank for
            itself, knows them.
    """

    owner: int
    columns: range
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Asked:
    """What a rank was asked of its piece, by all ranks one after the other.

    Attributes:
        places: [ids] where their rows are.
        lengths: int64 [samples of all ranks]: ids of each sample that were asked here.
        totals: Ids of each sample altogether, int64; None: nobody needs them.
        weights: [ids], or None.
        padding: Where the row is that gets no gradient, if it is here.
    """

    places: Tensor
    lengths: Tensor
    totals: Tensor | None
    weights: Tensor | None
    padding: int | None = None

    def offsets(self) -> Tensor:
        """Where each sample's ids begin; in the type of `places`, as torch wants it."""
        ends = self.lengths.cumsum(0)
        return (ends - self.lengths).to(self.places.dtype)

    def sample_of_ids(self) -> Tensor:
        return samples_of_ids(len(self.lengths), self.lengths, 0, self.lengths.device)


@dataclass(eq=False)
class LookedUp:
    """One lookup of a round.

    Attributes:
        samples: By rank.
        pieces: Of the table, in the order of the matrix of owners.
        order: By piece, which of this rank's ids went there, int64; None: all, in their order.
        asked: Of this rank's own piece.
    """

    lookup: Lookup
    table: SplitTable
    samples: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    order: tuple[Tensor | None, ...] = ()
    asked: Asked | None = None


@dataclass(eq=False)
class Round:
    """Lookups that were exchanged together.

    Attributes:
        token: Without entries; what depends on a table in this round takes it, so that autograd
            comes here last.
    """

    wire: Wire
    found: list[LookedUp]
    token: Tensor
    used: dict[str, list[tuple[LookedUp, Any]]] = field(default_factory=dict)


def run_round(
    wire: Wire, tables: Mapping[str, SplitTable], lookups: Sequence[Lookup], sent: Counter[Any]
) -> Round:
    """Exchange the ids of lookups; collective.

    Args:
        sent: Bytes to other ranks by table and kind, added to.

    Raises:
        DataError: Ids, offsets or weights of some rank cannot be used; the same on all ranks.
        PlanError: Ranks look up different tables, or in another order; on all of them.
    """
    said = _agree(wire, tables, lookups)
    found = [
        LookedUp(lookup, tables[lookup.table], tuple(rank[number][0] for rank in said))
        for number, lookup in enumerate(lookups)
    ]
    routes = [_route(each) for each in found]
    counts = _counts(wire, found, routes, said)
    parts: list[list[Tensor]] = [[] for _ in range(wire.size)]
    expected: list[list[Shape]] = [[] for _ in range(wire.size)]
    for number, (each, route) in enumerate(zip(found, routes, strict=True)):
        for piece, ids in route.items():
            owner = _pieces(each.table.placement)[piece][2]
            section = _section(each, piece, ids)
            parts[owner] += section
            if owner != wire.rank:
                sent[each.lookup.table, "ids"] += sum(x.nbytes for x in section)
        own = each.table.placement.piece_of(wire.rank)
        if own is not None and not each.table.is_here:
            for rank in range(wire.size):
                ragged = said[rank][number][1] < 0
                size = counts[rank][number]
                expected[rank] += _shapes(each, own, size, each.samples[rank], ragged)
    came = [iter(listed) for listed in wire.swap(parts, expected)]
    for number, each in enumerate(found):
        _take_in(wire, each, routes[number], [c[number] for c in counts], came,
                 [rank[number][1] for rank in said])  # fmt: skip
    leaves = [table.source.leaf for table in tables.values()]
    made = Round(wire, found, torch.empty(0, device=wire.device))
    made.token = _Begin.apply(made, tables, sent, *leaves)  # type: ignore[no-untyped-call]
    return made


def _agree(
    wire: Wire, tables: Mapping[str, SplitTable], lookups: Sequence[Lookup]
) -> list[list[tuple[int, int, int]]]:
    """By rank and lookup: samples, ids of each (-1: bags of any length) and ids."""
    described = [_description(lookup) for lookup in lookups]
    mark = crc32(repr(described).encode())
    heads = wire.gather([mark, len(lookups), any(x.problem for x in lookups), 0])
    if any(head[2] for head in heads):
        own = [(wire.rank, x.table, x.problem) for x in lookups if x.problem]
        raise lookup_error([p for listed in wire.documents(own) for p in listed])
    if any(head[:2] != heads[0][:2] for head in heads):
        raise _different(wire.documents(described))
    numbers = [
        n for x in lookups for n in (x.samples, -1 if x.lengths is not None else x.each, len(x.ids))
    ]
    return [
        [(row[n], row[n + 1], row[n + 2]) for n in range(0, len(row), 3)]
        for row in wire.gather(numbers)
    ]


def _description(lookup: Lookup) -> str:
    weights = lookup.weights
    weighted = "" if weights is None else f", weights of {weights.dtype}"
    learnt = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    return f"{lookup.mode} of {lookup.table}{weighted}{', learnt' if learnt else ''}"


def _different(said: Sequence[Any]) -> PlanError:
    """The error of ranks that look up different things."""
    rank = next(n for n, listed in enumerate(said) if listed != said[0])
    pairs = zip(said[0], said[rank], strict=False)
    number = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if number is None:
        number = min(len(said[0]), len(said[rank]))
    lines = [
        f"rank {r}: {said[r][number] if number < len(said[r]) else 'nothing'}" for r in (0, rank)
    ]
    return PlanError(
        f"lookup {number + 1} of a step is not the same on all ranks",
        problems=lines,
        fix="Look up the same tables in the same order on all ranks, also for empty batches.",
    )


def _pieces(placement: TablePlacement) -> list[tuple[int, int, int]]:
    """Range of columns, part of rows, owner."""
    return [
        (number, part, owner)
        for number, parts in enumerate(placement.owners)
        for part, owner in enumerate(parts)
    ]


def _route(each: LookedUp) -> dict[int, Tensor | None]:
    """By piece, which of this rank's ids go there; None: all."""
    placement, ids = each.table.placement, each.lookup.ids
    if each.table.is_here:
        return {}
    found: dict[int, Tensor | None] = {}
    piece = 0
    for number, parts in enumerate(placement.owners):
        if len(parts) == 1:
            found[piece] = None
        else:
            part = parts_of_rows(placement, number, ids)
            order = torch.sort(part, stable=True).indices
            sizes = torch.bincount(part, minlength=len(parts)).tolist()
            for offset, chosen in enumerate(order.split(sizes)):
                found[piece + offset] = chosen
        piece += len(parts)
    return found


def _counts(
    wire: Wire,
    found: Sequence[LookedUp],
    routes: Sequence[Mapping[int, Tensor | None]],
    said: Sequence[Sequence[tuple[int, int, int]]],
) -> list[list[int]]:
    """By asking rank and lookup, the ids that come here."""
    cut = [n for n, each in enumerate(found) if _is_cut(each.table.placement)]
    counts = [[rank[number][2] for number in range(len(found))] for rank in said]
    if not cut:
        return counts
    numbers = torch.zeros(wire.size, len(cut), dtype=torch.int64, device=wire.device)
    for column, number in enumerate(cut):
        owners = _pieces(found[number].table.placement)
        for piece, ids in routes[number].items():
            size = len(found[number].lookup.ids) if ids is None else len(ids)
            numbers[owners[piece][2], column] = size
    shape = ((len(cut),), torch.int64)
    came = wire.swap([[row] for row in numbers.unbind()], [[shape]] * wire.size)
    for rank, (row,) in enumerate(came):
        for number, size in zip(cut, row.tolist(), strict=True):
            counts[rank][number] = size
    return counts


def _is_cut(placement: TablePlacement) -> bool:
    """Whether several ranks share the rows of some column."""
    return placement.cut != "none" and any(len(parts) > 1 for parts in placement.owners)


def _section(each: LookedUp, piece: int, chosen: Tensor | None) -> list[Tensor]:
    """What goes to the owner of a piece."""
    lookup = each.lookup
    number = _pieces(each.table.placement)[piece][0]
    shared = len(each.table.placement.owners[number]) > 1
    ids = lookup.ids if chosen is None else lookup.ids[chosen]
    section = [ids.to(each.table.wire_ids)]
    if shared:
        samples = lookup.sample_of_ids()
        here = samples if chosen is None else samples[chosen]
        section.append(torch.bincount(here, minlength=lookup.samples).to(torch.int32))
        if lookup.mode == "mean" and lookup.lengths is not None:
            section.append(lookup.lengths.to(torch.int32))
    elif lookup.lengths is not None:
        section.append(lookup.lengths.to(torch.int32))
    if lookup.weights is not None and not lookup.weights.requires_grad:
        section.append(lookup.weights if chosen is None else lookup.weights[chosen])
    return section


def _shapes(
    each: LookedUp, own: tuple[int, int], size: int, samples: int, ragged: bool
) -> list[Shape]:
    """Of a section that comes from a rank; as `_section` makes it."""
    lookup = each.lookup
    shared = len(each.table.placement.owners[own[0]]) > 1
    shapes: list[Shape] = [((size,), each.table.wire_ids)]
    if shared or ragged:
        shapes.append(((samples,), torch.int32))
        if shared and ragged and lookup.mode == "mean":
            shapes.append(((samples,), torch.int32))
    if lookup.weights is not None and not lookup.weights.requires_grad:
        shapes.append(((size,), lookup.weights.dtype))
    return shapes


def _take_in(
    wire: Wire,
    each: LookedUp,
    route: Mapping[int, Tensor | None],
    counts: Sequence[int],
    came: Sequence[Any],
    lengths: Sequence[int],
) -> None:
    """What has come for a lookup; `lengths`: by rank, ids of each sample, -1 if they differ."""
    placement, lookup, device = each.table.placement, each.lookup, wire.device
    if each.table.is_here:
        everything = lookup.all_lengths()
        each.asked = Asked(each.table.source.places(lookup.ids), everything, everything,
                           lookup.weights, lookup.padding)  # fmt: skip
        return
    pieces = []
    for piece, (number, _, owner) in enumerate(_pieces(placement)):
        chosen = route[piece]
        size = len(lookup.ids) if chosen is None else len(chosen)
        known = list(counts) if owner == wire.rank else [0] * wire.size
        known[wire.rank] = size
        pieces.append(Piece(owner, placement.column_range(number), tuple(known)))
    each.pieces, each.order = tuple(pieces), tuple(route[n] for n in range(len(pieces)))
    own = placement.piece_of(wire.rank)
    if own is None:
        return
    shared = len(placement.owners[own[0]]) > 1
    ids, here, totals, weights = [], [], [], []
    for rank in range(wire.size):
        ids.append(next(came[rank]))
        uniform = torch.full((each.samples[rank],), max(0, lengths[rank]), device=device)
        ragged = lengths[rank] < 0
        mine = next(came[rank]).long() if shared or ragged else uniform
        here.append(mine)
        if lookup.mode == "mean" and shared:
            totals.append(next(came[rank]).long() if ragged else uniform)
        else:
            totals.append(mine)
        if lookup.weights is not None and not lookup.weights.requires_grad:
            weights.append(next(came[rank]))
    each.asked = Asked(
        each.table.source.places(torch.cat(ids)), torch.cat(here), torch.cat(totals),
        torch.cat(weights) if weights else None, _padding_here(each, own),
    )  # fmt: skip


def _padding_here(each: LookedUp, own: tuple[int, int]) -> int | None:
    """Where this rank has the row that gets no gradient; None: nowhere."""
    placement, padding = each.table.placement, each.lookup.padding
    if padding is None:
        return None
    key = torch.tensor([padding])
    if len(placement.owners[own[0]]) > 1 and int(parts_of_rows(placement, own[0], key)) != own[1]:
        return None
    return int(each.table.source.places(key.to(each.lookup.ids.device)))


# What the owner of a piece makes of its rows; gradients of rows are collected until the end.


class _Begin(Function):
    """The tables of a round, for autograd."""

    @staticmethod
    def forward(ctx: Any, made: Round, tables: Any, sent: Any, *leaves: Tensor) -> Tensor:
        ctx.made, ctx.tables, ctx.sent = made, tables, sent
        return made.token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        made: Round = ctx.made
        found: list[Tensor | None] = []
        for name, table in ctx.tables.items():
            uses = made.used.pop(name, [])
            looked_up = any(each.lookup.table == name for each in made.found)
            if not (looked_up and table.source.leaf.requires_grad):
                found.append(None)
                continue
            rows, gradients = _row_gradients(table, uses)
            if table.is_here:
                rows, gradients = _of_all_ranks(made.wire, name, rows, gradients, ctx.sent)
            found.append(table.source.gradient(rows, gradients))
        return None, None, None, *found


def _row_gradients(
    table: SplitTable, uses: Sequence[tuple[LookedUp, tuple[Tensor, Tensor | None, Tensor | None]]]
) -> tuple[Tensor, Tensor]:
    """Rows that were used, ascending, each once, and the sum of what all uses give each.

    Args:
        uses: With the gradient [entries, columns], for each id the entry that it belongs to (None:
            its own), and its factor.
    """
    values = table.source.values()
    if not uses:
        return (
            torch.empty(0, dtype=torch.int64, device=values.device),
            values.new_empty(0, values.shape[1]),
        )
    places, entries, factors, given = [], [], [], []
    start = 0
    for each, (gradient, entry, factor) in uses:
        asked = each.asked
        assert asked is not None
        numbers = torch.arange(len(asked.places), device=values.device) if entry is None else entry
        own = asked.places
        if each.lookup.mode == "rows" and asked.padding is not None:
            kept = own != asked.padding
            own, numbers = own[kept], numbers[kept]
            factor = None if factor is None else factor[kept]
        places.append(own.long())
        entries.append(numbers + start)
        ones = torch.ones(len(own), dtype=gradient.dtype, device=gradient.device)
        factors.append(ones if factor is None else factor)
        given.append(gradient)
        start += len(gradient)
    plain = all(factor is None for _, (_, _, factor) in uses)
    place, order = torch.sort(torch.cat(places), stable=True)
    rows, sizes = torch.unique_consecutive(place, return_counts=True)
    # A bag for each row that was used, of the gradients that it gets: nothing is expanded.
    sums = F.embedding_bag(
        torch.cat(entries)[order], torch.cat(given), sizes.cumsum(0) - sizes, mode="sum",
        per_sample_weights=None if plain else torch.cat(factors)[order],
    )  # fmt: skip
    return rows, sums


def _of_all_ranks(
    wire: Wire, name: str, rows: Tensor, gradients: Tensor, sent: Counter[Any]
) -> tuple[Tensor, Tensor]:
    """Gradients of a table that all ranks have, summed over them in the order of ranks."""
    if wire.size == 1:
        return rows, gradients
    counts = [n for (n,) in wire.gather([len(rows)])]
    width = gradients.shape[1]
    shapes: list[list[Shape]] = [
        [((n,), rows.dtype), ((n, width), gradients.dtype)] for n in counts
    ]
    sent[name, "gradients"] += (rows.nbytes + gradients.nbytes) * (wire.size - 1)
    came = wire.swap([[rows, gradients]] * wire.size, shapes)
    place, order = torch.sort(torch.cat([part[0] for part in came]), stable=True)
    found, sizes = torch.unique_consecutive(place, return_counts=True)
    every = torch.cat([part[1] for part in came])
    return found, F.embedding_bag(order, every, sizes.cumsum(0) - sizes, mode="sum")


class _Pooled(Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, weights: Tensor | None, made: Round, each: LookedUp
    ) -> Tensor:
        asked = each.asked
        assert asked is not None
        ctx.made, ctx.each = made, each
        ctx.save_for_backward(weights)
        return F.embedding_bag(
            asked.places, each.table.source.values(), asked.offsets(), mode="sum",
            per_sample_weights=weights,
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        (weights,) = ctx.saved_tensors
        made, each = ctx.made, ctx.each
        samples = each.asked.sample_of_ids()
        given = given.contiguous()
        if each.table.source.leaf.requires_grad:
            use = (each, (given, samples, weights))
            made.used.setdefault(each.lookup.table, []).append(use)
        of_weights = None
        if ctx.needs_input_grad[1]:
            values = each.table.source.values()[each.asked.places.long()]
            of_weights = (given[samples] * values).sum(1)
        return given.new_empty(0), of_weights, None, None


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, made: Round, each: LookedUp) -> Tensor:
        asked = each.asked
        assert asked is not None
        ctx.made, ctx.each = made, each
        return each.table.source.values().index_select(0, asked.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        made, each = ctx.made, ctx.each
        if each.table.source.leaf.requires_grad:
            use = (each, (given.contiguous(), None, None))
            made.used.setdefault(each.lookup.table, []).append(use)
        return given.new_empty(0), None, None


def pooled_here(made: Round, each: LookedUp, weights: Tensor | None) -> Tensor:
    """The sums over this rank's rows [samples of all ranks, columns here]; of means the share.

    Args:
        weights: Of the ids that were asked here, where a gradient of them is wanted.
    """
    assert each.asked is not None
    factors = each.asked.weights if weights is None else weights
    sums: Tensor = _Pooled.apply(made.token, factors, made, each)  # type: ignore[no-untyped-call]
    if each.lookup.mode != "mean":
        return sums
    assert each.asked.totals is not None
    return sums / each.asked.totals.clamp(min=1).unsqueeze(1).to(sums.dtype)


def rows_here(made: Round, each: LookedUp) -> Tensor:
    """The rows of the ids that were asked here [ids, columns here]."""
    found: Tensor = _Rows.apply(made.token, made, each)  # type: ignore[no-untyped-call]
    return found


def stretches(sizes: Sequence[int]) -> list[slice]:
    """Stretches of these sizes, one behind the other."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
