"""Tables whose parts lie over tiers: for the exchange of lookups, and for the optimiser.

The parameter stays what it is for everybody else: a tensor of all rows of the part, whose memory is
a mapped file. What it says is true after `settle`. An optimiser steps on the rows that were used,
as a dense tensor, with its own arithmetic; so must it leave all others as they are, and their state
(`row_state` tries that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from headway.errors import PlanError
from headway.parallel.tables.mapped_memory import file_of, mapped_tensor, row_chunks
from headway.parallel.tables.rounds import SplitTable
from headway.parallel.tables.split_tables import SplitTables
from headway.parallel.tables.table_parts import TablePart
from headway.parallel.tables.tiered_rows import TieredRows


class TieredTable:
    """A part of a table over tiers; a `RowSource`.

    Attributes:
        name: Logical name of the parameter.
        part: The part; its parameter is a tensor in a mapped file.
        rows: Where its rows lie.
    """

    def __init__(self, part: TablePart, rows: TieredRows) -> None:
        self.name, self.part, self.rows = part.name, part, rows
        self.looked_up: list[Tensor] | None = None

    @property
    def leaf(self) -> Tensor:
        return self.part.parameter

    def open(self) -> TieredTable:
        return self

    def values(self) -> Tensor:
        return self.rows.cache("")

    def places(self, keys: Tensor) -> Tensor:
        numbers = self.rows.rows_of(self.part.places(keys))[1]
        return numbers.to(keys.dtype)

    def gradient(self, places: Tensor, gradients: Tensor) -> Tensor | None:
        rows, order = self.rows.rows_in(places).sort()
        return self.part.gradient(rows, gradients[order])


class RowUpdates:
    """Has an optimiser step on the rows of tiered tables that a step has used."""

    def __init__(self, optimizer: Optimizer, tables: Sequence[TieredTable]) -> None:
        self._tables = tables
        self._lent: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._lend),
            optimizer.register_step_post_hook(self._take_back),
        ]

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _lend(self, optimizer: Optimizer, *_: Any) -> None:
        for table in self._tables:
            parameter, rows = table.part.parameter, table.rows
            if parameter.grad is None:
                continue
            gradient = parameter.grad.coalesce()
            slots = rows.numbers_of(gradient.indices()[0])
            self._lent[parameter] = gradient, slots
            state = optimizer.state.get(parameter, {})
            for key in rows.homes.keys() & state.keys():
                state[key] = rows.cache(key).index_select(0, slots)
            parameter.grad = None
            parameter.data = rows.cache("").index_select(0, slots)
            values = gradient.values()
            if isinstance(optimizer, SparseAdam):
                every = torch.arange(len(slots)).unsqueeze(0)
                values = torch.sparse_coo_tensor(
                    every, values, values.shape, is_coalesced=True, check_invariants=False
                )
            parameter.grad = values

    def _take_back(self, optimizer: Optimizer, *_: Any) -> None:
        for table in self._tables:
            parameter, rows = table.part.parameter, table.rows
            if parameter in self._lent:
                gradient, slots = self._lent.pop(parameter)
                rows.cache("").index_copy_(0, slots, parameter.detach())
                parameter.grad = None
                parameter.data = rows.homes[""]
                parameter.grad = gradient
                state = optimizer.state.get(parameter, {})
                for key in rows.homes.keys() & state.keys():
                    rows.cache(key).index_copy_(0, slots, state[key])
                    state[key] = rows.homes[key]
            rows.end_step()


def tier_tables(
    tables: SplitTables, optimizer: Optimizer, frequent: Mapping[str, Tensor] | None = None
) -> tuple[list[TieredTable], RowUpdates | None]:
    """Put parts of tables over tiers, where their placement says so (`TablePlacement.hot`).

    Args:
        tables: Whose lookups go through the tiers from now on.
        optimizer: Of their parameters.
        frequent: Name of a table -> numbers of rows that are known to be frequent, int64.

    Returns:
        The tables, and what has the optimiser update them; None: there are no such tables.

    Raises:
        PlanError: The optimiser changes rows that a step has not used, or memory is too small.
        RunError: There is no room for the files.
    """
    found = []
    for name, part in tables.parts.items():
        placement = part.placement
        if not placement.hot or not len(part.rows):
            continue
        state = _state_in_files(part, row_state(optimizer, part.parameter, name), optimizer)
        rows = TieredRows(
            name,
            part.parameter.detach(),
            placement.hot,
            placement.cold,
            state=state,
            first=_own_rows(part, (frequent or {}).get(name)),
        )
        part.parameter.data = rows.homes[""]
        found.append(TieredTable(part, rows))
        tables.tables[name] = SplitTable(placement, found[-1])
    return found, RowUpdates(optimizer, found) if found else None


def _own_rows(part: TablePart, rows: Tensor | None) -> Tensor | None:
    """Of rows by their logical numbers those that this rank has, by its own."""
    if rows is None:
        return None
    rows = rows.unique()
    return part.places(rows[torch.isin(rows, part.rows)]).long()


def _state_in_files(
    part: TablePart, forms: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, Tensor]:
    """The optimiser's state of all rows: what there is, else what rows begin with."""
    known = optimizer.state.get(part.parameter, {})
    found = {}
    for key, form in forms.items():
        if key in known:
            found[key] = known[key]
            continue
        shape = (len(part.rows), *form.shape)
        home = mapped_tensor(shape, form.dtype, part.placement.cold, what=part.name)
        file = file_of(home)
        assert file is not None
        if bool((form != 0).any()):
            for rows in row_chunks(home):
                home[rows] = form
                file.drop()
        found[key] = home
    return found


def row_state(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
    """What an optimiser keeps for each row of a table, found out by steps on a small one.

    Returns:
        By the optimiser's names: what a row begins with.

    Raises:
        PlanError: It changes rows that a step has not used, or what it keeps for them.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    settings = {key: value for key, value in group.items() if key != "params"}
    # Rows: one that both steps use, one that only the first uses, one that none uses.
    small = nn.Parameter(torch.ones(3, *parameter.shape[1:], dtype=parameter.dtype))
    taken = signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    trial = type(optimizer)([{**settings, "params": [small]}], **options)
    _trial_step(trial, small, (0, 1))
    before = small.detach().clone(), _state_by_row(trial, small)
    _trial_step(trial, small, (0,))
    after = small.detach(), _state_by_row(trial, small)
    same = torch.equal(before[0][1:], after[0][1:]) and bool((after[0][2] == 1).all())
    if not same or any(not torch.equal(v[1:], after[1][k][1:]) for k, v in before[1].items()):
        raise PlanError(
            f"{type(optimizer).__name__} cannot update table {name}, of which memory holds a part",
            problems=[
                "with these settings it changes rows that a step has not used: by momentum, "
                "moments or weight decay"
            ],
            fix="Give the table SGD without momentum, Adagrad, headway.optim.RowWiseAdagrad or "
            "SparseAdam, without weight decay, or leave out hot.",
        )
    return {key: value[2] for key, value in after[1].items()}


def _trial_step(trial: Optimizer, small: nn.Parameter, rows: Sequence[int]) -> None:
    indices = torch.tensor([rows])
    values = torch.ones(len(rows), *small.shape[1:], dtype=small.dtype)
    gradient = torch.sparse_coo_tensor(indices, values, small.shape, check_invariants=False)
    sparse = isinstance(trial, SparseAdam)
    small.grad = gradient.coalesce() if sparse else gradient.to_dense()
    trial.step()


def _state_by_row(trial: Optimizer, small: nn.Parameter) -> dict[str, Tensor]:
    return {
        key: value.clone()
        for key, value in trial.state[small].items()
        if isinstance(value, Tensor) and value.ndim and len(value) == len(small)
    }
