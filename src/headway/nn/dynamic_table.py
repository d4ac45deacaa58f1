"""A table whose rows appear with their keys; what a step reads, and what it changes.

Passes only read: a key without a row reads as its initial value, which is a pure function. What
backward passes leave for the touched rows becomes one small parameter [touched, dim] with its
gradient, an optimiser of any kind steps it, and rows are made and written back after that. So
several passes per step, and steps that are left out, need no rules of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headway.errors import CheckpointMismatch, DataError, UsageError
from headway.keywords import checks_keywords
from headway.nn.dynamic_initial import Distribution, initial_rows
from headway.nn.dynamic_slots import RowSlots
from headway.nn.dynamic_storage import RowStore, distinct
from headway.nn.row_moves import put_rows, take_rows
from headway.parallel.tables.split_tables import SplitTables
from headway.parallel.tables.table_parts import hashed_parts


@dataclass(eq=False)
class _Step:
    """What backward passes since the last step have touched.

    Attributes:
        keys: int64 [touched], each once.
        rows: int64 [touched]; -1: has none yet.
        changes: Those of the table when `rows` were found.
        waiting: Keys that have been seen, and are not admitted yet; may repeat.
    """

    keys: Tensor
    rows: Tensor
    changes: int
    waiting: list[Tensor] = field(default_factory=list)


@checks_keywords
class DynamicTable(nn.Module):
    """Rows by 64-bit keys, each made when it is first trained.

    Every key has a value at any time. Until it has a row that is its initial value, which depends
    on `seed`, key and column alone. A step of an optimiser that has `weight` among its parameters
    changes the rows of the keys that took part in backward passes since the last one: Adam and its
    like are what is called "lazy", their moments, and weight decay, act on touched rows only; the
    count of steps is that of the table. Optimisers whose step of one row depends on others (LAMB,
    Muon, Adafactor) are refused.

    A key is *seen* in a step if it takes part in a backward pass of it. All rules count steps, so
    that neither the order of a batch nor its division into micro-batches or ranks changes anything.

    Args:
        dim: Columns.
        initial: "uniform" from -scale to scale, "normal" of standard deviation scale, or "zeros".
        scale: See `initial`.
        seed: Of the initial values.
        admit_after: A key is trained from the step on before which it was seen in so many steps.
            Before, it has no row and reads as its initial value.
        evict_after: A key that has not been seen in so many steps is forgotten, with its row, its
            count, and what optimisers know of it: it is as new. None: never.
        max_norm: Rows that are longer are scaled to this length when they are read.
        room: Rows to make memory for at once.
        dtype: Of the rows; torch's default.
        device: Of the rows.

    Attributes:
        weight: What an optimiser steps: [0, dim], between backward and step [touched, dim].
        name: In the model, if the table is split over ranks.
        clock: Steps so far.
        rows_apart: A state_dict has no rows, as they are saved otherwise.

    Raises:
        UsageError: An argument that cannot be used.
    """

    def __init__(
        self,
        dim: int,
        *,
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
        _check("dim", dim, dim >= 1, "at least 1")
        _check("initial", initial, initial in ("uniform", "normal", "zeros"),
               '"uniform", "normal" or "zeros"')  # fmt: skip
        _check("scale", scale, 0 <= scale < float("inf"), "finite and not negative")
        _check("admit_after", admit_after, admit_after >= 0, "0 or more steps")
        _check("evict_after", evict_after, evict_after is None or evict_after >= 1,
               "None, or 1 or more steps")  # fmt: skip
        _check("max_norm", max_norm, max_norm is None or max_norm > 0, "None or more than 0")
        _check("room", room, room >= 0, "0 or more rows")
        self.dim, self.initial, self.scale, self.seed = dim, initial, scale, seed
        self.admit_after, self.evict_after, self.max_norm = admit_after, evict_after, max_norm
        self.clock = 0
        self.weight = nn.Parameter(torch.empty(0, dim, dtype=dtype, device=device))
        self._rows = RowStore(room, self.weight.device)
        self._rows.add_column("values", (dim,), self.weight.dtype)
        if evict_after is not None:
            self._rows.add_column("last", (), torch.int64)
        self._waiting = self._new_waiting()
        self.name = type(self).__name__
        self.rows_apart = False
        self._tables: SplitTables | None = None
        self._changes = 0  # of what is in it; what was found before may not be true any more
        self._step: _Step | None = None
        self._stepping: _Step | None = None
        # A state that is saved or loaded between backward and step has no touched rows.
        self.register_state_dict_post_hook(_leave_out_touched)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_forget_touched)  # type: ignore[no-untyped-call]
        self._listen()

    def _new_waiting(self) -> RowStore:
        waiting = RowStore(0, self.weight.device)
        waiting.add_column("seen", (), torch.int64)
        waiting.add_column("last", (), torch.int64)
        return waiting

    # What is in it.

    def __len__(self) -> int:
        """Keys that have a row."""
        if self.evict_after is None:
            return len(self._rows)
        return int((self._rows.taken() & ~self._old(self._rows)).sum())

    def lookup(self, keys: Tensor) -> Tensor:
        """The vectors of keys [n, dim] as a model reads them; makes no rows, has no gradient.

        Raises:
            DataError: Keys are no integers.
            UsageError: Of a table that is split, a key of another rank; so for all of this class.
        """
        flat = checked_keys(keys).reshape(-1)
        self._check_here(flat)
        return self._read(flat)[1].reshape(*keys.shape, self.dim)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and bool(self._find(torch.tensor([key]).to(self._device)) >= 0)

    @torch.no_grad()
    def upsert(self, keys: Tensor, values: Tensor) -> None:
        """Set the rows of keys, of one that is given several times to the last; counts as seen.

        Args:
            keys: int64 [n].
            values: [n, dim].

        Raises:
            DataError: Keys or values of another form.
        """
        checked_keys(keys)
        if keys.ndim != 1 or values.shape != (len(keys), self.dim):
            raise DataError(
                f"rows {list(values.shape)} for keys {list(keys.shape)}",
                why=f"There must be one key for each row, and rows have {self.dim} columns.",
            )
        self._check_here(keys)
        self._follow()
        unique, inverse = torch.unique(keys.long(), return_inverse=True)
        last = torch.zeros(len(unique), dtype=torch.int64, device=keys.device)
        last.scatter_reduce_(0, inverse, torch.arange(len(keys), device=keys.device), "amax")
        self._write(unique, self._find(unique), values[last])

    @torch.no_grad()
    def remove(self, keys: Tensor) -> int:
        """Forget keys, as if they had never been seen; how many of them had a row.

        Raises:
            DataError: Keys are no integers.
        """
        unique = torch.unique(checked_keys(keys))
        self._check_here(unique)
        self._follow()
        there = int((self._find(unique) >= 0).sum())
        self._changes += 1
        self._rows.remove(unique)
        self._waiting.remove(unique)
        return there

    def export(self, chunk: int = 1 << 20) -> Iterator[tuple[Tensor, Tensor]]:
        """All keys and rows, copied, in pieces of at most `chunk`; do not change it meanwhile.

        Yields:
            int64 [n] and [n, dim]; in no order that means anything.
        """
        self._follow()
        for keys, rows in self._rows.index.chunks(chunk):
            if self.evict_after is not None:
                kept = ~self._old(self._rows, rows)
                keys, rows = keys[kept], rows[kept]
            yield keys, self._rows.columns["values"].index_select(0, rows)

    # On several ranks.

    def split(self, name: str, tables: SplitTables) -> None:
        """Keep the keys that are this rank's, and look others up where they are.

        Args:
            name: Of this table in the model, equal on all ranks.
            tables: Those that exchange lookups.
        """
        self.name, self._tables = name, tables
        self._keep_own()

    def _keep_own(self) -> None:
        self._changes += 1
        for store in (self._rows, self._waiting):
            for keys, _ in list(store.index.chunks()):
                store.remove(keys[~self.is_here(keys)])

    @property
    def tables(self) -> SplitTables | None:
        """Those that exchange its lookups with other ranks."""
        return self._tables

    def is_here(self, keys: Tensor) -> Tensor:
        """bool [n]: which keys are this rank's."""
        if self._tables is None:
            return torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        wire = self._tables.wire
        return hashed_parts(keys, wire.size) == wire.rank

    def _check_here(self, keys: Tensor) -> None:
        if self._tables is None or bool((here := self.is_here(keys)).all()):
            return
        key, wire = int(keys[~here][0]), self._tables.wire
        raise UsageError(
            f"key {key} of {self.name} is not on rank {wire.rank}",
            why=f"Its row is on rank {int(hashed_parts(keys[~here][:1], wire.size))}, as its hash "
            "says.",
            fix="Give each rank the keys that are its own (`table.is_here(keys)`), or look up with "
            "the module.",
        )

    @property
    def leaf(self) -> Tensor:
        """`weight`, as `RowSource` calls it."""
        return self.weight

    # What a pass reads.

    @torch.no_grad()
    def places(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Without gradients: rows, and in them the place of each key [n].

        The rows are those of the table itself if all keys have one, else copies.
        """
        if self.max_norm is None:
            self._follow()
            rows = self._find(keys)
            if len(rows) and int(rows.min()) >= 0:
                return self._rows.columns["values"], rows
        found = self.open()
        places = found.places(keys)
        return found.values(), places

    def open(self) -> LookedUpRows:
        """Begin the lookups of a pass."""
        return LookedUpRows(self)

    @property
    def learns(self) -> bool:
        """Whether what is looked up now may be trained."""
        return self.training and torch.is_grad_enabled() and self.weight.requires_grad

    @property
    def _device(self) -> torch.device:
        return self.weight.device

    def _old(self, store: RowStore, rows: Tensor | None = None) -> Tensor:
        """Which rows are to be forgotten, by their age alone; whether that is done yet or not."""
        assert self.evict_after is not None
        last = store.columns["last"]
        last = last[: store.high] if rows is None else last[rows]
        return self.clock - last > self.evict_after

    def _find(self, keys: Tensor, store: RowStore | None = None) -> Tensor:
        """Row numbers, -1 for what there is not, or not any more."""
        store = store or self._rows
        rows = store.find(keys)
        if self.evict_after is not None and store.high:
            rows = torch.where(self._old(store, rows.clamp(min=0)), -1, rows)
        return rows

    @torch.no_grad()
    def _read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers [n], and values [n, dim] in memory of their own."""
        self._follow()
        rows = self._find(keys)
        missing = (rows < 0).nonzero().squeeze(1)
        table = self._rows.columns["values"]
        if not len(missing):
            values = take_rows(table, rows)
        else:
            values = table.new_empty(len(keys), self.dim)
            there = (rows >= 0).nonzero().squeeze(1)
            values.index_copy_(0, there, table.index_select(0, rows[there]))
            fresh = initial_rows(keys[missing], self.dim, self.initial, self.scale, self.seed)
            values.index_copy_(0, missing, fresh.to(values.dtype))
        if self.max_norm is not None:
            # As torch's EmbeddingBag does it.
            length = values.norm(dim=1, keepdim=True)
            values *= torch.where(length > self.max_norm, self.max_norm / (length + 1e-7), 1.0)
        return rows, values

    def _follow(self) -> None:
        """Go to the device and the type that the module has been moved to."""
        table = self._rows.columns["values"]
        if table.dtype != self.weight.dtype:
            self._rows.columns["values"] = table.to(self.weight.dtype)
        if table.device != self._device:
            self._rows.to(self._device)
            self._waiting.to(self._device)

    # What a step changes.

    @torch.no_grad()
    def _take(self, keys: Tensor, rows: Tensor, values: Tensor, gradient: Tensor) -> None:
        """Gradients [n, dim] of keys, each given once, from a backward pass."""
        step = self._step
        if step is None or self.weight.grad is None:
            # The first one, or the user has thrown away what there was.
            step = self._step = _Step(keys[:0], rows[:0], self._changes)
            self.weight.data, self.weight.grad = values[:0], None
        if self.admit_after:
            admitted = self._admitted(keys, rows)
            step.waiting.append(keys[~admitted])
            keys, rows = keys[admitted], rows[admitted]
            values, gradient = values[admitted], gradient[admitted]
        if len(step.keys):
            assert self.weight.grad is not None
            before = self.weight.grad
            first, inverse = distinct(torch.cat([step.keys, keys]))
            keys, rows = torch.cat([step.keys, keys])[first], torch.cat([step.rows, rows])[first]
            values = torch.cat([self.weight.data, values])[first]
            gradient = torch.zeros_like(values).index_add_(
                0, inverse, torch.cat([before, gradient])
            )
        step.keys, step.rows = keys, rows
        self.weight.grad = None
        self.weight.data = values
        self.weight.grad = gradient

    def _admitted(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Of keys that are touched, which are trained."""
        places = self._find(keys, self._waiting)
        if not self._waiting.high:
            return rows >= 0
        seen = self._waiting.columns["seen"][places.clamp(min=0)]
        return (rows >= 0) | ((places >= 0) & (seen >= self.admit_after))

    def _listen(self) -> None:
        """Hear of the steps of all optimisers; those of others than `weight` are let pass."""
        self._slots: weakref.WeakKeyDictionary[Optimizer, RowSlots] = weakref.WeakKeyDictionary()
        me = weakref.ref(self)

        def before(optimizer: Optimizer, *_: Any) -> None:
            if (table := me()) is not None and table.is_stepped_by(optimizer):
                table._before_step(optimizer)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (table := me()) is not None and table.is_stepped_by(optimizer):
                table._after_step(optimizer)

        for handle in (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ):
            weakref.finalize(self, handle.remove).atexit = False

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimiser has `weight` among its parameters."""
        return any(p is self.weight for group in optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        if self.weight.grad is None:
            self._forget_step()
        step = self._stepping = self._step
        if step is None:
            return
        if step.changes != self._changes:
            step.rows, self.weight.data = self._read(step.keys)
        self._slots_of(optimizer).take(optimizer, step.rows, self._rows.room)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer) -> None:
        step = self._step
        if step is not self._stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step has run a backward pass of a table that grows",
                why="The rows that take part in a step must be known when it begins.",
                fix="Call loss.backward() before optimizer.step(), without a closure.",
            )
        if step is not None:
            rows = self._write(step.keys, step.rows, self.weight.data)
            self._slots[optimizer].put(optimizer, rows, self._rows.room)
            if step.waiting:
                self._count(torch.unique(torch.cat(step.waiting)))
            self._forget_step()
        self.clock += 1
        self._changes += 1
        if self.evict_after is not None and self.clock % self.evict_after == 0:
            for store in (self._rows, self._waiting):
                if store.high:
                    store.remove_rows(store.taken() & self._old(store))

    def _forget_step(self) -> None:
        self._step = self._stepping = None
        self.weight.grad = None
        self.weight.data = self.weight.data[:0].clone()

    def _write(self, keys: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """Write rows of keys, each given once; makes those that are -1. The row numbers of all."""
        self._changes += 1
        missing = (rows < 0).nonzero().squeeze(1)
        if len(missing):
            new = keys[missing]
            if self.evict_after is not None:
                self._rows.remove(new)  # too old, and not taken out yet
            if self.admit_after:
                self._waiting.remove(new)
            rows = rows.index_copy(0, missing, self._rows.make(new))
        put_rows(self._rows.columns["values"], rows, values.to(self.weight.dtype))
        if self.evict_after is not None:
            self._rows.columns["last"][rows] = self.clock
        return rows

    def _count(self, keys: Tensor) -> None:
        """Keys that were seen and have no row."""
        places = self._find(keys, self._waiting)
        missing = (places < 0).nonzero().squeeze(1)
        if len(missing):
            new = keys[missing]
            self._waiting.remove(new)
            places[missing] = made = self._waiting.make(new)
            self._waiting.columns["seen"][made] = 0
        self._waiting.columns["seen"][places] += 1
        self._waiting.columns["last"][places] = self.clock

    # In pieces.

    @torch.no_grad()
    def pieces(
        self, optimizer: Optimizer | None = None, chunk: int = 1 << 20
    ) -> Iterator[dict[str, Tensor]]:
        """All that this rank has, in pieces of bounded memory, for another number of ranks too.

        Args:
            optimizer: Whose state is to be among them.
            chunk: Keys of a piece at most.

        Yields:
            Tensors by name. What belongs to a table as a whole is in each; "rows.*" and "waiting.*"
            have an entry for each key, of which one piece has some.
        """
        whole = {"clock": torch.tensor(self.clock), "law": _as_numbers(self._law())}
        slots = None
        if optimizer is not None:
            slots = self._slots_of(optimizer)
            state = optimizer.state[self.weight]
            whole |= {
                f"state.{name}": value.clone()
                for name, value in state.items()
                if isinstance(value, Tensor) and name not in slots.initial
            }
        yield whole
        for name, store in (("rows", self._rows), ("waiting", self._waiting)):
            for keys, rows in store.index.chunks(chunk):
                if self.evict_after is not None:
                    kept = ~self._old(store, rows)
                    keys, rows = keys[kept], rows[kept]
                if not len(keys):
                    continue
                piece = {f"{name}.{key}": take_rows(v, rows) for key, v in store.columns.items()}
                if slots is not None and optimizer is not None and store is self._rows:
                    entries = slots.entries(optimizer, rows)
                    piece |= {f"rows.slots.{key}": value for key, value in entries.items()}
                yield whole | piece | {f"{name}.keys": keys}

    @torch.no_grad()
    def take_piece(self, piece: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> None:
        """Take over what is this rank's of a piece; each rank is given the pieces of all.

        Args:
            optimizer: That is to have its state from it.

        Raises:
            CheckpointMismatch: It is of a table with another law of its rows.
        """
        law = bytes(piece["law"].tolist()).decode()
        if law != repr(self._law()):
            raise self._mismatch(law)
        self.clock = int(piece["clock"])
        self._changes += 1
        self._follow()
        slots = None if optimizer is None else self._slots_of(optimizer)
        whole = {k[6:]: v.clone() for k, v in piece.items() if k.startswith("state.")}
        if optimizer is not None and slots is not None and whole:
            # What has begun has its state of rows as well, also where this rank has no row.
            begun = {k: v.new_empty(0, *v.shape) for k, v in slots.initial.items()}
            optimizer.state[self.weight] = begun | optimizer.state[self.weight] | whole
        for name, store in (("rows", self._rows), ("waiting", self._waiting)):
            if f"{name}.keys" not in piece:
                continue
            here = self.is_here(piece[f"{name}.keys"])
            own = {k.removeprefix(f"{name}."): v[here].to(self._device) for k, v in piece.items()
                   if k.startswith(f"{name}.")}  # fmt: skip
            keys = own.pop("keys")
            store.remove(keys)
            rows = store.make(keys)
            for key in store.columns:
                put_rows(store.columns[key], rows, own[key].to(store.columns[key].dtype))
            if slots is not None and optimizer is not None and store is self._rows:
                entries = {k[6:]: v for k, v in own.items() if k.startswith("slots.")}
                slots.enter(optimizer, rows, entries, store.room)

    @torch.no_grad()
    def columns(self, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
        """All that this rank has, as one piece whose rows may be nobody's; without copies of rows.

        Returns:
            As a piece of `pieces`, and "rows.taken", "waiting.taken": bool, which rows count.
            Tensors are this table's own memory; its next step changes them.
        """
        self._follow()
        found = {"clock": torch.tensor(self.clock), "law": _as_numbers(self._law())}
        for name, store in (("rows", self._rows), ("waiting", self._waiting)):
            keys = torch.zeros(store.high, dtype=torch.int64, device=self._device)
            for some, rows in store.index.chunks():
                keys[rows] = some
            found |= {f"{name}.{key}": v[: store.high] for key, v in store.columns.items()}
            taken = store.taken()
            if self.evict_after is not None:
                taken &= ~self._old(store)
            found |= {f"{name}.keys": keys, f"{name}.taken": taken}
        if optimizer is None or not self.is_stepped_by(optimizer):
            return found
        slots = self._slots_of(optimizer).columns(optimizer, self._rows.high)
        return found | {f"rows.slots.{key}": value for key, value in slots.items()}

    def clear(self) -> None:
        """Forget all keys, and what the steps since the last update have touched."""
        self._follow()
        self.forget_step()
        self.clock = 0
        for name in ("_rows", "_waiting"):
            old: RowStore = getattr(self, name)
            store = RowStore(0, self._device)
            for column, like in old.columns.items():
                store.add_column(column, tuple(like.shape[1:]), like.dtype)
            setattr(self, name, store)

    def forget_step(self) -> None:
        """Leave out the step that is under way: no key of it counts as seen."""
        self._forget_step()

    @property
    def touched(self) -> Tensor:
        """The keys of the rows of `weight`, int64 [touched]."""
        return torch.empty(0, dtype=torch.int64) if self._step is None else self._step.keys

    def check(self, optimizer: Optimizer) -> frozenset[str]:
        """Find out what an optimiser keeps of rows, by name; nothing if it does not step them.

        Raises:
            UsageError: The step of a row does not follow from that row alone.
        """
        if not self.is_stepped_by(optimizer):
            return frozenset()
        return frozenset(self._slots_of(optimizer).initial)

    def _slots_of(self, optimizer: Optimizer) -> RowSlots:
        if optimizer not in self._slots:
            self._slots[optimizer] = RowSlots(optimizer, self.weight, self.name)
        return self._slots[optimizer]

    def _mismatch(self, law: object) -> CheckpointMismatch:
        return CheckpointMismatch(
            f"a table of {law} cannot be loaded into one of {self._law()}",
            why="Keys without a row would have other values than in the run that saved it.",
            fix="Make the table with the arguments with which it was saved.",
        )

    # As a module.

    def get_extra_state(self) -> dict[str, Any]:
        """All keys and rows, in the order of row numbers, as optimisers have their states."""
        if self.rows_apart:
            return {}
        state: dict[str, Any] = {"law": self._law(), "clock": self.clock, "part": self._part()}
        for name, store in (("rows", self._rows), ("waiting", self._waiting)):
            keys = torch.zeros(store.high, dtype=torch.int64, device=self._device)
            for some, rows in store.index.chunks():
                keys[rows] = some
            columns = {key: column[: store.high].clone() for key, column in store.columns.items()}
            state[name] = {"keys": keys, "taken": store.taken(), **columns}
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_extra_state` gave, in another process too.

        Raises:
            CheckpointMismatch: It is of a table with another law of its rows.
        """
        if state["law"] != self._law():
            raise self._mismatch(state["law"])
        if state["part"] not in ([0, 1], self._part()):
            raise CheckpointMismatch(
                f"the part of rank {state['part'][0]} of {state['part'][1]} cannot be loaded as "
                f"that of rank {self._part()[0]} of {self._part()[1]}",
                why="A state_dict of a table that is split has this rank's keys alone.",
                fix="Save table.pieces() on each rank, and give all of them to table.take_piece.",
            )
        self.clock = state["clock"]
        self._forget_step()
        self._follow()  # else rows of a module that has just been moved would be rounded
        stores = []
        for name, old in (("rows", self._rows), ("waiting", self._waiting)):
            saved = state[name]
            taken = saved["taken"].to(self._device)
            store = RowStore(len(taken), self._device)
            for column, like in old.columns.items():
                store.add_column(column, tuple(like.shape[1:]), like.dtype)
                store.columns[column].copy_(saved[column])
            store.adopt(saved["keys"].to(self._device), taken)
            stores.append(store)
        self._rows, self._waiting = stores
        self._keep_own()

    def _part(self) -> list[int]:
        """This rank, and of how many."""
        return [0, 1] if self._tables is None else [self._tables.wire.rank, self._tables.wire.size]

    def _law(self) -> dict[str, Any]:
        return {
            "dim": self.dim, "initial": self.initial, "scale": self.scale, "seed": self.seed,
            "admit_after": self.admit_after, "evict_after": self.evict_after,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._listen()

    def extra_repr(self) -> str:
        """The arguments that are not the defaults."""
        law = {k: v for k, v in self._law().items() if v not in (0, None) and k != "dim"}
        return ", ".join([str(self.dim), *(f"{k}={v!r}" for k, v in law.items())])


class LookedUpRows:
    """What one pass has looked up in a table; its gradients come back here.

    Attributes:
        first: Of the last call of `places`, a place of each distinct key among its keys; ascending.
    """

    def __init__(self, table: DynamicTable) -> None:
        self._table = table
        self._learns = table.learns
        self._changes = table._changes
        none = torch.empty(0, dtype=torch.int64, device=table.weight.device)
        self._keys, self._rows = [none], [none]
        self._values = [table.weight.detach()[:0]]
        self._count = 0
        self._several = False
        self.first = torch.empty(0, dtype=torch.int64)

    def places(self, keys: Tensor) -> Tensor:
        """Where in `values()` the rows of keys are; int64 [n]."""
        self.first, inverse = distinct(keys)
        own = keys.index_select(0, self.first)
        rows, values = self._table._read(own)
        start = self._count
        for held, new in ((self._keys, own), (self._rows, rows), (self._values, values)):
            held[:] = [*held, new] if start else [new]
        self._several = self._several or start > 0
        self._count += len(own)
        return inverse + start if start else inverse

    def values(self) -> Tensor:
        """The rows that were looked up [looked up, dim], without gradients."""
        return self._one(self._values)

    def gradient(self, places: Tensor, gradients: Tensor) -> None:
        """Take the gradients of the rows that were used.

        Args:
            places: int64 [used], ascending, each once.
            gradients: [used, dim].
        """
        if not self._learns:
            return
        keys, rows, values = self._one(self._keys), self._one(self._rows), self.values()
        if len(places) < self._count:
            keys, rows, values = keys[places], rows[places], values[places]
        if self._several:
            first, inverse = distinct(keys)
            keys, rows, values = keys[first], rows[first], values[first]
            gradients = torch.zeros_like(values).index_add_(0, inverse, gradients)
        if self._changes != self._table._changes:
            rows, values = self._table._read(keys)  # a step came between forward and backward
        self._table._take(keys, rows, values, gradients)

    @staticmethod
    def _one(parts: list[Tensor]) -> Tensor:
        if len(parts) != 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]


def checked_keys(keys: Any) -> Tensor:
    """The keys as int64.

    Raises:
        DataError: They are no integers.
    """
    if isinstance(keys, Tensor) and keys.dtype in (torch.int64, torch.int32):
        return keys.long()
    form = (
        str(keys.dtype).removeprefix("torch.") if isinstance(keys, Tensor) else type(keys).__name__
    )
    raise DataError(
        f"keys are {form}, and must be a tensor of int64 or int32",
        why="Keys are names, not numbers: in float32, 16777217 would be the key 16777216.",
        fix="Make them integers before they become a tensor.",
    )


def _leave_out_touched(table: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"][:0].clone()


def _forget_touched(table: nn.Module, *_: Any) -> None:
    assert isinstance(table, DynamicTable)
    table._forget_step()


def _as_numbers(law: Mapping[str, Any]) -> Tensor:
    """A text that a tensor can carry."""
    return torch.tensor(list(repr(law).encode()), dtype=torch.uint8)


def _check(name: str, value: object, legal: bool, wanted: str) -> None:
    if not legal:
        raise UsageError(f"a table that grows: {name} is {value!r}, and must be {wanted}")
