"""A lookup in a table: what a module was asked, in one form for all that can be asked; its check.

Ids are flat; samples (bags, or the first dimension of ids that are looked up one by one) have so
many of them each. Ids of padding have been left out of bags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headway.errors import DataError

Mode = Literal["sum", "mean", "rows"]
"""What is wanted of the rows of a sample: their sum, their mean, or each of them."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """What this rank asks of one table.

    Attributes:
        table: Logical name of the parameter.
        ids: [ids], of integers.
        lengths: int64 [samples]; None: `each` ids in all of them.
        shape: Of the result; its last dimension has the table's columns.
        weights: [ids], if rows are to be multiplied.
        padding: The row that gets no gradient, if any.
    """

    table: str
    mode: Mode
    ids: Tensor
    samples: int
    shape: torch.Size
    lengths: Tensor | None = None
    each: int = 0
    weights: Tensor | None = None
    padding: int | None = None
    problem: str = ""

    @property
    def learns_weights(self) -> bool:
        """Whether a gradient of the weights is wanted."""
        weights = self.weights
        return weights is not None and weights.requires_grad and torch.is_grad_enabled()

    def sample_of_ids(self) -> Tensor:
        """To which sample each id belongs; int64 [ids]."""
        return samples_of_ids(self.samples, self.lengths, self.each, self.ids.device)

    def all_lengths(self) -> Tensor:
        """int64 [samples]."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.samples,), self.each, device=self.ids.device)


def samples_of_ids(samples: int, lengths: Tensor | None, each: int, device: torch.device) -> Tensor:
    """To which of `samples` each id belongs; int64."""
    numbers = torch.arange(samples, device=device)
    return numbers.repeat_interleave(each if lengths is None else lengths)


def embedding_lookup(table: str, module: nn.Embedding, ids: Any, rows: int) -> Lookup:
    """What `module(ids)` asks; a problem is a part of it, so that all ranks hear of it."""
    columns = module.embedding_dim
    problem = _wrong_ids(ids)
    if problem:
        return _without(table, "rows", columns, problem)
    samples = ids.shape[0] if ids.ndim else 1
    shape = torch.Size((*ids.shape, columns))
    each = ids.numel() // samples if samples else 0
    flat = ids.detach().reshape(-1)
    problem = _outside(flat, rows, ids.shape)
    return Lookup(
        table, "rows", flat, samples, shape, each=each, padding=module.padding_idx, problem=problem
    )


def bag_lookup(
    table: str, module: nn.EmbeddingBag, ids: Any, offsets: Any, weights: Any, rows: int
) -> Lookup:
    """What `module(ids, offsets, weights)` asks; problems as of `embedding_lookup`."""
    columns, mode = module.embedding_dim, module.mode
    assert mode in ("sum", "mean")
    problem = (
        _wrong_ids(ids)
        or _wrong_bags(ids, offsets, module.include_last_offset)
        or _wrong_weights(ids, weights, mode)
        or _outside(ids.detach().reshape(-1), rows, ids.shape)
    )
    if problem:
        return _without(table, "sum", columns, problem)
    flat = ids.detach().reshape(-1)
    factors = None if weights is None else weights.reshape(-1)
    lengths: Tensor | None = None
    each = 0
    if ids.ndim == 2:
        samples, each = ids.shape
    else:
        ends = offsets.detach().to(torch.int64)
        if not module.include_last_offset:
            ends = torch.cat([ends, ends.new_tensor([flat.numel()])])
        lengths = ends.diff()
        samples = len(lengths)
        flat = flat[: int(ends[-1])] if samples else flat[:0]
        factors = None if factors is None else factors[: len(flat)]
    padding = module.padding_idx
    if padding is not None and bool((left_out := flat == padding).any()):
        kept = ~left_out
        owners = samples_of_ids(samples, lengths, each, flat.device)[kept]
        lengths, each = torch.bincount(owners, minlength=samples), 0
        flat = flat[kept]
        factors = None if factors is None else factors[kept]
    shape = torch.Size((samples, columns))
    return Lookup(table, mode, flat, samples, shape, lengths, each, factors)  # type: ignore[arg-type]


def _without(table: str, mode: Mode, columns: int, problem: str) -> Lookup:
    """In the place of one that cannot be made."""
    return Lookup(table, mode, torch.empty(0, dtype=torch.int64), 0, torch.Size((0, columns)),
                  problem=problem)  # fmt: skip


def _wrong_ids(ids: Any) -> str:
    if not isinstance(ids, Tensor):
        return f"ids are {type(ids).__name__}, and must be a tensor of integers"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids are {str(ids.dtype).removeprefix('torch.')}, and must be int32 or int64"
    return ""


def _outside(flat: Tensor, rows: int, shape: torch.Size) -> str:
    if not rows or not flat.numel():
        return ""
    low, high = torch.aminmax(flat)
    if int(low) >= 0 and int(high) < rows:
        return ""
    place = int(((flat < 0) | (flat >= rows)).nonzero()[0])
    given = f"id {int(flat[place])}, {_at(place, shape)}"
    return f"{given}, is not among its {rows} rows (0 to {rows - 1})"


def _at(place: int, shape: torch.Size) -> str:
    """ "number 3", or "at [2, 5]"."""
    if len(shape) < 2:
        return f"number {place}"
    return f"at {[int(n) for n in torch.unravel_index(torch.tensor(place), shape)]}"


def _wrong_bags(ids: Tensor, offsets: Any, include_last: bool) -> str:
    if ids.ndim == 2:
        return "" if offsets is None else "offsets are given, and ids have two dimensions already"
    if ids.ndim != 1:
        return f"ids have {ids.ndim} dimensions, and bags have one or two"
    wrong = _wrong_ids(offsets).replace("ids", "offsets")
    if wrong:
        return wrong
    if offsets.ndim != 1:
        return f"offsets have {offsets.ndim} dimensions, and must have one"
    if include_last and not offsets.numel():
        return "offsets are empty, and the last one of them is to be the number of ids"
    if not offsets.numel():
        return ""
    if int(offsets[0]):
        return f"the first offset is {int(offsets[0])}, and must be 0"
    steps = offsets.diff()
    if bool((steps < 0).any()):
        place = int((steps < 0).nonzero()[0]) + 1
        return (
            f"offset {int(offsets[place])}, number {place}, is below the one before it, "
            f"{int(offsets[place - 1])}: a bag of a negative number of ids"
        )
    if int(offsets[-1]) > ids.numel():
        return f"offset {int(offsets[-1])}, the last one, is behind the {ids.numel()} ids"
    return ""


def _wrong_weights(ids: Tensor, weights: Any, mode: str) -> str:
    if weights is None:
        return ""
    if mode != "sum":
        return f"weights are given, and the mode is {mode}; torch takes them for sums alone"
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        return "weights are no tensor of real numbers"
    if weights.shape != ids.shape:
        return f"weights are {list(weights.shape)}, and ids are {list(ids.shape)}"
    if weights.numel() and bool((wrong := weights.detach().isnan()).any()):
        place = int(wrong.reshape(-1).nonzero()[0])
        return f"weight NaN, {_at(place, ids.shape)}, cannot be multiplied with"
    return ""


def lookup_error(problems: list[tuple[int, str, str]]) -> DataError:
    """The error that all ranks raise.

    Args:
        problems: Rank, table and what is wrong.
    """
    rank, table, problem = problems[0]
    more = f"{len(problems) - 1} more lookups are wrong. " if len(problems) > 1 else ""
    return DataError(
        f"table {table}: {problem}",
        where=f"rank {rank} of those that share the batch",
        why=f"{more}No rank has looked anything up.",
        fix="Correct the data, or the size of the table.",
    )
