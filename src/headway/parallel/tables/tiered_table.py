"""Tables whose parts lie over tiers: for the exchange of lookups, and for the optimiser.

The parameter stays what it is for everybody else: a tensor of all rows of the part, whose memory is
a mapped file. What it says is true after `settle`. An optimiser steps on the rows that were used,
as a dense tensor, with its own arithmetic; it must be one that leaves all others as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from headway.channel.mapped_memory import file_of, mapped_tensor, row_chunks
from headway.channel.process_memory import HeapTrimmer
from headway.parallel.tables.rounds import SplitTable
from headway.parallel.tables.split_tables import SplitTables
from headway.parallel.tables.table_parts import TablePart, parts_of_rows
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

    def ahead(self, ids: Tensor) -> None:
        """Begin to read the rows of the next step, of which this rank has some.

        Args:
            ids: As the modules will be asked for; those of other ranks are not among them unless
                the caller has exchanged them.
        """
        self.rows.ahead(own_rows(self.part, ids))

    def gradient(self, places: Tensor, gradients: Tensor) -> Tensor | None:
        rows, order = self.rows.rows_in(places).sort()
        return self.part.gradient(rows, gradients.index_select(0, order))


class RowUpdates:
    """Has an optimiser step on the rows of tiered tables that a step has used."""

    def __init__(self, optimizer: Optimizer, tables: Sequence[TieredTable]) -> None:
        self._tables = tables
        # Each step uses another number of rows.
        self._freed = HeapTrimmer(sum(table.rows.memory for table in tables) // 4)
        self._lent: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._lend),
            optimizer.register_step_post_hook(self._take_back),
            optimizer.register_load_state_dict_post_hook(self._adopt),
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
        self._freed.end_step()

    def _adopt(self, optimizer: Optimizer) -> None:
        """A checkpoint has been read: into the homes of the tables, and into new state."""
        for table in self._tables:
            state = optimizer.state.get(table.part.parameter, {})
            for key in table.rows.homes.keys() & state.keys():
                table.rows.adopt(key, state[key])
                state[key] = table.rows.homes[key]
            table.rows.reload()


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

    The optimiser's step must leave rows that are not used as they are, and their state.

    Raises:
        PlanError: Memory is too small.
        RunError: There is no room for the files.
    """
    found = []
    for name, part in tables.parts.items():
        placement, known = part.placement, (frequent or {}).get(name)
        if not placement.hot or not len(part.parameter):
            continue
        state = _state_in_files(part, row_state(optimizer, part.parameter), optimizer)
        rows = TieredRows(
            name,
            part.parameter.detach(),
            placement.hot,
            placement.cold,
            state=state,
            first=None if known is None else own_rows(part, known),
        )
        part.parameter.data = rows.homes[""]
        found.append(TieredTable(part, rows))
        tables.tables[name] = SplitTable(placement, found[-1])
    return found, RowUpdates(optimizer, found) if found else None


def own_rows(part: TablePart, ids: Tensor) -> Tensor:
    """Of rows by their logical numbers those that this rank has, by its own; int64."""
    ids = ids[(ids >= 0) & (ids < part.placement.rows)]
    if part.piece is not None and len(part.placement.owners[part.piece[0]]) > 1:
        number, own = part.piece
        ids = ids[parts_of_rows(part.placement, number, ids) == own]
    return part.places(ids).long()


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
        shape = (len(part.parameter), *form.shape)
        home = mapped_tensor(shape, form.dtype, part.placement.cold, what=part.name)
        file = file_of(home)
        assert file is not None
        if bool((form != 0).any()):
            for rows in row_chunks(home):
                home[rows] = form
                file.drop()
        found[key] = home
    return found


def row_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What an optimiser keeps for each row of a table, found out by a step on a small one.

    Its step must leave rows that are not used as they are, and their state.

    Returns:
        By the optimiser's names: what a row begins with.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    small = nn.Parameter(torch.zeros(2, *parameter.shape[1:], dtype=parameter.dtype))
    trial = copy.copy(optimizer)
    trial.param_groups, trial.state = [{**group, "params": [small]}], defaultdict(dict)
    known = optimizer.state.get(parameter, {})
    for key, value in known.items():
        # Some make their state with themselves: here from the first rows of it.
        by_row = isinstance(value, Tensor) and value.shape[:1] == parameter.shape[:1]
        trial.state[small][key] = value[:2].clone() if by_row else copy.deepcopy(value)
    values = torch.ones(1, *small.shape[1:], dtype=small.dtype)
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0]]), values, small.shape, is_coalesced=True, check_invariants=False
    )
    small.grad = gradient if isinstance(optimizer, SparseAdam) else gradient.to_dense()
    trial.step()
    return {
        key: value[1]
        for key, value in trial.state[small].items()
        if isinstance(value, Tensor) and value.shape[:1] == small.shape[:1]
    }
