"""A table over two tiers: frequent rows in memory, the others in a mapped file.

A row lies in one of the two. Every lookup first brings its rows to memory (`rows_of`), so that
forward, gradients and update see ordinary tensors of *slots*; values never depend on where a row
has been. Rows that were brought for one step go home after it, unless they have become frequent:
each row counts the steps that have used it, and takes the slot of one that fewer steps have used.

`ahead` brings the rows of the next step while the current one computes, in a thread. All
bookkeeping is done by that thread, or by the caller after it has waited for it, in an order that
does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.channel.mapped_memory import MappedFile, copy_rows, file_of, into_file
from headway.errors import DataError, PlanError
from headway.plans.tables import rows_in_memory
from headway.units import format_bytes

_REVIEW = 64
"""Steps after which the hot rows are looked through for those that are used least."""

_HALVE = 256
"""Steps after which all counts are halved, so that rows that were frequent once make room."""

_AT_ONCE = 16384
"""Rows that are read or written through one buffer."""

PER_ROW = 5
"""Bytes of memory for each row, wherever it lies: its slot and its count."""

_PER_SLOT = 17
"""Bytes for each slot beside the row: which row, when it was used, whether it is hot."""


@dataclass(frozen=True, eq=False)
class _Tier:
    """One tensor of the table, the rows or a part of the optimiser's state, in both tiers.

    Attributes:
        home: [rows, ...], in the file.
        cache: [slots, ...], in memory.
    """

    home: Tensor
    file: MappedFile
    cache: Tensor

    def read(self, rows: Tensor, slots: Tensor) -> None:
        """Bring rows, ascending, to slots."""
        for own, there in self._parts(rows, slots):
            values = self._buffer(len(own))
            self.file.read_stretches(*self._stretches(own), values)
            self.cache.index_copy_(0, there, self._rows_in(values))

    def write(self, rows: Tensor, slots: Tensor) -> None:
        """Write slots home to rows, ascending."""
        for own, there in self._parts(rows, slots):
            values = self._buffer(len(own))
            torch.index_select(self.cache, 0, there, out=self._rows_in(values))
            self.file.write_stretches(*self._stretches(own), values)

    def _parts(self, rows: Tensor, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if not len(rows):
            return iter(())
        return zip(rows.split(_AT_ONCE), slots.split(_AT_ONCE), strict=True)

    def _buffer(self, rows: int) -> bytearray:
        return bytearray(rows * self.home[:1].nbytes)

    def _rows_in(self, values: bytearray) -> Tensor:
        found = torch.frombuffer(values, dtype=self.home.dtype)
        return found.view(-1, *self.home.shape[1:])

    def _stretches(self, rows: Tensor) -> tuple[list[int], list[int]]:
        """Beginnings and sizes in bytes of rows that lie next to each other."""
        size = self.home[:1].nbytes
        begin = torch.cat([rows.new_zeros(1), (rows.diff() > 1).nonzero().view(-1) + 1])
        sizes = torch.cat([begin, begin.new_tensor([len(rows)])]).diff()
        return (rows[begin] * size).tolist(), (sizes * size).tolist()


class TieredRows:
    """The rows of one table, and what the optimiser keeps for each of them.

    Args:
        name: Of the table, for errors.
        weight: [rows, columns]; taken over where it lies in a mapped file, else copied to one.
        hot: What memory holds: see `TableSplit.hot`. A size is that of all that this object takes.
        folder: Of the files; empty: that of temporary files.
        state: What the optimiser keeps for each row, by its names: [rows, ...].
        first: Rows that are known to be frequent, int64; they are hot from the beginning.

    Attributes:
        source: [slots, columns], a leaf: in its gradient backward leaves that of the slots.
        homes: "" -> the whole table, and by its names the optimiser's state; true after `settle`.
        brought: Rows that were read from files so far.

    Raises:
        PlanError: The memory is too small for the table's own bookkeeping.
        RunError: As of `mapped_tensor`.
    """

    def __init__(
        self,
        name: str,
        weight: Tensor,
        hot: str,
        folder: str = "",
        *,
        state: Mapping[str, Tensor] | None = None,
        first: Tensor | None = None,
    ) -> None:
        self.name, self._hot_text = name, hot
        tensors = {"": weight, **(state or {})}
        homes = {key: into_file(t, folder, what=name) for key, t in tensors.items()}
        rows, slots = len(weight), self._slots_of(list(homes.values()))
        self._tiers = {key: _tier(home, slots) for key, home in homes.items()}
        self.homes = homes
        # Data, because rows that come while a step computes are no change to what it has used.
        self.source = self._tiers[""].cache.data.requires_grad_()
        self._place = torch.full((rows,), -1, dtype=torch.int32)
        self._count = torch.zeros(rows, dtype=torch.uint8)
        self._row = torch.full((slots,), -1)
        self._used = torch.full((slots,), -1)
        self._hot = torch.zeros(slots, dtype=torch.bool)
        self._free = torch.arange(slots - 1, -1, -1)
        self._staged = torch.empty(0, dtype=torch.int64)
        self._weak = torch.empty(0, dtype=torch.int64)
        self._step, self._reviewed, self._halved = 1, 0, 0
        self._hot_rows, self._reserve = 0, 0
        self._open, self._settled = False, True
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self.brought = 0
        if first is not None:
            self._bring(first.unique()[: slots - slots // 8], 0, 0)
            self._reserve = 0
            self._release(1)

    def _slots_of(self, homes: Sequence[Tensor]) -> int:
        rows = len(homes[0])
        each = sum(home[:1].nbytes for home in homes) + _PER_SLOT
        if self._hot_text.endswith(("%", "rows")):
            return max(1, rows_in_memory(self._hot_text, rows, each))
        # A size is that of everything: the bookkeeping of all rows comes first.
        memory = rows_in_memory(self._hot_text, rows * (each + PER_ROW), 1)
        found = (memory - rows * PER_ROW) // each
        if found < 1:
            missing = rows * PER_ROW + each - memory
            raise PlanError(
                f"{format_bytes(memory)} of memory are too few for table {self.name}",
                problems=[
                    f"{rows} rows take {PER_ROW} bytes each, wherever they lie, and a row in "
                    f"memory {each} bytes: {format_bytes(missing)} are missing"
                ],
                fix="Raise hot, or split the table over more ranks.",
            )
        return min(found, rows)

    @property
    def memory(self) -> int:
        """Bytes of memory that this object takes."""
        slots = sum(tier.cache.nbytes for tier in self._tiers.values())
        return slots + _PER_SLOT * len(self._row) + PER_ROW * len(self._place)

    # -- lookups ---------------------------------------------------------------------------------

    def rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Bring rows to memory.

        Args:
            ids: Numbers of rows, of any shape.

        Returns:
            `source`, and in the shape of `ids` the number of each row in it, int64. They hold until
            the step's update; of lookups without gradients, until the next lookup.

        Raises:
            DataError: An id is not among the rows.
            PlanError: Memory cannot hold all rows of a step at the same time.
        """
        self._wait()
        if not torch.is_grad_enabled() and not self._open:
            self._step += 1
        self._open |= torch.is_grad_enabled()
        flat = ids.detach().reshape(-1)
        self._check(flat)
        return self.source, self._bring(flat, self._step, self._step).view(ids.shape)

    def ahead(self, ids: Tensor) -> None:
        """Begin to bring the rows of the next step: after the last lookup of this one."""
        self._wait()
        flat, step = ids.detach().reshape(-1).clone(), self._step

        def bring() -> None:
            self._release(step)
            # Else there may be room once this step's rows are home.
            with suppress(PlanError):
                self._bring(flat, step + 1, step)

        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="tiers")
        self._under_way = self._thread.submit(bring)

    def numbers_of(self, rows: Tensor) -> Tensor:
        """The slots of rows that the current step has brought."""
        return self._place.index_select(0, rows).long()

    def rows_in(self, slots: Tensor) -> Tensor:
        """Which rows slots hold, int64."""
        return self._row.index_select(0, slots)

    def end_step(self) -> None:
        """The update has been made: rows of this step may go home."""
        self._step += 1
        self._open = self._settled = False

    # -- the whole table -------------------------------------------------------------------------

    def settle(self) -> None:
        """Write what is in memory home: `homes` says what is true until the next update."""
        self._wait()
        if not self._settled:
            self._send((self._row >= 0).nonzero().view(-1))
            self._settled = True

    def adopt(self, key: str, home: Tensor) -> None:
        """Take over a tensor of the whole table, or of a part of the state, that has been read."""
        self._wait()
        tier = self._tiers[key]
        if file_of(home) is None:
            copy_rows(tier.home, home)
            return
        self._tiers[key] = _tier(home, len(self._row), tier.cache)
        self.homes[key] = home

    def reload(self) -> None:
        """`homes` have been written: memory says the same."""
        self._wait()
        rows = self._row[self._row >= 0].sort().values
        slots = self._place[rows].long()
        for tier in self._tiers.values():
            tier.read(rows, slots)
        self._settled = True

    def cache(self, key: str) -> Tensor:
        """[slots, ...] of the table ("") or of a part of the optimiser's state."""
        return self._tiers[key].cache

    def close(self) -> None:
        """Settle, and end the thread."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    # -- where rows lie --------------------------------------------------------------------------

    def _wait(self) -> None:
        pending, self._under_way = self._under_way, None
        if pending is not None:
            pending.result()

    def _check(self, flat: Tensor) -> None:
        if not len(flat):
            return
        low, high = (int(n) for n in torch.aminmax(flat))
        if low < 0 or high >= len(self._place):
            raise DataError(
                f"id {low if low < 0 else high} is not among the rows of a table",
                where=f"table {self.name}",
                why=f"It has {len(self._place)} rows, from 0.",
                fix="Give the table more rows, or check the data.",
            )

    def _bring(self, flat: Tensor, step: int, now: int) -> Tensor:
        """The slots of rows, which are in memory then and stay there until the end of `step`.

        Args:
            now: Rows of steps before it may go home.
        """
        numbers = self._place.index_select(0, flat).long()
        away = numbers < 0
        if not bool(away.any()):
            self._note(flat, numbers, step)
            return numbers
        # First those that are here, which must not make room for the others.
        self._note(flat[~away], numbers[~away], step)
        missing = flat[away].unique().long()
        self._make_room(len(missing), now)
        left = len(self._free) - len(missing)
        slots, self._free = self._free[left:], self._free[:left]
        for tier in self._tiers.values():
            tier.read(missing, slots)
        self._row[slots] = missing
        self._staged = torch.cat([self._staged, slots])
        self._place[missing] = slots.int()
        # Room for what this step and the next bring; less where fewer rows are away for a time.
        self._reserve = max(2 * len(missing), self._reserve * 7 // 8)
        self.brought += len(missing)
        self._note(missing, slots, step)
        return self._place.index_select(0, flat).long()

    def _note(self, rows: Tensor, slots: Tensor, step: int) -> None:
        """A step uses these rows; each counts once."""
        new = self._used.index_select(0, slots) < step
        rows = rows[new]
        # Equal for equal rows, so that it does not matter which of them is written last.
        count = self._count.index_select(0, rows)
        self._count[rows] = count + (count < 255)
        self._used[slots] = step

    def _make_room(self, slots: int, now: int) -> None:
        if len(self._free) < slots:
            self._release(now)
        missing = slots - len(self._free)
        if missing <= 0:
            return
        idle = (self._hot & (self._used < now)).nonzero().view(-1)
        if len(idle) < missing:
            raise self._too_small(missing - len(idle))
        order = self._count[self._row[idle]].sort(stable=True).indices
        self._go_home(idle[order[:missing]])

    def _too_small(self, missing: int) -> PlanError:
        each = sum(tier.cache[:1].nbytes for tier in self._tiers.values()) + _PER_SLOT
        return PlanError(
            f"memory cannot hold the rows that one step uses of table {self.name}",
            problems=[
                f"hot is {self._hot_text!r}, which is {len(self._row)} rows; the step needs "
                f"{missing} more, {format_bytes(missing * each)}"
            ],
            fix="Raise hot, or make the batch smaller.",
        )

    def _release(self, step: int) -> None:
        """Rows that were brought for steps before `step` become hot, or go home."""
        over = self._used[self._staged] < step
        slots, self._staged = self._staged[over], self._staged[~over]
        room = max(0, len(self._row) - self._reserve - self._hot_rows)
        self._hot[slots[:room]] = True
        self._hot_rows += len(slots[:room])
        self._go_home(self._promote(slots[room:], step))
        if step >= self._halved + _HALVE:
            self._halved = step
            self._count >>= 1

    def _promote(self, slots: Tensor, step: int) -> Tensor:
        """Let rows be hot that have been used more than others; returns the slots to be freed."""
        if step >= self._reviewed + _REVIEW:
            self._reviewed = step
            hot = self._hot.nonzero().view(-1)
            order = self._count[self._row[hot]].sort(stable=True).indices
            self._weak = hot[order[: len(hot) // 16 + 1]]
        weak = self._weak[self._hot[self._weak] & (self._used[self._weak] < step)]
        slots = slots[self._count[self._row[slots]].sort(stable=True, descending=True).indices]
        number = min(len(slots), len(weak))
        own, other = (self._count[self._row[s[:number]]].int() for s in (slots, weak))
        # One step more may be chance.
        better = int((own > other + 1).sum())
        self._hot[slots[:better]], self._hot[weak[:better]] = True, False
        self._weak = weak[better:]
        return torch.cat([slots[better:], weak[:better]])

    def _go_home(self, slots: Tensor) -> None:
        if not len(slots):
            return
        self._send(slots)
        self._hot_rows -= int(self._hot[slots].sum())
        self._hot[slots] = False
        self._place[self._row[slots]] = -1
        self._row[slots] = -1
        self._free = torch.cat([self._free, slots])

    def _send(self, slots: Tensor) -> None:
        """Write slots home, in the order of the file."""
        rows, order = self._row[slots].sort()
        for tier in self._tiers.values():
            tier.write(rows, slots[order])


def _tier(home: Tensor, slots: int, cache: Tensor | None = None) -> _Tier:
    file = file_of(home)
    assert file is not None
    if cache is None:
        cache = torch.zeros((slots, *home.shape[1:]), dtype=home.dtype)
    return _Tier(home, file, cache)
