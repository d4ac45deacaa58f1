"""What the owner of rows makes of them, and the gradients of the rows that were used.

Whatever depends on a table in a batch takes the batch's token. So autograd comes to the batch last,
when all ranks' gradients have come or are under way, and there each table gets the gradient of the
rows that were used, each row once: a bag of gradients per row, in the order of ranks and samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from headway.parallel.tables.rounds import Conversation, LookedUp
from headway.parallel.tables.table_parts import RowRound
from headway.parallel.tables.wire import Flight, Shape, Wire


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

    talk: Conversation
    token: Tensor
    used: list[Use | ComingUses] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)

    @staticmethod
    def begin(talk: Conversation) -> BatchUse:
        """For a batch that begins now: what is computed before has its gradients later."""
        made = BatchUse(talk, torch.empty(0, device=talk.wire.device))
        leaves = [table.source.leaf for table in talk.tables.values()]
        made.token = _Begin.apply(made, *leaves)  # type: ignore[no-untyped-call]
        return made


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, made: BatchUse, *leaves: Tensor) -> Tensor:
        ctx.made, ctx.names = made, tuple(made.talk.tables)
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
        found: list[Tensor | None] = []
        for name in ctx.names:
            gradient = None
            if name in made.reached and made.talk.tables[name].source.leaf.requires_grad:
                gradient = _table_gradient(made.talk, name, list(uses.get(name, {}).values()))
            found.append(gradient)
        made.reached.clear()
        return None, *found


def _table_gradient(
    talk: Conversation, name: str, rounds: Sequence[Sequence[Use]]
) -> Tensor | None:
    table = talk.tables[name]
    total: Tensor | None = None
    for uses in rounds or [[]]:
        rows = uses[0].each.rows if uses else table.source.open()
        places, sums = _row_gradients(rows, uses)
        if table.is_here:
            places, sums = _of_all_ranks(talk.wire, name, places, sums, talk.sent)
        gradient = rows.gradient(places, sums)
        total = gradient if total is None or gradient is None else total + gradient
    return total


def _row_gradients(rows: RowRound, uses: Sequence[Use]) -> tuple[Tensor, Tensor]:
    """Places that were used, ascending, each once, and the sum of what all uses give each."""
    values = rows.values()
    if not uses:
        none = torch.empty(0, dtype=torch.int64, device=values.device)
        return none, values.new_empty(0, values.shape[1])
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
    place, order = torch.sort(_joined(places), stable=True)
    found, sizes = torch.unique_consecutive(place, return_counts=True)
    # A bag for each row that was used, of the gradients that it gets: nothing is expanded.
    sums = F.embedding_bag(
        _joined(entries)[order], _joined([use.gradient for use in uses]),
        sizes.cumsum(0) - sizes, mode="sum",
        per_sample_weights=_joined(factors)[order] if weighted else None,
    )  # fmt: skip
    return found.long(), sums


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
    wire: Wire, name: str, rows: Tensor, gradients: Tensor, sent: Counter[tuple[str, str]]
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
