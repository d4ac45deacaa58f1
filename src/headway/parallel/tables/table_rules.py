"""Rules of functions of torch on pending sums and on rows that lie where they are owned.

A rule acts on the parts where they lie, or raises `RuleRefused`; then the values of this rank's
samples are taken, and the function works on them. All of it follows from shapes and places that
all ranks know, so that they decide alike: a function that would make more numbers to be sent than
there are is refused, and so is one that does not leave samples apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.parallel.split_tensor import RuleRefused, torch_function_name
from headway.parallel.tables.pending_sum import (
    OWN,
    Block,
    OwnedRows,
    PendingSum,
    spread_over_ids,
    spread_over_samples,
    take,
)
from headway.parallel.tables.places import (
    Places,
    at_owners,
    carried,
    content_of,
    entries_at,
    in_order,
    numbers_of,
    owners_of,
    probe,
    same_places,
    sum_targets,
    sums_at,
)
from headway.parallel.tables.places import joined as places_joined
from headway.parallel.tables.row_gradients import BatchUse, pooled_here

Form = PendingSum | OwnedRows

_SMALL = 4
"""A factor of so many times fewer entries goes to the owners of the other one."""


def function(context: Any, func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Form:
    """Of entries one by one: of sums only what is linear, or where each lies on one rank."""
    name = torch_function_name(func)
    if args or kwargs or name not in _LINEAR + _SQUARES:
        raise RuleRefused(name)
    return _mapped(x, func, linear=name in _LINEAR)


_LINEAR = ("neg", "negative", "positive", "clone", "contiguous")
_SQUARES = ("square", "abs")


def _mapped(x: Any, func: Callable[[Tensor], Tensor], *, linear: bool) -> Form:
    if isinstance(x, OwnedRows):
        rows: OwnedRows = x.mapped(func)
        return rows
    if not isinstance(x, PendingSum) or not (linear or x.is_apart):
        raise RuleRefused("its entries are sums that are still to be taken")
    return x.with_blocks([block.mapped(func) for block in x.blocks])


# Sums, differences, products.


def arithmetic(context: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sums with anything of this rank's samples; products with what is the same for all samples."""
    name = torch_function_name(func)
    if kwargs or len(args) != 2:
        raise RuleRefused(name)
    x, y = args
    if name in _REVERSED:
        name, x, y = name[1:], y, x
    if name in ("sub", "subtract"):
        return _sum_of(x, _negative(y))
    if name == "add":
        return _sum_of(x, y)
    if name in ("mul", "multiply"):
        return _product(x, y) if isinstance(x, Form) else _product(y, x)
    if name in ("div", "divide", "true_divide", "truediv") and _is_constant(y, x):
        return _scaled(x, y, torch.div)
    if name == "pow" and isinstance(y, int | float) and isinstance(x, Form):
        return _mapped(x, lambda t: t**y, linear=False)
    raise RuleRefused(name)


_REVERSED = ("radd", "rsub", "rmul")


def _negative(x: Any) -> Any:
    return _mapped(x, torch.neg, linear=True) if isinstance(x, Form) else -x


def _sum_of(x: Any, y: Any) -> PendingSum:
    if not isinstance(x, PendingSum):
        x, y = y, x
    if not isinstance(x, PendingSum) or isinstance(y, OwnedRows):
        raise RuleRefused("rows do not lie where other ones do")
    if isinstance(y, PendingSum):
        _check_alike(x, y)
        return x.with_blocks([*x.blocks, *y.blocks], token=_both(x.batch, x.token, y.token))
    own = _own_entries(x, y)
    return x.with_blocks([*x.blocks, Block(OWN, range(x.size), (), own)])


def _check_alike(x: PendingSum, y: PendingSum) -> None:
    if (x.batch, x.samples, x.tail, x.dtype) != (y.batch, y.samples, y.tail, y.dtype):
        raise RuleRefused("they differ in shape, or in type")


def _own_entries(x: PendingSum, y: Any) -> Tensor:
    """What is added to this rank's samples [own samples, entries]."""
    shape = (x.own_samples, *x.tail)
    if not isinstance(y, Tensor):
        device = x.batch.exchange.wire.device
        return torch.full((shape[0], x.size), y, dtype=x.dtype, device=device)
    if y.dtype != x.dtype or y.ndim > len(shape) or not _fits(y.shape, shape):
        raise RuleRefused("a sum of another shape, or of another type")
    return y.expand(shape).reshape(shape[0], x.size)


def _fits(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Whether a shape can be expanded into another one."""
    behind = into[len(into) - len(shape) :]
    return all(n in (1, m) for n, m in zip(shape, behind, strict=True))


def _is_constant(y: Any, x: Any) -> bool:
    """Whether a factor of x is the same for all samples, of whatever rank."""
    if isinstance(y, int | float):
        return True
    ndim = 1 + len(x.tail) if isinstance(x, PendingSum) else len(x.shape)
    return isinstance(y, Tensor) and y.ndim < ndim and y.dtype == x.dtype


def _product(x: Any, y: Any) -> Any:
    if _is_constant(y, x):
        return _scaled(x, y, torch.mul)
    if isinstance(x, OwnedRows):
        if isinstance(y, OwnedRows) and y.each is x.each:
            return _rows_together(x, y)
        return _weighted(x, y)
    if not isinstance(y, PendingSum):
        raise RuleRefused("a factor that samples do not share")
    if x.batch is y.batch and x.samples == y.samples:
        if x.tail == y.tail and _alike(x, y) and x.is_apart:
            pairs = zip(x.blocks, y.blocks, strict=True)
            token = _both(x.batch, x.token, y.token)
            blocks = [_times(a, b) for a, b in pairs]
            return replace(x, blocks=tuple(blocks), token=token)
        if y.size * _SMALL <= x.size or x.size * _SMALL <= y.size:
            return _small_product(*((x, y) if y.size < x.size else (y, x)))
    raise RuleRefused("a product of two sums that are still to be taken")


def _both(batch: BatchUse, *tokens: Tensor) -> Tensor:
    """A token of what depends on several things."""
    real = list({id(token): token for token in tokens if token is not batch.token}.values())
    return torch.cat(real) if len(real) > 1 else real[0] if real else batch.token


def _alike(x: PendingSum, y: PendingSum) -> bool:
    """Whether blocks have the same owners and places."""
    return len(x.blocks) == len(y.blocks) and all(
        a.owner == b.owner and same_places(a.places, b.places)
        for a, b in zip(x.blocks, y.blocks, strict=True)
    )


def _times(a: Block, b: Block) -> Block:
    # Also where nothing is: ranks must agree on what is still as it was found.
    factor = b.local
    return a.mapped(lambda t: t if factor is None else t * factor)


def _scaled(x: Any, y: Any, func: Callable[[Tensor, Any], Tensor]) -> Any:
    if isinstance(y, Tensor) and y.requires_grad:
        # Also a rank that has nothing to multiply has a part in the gradient: of zeros.
        x = replace(x, token=torch.cat([x.token.to(y.dtype), y.reshape(-1)[:0]]))
    if not isinstance(y, Tensor) or y.ndim == 0:
        return _mapped(x, lambda t: func(t, y), linear=True)
    if isinstance(x, OwnedRows):
        if x.flat or y.ndim != 1:
            raise RuleRefused("a factor that differs between the places of a sample")
        columns = _columns_here(x)
        return x.mapped(lambda t: func(t, y.expand(x.shape[-1])[columns.start : columns.stop]))
    if y.ndim > len(x.tail) or not _fits(y.shape, x.tail):
        raise RuleRefused("a product of another shape")
    factors = y.expand(x.tail).reshape(1, x.size)

    def scaled(block: Block) -> Block:
        return block.mapped(lambda t: func(t, entries_at(factors, block.places)))

    return replace(x, blocks=tuple(map(scaled, x.blocks)))


def _columns_here(x: OwnedRows) -> range:
    rank = x.batch.exchange.wire.rank
    return next((p.columns for p in x.each.pieces if p.owner == rank), range(0))


def _rows_together(x: OwnedRows, y: OwnedRows) -> OwnedRows:
    first, second = x.rows(), y.rows()
    if x.flat != y.flat:
        raise RuleRefused("a product of another shape")
    token = _both(x.batch, x.token, y.token)
    local = None if first is None or second is None else first * second
    return replace(x, local=local, token=token, as_found=False)


def _weighted(x: OwnedRows, y: Any) -> OwnedRows:
    """Rows times a number for each id: that goes to where they lie."""
    shape = x.shape if x.flat else (*x.shape[:-1], 1)
    if not isinstance(y, Tensor) or y.shape != torch.Size(shape) or y.dtype != x.dtype:
        raise RuleRefused("a factor that differs between the columns of a row")
    if x.token is not x.batch.token:
        raise RuleRefused("rows that have been multiplied so before")
    factors, token = spread_over_ids(x.batch, x.each, y.reshape(-1))
    rows = x.rows()
    local = None if rows is None else rows * factors.unsqueeze(1)
    return replace(x, local=local, token=token, as_found=False)


def _small_product(x: PendingSum, small: PendingSum) -> PendingSum:
    """The small one is taken, and goes to the owners of the other one."""
    if not _fits(small.tail, x.tail) or len(small.tail) != len(x.tail):
        raise RuleRefused("a product of another shape")
    own = take([small])[0].reshape(small.own_samples, small.size)
    owners = {block.owner for block in x.blocks}
    ranks = range(x.batch.exchange.wire.size)
    wanted: list[Places] = [range(small.size if rank in owners else 0) for rank in ranks]
    everywhere, token = spread_over_samples(x, own, wanted)
    source = probe(small.tail).expand(1, *x.tail).reshape(-1)

    def times(block: Block) -> Block:
        factors = own if block.owner == OWN else everywhere
        chosen = source[numbers_of(block.places)]
        return block.mapped(lambda t: t * factors.index_select(1, chosen.to(t.device)))

    return x.with_blocks([times(block) for block in x.blocks], token=token)


# Products with matrices that all ranks have.


def linear(
    context: Any, func: Callable[..., Any], x: Any, weight: Any, bias: Tensor | None = None
) -> PendingSum:
    """The columns of the weight with the entries that they meet, where this sends fewer numbers."""
    if not isinstance(x, PendingSum) or len(x.tail) != 1 or not isinstance(weight, Tensor):
        raise RuleRefused("a product of other things than a sample's entries and a matrix")
    if weight.ndim != 2 or weight.shape[1] != x.size or weight.dtype != x.dtype:
        raise RuleRefused("a product of another shape, or of another type")
    owners = dict.fromkeys(block.owner for block in x.blocks if block.owner != OWN)
    if len(weight) * len(owners) >= x.traffic:
        raise RuleRefused("its result would be more numbers to send")
    found = [
        _multiplied([b for b in x.blocks if b.owner == owner], owner, weight) for owner in owners
    ]
    # Also without entries of its own a rank has a part in the gradient of the weight: of zeros.
    own = [block for block in x.blocks if block.owner == OWN]
    device = x.batch.exchange.wire.device
    none = torch.empty(x.own_samples, 0, dtype=x.dtype, device=device)
    product = _multiplied(own or [Block(OWN, range(0), (), none)], OWN, weight)
    if bias is not None:
        product = product.mapped(bias.__add__)
    return x.with_blocks([*found, product], (len(weight),))


def _multiplied(blocks: Sequence[Block], owner: int, weight: Tensor) -> Block:
    tables = tuple(dict.fromkeys(name for block in blocks for name in block.tables))
    parts = [block.local for block in blocks if block.local is not None]
    local = None
    if parts:
        columns = [entries_at(weight, block.places) for block in blocks]
        local = F.linear(_side_by_side(parts), _side_by_side(columns))
    return Block(owner, range(len(weight)), tables, local)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def matmul(context: Any, func: Callable[..., Any], x: Any, y: Any) -> PendingSum:
    """With a matrix or a vector as `linear`; of two results as `_contracted`."""
    if isinstance(x, PendingSum) and isinstance(y, PendingSum):
        return _contracted(x, y)
    if isinstance(x, PendingSum) and isinstance(y, Tensor) and y.ndim == 2:
        return linear(context, func, x, y.T)
    if isinstance(x, PendingSum) and isinstance(y, Tensor) and y.ndim == 1:
        found = linear(context, func, x, y.unsqueeze(0))
        return replace(found, tail=())
    raise RuleRefused("a product of other things than results of lookups and matrices")


def einsum(context: Any, func: Callable[..., Any], equation: Any, *parts: Any) -> PendingSum:
    """Of two results, over one dimension that both have and the result has not."""
    if len(parts) == 1 and isinstance(parts[0], tuple | list):
        parts = tuple(parts[0])
    if not isinstance(equation, str) or len(parts) != 2:
        raise RuleRefused("a product of other things than two results of lookups")
    names, arrow, into = equation.replace(" ", "").partition("->")
    first, _, second = names.partition(",")
    over = set(first) & set(second) - set(into)
    wanted = first[:1] + "".join(d for d in first[1:] if d not in over)
    wanted += "".join(d for d in second[1:] if d not in over)
    plain = len(first) == len(second) == 3 and first[0] == second[0]
    if not arrow or not plain or len(over) != 1 or into != wanted or len(set(into)) != 3:
        raise RuleRefused("a product of another form")
    x, y = (
        part.moved(*_turned(part.tail))
        if isinstance(part, PendingSum) and turned and len(part.tail) == 2
        else part
        for part, turned in zip(parts, (first[1] in over, second[2] in over), strict=True)
    )
    return matmul(context, func, x, y)


def _turned(tail: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    found = probe(tail).transpose(1, 2)
    return found.reshape(-1), (tail[1], tail[0])


def _contracted(x: PendingSum, y: PendingSum) -> PendingSum:
    """The product over a dimension of which one rank has all there is of each entry.

    So it is where tables are cut by columns. What ranks have of their own samples goes there.
    """
    if len(x.tail) != 2 or len(y.tail) != 2 or x.tail[1] != y.tail[0]:
        raise RuleRefused("a product of another form")
    if (x.batch, x.samples, x.dtype) != (y.batch, y.samples, y.dtype):
        raise RuleRefused("they differ in samples, or in type")
    owners = _owners(x, y)
    size = x.tail[0] * y.tail[1]
    marks = {id(b.mark): b.width for v in (x, y) for b in v.blocks if b.owner != OWN}
    if size * len(set(owners)) >= sum(marks.values()):
        raise RuleRefused("its result would be more numbers to send")
    went: dict[Any, tuple[Tensor, Tensor]] = {}
    first, token = _entries_of(x, owners, False, went)
    second, other = _entries_of(y, owners, True, went)
    local = None
    wire = x.batch.exchange.wire
    if wire.rank in owners:
        count = owners.count(wire.rank)
        rows = first.view(-1, x.tail[0], count)
        local = torch.bmm(rows, second.view(-1, count, y.tail[1])).view(-1, size)
    tables = tuple(dict.fromkeys(name for b in (*x.blocks, *y.blocks) for name in b.tables))
    blocks = [
        Block(owner, range(size), tables, local if owner == wire.rank else None)
        for owner in dict.fromkeys(owners)
    ]
    tail = (x.tail[0], y.tail[1])
    return x.with_blocks(blocks, tail, _both(x.batch, token, other))


def _owners(x: PendingSum, y: PendingSum) -> tuple[int, ...]:
    """Of each entry of the dimension that is summed over the rank that has all there is of it."""
    if not x.is_apart or not y.is_apart:
        raise RuleRefused("its entries are sums that are still to be taken")
    first, second = (
        owners_of(tuple((b.owner, b.places) for b in v.blocks), v.tail[1], by_row, OWN)
        for v, by_row in ((x, False), (y, True))
    )
    found = [a | b for a, b in zip(first, second, strict=True)]
    if any(len(ranks) != 1 for ranks in found):
        raise RuleRefused("what would be multiplied lies on several ranks")
    return tuple(next(iter(ranks)) for ranks in found)


def _entries_of(
    x: PendingSum, owners: tuple[int, ...], by_row: bool, went: dict[Any, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """What this rank has of the entries that are its own, in order, and a token; collective.

    Args:
        owners: Of each row of a sample, or of each column.
        went: What has gone to the owners already.
    """
    wire = x.batch.exchange.wire
    here = [block for block in x.blocks if block.owner == wire.rank]
    parts = [block.local for block in here if block.local is not None]
    places = [block.places for block in here]
    token = x.token
    own = [block for block in x.blocks if block.owner == OWN and block.local is not None]
    if own:
        listed = tuple(block.places for block in own)
        wanted, where = at_owners(listed, owners, x.tail[1], by_row, wire.size)
        key = tuple(id(block.mark) for block in own), tuple(map(content_of, wanted))
        if key not in went:
            entries = _side_by_side([b.local for b in own if b.local is not None])
            went[key] = spread_over_samples(x, entries, wanted)
        part, token = went[key]
        token = _both(x.batch, x.token, token)
        parts.append(part)
        places.append(where[wire.rank])
    if not parts:
        return torch.empty(0, dtype=x.dtype, device=wire.device), token
    order = in_order(tuple(places))
    found = _side_by_side(parts)
    return found if order is None else found.index_select(1, order.to(found.device)), token


# Sums over entries of a sample.


def total(
    context: Any,
    func: Callable[..., Any],
    x: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> PendingSum:
    """Over some dimensions of a sample, none of them that of samples."""
    dims = _dims(x, dim)
    if dtype not in (None, x.dtype):
        raise RuleRefused("a sum in another type")
    if isinstance(x, OwnedRows):
        summed, dims = _rows_summed(x, dims, keepdim)
        if not dims:
            return summed
        x = summed
    target, tail = sum_targets(x.tail, frozenset(dims), keepdim)
    found: PendingSum = x.with_blocks([_summed(block, target) for block in x.blocks], tail)
    return found


def mean(
    context: Any,
    func: Callable[..., Any],
    x: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The sum, divided by the number of its terms."""
    shape = x.shape if isinstance(x, OwnedRows) else (0, *x.tail)
    count = prod(shape[d] for d in _dims(x, dim))
    return _scaled(total(context, func, x, dim, keepdim, dtype=dtype), count, torch.div)


def _dims(x: Any, dim: Any) -> set[int]:
    if not isinstance(x, Form):
        raise RuleRefused("no result of a lookup")
    ndim = len(x.shape) if isinstance(x, OwnedRows) else 1 + len(x.tail)
    listed = (dim,) if isinstance(dim, int) else tuple(dim or ())
    dims = {d % ndim for d in listed}
    if not dims or 0 in dims:
        raise RuleRefused("a sum over samples")
    return dims


def _rows_summed(x: OwnedRows, dims: set[int], keepdim: bool) -> tuple[PendingSum, set[int]]:
    """The sums of each sample's rows, and the dimensions that are still to be summed."""
    places = range(1, len(x.shape) - (0 if x.flat else 1))
    if not dims >= set(places):
        raise RuleRefused("a sum over some of a sample's rows")
    batch, each = x.batch, x.each
    rank, columns = batch.exchange.wire.rank, each.lookup.shape[-1]
    local = None
    if each.asked is not None:
        if x.local is None:
            local = pooled_here(batch, each, x.token)
        else:
            assert each.asked.lengths is not None
            zeros = x.local.new_zeros(len(each.asked.lengths), x.local.shape[1])
            local = zeros.index_add(0, each.asked.sample_of_ids(), x.local)
    blocks = tuple(
        Block(p.owner, p.columns, (each.lookup.table,), local if p.owner == rank else None)
        for p in each.pieces
    )
    tail = (*(1 for _ in places), columns) if keepdim else (columns,)
    if x.flat:
        tail = tail[:-1]
    rest = {1 if not keepdim else len(tail)} if len(x.shape) - 1 in dims and not x.flat else set()
    return PendingSum(batch, each.samples, tail, blocks, x.dtype, x.token), rest


def _summed(block: Block, target: Tensor) -> Block:
    """Entries that go to one place added up; `target`: of each place that of its sum."""
    places, order, together = sums_at(block.places, target)
    if order is None:
        return block.at(places)
    if not together:
        return block.mapped(partial(entries_at, places=order), places)
    if len(places) == 1:
        return block.mapped(lambda t: t.sum(1, keepdim=True), places)

    def added(t: Tensor) -> Tensor:
        zeros = t.new_zeros(len(t), len(places))
        return zeros.index_add(1, order.to(t.device), t)

    return block.mapped(added, places)


# Other shapes, parts and joints of samples.


def reshape(context: Any, func: Callable[..., Any], x: Any, *shape: Any) -> PendingSum:
    """Another shape of each sample."""
    if shape and not isinstance(shape[0], int):
        shape = tuple(shape[0]) if len(shape) == 1 else ()
    if not isinstance(x, PendingSum) or not shape or any(not isinstance(n, int) for n in shape):
        raise RuleRefused("a shape in which samples are not apart")
    rest = shape[1:]
    known = prod(n for n in rest if n != -1)
    fits = known == x.size if -1 not in rest else known > 0 and x.size % known == 0
    if (shape[0] == -1 and -1 in rest) or shape[0] not in (-1, x.own_samples) or not fits:
        raise RuleRefused("a shape in which samples are not apart")
    return replace(x, tail=tuple(x.size // known if n == -1 else n for n in rest))


def indexing(context: Any, func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Entries of each sample in other places; of all samples the same ones."""
    name = torch_function_name(func)
    if isinstance(x, OwnedRows):
        return _flat_rows(x, name, args, kwargs)
    if not isinstance(x, PendingSum) or not _LEAVES_SAMPLES[name](1 + len(x.tail), args, kwargs):
        raise RuleRefused("it does not leave samples as they are")
    key = _hashable(args), _hashable(kwargs)
    kind, sources = _sources(func, x.tail, _Call(key, args, kwargs))
    moved = [x.moved(source, tail) for source, tail in sources]
    return moved[0] if kind is None else kind(moved)


@dataclass(frozen=True)
class _Call:
    """Arguments of a function; two are the same if their keys are."""

    key: Any
    args: Any = field(compare=False)
    kwargs: Any = field(compare=False)


def _hashable(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(entry)) for key, entry in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    return ("tensor", *value.tolist()) if isinstance(value, Tensor) else value


@lru_cache(1024)
def _sources(
    func: Callable[..., Any], tail: tuple[int, ...], call: _Call
) -> tuple[Any, tuple[tuple[Tensor, torch.Size], ...]]:
    """The container of a function's results, if there are several; for each of them, from where
    its entries are, and the shape of a sample."""
    with torch.no_grad():
        found = func(probe(tail), *call.args, **call.kwargs)
    several = isinstance(found, tuple | list)
    results = found if several else (found,)
    sources = tuple((result.reshape(-1), result.shape[1:]) for result in results)
    return type(found) if several else None, sources


def _flat_rows(x: OwnedRows, name: str, args: Any, kwargs: Any) -> OwnedRows:
    """Rows of one column without the dimension of columns."""
    dim = kwargs.get("dim", args[0] if args else None)
    last = len(x.shape) - 1
    if name != "squeeze" or x.flat or x.shape[-1] != 1 or dim not in (-1, last):
        raise RuleRefused("rows lie apart")
    return replace(x, flat=True)


def _by_dim(position: int, default: int | None, extra: int = 0) -> Callable[..., bool]:
    """Whether the dimension that is named at a position is not that of samples."""

    def apart(ndim: int, args: Sequence[Any], kwargs: Any) -> bool:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        return isinstance(dim, int) and dim % (ndim + extra) != 0

    return apart


def _transposes(ndim: int, args: Sequence[Any], kwargs: Any) -> bool:
    return len(args) == 2 and not kwargs and all(isinstance(d, int) and d % ndim for d in args)


def _permutes(ndim: int, args: Sequence[Any], kwargs: Any) -> bool:
    dims = args[0] if args and not isinstance(args[0], int) else args
    return not kwargs and len(dims) == ndim and dims[0] % ndim == 0


def _flattens(ndim: int, args: Sequence[Any], kwargs: Any) -> bool:
    first = kwargs.get("start_dim", args[0] if args else 0)
    return bool(first % ndim)


def _indexes(ndim: int, args: Sequence[Any], kwargs: Any) -> bool:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    used = sum(1 for entry in index if entry is not None and entry is not Ellipsis)
    if not index or (index[0] is Ellipsis and used > ndim - 1):
        return False
    whole = index[0] is Ellipsis or (isinstance(index[0], slice) and index[0] == slice(None))
    return whole and all(map(_is_plain_index, index[1:]))


def _is_plain_index(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.ndim == 1 and entry.dtype == torch.int64 and entry.device.type == "cpu"
    return entry is None or entry is Ellipsis or isinstance(entry, int | slice)


_LEAVES_SAMPLES: dict[str, Callable[..., bool]] = {
    "flatten": _flattens, "getitem": _indexes, "permute": _permutes, "transpose": _transposes,
    "swapaxes": _transposes, "swapdims": _transposes, "squeeze": _by_dim(0, None),
    "unsqueeze": _by_dim(0, None, 1), "unflatten": _by_dim(0, None), "select": _by_dim(0, None),
    "narrow": _by_dim(0, None), "chunk": _by_dim(1, 0), "split": _by_dim(1, 0),
    "unbind": _by_dim(0, 0),
}  # fmt: skip
"""By name, whether a function leaves the dimension of samples as it is; of ndim and arguments."""


def joined(context: Any, func: Callable[..., Any], parts: Any, dim: int = 0) -> PendingSum:
    """Pending sums, and what this rank has of its own samples, next to each other."""
    first = next(x for x in parts if isinstance(x, Form))
    stacks = torch_function_name(func) == "stack"
    if not isinstance(first, PendingSum) or dim % (1 + len(first.tail) + stacks) == 0:
        raise RuleRefused("samples do not lie next to each other")
    pending = [_as_pending(x, first) for x in parts]
    source, place_of = places_joined(tuple(x.tail for x in pending), dim, stacks)
    blocks, begin = [], 0
    for x in pending:
        blocks += [block.at(carried(block.places, place_of, begin)) for block in x.blocks]
        begin += x.size
    token = _both(first.batch, *(x.token for x in pending))
    return first.with_blocks(blocks, source.shape[1:], token)


def _as_pending(x: Any, like: PendingSum) -> PendingSum:
    if isinstance(x, PendingSum):
        if (x.batch, x.samples, x.dtype) != (like.batch, like.samples, like.dtype):
            raise RuleRefused("they differ in samples, or in type")
        return x
    if not isinstance(x, Tensor) or x.dtype != like.dtype or not x.ndim:
        raise RuleRefused("rows lie apart")
    own = Block(OWN, range(prod(x.shape[1:])), (), x.reshape(len(x), prod(x.shape[1:])))
    return PendingSum(
        like.batch, like.samples, tuple(x.shape[1:]), (own,), like.dtype, like.batch.token
    )
