"""Rows by 64-bit keys, in tensors that grow: open addressing, no loop over keys.

An index of pairs (key, row number), 16 bytes side by side, so that one memory access answers most
questions; the rows themselves, and whatever else belongs to a row, lie in tensors in the order in
which they were made. When the index grows, rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headway.nn.huge_pages import empty_in_huge_pages
from headway.nn.row_moves import marked, take_rows
from headway.parallel.tables.table_parts import mixed_hashes

_EMPTY, _REMOVED = -1, -2
_FIRST_SLOTS = 1 << 10
# Half full, three keys of four are found at the first slot at which one looks.
_MOST_LOAD = 0.5
# So many keys look at one slot after the other; fewer at several at once.
_FEW = 2000
_CHUNK = 1 << 20


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Each key once, without sorting.

    Args:
        keys: int64 [n].

    Returns:
        For each distinct key a place where it is, int64 [u], ascending, and for each key the number
        of its distinct one, int64 [n].
    """
    size = len(keys)
    bits = max(4, (2 * size).bit_length())
    everyone = torch.arange(size, dtype=torch.int32, device=keys.device)
    board = torch.empty(1 << bits, dtype=torch.int32, device=keys.device)
    # All write their number on the board where their hash says; who reads that of an equal key
    # takes it. Other bits of the hash separate those that met another key.
    hashes = mixed_hashes(keys)
    slots = hashes & ((1 << bits) - 1)
    chosen = board.scatter_(0, slots, everyone).gather(0, slots)
    waiting = marked(keys.index_select(0, chosen) != keys)
    for turn in range(1, 64 // bits):
        if not len(waiting):
            break
        own = keys.index_select(0, waiting)
        slots = (hashes.index_select(0, waiting) >> (turn * bits)) & ((1 << bits) - 1)
        found = board.scatter_(0, slots, waiting.int()).gather(0, slots)
        chosen[waiting] = found
        waiting = waiting[keys.index_select(0, found) != own]
    if len(waiting):
        _, inverse = torch.unique(keys[waiting], return_inverse=True)
        last = torch.empty(int(inverse.max()) + 1, dtype=torch.int64, device=keys.device)
        chosen[waiting] = last.scatter_(0, inverse, waiting)[inverse].int()
    first = chosen == everyone
    numbers = first.cumsum(0) - 1
    return marked(first), numbers.index_select(0, chosen)


class KeyIndex:
    """64-bit keys -> row numbers.

    Attributes:
        size: Keys in it.
    """

    def __init__(self, device: torch.device, slots: int = _FIRST_SLOTS) -> None:
        self.size = 0
        self._used = 0  # with removed ones, which still lengthen searches
        self._entries = self._empty(slots, device)

    @staticmethod
    def _empty(slots: int, device: torch.device) -> Tensor:
        return empty_in_huge_pages((slots, 2), torch.int64, device).fill_(_EMPTY)

    @property
    def slots(self) -> int:
        return len(self._entries)

    def _homes(self, keys: Tensor) -> Tensor:
        # The upper bits: the lower ones are the same for all keys of one of 2^k ranks; and a
        # larger index has entries in nearly the same order, so that growing reads and writes in
        # stretches.
        bits = self.slots.bit_length() - 1
        return (mixed_hashes(keys) >> (64 - bits)) & (self.slots - 1)

    def find(self, keys: Tensor) -> Tensor:
        """Row numbers of keys [n], -1 for those that are missing; int64 [n]."""
        rows = self._search(keys, self._homes(keys))[1]
        return rows if self._used == self.size else rows.clamp_(min=-1)

    def _search(self, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """From a slot on, where each key is or was, or the first empty slot; what it says there.

        Args:
            keys: int64 [n].
            slots: int64 [n]; where the search ends takes the place of where it begins.
        """
        rows, waiting = self._look(keys, slots)
        ends, slots = slots, slots.index_select(0, waiting)
        keys = keys.index_select(0, waiting)
        while len(waiting) > _FEW:
            slots = (slots + 1).bitwise_and_(self.slots - 1)
            found, on = self._look(keys, slots)
            rows.scatter_(0, waiting, found)
            ends.scatter_(0, waiting, slots)
            waiting, slots = waiting.index_select(0, on), slots.index_select(0, on)
            keys = keys.index_select(0, on)
        if len(waiting):
            ends[waiting], rows[waiting] = self._search_stretches(keys, slots + 1)
        return ends, rows

    def _look(self, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers in slots [n], and where among them there is another key, int64 [others]."""
        entries = take_rows(self._entries, slots)
        rows = entries[:, 1].contiguous()
        others = marked(entries[:, 0] != keys)
        full = marked(rows.index_select(0, others) != _EMPTY)
        return rows, others.index_select(0, full)

    def _search_stretches(self, keys: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `_search`, of few keys: the longest stretch has many times the mean."""
        ends, rows = torch.empty_like(slots), torch.empty_like(slots)
        waiting = torch.arange(len(keys), device=keys.device)
        width = 4
        while len(waiting):
            near = slots.unsqueeze(1) + torch.arange(width, device=slots.device)
            near = near.bitwise_and_(self.slots - 1).view(-1)
            entries = take_rows(self._entries, near)
            stops = entries[:, 1] == _EMPTY
            stops |= (entries[:, 0].view(-1, width) == keys.unsqueeze(1)).view(-1)
            # Numbers into all of `near`: `gather` takes many times the time.
            first = stops.view(torch.uint8).view(-1, width).argmax(1)
            first += torch.arange(0, len(near), width, device=slots.device)
            ends[waiting] = near.index_select(0, first)
            rows[waiting] = entries[:, 1].index_select(0, first)
            on = marked(~stops.index_select(0, first))
            waiting, slots, keys = waiting[on], slots[on] + width, keys[on]
            width = min(4 * width, self.slots)
        return ends, rows

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Enter keys that are missing, each once, with their row numbers."""
        self.reserve(len(keys))
        self.size += len(keys)
        self._used += len(keys)
        slots = self._homes(keys)
        numbers = self._entries.view(-1)
        while len(keys):
            slots = self._search(keys, slots)[0]
            places = 2 * slots
            # Several may want the same slot: the row number that can be read afterwards has it.
            numbers[places + 1] = rows
            won = numbers[places + 1] == rows
            numbers[places[won]] = keys[won]
            lost = ~won
            keys, rows, slots = keys[lost], rows[lost], slots[lost]

    def remove(self, keys: Tensor) -> Tensor:
        """Take out keys, each given once; the row numbers of those that were there."""
        slots, rows = self._search(keys, self._homes(keys))
        there = rows >= 0
        self._entries.view(-1)[2 * slots[there] + 1] = _REMOVED
        self.size -= int(there.sum())
        return rows[there]

    def remove_rows(self, gone: Tensor) -> None:
        """Take out all keys whose rows are marked: bool [rows]."""
        for start in range(0, self.slots, _CHUNK):
            numbers = self._entries[start : start + _CHUNK, 1]
            taken = (numbers >= 0).nonzero().squeeze(1)
            taken = taken[gone[numbers[taken]]]
            numbers[taken] = _REMOVED
            self.size -= len(taken)

    def chunks(self, size: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """All keys and their row numbers, at most `size` at a time, in any order."""
        for start in range(0, self.slots, size):
            entries = self._entries[start : start + size]
            entries = entries[entries[:, 1] >= 0]
            if len(entries):
                yield entries[:, 0].contiguous(), entries[:, 1].contiguous()

    def reserve(self, more: int) -> None:
        """Make room for so many keys more."""
        if self._used + more <= _MOST_LOAD * self.slots:
            return
        slots = self.slots
        # Of removed ones a third of the room is freed at least, or the index doubles.
        while self.size + more > 2 / 3 * _MOST_LOAD * slots:
            slots *= 2
        old, size = self, self.size
        fresh = KeyIndex(self._entries.device, slots)
        for keys, rows in old.chunks():
            fresh.insert(keys, rows)
        self._entries, self._used = fresh._entries, size

    def to(self, device: torch.device) -> None:
        """Move it."""
        self._entries = self._entries.to(device)


class RowStore:
    """Rows by key, and other columns of them.

    Attributes:
        index: Keys -> row numbers.
        columns: By name, tensors [room, ...]; entries of row numbers that nobody has mean nothing.
        high: Row numbers below it have been given out.
    """

    def __init__(self, room: int = 0, device: torch.device | None = None) -> None:
        self.index = KeyIndex(device or torch.device("cpu"))
        if room:
            self.index.reserve(room)
        self.columns: dict[str, Tensor] = {}
        self.high = 0
        self._free = torch.empty(0, dtype=torch.int64, device=device)
        self._room = room

    def __len__(self) -> int:
        return self.index.size

    @property
    def room(self) -> int:
        """How many rows there is memory for."""
        return self._room

    def add_column(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Another tensor with an entry for each row."""
        device = self._free.device
        self.columns[name] = empty_in_huge_pages((self._room, *shape), dtype, device)

    def find(self, keys: Tensor) -> Tensor:
        """Row numbers [n] of keys, -1 for missing ones."""
        return self.index.find(keys)

    def make(self, keys: Tensor) -> Tensor:
        """Row numbers for missing keys, each given once; the caller fills their columns."""
        again = min(len(keys), len(self._free))
        reused, self._free = self._free[:again], self._free[again:]
        fresh = torch.arange(self.high, self.high + len(keys) - again, device=keys.device)
        self.high += len(fresh)
        if self.high > self._room:
            self._grow(max(self.high, self._room + self._room // 2, 64))
        rows = torch.cat([reused, fresh])
        self.index.insert(keys, rows)
        return rows

    def remove(self, keys: Tensor) -> int:
        """Take out keys, each given once; how many of them were there."""
        rows = self.index.remove(keys)
        self._free = torch.cat([self._free, rows])
        return len(rows)

    def remove_rows(self, gone: Tensor) -> None:
        """Take out the rows that are marked: bool [high], none of a number that nobody has."""
        self.index.remove_rows(gone)
        self._free = torch.cat([self._free, gone.nonzero().squeeze(1)])

    def taken(self) -> Tensor:
        """bool [high]: which row numbers somebody has."""
        mark = torch.ones(self.high, dtype=torch.bool, device=self._free.device)
        mark[self._free] = False
        return mark

    def adopt(self, keys: Tensor, taken: Tensor) -> None:
        """Become a store of these keys, in the order of row numbers; columns have their values.

        Args:
            keys: int64 [rows]; what those are that nobody has means nothing.
            taken: bool [rows].
        """
        self.high = len(keys)
        rows = taken.nonzero().squeeze(1)
        self.index.insert(keys[rows], rows)
        self._free = (~taken).nonzero().squeeze(1)

    def to(self, device: torch.device) -> None:
        """Move it."""
        self.index.to(device)
        self._free = self._free.to(device)
        self.columns = {name: column.to(device) for name, column in self.columns.items()}

    def _grow(self, room: int) -> None:
        for name, old in self.columns.items():
            # One after the other: the old tensor of a column is gone before the next one is made.
            new = empty_in_huge_pages((room, *old.shape[1:]), old.dtype, old.device)
            new[: len(old)] = old
            self.columns[name] = new
        self._room = room
