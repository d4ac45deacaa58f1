"""`nn.EmbeddingBag` for ids without a limit: bags of 64-bit keys, over a table that grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional

from headway.errors import DataError, UsageError
from headway.keywords import checks_keywords
from headway.nn.dynamic_initial import Distribution
from headway.nn.dynamic_table import DynamicTable, LookedUpRows, checked_keys
from headway.nn.row_moves import take_rows
from headway.parallel.tables.lookups import Lookup

Combiner = Literal["sum", "mean", "sqrtn"]
"""sum: of weight times vector. mean: that, divided by the sum of the weights. sqrtn: divided by
the square root of the sum of their squares. Without weights all of them are 1."""


@dataclass(frozen=True, eq=False)
class _Bags:
    """Bags in one form.

    Attributes:
        keys: int64 [keys], of one bag after the other.
        sizes: int64 [bags].
        weights: [keys], of the table's type.
    """

    keys: Tensor
    sizes: Tensor
    weights: Tensor | None

    def owners(self) -> Tensor:
        """The bag of each key, int64 [keys]."""
        numbers = torch.arange(len(self.sizes), device=self.sizes.device)
        return numbers.repeat_interleave(self.sizes)


@checks_keywords
class DynamicEmbeddingBag(nn.Module):
    """Sums or means of bags of vectors that are looked up by 64-bit keys.

    Rows are made when they are first trained, so that there is no number of rows, and any int64 is
    a key. `DynamicTable` says what is read and trained when; its other arguments are taken here,
    too. Any optimiser of torch that steps each number for itself trains it:

        bag = headway.nn.DynamicEmbeddingBag(16)
        optimizer = torch.optim.Adam(bag.parameters())
        bag(torch.tensor([[7, -3], [2**60, 7]])).sum().backward()
        optimizer.step()

    Args:
        dim: Columns; with `table`, what that has.
        mode: See `Combiner`.
        default_id: The key whose vector an empty bag gets; None: zeros.
        table: That of another module, to share it; then no argument of a table may be given.
        **law: Arguments of `DynamicTable`.

    Attributes:
        table: The `DynamicTable`.

    Raises:
        UsageError: An argument that cannot be used.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        mode: Combiner = "sum",
        default_id: int | None = None,
        table: DynamicTable | None = None,
        initial: Distribution = "uniform",
        scale: float = 0.01,
        seed: int = 0,
        admit_after: int = 0,
        evict_after: int | None = None,
        max_norm: float | None = None,
        room: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        law: dict[str, Any] = {
            "initial": initial, "scale": scale, "seed": seed, "admit_after": admit_after,
            "evict_after": evict_after, "max_norm": max_norm, "room": room, "dtype": dtype,
            "device": device,
        }  # fmt: skip
        self.mode, self.default_id = mode, default_id
        _check_bag(mode, default_id, dim, table, law)
        if table is None:
            assert dim is not None
            table = DynamicTable(dim, **law)
        self.table = table

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a hash table is no graph of fixed shapes
    def forward(
        self,
        keys: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The vectors of bags [bags, dim].

        Args:
            keys: int64 or int32, [bags, keys of each], or [all keys] with `offsets` or `lengths`.
            offsets: [bags]: where each bag begins.
            per_sample_weights: As `keys`; may have a gradient.
            lengths: [bags]: how many keys each bag has, in the place of `offsets`.

        Raises:
            DataError: Keys that are no integers, offsets that fall, negative lengths, weights that
                are not finite.
        """
        if (tables := self.table.tables) is None:
            bags = self._bags(keys, offsets, lengths, per_sample_weights)
            starts = bags.sizes.cumsum(0) - bags.sizes
            sums = self._sums(bags.keys, starts, bags.sizes, bags.weights)
            return sums if self.mode == "sum" else sums / self._divisor(bags, sums.dtype)
        found: Tensor = tables.look_up(self._lookup(keys, offsets, lengths, per_sample_weights))
        return found

    def _lookup(
        self, keys: Any, offsets: Tensor | None, lengths: Tensor | None, weights: Tensor | None
    ) -> Lookup:
        """What is asked of all ranks; a problem is a part of it, so that all of them hear of it."""
        name, dim = self.table.name, self.table.dim
        try:
            bags = self._bags(keys, offsets, lengths, weights)
        except DataError as error:
            none = torch.empty(0, dtype=torch.int64, device=self.table.weight.device)
            problem = ". ".join(filter(None, [error.what, error.why.rstrip(".")]))
            return Lookup(name, "sum", none, 0, torch.Size((0, dim)), problem=problem)
        mode, factors = self._shares(bags)
        shape = torch.Size((len(bags.sizes), dim))
        return Lookup(name, mode, bags.keys, len(bags.sizes), shape, bags.sizes, weights=factors)

    def _bags(
        self, keys: Any, offsets: Tensor | None, lengths: Tensor | None, weights: Tensor | None
    ) -> _Bags:
        """The bags in one form; raises if they have none."""
        flat = checked_keys(keys)
        sizes = _sizes(flat, offsets, lengths)
        factors = _weights(keys, weights)
        if factors is not None:
            factors = factors.to(self.table.weight.dtype)
        bags = _Bags(flat.reshape(-1), sizes, factors)
        return bags if self.default_id is None else _filled(bags, self.default_id)

    def _shares(self, bags: _Bags) -> tuple[Literal["sum", "mean"], Tensor | None]:
        """Combiner and weights that mean the same where only part of a bag is."""
        if self.mode == "sum" or (self.mode == "mean" and bags.weights is None):
            return self.mode, bags.weights
        dtype = self.table.weight.dtype
        by_bag = 1 / self._divisor(bags, dtype).squeeze(1)
        shares = by_bag.index_select(0, bags.owners())
        return "sum", shares if bags.weights is None else bags.weights * shares

    def _sums(self, keys: Tensor, starts: Tensor, sizes: Tensor, weights: Tensor | None) -> Tensor:
        if not self.table.learns:
            rows, places = self.table.places(keys)
            return functional.embedding_bag(
                places, rows, starts, mode="sum", per_sample_weights=weights
            )
        found = self.table.open()
        places = found.places(keys)
        sums: Tensor = _Sums.apply(  # type: ignore[no-untyped-call]
            self.table.weight, weights, found, places, starts, sizes
        )
        return sums

    def _divisor(self, bags: _Bags, dtype: torch.dtype) -> Tensor:
        """[bags, 1]; 1 for empty bags."""
        sizes, weights = bags.sizes, bags.weights
        if weights is None:
            total = sizes.clamp(min=1).to(dtype)
        else:
            terms = (weights if self.mode == "mean" else weights.square()).to(dtype)
            total = terms.new_zeros(len(sizes)).index_add(0, bags.owners(), terms)
            total = torch.where(sizes == 0, 1, total)
        return (total if self.mode == "mean" else total.sqrt()).unsqueeze(1)

    def extra_repr(self) -> str:
        """Combiner and default."""
        default = "" if self.default_id is None else f", default_id={self.default_id}"
        return f"mode={self.mode!r}{default}"


class _Sums(Function):
    """Sums over bags. The table is told the gradients of its rows; autograd keeps none."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        weights: Tensor | None,
        found: LookedUpRows,
        places: Tensor,
        starts: Tensor,
        sizes: Tensor,
    ) -> Tensor:
        ctx.found = found
        ctx.save_for_backward(places, sizes, weights)
        return functional.embedding_bag(
            places, found.values(), starts, mode="sum", per_sample_weights=weights
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        places, sizes, weights = ctx.saved_tensors
        given = given.contiguous()
        values = ctx.found.values()
        bags = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = (take_rows(given, bags) * take_rows(values, places)).sum(1)

        def shares(some: Tensor) -> Tensor:
            parts = take_rows(given, bags.index_select(0, some))
            return parts if weights is None else parts * weights.index_select(0, some).unsqueeze(1)

        # One place of each row first: adding is slower than copying.
        first = ctx.found.first
        gradient = shares(first)
        if len(first) < len(places):
            others = torch.ones(len(places), dtype=torch.bool, device=places.device)
            others[first] = False
            more = others.nonzero().squeeze(1)
            gradient.index_add_(0, places.index_select(0, more), shares(more))
        ctx.found.gradient(torch.arange(len(values), device=places.device), gradient)
        return None, of_weights, None, None, None, None


def _check_bag(
    mode: str, default_id: int | None, dim: int | None, table: DynamicTable | None,
    law: dict[str, Any],
) -> None:  # fmt: skip
    def refuse(what: str, why: str = "") -> UsageError:
        return UsageError(f"headway.nn.DynamicEmbeddingBag: {what}", why=why)

    if mode not in ("sum", "mean", "sqrtn"):
        raise refuse(f'mode is {mode!r}, and must be "sum", "mean" or "sqrtn"')
    if default_id is not None and not -(2**63) <= default_id < 2**63:
        raise refuse(f"default_id is {default_id}, and must have 64 bits")
    if table is None:
        if dim is None:
            raise refuse("dim is missing, and no table is given either")
        return
    if dim is not None and dim != table.dim:
        raise refuse(f"dim is {dim}, and the table that is given has {table.dim} columns")
    defaults = {"initial": "uniform", "scale": 0.01}
    given = [k for k, v in law.items() if v != defaults.get(k) and v not in (0, None)]
    if given:
        raise refuse(
            f"{', '.join(given)} and table are given", "The table that is shared has its own."
        )


def _sizes(keys: Tensor, offsets: Tensor | None, lengths: Tensor | None) -> Tensor:
    """How many keys each bag has, int64 [bags]."""
    if keys.ndim == 2:
        if offsets is not None or lengths is not None:
            raise DataError("keys have two dimensions, and offsets or lengths are given as well")
        return torch.full((keys.shape[0],), keys.shape[1], device=keys.device)
    if keys.ndim != 1:
        raise DataError(f"keys are {list(keys.shape)}, and must have one or two dimensions")
    if (offsets is None) == (lengths is None):
        both = "both offsets and lengths" if offsets is not None else "neither offsets nor lengths"
        raise DataError(f"keys have one dimension, and {both} are given")
    given = lengths if offsets is None else offsets
    assert given is not None
    name = "lengths" if offsets is None else "offsets"
    if given.ndim != 1 or given.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"{name} are {str(given.dtype).removeprefix('torch.')} {list(given.shape)}, and must "
            "be int64 or int32 of one dimension"
        )
    sizes = given.long()
    if offsets is not None:
        if (len(sizes) and int(sizes[0]) != 0) or (not len(sizes) and len(keys)):
            raise DataError("the first offset must be 0: keys before it would be in no bag")
        sizes = torch.cat([sizes, sizes.new_tensor([len(keys)])]).diff()
    if len(sizes) and int(sizes.min()) < 0:
        bag = int(sizes.argmin())
        raise DataError(
            f"bag {bag} has {int(sizes[bag])} keys",
            why=f"The {name} say so; there are {len(keys)} keys.",
            fix="Offsets must not fall, and not exceed the number of keys; lengths must not be "
            "negative.",
        )
    if int(sizes.sum()) != len(keys):
        raise DataError(f"lengths add up to {int(sizes.sum())}, and there are {len(keys)} keys")
    return sizes


def _weights(keys: Tensor, weights: Tensor | None) -> Tensor | None:
    if weights is None:
        return None
    if weights.shape != keys.shape or not weights.is_floating_point():
        raise DataError(
            f"weights are {str(weights.dtype).removeprefix('torch.')} {list(weights.shape)}, and "
            f"must be real numbers {list(keys.shape)}, as keys"
        )
    wrong = ~weights.detach().isfinite()
    if bool(wrong.any()):
        place = wrong.reshape(-1).nonzero()[0]
        raise DataError(
            f"weight number {int(place)} is {float(weights.detach().reshape(-1)[place])}",
            why="It would make the rows of its bag, and all that follows, NaN.",
            fix="Clean the data; nothing has been changed.",
        )
    return weights.reshape(-1)


def _filled(bags: _Bags, default: int) -> _Bags:
    """With one key of weight 1 in each empty bag."""
    empty = bags.sizes == 0
    if not bool(empty.any()):
        return bags
    weights = bags.weights
    filled = _Bags(bags.keys, bags.sizes.clamp(min=1), None)
    owners = filled.owners()
    real = ~empty[owners]
    keys = torch.full_like(owners, default).masked_scatter(real, bags.keys)
    if weights is not None:
        weights = weights.new_ones(len(owners)).masked_scatter(real, weights)
    return _Bags(keys, filled.sizes, weights)
