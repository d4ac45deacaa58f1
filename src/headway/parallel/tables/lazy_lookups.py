"""Lookups whose results nobody has asked for yet: what stands in their place in the user's code.

Lookups are recorded until a function of torch wants one of them, or until there are as many as the
step before had: then the ids of all of them travel together. A function that has a rule
(`parallel.operator_rules`, kind "tables") acts on the parts where they lie; for any other one the
values of this rank's samples are taken first, of all of its operands in one exchange. What was
taken as it was found in the step before is sent at once, while the model goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.errors import PeerLost, PlanError, Stalled
from headway.parallel.split_tensor import (
    ATTRIBUTES_OF_PART,
    AUTOGRAD_FUNCTION,
    KnownShape,
    RuleRefused,
    TorchFunctionOperand,
    call_method,
    in_autograd_function,
    leaves,
    map_nested,
    modifies_in_place,
    torch_function_name,
)
from headway.parallel.stages import user_line
from headway.parallel.tables.lookups import Lookup
from headway.parallel.tables.pending_sum import (
    OWN,
    OwnedRows,
    PendingSum,
    Taking,
    pending_of,
    spread_over_ids,
    take,
    take_raw,
)
from headway.parallel.tables.rounds import LookedUp, TableExchange, run_round
from headway.parallel.tables.row_gradients import BatchUse, pooled_here, rows_here


class LazyResult(KnownShape, TorchFunctionOperand):
    """What a lookup gives, or what has become of it; any function of torch takes it.

    It is no subclass of Tensor, as `SplitTensor` is none and for the same reasons.

    Attributes:
        shape: Of this rank's samples.
        form: Where its numbers are; None: in no round yet.
    """

    form: PendingSum | OwnedRows | _Sent | Tensor | None

    def __init__(
        self,
        context: LookupContext,
        shape: torch.Size,
        like: Tensor,
        form: PendingSum | OwnedRows | _Sent | Tensor | None,
    ) -> None:
        self.context, self.shape, self.form, self._like = context, shape, form, like

    @property
    def requires_grad(self) -> bool:
        return self._like.requires_grad

    def __iter__(self) -> Iterator[Any]:
        return iter(taken(self))

    def __bool__(self) -> bool:
        return bool(taken(self))

    def __float__(self) -> float:
        return float(taken(self))

    def __int__(self) -> int:
        return int(taken(self))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return taken(self).__array__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LazyResult(shape={tuple(self.shape)})"

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES_OF_PART:
            return getattr(self._like, name)
        found = None if name.startswith("__") else getattr(Tensor, name, None)
        if found is None:
            raise AttributeError(f"a lookup in a split table has no attribute {name!r}")
        return partial(call_method, found, self) if callable(found) else getattr(taken(self), name)


@dataclass(eq=False)
class _InFlight:
    """Lookups that are sent as they were found; `values` once somebody has asked for one."""

    taking: Taking
    found: tuple[LookedUp, ...]
    values: dict[int, Tensor] = field(default_factory=dict)

    def value(self, each: LookedUp) -> Tensor:
        if not self.values:
            came = self.taking.finish([self.taking.batch.token])
            for one, rows in zip(self.found, came, strict=True):
                self.values[id(one)] = _pooled_rows(one, rows) if one.travel_rows else rows
        return self.values[id(each)].view(each.lookup.shape)


def _pooled_rows(each: LookedUp, rows: Tensor) -> Tensor:
    """What this rank makes of the rows that it has got, each once."""
    lookup, inverse = each.lookup, each.inverse
    assert inverse is not None
    if lookup.mode == "rows":
        return F.embedding(inverse, rows)
    ends = lookup.all_lengths().cumsum(0)
    return F.embedding_bag(
        inverse, rows, ends - lookup.all_lengths(), mode=lookup.mode,
        per_sample_weights=lookup.weights,
    )  # fmt: skip


class LookupContext:
    """The lookups of one model.

    Attributes:
        batch: That is under way in the model, from its first line to its last.
    """

    def __init__(self, exchange: TableExchange) -> None:
        self.exchange = exchange
        self.batch: BatchUse | None = None
        self._unsent: list[tuple[Lookup, LazyResult]] = []
        self._round = 0
        # By number of the round in a batch: lookups that it had in the last one.
        self._expected: dict[int, int] = {}
        # Lookups that were taken as they were found, by their place in a batch.
        self._raw: set[tuple[Any, ...]] = set()

    def begin(self) -> None:
        """A batch enters the model."""
        self.batch, self._round, self._unsent = BatchUse.begin(self.exchange), 0, []

    def end(self) -> None:
        """It has left it."""
        self.batch = None

    def look_up(self, lookup: Lookup) -> LazyResult:
        """Record a lookup; collective, sooner or later."""
        source = self.exchange.tables[lookup.table].source
        like = torch.empty(0, dtype=source.leaf.dtype, device=source.leaf.device)
        like.requires_grad_(torch.is_grad_enabled() and source.leaf.requires_grad)
        result = LazyResult(self, lookup.shape, like, None)
        self._unsent.append((lookup, result))
        if lookup.problem or self._expected.get(self._round) == len(self._unsent):
            self._send()
        return result

    def _send(self) -> None:
        entries, self._unsent = self._unsent, []
        number, self._round = self._round, self._round + 1
        if self.batch is not None:
            self._expected[number] = len(entries)
        batch = self.batch or BatchUse.begin(self.exchange)
        lookups = [lookup for lookup, _ in entries]
        keys = [(number, n, x.table, x.mode) for n, x in enumerate(lookups)]
        wanted = {n for n, key in enumerate(keys) if key in self._raw}
        with self._naming(lookups):
            found = run_round(self.exchange, lookups, wanted)
        for key, each in zip(keys, found, strict=True):
            each.key = key
        at_once = [
            each
            for each in found
            if each.travel_rows
            or (each.key in self._raw and not each.lookup.learns_weights and _pools(each))
        ]
        flight = None
        if at_once:
            flight = _InFlight(take_raw(batch, at_once), tuple(at_once))
        for (_, result), each in zip(entries, found, strict=True):
            if flight is not None and any(each is one for one in at_once):
                result.form = _Sent(flight, each)
            else:
                result.form = _form(batch, each)

    @contextmanager
    def _naming(self, lookups: Sequence[Lookup]) -> Iterator[None]:
        """An exchange that breaks, or that another rank does not come to, says what it was for."""
        try:
            yield
        except (RuntimeError, PeerLost, Stalled) as error:
            names = ", ".join(dict.fromkeys(lookup.table for lookup in lookups))
            rank = self.exchange.wire.rank
            error.add_note(f"rank {rank} of those that share the batch looks up in {names}")
            raise

    def settled(self, x: Any) -> Any:
        """Where the numbers of a result are; anything else as it is."""
        if not isinstance(x, LazyResult):
            return x
        if x.form is None:
            self._send()
        if x.form is None:
            raise PlanError(
                "a lookup of an earlier batch is used",
                problems=["nobody has asked for it before the next batch entered the model"],
                where=user_line(),
                fix="Use what is looked up within the pass in which it is.",
            )
        if isinstance(x.form, _Sent):
            x.form = x.form.value()
        return x.form

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function of torch gives; it stays in parts where a rule says how.

        Raises:
            PlanError: It is called in an autograd function of the model's own.
        """
        from headway.parallel.operator_rules import RULES

        if in_autograd_function():
            raise PlanError(
                "a lookup in a split table cannot be used here",
                problems=[AUTOGRAD_FUNCTION],
                where=user_line(),
                fix="Take it before: headway.parallel.tables.taken(x).",
            )
        rule = RULES["tables"].get(torch_function_name(func))
        forms = map_nested((args, kwargs), self.settled)
        pending = any(isinstance(x, PendingSum | OwnedRows) for x in leaves(forms))
        device = self.exchange.wire.device.type
        # In mixed precision products have another type than what they are made of.
        mixed = torch.is_autocast_enabled(device)
        if pending and rule and not mixed and not modifies_in_place(func, kwargs):
            try:
                return map_nested(rule(self, func, *forms[0], **forms[1]), self.wrapped)
            except RuleRefused:
                pass
        args, kwargs = self.take((args, kwargs))
        return func(*args, **kwargs)

    def wrapped(self, form: Any) -> Any:
        """What stands for a form in the user's code."""
        if isinstance(form, PendingSum):
            shape = torch.Size((form.own_samples, *form.tail))
        elif isinstance(form, OwnedRows):
            shape = form.shape
        else:
            return form
        like = torch.empty(0, dtype=form.dtype, device=self.exchange.wire.device)
        like.requires_grad_(form.token.requires_grad)
        return LazyResult(self, shape, like, form)

    def take(self, nested: Any) -> Any:
        """Nested arguments with the values of this rank's samples; one exchange for all of them."""
        lazy: dict[int, LazyResult] = {}
        for x in leaves(nested):
            if isinstance(x, LazyResult):
                self.settled(x)
                lazy[id(x)] = x
        open_ones = [x for x in lazy.values() if isinstance(x.form, PendingSum | OwnedRows)]
        batches = {id(x.form.batch): x.form.batch for x in open_ones}  # type: ignore[union-attr]
        for batch in batches.values():
            ours = [x for x in open_ones if x.form.batch is batch]  # type: ignore[union-attr]
            forms = [x.form for x in ours]
            self.note_taken(forms)  # type: ignore[arg-type]
            for x, value in zip(ours, take(forms), strict=True):  # type: ignore[arg-type]
                x.form = value
        return map_nested(nested, lambda x: x.form if isinstance(x, LazyResult) else x)

    def note_taken(self, forms: Sequence[PendingSum | OwnedRows]) -> None:
        """From the next batch on, what is taken as it was found goes at once."""
        for form in forms:
            if isinstance(form, OwnedRows):
                if form.as_found:
                    self._raw.add(form.each.key)
                continue
            for block in form.blocks:
                if block.source is not None and block.owner != OWN:
                    self._raw.add(block.source.key)


@dataclass(eq=False)
class _Sent:
    """One of the lookups of a flight."""

    flight: _InFlight
    each: LookedUp

    def value(self) -> Tensor:
        return self.flight.value(self.each)


def _pools(each: LookedUp) -> bool:
    """Whether what is found for a sample is one row of numbers, not one for each of its ids."""
    return not each.table.is_here and (each.lookup.mode != "rows" or len(each.lookup.shape) == 2)


def _form(batch: BatchUse, each: LookedUp) -> PendingSum | OwnedRows | Tensor:
    lookup, token = each.lookup, batch.token
    if each.table.is_here:
        if lookup.mode == "rows":
            return rows_here(batch, each, token).view(lookup.shape)
        return pooled_here(batch, each, token, lookup.weights if lookup.learns_weights else None)
    if not _pools(each):
        return OwnedRows(batch, each, each.rows.values().dtype, token)
    weights = None
    if lookup.learns_weights:
        assert lookup.weights is not None
        weights, token = spread_over_ids(batch, each, lookup.weights)
    return pending_of(batch, each, token, weights)


def taken(x: Any) -> Any:
    """The values of this rank's samples as a Tensor; of nested arguments likewise. Collective.

    Anything that is no lookup in a split table, nor computed from one, stays as it is.
    """
    first = next((leaf for leaf in leaves(x) if isinstance(leaf, LazyResult)), None)
    return x if first is None else first.context.take(x)
