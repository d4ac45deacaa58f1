"""What an optimiser's step does to the rows of a table, found out by steps of small ones.

A table may be cut only where the optimiser treats its parts as it treats the whole, and only the
rows that were used need a gradient where the others then stay as they are. No list of optimisers
says so: it follows from their options as well, and users write their own. So the optimiser's step
is tried, with the options of the table's group, on a table of a few numbers, whole and in parts.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.errors import RecipeError

_ROWS, _COLUMNS, _STEPS = 6, 4, 3
_TOLERANCE = 1e-12
_RATE = 0.1
"""Of the trial: a schedule may begin at 0, with which no step shows anything."""


@dataclass(frozen=True)
class RowLaw:
    """What a step makes of a table.

    Attributes:
        rows: The update of a row follows from that row alone.
        columns: And that of a range of columns from these columns alone.
        keeps: Rows whose gradient is zero stay as they are, and what is kept of them, too.
        sparse: A sparse gradient makes the same of it as a dense one.
        only_sparse: There is no step with a dense one.
        by_element: Numbers that are kept for each number of the table.
        by_row: Numbers that are kept for each of its rows.
    """

    rows: bool
    columns: bool
    keeps: bool
    sparse: bool
    only_sparse: bool = False
    by_element: int = 0
    by_row: int = 0

    @property
    def touched(self) -> bool:
        """Whether a sparse gradient, of the rows that were used, means what a dense one does."""
        return self.keeps and self.sparse


def law_options(group: Mapping[str, Any]) -> str:
    """What a law depends on: the options of a group but for its rate, as a text to compare."""
    return repr({key: value for key, value in group.items() if key not in ("params", "lr")})


def row_law(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> RowLaw:
    """The law of a group of an optimiser, which is left as it is.

    Raises:
        RecipeError: Its step cannot be tried.
    """
    trial = _Trial(optimizer, group, device)
    try:
        law = trial.law()
        by_element, by_row = trial.kept(sparse=law.only_sparse)
        return replace(law, by_element=by_element, by_row=by_row)
    except Exception as error:
        raise RecipeError(
            f"the update of a table by {type(optimizer).__name__} could not be tried on a small "
            f"table: {type(error).__name__}: {error}",
            why="A table is split only where its parts are updated as the whole would be.",
            fix="Use an optimiser of torch, or leave out split.tables.",
        ) from error


Gradients = Sequence[Tensor]
"""Of a table, step by step."""
Found = list[Tensor]
"""A table after some steps, and what is kept of it, in the order of the names."""


class _Trial:
    """Steps of a small table."""

    def __init__(
        self, optimizer: Optimizer, group: Mapping[str, Any], device: torch.device
    ) -> None:
        self._optimizer, self._group = optimizer, group
        source = torch.Generator().manual_seed(0)
        shape = (_ROWS, _COLUMNS)
        numbers = torch.randn(_STEPS + 1, *shape, dtype=torch.float64, generator=source)
        self._table, *self._dense = numbers.to(device)
        # In each step other rows have no gradient; the first two belong to one part.
        self._partial = [gradient.clone() for gradient in self._dense]
        for step, gradient in enumerate(self._partial):
            gradient[[step, _ROWS - 1 - step]] = 0.0

    def law(self) -> RowLaw:
        sparse = self._attempt([_sparse(gradient) for gradient in self._partial])
        try:
            whole = self._run(self._partial)
        except Exception:
            if sparse is None:
                raise
            return self._law(self._partial, sparse, _sparse, RowLaw(True, True, True, True, True))
        same = sparse is not None and _alike(whole, sparse)
        law = RowLaw(True, True, self._keeps(), same)
        return self._law(self._dense, self._run(self._dense), _as_it_is, law)

    def _law(
        self, gradients: Gradients, whole: Found, form: Callable[[Tensor], Tensor], law: RowLaw
    ) -> RowLaw:
        """The law, with what parts of rows and of columns show."""
        found = {}
        for name, dim, size in (("rows", 0, _ROWS // 2), ("columns", 1, _COLUMNS // 2)):
            halves = zip(*(g.split(size, dim) for g in gradients), strict=True)
            parts = [
                self._run([form(each.contiguous()) for each in half], table.contiguous())
                for half, table in zip(halves, self._table.split(size, dim), strict=True)
            ]
            found[name] = _alike(whole, _joined(whole, parts, dim))
        rows = found["rows"]
        return RowLaw(rows, rows and found["columns"], law.keeps, law.sparse, law.only_sparse)

    def kept(self, *, sparse: bool) -> tuple[int, int]:
        """Numbers that are kept for each element, and for each row."""
        gradients = [_sparse(g) for g in self._dense] if sparse else self._dense
        _, *state = self._run(gradients)
        shapes = [tuple(each.shape) for each in state]
        return shapes.count((_ROWS, _COLUMNS)), sum(
            math.prod(shape[1:])
            for shape in shapes
            if shape[:1] == (_ROWS,) and shape[1:] != (_COLUMNS,)
        )

    def _keeps(self) -> bool:
        """Whether rows stay as they are in a step in which their gradient is zero."""
        before = self._run(self._dense)
        after = self._run([*self._dense, self._partial[0]])
        rows = [0, _ROWS - 1]
        return all(
            torch.equal(a[rows], b[rows])
            for a, b in zip(before, after, strict=True)
            if a.shape[:1] == (_ROWS,)
        )

    def _attempt(self, gradients: Gradients) -> Found | None:
        try:
            # Adagrad makes sparse tensors, of which torch warns until the check is on or off.
            with torch.sparse.check_sparse_tensor_invariants(False):
                found = self._run(gradients)
        except Exception:  # each optimiser refuses in its own way
            return None
        # SGD keeps a momentum that is sparse itself, which no checkpoint could hold.
        return None if any(each.is_sparse for each in found) else found

    def _run(self, gradients: Gradients, table: Tensor | None = None) -> Found:
        """The table, or a part, after steps by these gradients, and what is kept of it."""
        parameter = nn.Parameter((self._table if table is None else table).clone())
        small = copy.copy(self._optimizer)
        rate = {"lr": _RATE} if "lr" in self._group else {}
        small.param_groups = [{**self._group, **rate, "params": [parameter]}]
        small.state = defaultdict(dict)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            small.step()
        kept = small.state[parameter]
        state = [kept[key].detach() for key in sorted(kept) if isinstance(kept[key], Tensor)]
        return [parameter.detach(), *state]


def _sparse(gradient: Tensor) -> Tensor:
    """With the rows that are not zero."""
    rows = gradient.ne(0).any(1).nonzero().view(1, -1)
    values = gradient[rows[0]]
    return torch.sparse_coo_tensor(
        rows, values, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _joined(whole: Found, parts: Sequence[Found], dim: int) -> Found:
    """The parts put together; of a number for the whole, that of the first part."""
    return [
        torch.cat(own, dim) if wanted.dim() > dim else own[0]
        for wanted, *own in zip(whole, *parts, strict=True)
    ]


def _alike(one: Found, other: Found) -> bool:
    return len(one) == len(other) and all(map(_close, one, other))


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)
