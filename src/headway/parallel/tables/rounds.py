"""One round of lookups: all that ranks ask of each other's tables, in one exchange of ids.

Every rank first says how many samples and ids it has for each lookup, and a fingerprint of what it
looks up where; a rank that does something else, or has been given bad ids, is found here, on all
ranks. Then each id goes to the rank that has its row (to one of each range of columns), with the
lengths of bags where they do not follow from what was said. Where rows travel, each id goes once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from headway.errors import PlanError
from headway.parallel.tables.lookups import Lookup, lookup_error, samples_of_ids
from headway.parallel.tables.table_parts import RowRound, RowSource, parts_of_rows
from headway.parallel.tables.wire import Shape, Wire
from headway.plans.tables import TablePlacement

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

    @property
    def most_parts(self) -> int:
        """Of the rows of some column, the ranks that have them."""
        return 1 if self.is_here else max(map(len, self.placement.owners))


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a table as all ranks see it in a round.

    Attributes:
        owner: The rank that has it.
        columns: Of the table, those of the piece.
        sizes: By asking rank, the ids that it has sent there; only its owner, and each rank for
            itself, knows them.
        order: Which of this rank's keys went there, int64; None: all, in their order.
    """

    owner: int
    columns: range
    sizes: tuple[int, ...]
    order: Tensor | None


@dataclass(frozen=True, eq=False)
class Asked:
    """What a rank was asked of its piece, by all ranks one after the other.

    Attributes:
        places: [ids] where their rows are.
        lengths: int64 [samples of all ranks]: ids of each sample that were asked here; None where
            rows travel.
        totals: Ids of each sample altogether, int64; None: nobody needs them.
        weights: [ids], or None.
        padding: Where the row is that gets no gradient, if it is here.
        counted: bool [ids]: those that count as used; None: all.
    """

    places: Tensor
    lengths: Tensor | None
    totals: Tensor | None = None
    weights: Tensor | None = None
    padding: int | None = None
    counted: Tensor | None = None

    def offsets(self) -> Tensor:
        """Where each sample's ids begin; in the type of `places`, as torch wants it."""
        assert self.lengths is not None
        ends = self.lengths.cumsum(0)
        return (ends - self.lengths).to(self.places.dtype)

    def sample_of_ids(self) -> Tensor:
        assert self.lengths is not None
        return samples_of_ids(len(self.lengths), self.lengths, 0, self.lengths.device)


@dataclass(frozen=True)
class Said:
    """What a rank says of a lookup: its samples, ids of each (-1: they differ), and ids."""

    samples: int
    each: int
    ids: int


@dataclass(eq=False)
class LookedUp:
    """One lookup of a round.

    Attributes:
        said: By rank.
        travel_rows: Each row travels once to each rank that asks for it, which pools.
        keys: What this rank asks for: its ids, or each of them once.
        inverse: Of each id, its place among the keys; None: the keys are the ids.
        asked: Of this rank's own piece; None: it has none.
        key: Its place among the lookups of a batch.
    """

    lookup: Lookup
    table: SplitTable
    rows: RowRound
    said: tuple[Said, ...]
    counting: tuple[bool, ...]
    travel_rows: bool
    keys: Tensor
    inverse: Tensor | None = None
    pieces: tuple[Piece, ...] = ()
    asked: Asked | None = None
    key: tuple[Any, ...] = ()

    @property
    def samples(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(each.samples for each in self.said)


@dataclass(eq=False)
class TableExchange:
    """What the rounds of one model share.

    Attributes:
        sent: Bytes to other ranks by table and kind.
        counting: Whether rows that are looked up now count as used.
        room: Lookups of a round that fit into what ranks say first.
    """

    wire: Wire
    tables: dict[str, SplitTable]
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    counting: bool = True
    room: int = 4


def run_round(
    exchange: TableExchange, lookups: Sequence[Lookup], rows_wanted: Container[int] = ()
) -> list[LookedUp]:
    """Exchange the ids of lookups; collective.

    Args:
        rows_wanted: Numbers of lookups whose rows are wanted one by one, as is known from the step
            before; the same on all ranks.

    Raises:
        DataError: Ids, offsets or weights of some rank cannot be used; the same on all ranks.
        PlanError: Ranks look up different tables, or in another order; on all of them.
    """
    wire = exchange.wire
    said, counting = _agree(exchange, lookups)
    found = []
    for number, lookup in enumerate(lookups):
        table = exchange.tables[lookup.table]
        here = tuple(rank[number] for rank in said)
        rows = _rows_travel(table, lookup, here, number in rows_wanted)
        each = LookedUp(lookup, table, table.source.open(), here, counting, rows, lookup.ids)
        if rows:
            each.keys, each.inverse = torch.unique(lookup.ids, return_inverse=True)
        found.append(each)
    routes = [_route(each) for each in found]
    counts = _counts(wire, found, routes)
    parts: list[list[Tensor]] = [[] for _ in range(wire.size)]
    expected: list[list[Shape]] = [[] for _ in range(wire.size)]
    for number, each in enumerate(found):
        for (column, _, owner), chosen in zip(_pieces(each), routes[number], strict=True):
            section = _section(each, column, chosen)
            parts[owner] += section
            if owner != wire.rank:
                exchange.sent[each.lookup.table, "ids"] += sum(x.nbytes for x in section)
        own = each.table.placement.piece_of(wire.rank)
        if own is not None and not each.table.is_here:
            for rank in range(wire.size):
                expected[rank] += _shapes(each, own[0], counts[rank][number], each.said[rank])
    nothing = all(each.table.is_here for each in found)
    came = [iter(listed) for listed in ([] if nothing else wire.swap(parts, expected))]
    for number, each in enumerate(found):
        _take_in(wire, each, routes[number], [row[number] for row in counts], came)
    return found


def _agree(
    exchange: TableExchange, lookups: Sequence[Lookup]
) -> tuple[list[list[Said]], tuple[bool, ...]]:
    """What each rank says of each lookup, and whether its lookups count."""
    wire = exchange.wire
    described = [_description(lookup) for lookup in lookups]
    mark = crc32(repr(described).encode())
    numbers = [
        n for x in lookups for n in (x.samples, -1 if x.lengths is not None else x.each, len(x.ids))
    ]
    first = numbers[: 3 * exchange.room]
    first += [0] * (3 * exchange.room - len(first))
    problem = any(x.problem for x in lookups)
    heads = wire.gather([mark, len(lookups), problem, exchange.counting, *first])
    if any(head[2] for head in heads):
        own = [(wire.rank, x.table, x.problem) for x in lookups if x.problem]
        raise lookup_error([p for listed in wire.documents(own) for p in listed])
    if any(head[:2] != heads[0][:2] for head in heads):
        raise _different(wire.documents(described))
    counting = tuple(bool(head[3]) for head in heads)
    rows = [head[4:] for head in heads]
    if len(lookups) > exchange.room:
        # From now on so many fit, on all ranks: they look up equally much.
        exchange.room = len(lookups)
        rows = wire.gather(numbers)
    said = [[Said(*row[n : n + 3]) for n in range(0, 3 * len(lookups), 3)] for row in rows]
    return said, counting


def _description(lookup: Lookup) -> str:
    weights = lookup.weights
    weighted = "" if weights is None else f", weights of {weights.dtype}"
    return f"{lookup.mode} of {lookup.table}{weighted}{', learnt' if lookup.learns_weights else ''}"


def _different(said: Sequence[Any]) -> PlanError:
    """The error of ranks that look up different things."""
    rank = next((n for n, listed in enumerate(said) if listed != said[0]), 0)
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


def _rows_travel(table: SplitTable, lookup: Lookup, said: Sequence[Said], wanted: bool) -> bool:
    """Whether rows travel, each once, and not sums: by what is fewer numbers for all ranks."""
    if table.is_here or table.placement.travels == "sums":
        return False
    if table.placement.travels == "rows" or (wanted and lookup.mode == "rows"):
        return True
    ids, samples = sum(each.ids for each in said), sum(each.samples for each in said)
    return ids < samples * table.most_parts


def _pieces(each: LookedUp) -> list[tuple[int, int, int]]:
    """Range of columns, part of rows, owner; none where nobody asks anybody."""
    if each.table.is_here:
        return []
    return [
        (number, part, owner)
        for number, parts in enumerate(each.table.placement.owners)
        for part, owner in enumerate(parts)
    ]


def _route(each: LookedUp) -> list[Tensor | None]:
    """By piece, which of this rank's keys go there; None: all."""
    placement, found = each.table.placement, list[Tensor | None]()
    if each.table.is_here:
        return found
    for number, parts in enumerate(placement.owners):
        if len(parts) == 1:
            found.append(None)
            continue
        part = parts_of_rows(placement, number, each.keys)
        order = torch.sort(part, stable=True).indices
        found += order.split(torch.bincount(part, minlength=len(parts)).tolist())
    return found


def _counts(
    wire: Wire, found: Sequence[LookedUp], routes: Sequence[Sequence[Tensor | None]]
) -> list[list[int]]:
    """By asking rank and lookup, the ids that come here."""
    # What each rank has said it has comes here whole where one rank has all rows.
    open_ones = [n for n, x in enumerate(found) if x.table.most_parts > 1 or x.travel_rows]
    counts = [[each.said[rank].ids for each in found] for rank in range(wire.size)]
    if not open_ones:
        return counts
    numbers = torch.zeros(wire.size, len(open_ones), dtype=torch.int64)
    for column, number in enumerate(open_ones):
        each = found[number]
        for (_, _, owner), chosen in zip(_pieces(each), routes[number], strict=True):
            numbers[owner, column] = len(each.keys) if chosen is None else len(chosen)
    shape = ((len(open_ones),), torch.int64)
    came = wire.swap([[row] for row in numbers.to(wire.device)], [[shape]] * wire.size)
    for rank, (row,) in enumerate(came):
        for number, size in zip(open_ones, row.tolist(), strict=True):
            counts[rank][number] = size
    return counts


def _section(each: LookedUp, column: int, chosen: Tensor | None) -> list[Tensor]:
    """What goes to the owner of a piece."""
    lookup = each.lookup
    keys = each.keys if chosen is None else each.keys[chosen]
    section = [keys.to(each.table.wire_ids)]
    if each.travel_rows:
        return section
    if len(each.table.placement.owners[column]) > 1:
        samples = lookup.sample_of_ids()
        here = samples if chosen is None else samples[chosen]
        section.append(torch.bincount(here, minlength=lookup.samples).to(torch.int32))
        if lookup.mode == "mean" and lookup.lengths is not None:
            section.append(lookup.lengths.to(torch.int32))
    elif lookup.lengths is not None:
        section.append(lookup.lengths.to(torch.int32))
    if lookup.weights is not None and not lookup.learns_weights:
        weights = lookup.weights
        section.append(weights if chosen is None else weights[chosen])
    return section


def _shapes(each: LookedUp, column: int, size: int, said: Said) -> list[Shape]:
    """Of a section that comes from a rank; as `_section` makes it."""
    lookup, ragged = each.lookup, said.each < 0
    shapes: list[Shape] = [((size,), each.table.wire_ids)]
    if each.travel_rows:
        return shapes
    shared = len(each.table.placement.owners[column]) > 1
    if shared or ragged:
        shapes.append(((said.samples,), torch.int32))
        if shared and ragged and lookup.mode == "mean":
            shapes.append(((said.samples,), torch.int32))
    if lookup.weights is not None and not lookup.learns_weights:
        shapes.append(((size,), lookup.weights.dtype))
    return shapes


def _take_in(
    wire: Wire,
    each: LookedUp,
    route: Sequence[Tensor | None],
    counts: Sequence[int],
    came: Sequence[Any],
) -> None:
    """What has come for a lookup, from each rank so many ids."""
    placement, lookup = each.table.placement, each.lookup
    if each.table.is_here:
        lengths = lookup.all_lengths()
        places = each.rows.places(lookup.ids)
        counted = None if each.counting[wire.rank] else torch.zeros_like(places, dtype=torch.bool)
        each.asked = Asked(places, lengths, lengths, lookup.weights, lookup.padding, counted)
        return
    pieces = []
    for (number, _, owner), chosen in zip(_pieces(each), route, strict=True):
        known = list(counts) if owner == wire.rank else [0] * wire.size
        known[wire.rank] = len(each.keys) if chosen is None else len(chosen)
        pieces.append(Piece(owner, placement.column_range(number), tuple(known), chosen))
    each.pieces = tuple(pieces)
    own = placement.piece_of(wire.rank)
    if own is None:
        return
    shared = len(placement.owners[own[0]]) > 1
    ids, here, totals, weights = [], [], [], []
    for rank, said in enumerate(each.said):
        ids.append(next(came[rank]))
        if each.travel_rows:
            continue
        uniform = torch.full((said.samples,), max(0, said.each), device=wire.device)
        ragged = said.each < 0
        here.append(next(came[rank]).long() if shared or ragged else uniform)
        if lookup.mode == "mean":
            apart = shared and ragged
            totals.append(next(came[rank]).long() if apart else uniform if shared else here[-1])
        if lookup.weights is not None and not lookup.learns_weights:
            weights.append(next(came[rank]))
    counted = None
    if not all(each.counting):
        marks = torch.tensor(each.counting, device=wire.device)
        counted = marks.repeat_interleave(torch.tensor(counts, device=wire.device))
    each.asked = Asked(
        each.rows.places(torch.cat(ids)), torch.cat(here) if here else None,
        torch.cat(totals) if totals else None, torch.cat(weights) if weights else None,
        _padding_here(each, own), counted,
    )  # fmt: skip


def _padding_here(each: LookedUp, own: tuple[int, int]) -> int | None:
    """Where this rank has the row that gets no gradient; None: nowhere."""
    placement, padding = each.table.placement, each.lookup.padding
    if padding is None:
        return None
    key = torch.tensor([padding])
    if len(placement.owners[own[0]]) > 1 and int(parts_of_rows(placement, own[0], key)) != own[1]:
        return None
    return int(each.rows.places(key.to(each.keys.device)))
