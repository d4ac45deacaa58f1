"""What the owner of rows makes of them, and the gradients of the rows that were used.

Whatever depends on a table in a batch takes the batch's token. So autograd comes to the batch last,
when all ranks' gradients have come or are under way, and there each table gets the gradient of the
rows that were used, each row once: a bag of gradients per row, in the order of ranks and samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from headway.parallel.tables.rounds import LookedUp, TableExchange
from headway.parallel.tables.table_parts import RowRound
from headway.parallel.tables.wire import Flight, Shape

_INT32 = 2**31


@dataclass(frozen=True, eq=False)
class Use:
    """A gradient for the rows of a lookup.

    Attributes:
        gradient: [entries, columns here].
        factors: Of each id that was asked here; None: 1.
        by_sample: Its entries are samples; if not, ids.
    """

    each: LookedUp
    gradient: Tensor
    factors: Tensor | None = None
    by_sample: bool = True


@dataclass(frozen=True, eq=False)
class ComingUses:
    """Gradients that are under way: of pooled lookups, each by rank."""

    flight: Flight
    lookups: tuple[LookedUp, ...]

    def arrive(self) -> Iterable[Use]:
        came = [iter(listed) for listed in self.flight.wait()]
        for each in self.lookups:
            # A rank that this one asked nothing of has sent nothing; order is that of ranks.
            gradient = torch.cat([next(part) for part in came])
            assert each.asked is not None
            if each.travel_rows:
                yield Use(each, gradient, by_sample=False)
            else:
                yield Use(each, mean_shares(each, gradient), each.asked.weights)


@dataclass(eq=False)
class BatchUse:
    """What one batch has used of the tables.

    Attributes:
        token: Without entries; takes autograd to the batch.
        reached: Names of tables that backward has come to, on any rank.
    """

    exchange: TableExchange
    token: Tensor
    used: list[Use | ComingUses] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)

    @staticmethod
    def begin(exchange: TableExchange) -> BatchUse:
        """For a batch that begins now: what is computed before has its gradients later."""
        made = BatchUse(exchange, torch.empty(0, device=exchange.wire.device))
        leaves = [table.source.leaf for table in exchange.tables.values()]
        made.token = _Begin.apply(made, *leaves)  # type: ignore[no-untyped-call]
        return made


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, made: BatchUse, *leaves: Tensor) -> Tensor:
        ctx.made, ctx.names = made, tuple(made.exchange.tables)
        return made.token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        made: BatchUse = ctx.made
        uses: dict[str, dict[int, list[Use]]] = {}
        for use in made.used:
            for one in use.arrive() if isinstance(use, ComingUses) else (use,):
                # What several rounds of a source have used comes together if it lets them.
                rounds = uses.setdefault(one.each.lookup.table, {})
                rounds.setdefault(id(one.each.rows), []).append(one)
        made.used.clear()
        wanted = [
            name
            for name in ctx.names
            if name in made.reached and made.exchange.tables[name].source.leaf.requires_grad
        ]
        made.reached.clear()
        found = _table_gradients(made.exchange, {n: [*uses.get(n, {}).values()] for n in wanted})
        return None, *(found.get(name) for name in ctx.names)


@dataclass(frozen=True, eq=False)
class _Given:
    """What uses of a table give its rows.

    Attributes:
        places: [given] of rows, not in order.
        limit: Above all of them.
        entries: Of each, which of `gradients` it is; None: all, in their order.
        gradients: [entries, columns here].
        factors: [given], or None.
    """

    places: Tensor
    limit: int
    entries: Tensor | None
    gradients: Tensor
    factors: Tensor | None = None


def _table_gradients(
    exchange: TableExchange, uses: Mapping[str, Sequence[Sequence[Use]]]
) -> dict[str, Tensor | None]:
    """Of each table, from what several rounds have used of it; collective."""
    rounds: list[tuple[str, RowRound, _Given]] = []
    for name, listed in uses.items():
        for same in listed or [[]]:
            rows = same[0].each.rows if same else exchange.tables[name].source.open()
            rounds.append((name, rows, _given(rows, same)))
    sums = _summed([given for _, _, given in rounds])
    copies = [n for n, (name, _, _) in enumerate(rounds) if exchange.tables[name].is_here]
    if copies and exchange.wire.size > 1:
        own = [(rounds[n][0], rounds[n][2].limit, *sums[n]) for n in copies]
        for number, every in zip(copies, _of_all_ranks(exchange, own), strict=True):
            sums[number] = every
    found: dict[str, Tensor | None] = {}
    for (name, rows, _), (places, gradients) in zip(rounds, sums, strict=True):
        gradient, before = rows.gradient(places, gradients), found.get(name)
        found[name] = gradient if before is None or gradient is None else before + gradient
    return found


def _given(rows: RowRound, uses: Sequence[Use]) -> _Given:
    values = rows.values()
    if not uses:
        none = torch.empty(0, dtype=torch.int64, device=values.device)
        return _Given(none, len(values), None, values.new_empty(0, values.shape[1]))
    places, entries, factors = [], [], []
    weighted = any(use.factors is not None for use in uses)
    start = 0
    for use in uses:
        asked = use.each.asked
        assert asked is not None
        own, factor = asked.places, use.factors
        entry = (
            asked.sample_of_ids() if use.by_sample else torch.arange(len(own), device=own.device)
        )
        if weighted and factor is None:
            factor = use.gradient.new_ones(len(own))
        kept = _kept(use, own)
        if kept is not None:
            own, entry = own[kept], entry[kept]
            factor = None if factor is None else factor[kept]
        places.append(own)
        entries.append(entry + start if start else entry)
        factors.append(factor)
        start += len(use.gradient)
    return _Given(
        _joined(places), len(values), _joined(entries), _joined([use.gradient for use in uses]),
        _joined(factors) if weighted else None,
    )  # fmt: skip


def _summed(given: Sequence[_Given]) -> list[tuple[Tensor, Tensor]]:
    """Places, int64, ascending, each once, and the sum of what each is given."""
    found = []
    for one, (place, order) in zip(given, _sorted_apart(given), strict=True):
        places, sizes = torch.unique_consecutive(place, return_counts=True)
        # A bag for each row that was used, of the gradients that it gets: nothing is expanded.
        sums = F.embedding_bag(
            order if one.entries is None else one.entries[order], one.gradients,
            sizes.cumsum(0) - sizes, mode="sum",
            per_sample_weights=None if one.factors is None else one.factors[order],
        )  # fmt: skip
        found.append((places.long(), sums))
    return found


def _sorted_apart(given: Sequence[_Given]) -> list[tuple[Tensor, Tensor]]:
    """The places of each, sorted, and the order that does it; stable.

    In one sort: torch takes a fourth of the time for numbers of several tables, 33,000 or more.
    """
    if len(given) == 1:
        return [torch.sort(given[0].places, stable=True)]
    counts = [len(one.places) for one in given]
    begins = [0, *accumulate(one.limit for one in given)]
    narrow = torch.int32 if begins[-1] < _INT32 else torch.int64
    keys = [one.places.to(narrow) + begin for one, begin in zip(given, begins, strict=False)]
    place, order = torch.sort(torch.cat(keys), stable=True)
    starts = [0, *accumulate(counts)]
    return [
        (places - begin, orders - start)
        for places, orders, begin, start in zip(
            place.split(counts), order.split(counts), begins, starts, strict=False
        )
    ]


def _kept(use: Use, places: Tensor) -> Tensor | None:
    """bool: ids whose rows get this gradient; None: all."""
    asked = use.each.asked
    assert asked is not None
    kept = asked.counted
    if use.each.lookup.mode == "rows" and asked.padding is not None:
        real = places != asked.padding
        kept = real if kept is None else kept & real
    return kept


def _joined(parts: Sequence[Any]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _of_all_ranks(
    exchange: TableExchange, own: Sequence[tuple[str, int, Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of tables that all ranks have, summed over them in the order of ranks; collective.

    Args:
        own: Of each table the name, a number above all places, places and their gradients.
    """
    wire, ids = exchange.wire, [exchange.tables[name].wire_ids for name, *_ in own]
    counts = wire.gather([len(places) for _, _, places, _ in own])
    parts: list[Tensor] = []
    expected: list[list[Shape]] = [[] for _ in range(wire.size)]
    for number, ((name, _, places, gradients), kind) in enumerate(zip(own, ids, strict=True)):
        parts += [places.to(kind), gradients]
        exchange.sent[name, "gradients"] += (parts[-2].nbytes + gradients.nbytes) * (wire.size - 1)
        for rank, listed in enumerate(expected):
            size = counts[rank][number]
            listed += [((size,), kind), ((size, gradients.shape[1]), gradients.dtype)]
    came = wire.swap([parts] * wire.size, expected)
    return _summed(
        [
            _Given(
                torch.cat([part[2 * number] for part in came]), limit, None,
                torch.cat([part[2 * number + 1] for part in came]),
            )
            for number, (_, limit, _, _) in enumerate(own)
        ]
    )  # fmt: skip


# What an owner makes of its rows: sums over those of a sample, or the rows themselves.


def pooled_values(each: LookedUp, weights: Tensor | None = None) -> Tensor:
    """The sums over this rank's rows [samples of all ranks, columns here], without a gradient."""
    asked = each.asked
    assert asked is not None
    weights = asked.weights if weights is None else weights
    sums = F.embedding_bag(
        asked.places, each.rows.values(), asked.offsets(), mode="sum",
        per_sample_weights=weights,
    )  # fmt: skip
    return mean_shares(each, sums)


def mean_shares(each: LookedUp, sums: Tensor) -> Tensor:
    """Of a mean the share that sums over rows here have in it; its own adjoint."""
    if each.lookup.mode != "mean":
        return sums
    assert each.asked is not None
    assert each.asked.totals is not None
    return sums / each.asked.totals.clamp(min=1).unsqueeze(1).to(sums.dtype)


class _Pooled(Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, weights: Tensor | None, batch: BatchUse, each: LookedUp
    ) -> Tensor:
        ctx.batch, ctx.each = batch, each
        ctx.save_for_backward(weights)
        return pooled_values(each, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        (weights,) = ctx.saved_tensors
        batch, each = ctx.batch, ctx.each
        shares = mean_shares(each, given).contiguous()
        batch.reached.add(each.lookup.table)
        batch.used.append(Use(each, shares, each.asked.weights if weights is None else weights))
        of_weights = None
        if ctx.needs_input_grad[1]:
            values = each.rows.values()[each.asked.places.long()]
            of_weights = (shares[each.asked.sample_of_ids()] * values).sum(1)
        return given.new_empty(0), of_weights, None, None


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, batch: BatchUse, each: LookedUp) -> Tensor:
        asked = each.asked
        assert asked is not None
        ctx.batch, ctx.each = batch, each
        return each.rows.values().index_select(0, asked.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        batch, each = ctx.batch, ctx.each
        batch.reached.add(each.lookup.table)
        batch.used.append(Use(each, given.contiguous(), by_sample=False))
        return given.new_empty(0), None, None


def pooled_here(
    batch: BatchUse, each: LookedUp, token: Tensor, weights: Tensor | None = None
) -> Tensor:
    """As `pooled_values`, with a gradient of the rows and of the weights."""
    found: Tensor = _Pooled.apply(token, weights, batch, each)  # type: ignore[no-untyped-call]
    return found


def rows_here(batch: BatchUse, each: LookedUp, token: Tensor) -> Tensor:
    """The rows of the ids that were asked here [ids, columns here]."""
    found: Tensor = _Rows.apply(token, batch, each)  # type: ignore[no-untyped-call]
    return found
