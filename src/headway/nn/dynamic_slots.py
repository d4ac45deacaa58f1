"""The state of any optimiser for rows of which only some take part in a step.

Between steps an optimiser's state of the table has an entry for every row. For a step, those of
the touched rows take their place, so that the optimiser sees an ordinary small parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.errors import HeadwayError, UsageError
from headway.optim.row_law import row_law


class RowSlots:
    """What an optimiser keeps for each row of one table.

    Attributes:
        initial: Name of the state -> its entries for a row that has never been touched.
    """

    def __init__(self, optimizer: Optimizer, parameter: nn.Parameter, name: str) -> None:
        self.initial = _initial_slots(optimizer, parameter, name)
        self._parameter = parameter
        self._whole: dict[str, Tensor] = {}

    def take(self, optimizer: Optimizer, rows: Tensor, room: int) -> None:
        """Put the entries of rows in the place of the whole.

        Args:
            rows: int64 [touched]; -1: one that does not exist yet.
            room: Rows that there is memory for.
        """
        self.restore(optimizer)
        state = optimizer.state[self._parameter]
        missing = rows < 0
        for name, initial in self.initial.items():
            if not isinstance(state.get(name), Tensor):
                continue  # the optimiser has not begun
            whole = _fitted(state[name], initial, room)
            if room:
                part = whole.index_select(0, rows.clamp(min=0))
                part[missing] = initial.to(part.dtype)
            else:
                part = initial.to(whole.dtype).expand(len(rows), *initial.shape).clone()
            self._whole[name], state[name] = whole, part

    def put(self, optimizer: Optimizer, rows: Tensor, room: int) -> None:
        """Write the entries of rows back; each row exists now."""
        state = optimizer.state[self._parameter]
        for name, initial in self.initial.items():
            part = state.get(name)
            if isinstance(part, Tensor):
                whole = self._whole.pop(name, part.new_empty(0, *initial.shape))
                state[name] = _fitted(whole, initial, room).index_copy_(0, rows, part)

    def entries(self, optimizer: Optimizer, rows: Tensor) -> dict[str, Tensor]:
        """What is kept of rows, by name; of what the optimiser has not begun, nothing."""
        state = optimizer.state[self._parameter]
        return {
            name: _fitted(state[name], initial, int(rows.max()) + 1).index_select(0, rows)
            for name, initial in self.initial.items()
            if isinstance(state.get(name), Tensor)
        }

    def columns(self, optimizer: Optimizer, high: int) -> dict[str, Tensor]:
        """What is kept of the rows below `high`, by name; of what has not begun, nothing."""
        state = optimizer.state[self._parameter]
        return {
            name: _fitted(state[name], initial, high)[:high]
            for name, initial in self.initial.items()
            if isinstance(state.get(name), Tensor)
        }

    def enter(
        self, optimizer: Optimizer, rows: Tensor, entries: Mapping[str, Tensor], room: int
    ) -> None:
        """Set what is kept of rows."""
        state = optimizer.state[self._parameter]
        for name, entry in entries.items():
            initial = self.initial[name]
            whole = state.get(name, entry.new_empty(0, *initial.shape))
            state[name] = _fitted(whole, initial, room).index_copy_(0, rows, entry)

    def restore(self, optimizer: Optimizer) -> None:
        """After a step that has raised an exception: the whole, as it was."""
        optimizer.state[self._parameter].update(self._whole)
        self._whole.clear()


def _fitted(whole: Tensor, initial: Tensor, room: int) -> Tensor:
    """With entries for `room` rows."""
    if len(whole) >= room:
        return whole
    larger = whole.new_empty(room, *initial.shape)
    larger[: len(whole)] = whole
    larger[len(whole) :] = initial.to(whole.dtype)
    return larger


def _initial_slots(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
    """Try the optimiser on rows of no importance: what it keeps for each that has a gradient of 0.

    Raises:
        UsageError: The step of a row does not follow from that row alone, or cannot be tried.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    try:
        by_row = row_law(optimizer, group, parameter.device).rows
        state = _trial(optimizer, group, parameter)
    except (HeadwayError, TypeError, ValueError, RuntimeError) as error:
        raise _unusable(optimizer, name, f"a trial step of it ends with: {error}") from error
    if not by_row:
        raise _unusable(optimizer, name, "the step of a row depends on the other rows of the batch")
    return {k: v[0].clone() for k, v in state.items() if isinstance(v, Tensor) and v.ndim}


def _trial(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> Mapping[str, Any]:
    """The state of two rows after a step of a new optimiser of this kind."""
    trial = nn.Parameter(parameter.detach().new_zeros(2, parameter.shape[1]))
    trial.grad = torch.zeros_like(trial)
    legal = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in group.items() if k in legal and k != "params"}
    # Some make their state when they are made.
    fresh = type(optimizer)([trial], **options)
    fresh.step()
    return fresh.state[trial]  # type: ignore[no-any-return]


def _unusable(optimizer: Optimizer, name: str, why: str) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} cannot train a table that grows",
        where=name,
        why=f"Only the rows of a batch take part in a step, and {why}.",
        fix="Give the table an optimiser of its own: SGD, Adagrad, Adam, headway.optim's "
        "RowWiseAdagrad.",
    )
