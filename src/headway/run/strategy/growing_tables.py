"""Tables that grow, as runs need them: gradients, checkpoints for any number of ranks, comparison.

A checkpoint has the rows of all ranks one rank after the other, as one tensor for each column, of
which each rank writes its own stretch. A rank that reads takes an even share of the rows, whoever
wrote them, and all give each other what is theirs, a chunk at a time. So nobody ever has a whole
table, and neither the number of ranks nor the order of rows matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.checkpoint.format import TensorEntry
from headway.checkpoint.tensor_part import TensorPart
from headway.errors import CheckpointMismatch
from headway.nn import DynamicTable
from headway.parallel.tables.table_parts import hashed_parts
from headway.parallel.tables.wire import Wire
from headway.plans.tables import even_range

CHUNK = 1 << 16
"""Rows that a rank deals at once."""
_STORES = ("rows", "waiting")
_SLOTS = "rows.slots."


class GrowingTables:
    """The tables of a model that grow.

    Attributes:
        tables: Name of the module -> table.
        wire: The ranks that have parts of them; None: this process has all.
    """

    def __init__(self, model: nn.Module, wire: Wire | None = None) -> None:
        self.tables = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, DynamicTable)
        }
        # Of a table that several modules share, all names: a state_dict has each.
        self._names = tuple(
            f"{name}."
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, DynamicTable)
        )
        self.wire = wire

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Name of the parameter -> what the optimiser steps: the rows that a step has touched."""
        return {f"{name}.weight": table.weight for name, table in self.tables.items()}

    def has(self, name: str) -> bool:
        """Whether a checkpoint's tensor, or a parameter, is of one of them."""
        own = name.removeprefix("model.").removeprefix("optimizer.")
        return own.startswith(self._names)

    def needed(self) -> dict[str, Tensor]:
        """Of a checkpoint what must be there, if it is of this model."""
        return {f"model.{name}.clock": torch.tensor(0) for name in self.tables}

    @contextmanager
    def rows_apart(self) -> Iterator[None]:
        """Inside, a state_dict has nothing of them."""
        for table in self.tables.values():
            table.rows_apart = True
        try:
            yield
        finally:
            for table in self.tables.values():
                table.rows_apart = False

    def clear(self) -> None:
        """Drop gradients: nothing has been touched since."""
        for table in self.tables.values():
            table.forget_step()

    # -- checkpoints -----------------------------------------------------------------------------

    def saved(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """This rank's part of a checkpoint; collective. The tables' own memory."""
        found: dict[str, Tensor] = {}
        for name, table in self.tables.items():
            columns = table.columns(optimizer)
            counts = self._gather([len(columns[f"{store}.keys"]) for store in _STORES])
            for key, value in columns.items():
                store = key.partition(".")[0]
                if store in _STORES:
                    number = _STORES.index(store)
                    before = [count[number] for count in counts[: self._rank]]
                    whole = sum(count[number] for count in counts), *value.shape[1:]
                    offsets = sum(before), *(0 for _ in value.shape[1:])
                    value = TensorPart.of(value, whole, offsets)
                found[_saved_name(name, key)] = value
        return found

    def target(self, name: str, entry: TensorEntry) -> Tensor:
        """Memory for what this rank reads of a tensor of a checkpoint."""
        dtype: torch.dtype = getattr(torch, entry.dtype)
        table = self._table_of(name)
        if not any(_piece_name(table, name).startswith(f"{store}.") for store in _STORES):
            return torch.empty(entry.shape, dtype=dtype)
        rows = even_range(self._rank, self._size, entry.shape[0])
        device = self.tables[table].weight.device
        local = torch.empty((len(rows), *entry.shape[1:]), dtype=dtype, device=device)
        return TensorPart.of(local, entry.shape, (rows.start, *(0 for _ in entry.shape[1:])))

    def restore(self, tensors: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Take over what has been read into targets; collective.

        Args:
            optimizer: Has been given what it keeps for a table as a whole.

        Raises:
            CheckpointMismatch: A table has another law of its rows, or the optimiser is another.
        """
        for name, table in self.tables.items():
            read = {_piece_name(name, key): t for key, t in tensors.items()
                    if self.has(key) and self._table_of(key) == name}  # fmt: skip
            slots = {key.removeprefix(_SLOTS) for key in read if key.startswith(_SLOTS)}
            if unknown := sorted(slots - table.check(optimizer)):
                raise CheckpointMismatch(
                    f"the checkpoint has {unknown[0]} of each row of {name}, of which "
                    f"{type(optimizer).__name__} knows nothing",
                    fix="Resume with the optimiser that was saved.",
                )
            table.clear()
            stepping = optimizer if table.is_stepped_by(optimizer) else None
            whole = {k: t for k, t in read.items() if not isinstance(t, TensorPart)}
            for store in _STORES:
                parts = {k: t for k, t in read.items() if k.startswith(f"{store}.")}
                for piece in self._dealt(parts, store):
                    table.take_piece({**whole, **piece}, stepping)

    def _dealt(self, parts: Mapping[str, Tensor], store: str) -> Iterator[dict[str, Tensor]]:
        """What is this rank's of all rows, chunk by chunk; collective."""
        rows = max(t.shape[0] for t in parts.values()) if parts else 0
        share = max(len(even_range(n, self._size, rows)) for n in range(self._size))
        local = {key: t.local for key, t in parts.items() if isinstance(t, TensorPart)}
        for start in range(0, max(1, share), CHUNK):
            piece = {key: t[start : start + CHUNK] for key, t in local.items()}
            taken = piece.pop(f"{store}.taken")
            yield self._exchanged({key: t[taken] for key, t in piece.items()}, store)

    def _exchanged(self, piece: dict[str, Tensor], store: str) -> dict[str, Tensor]:
        if self.wire is None:
            return piece
        owners = hashed_parts(piece[f"{store}.keys"], self.wire.size)
        order = owners.argsort(stable=True)
        counts = torch.bincount(owners, minlength=self.wire.size).tolist()
        ordered = {key: t[order].split(counts) for key, t in sorted(piece.items())}
        return self._swapped(ordered, counts)

    def _swapped(
        self, ordered: Mapping[str, Sequence[Tensor]], counts: Sequence[int]
    ) -> dict[str, Tensor]:
        """Give each rank its stretch of each column; what came from all."""
        assert self.wire is not None
        ranks = range(self.wire.size)
        coming = [told[self.wire.rank] for told in self.wire.gather(counts)]
        came = self.wire.swap(
            [[column[rank] for column in ordered.values()] for rank in ranks],
            [[((coming[rank], *column[0].shape[1:]), column[0].dtype)
              for column in ordered.values()] for rank in ranks],
        )  # fmt: skip
        return {
            key: torch.cat([came[rank][number] for rank in ranks])
            for number, key in enumerate(ordered)
        }

    # -- on one rank -----------------------------------------------------------------------------

    def numbers(self, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        """All keys with what belongs to them, in the order of keys, whole on rank 0; collective.

        Returns:
            Kind -> name -> tensor; "key": the keys, each as two int32, and counts of steps.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, table in self.tables.items():
            columns = table.columns(optimizer)
            for store in _STORES:
                own = {k: t for k, t in columns.items() if k.startswith(f"{store}.")}
                taken = own.pop(f"{store}.taken")
                self._add(found, name, self._on_first({k: t[taken] for k, t in own.items()}))
            if table.weight.grad is not None:
                touched = {"touched.keys": table.touched, "touched.gradient": table.weight.grad}
                self._add(found, name, self._on_first(touched))
            found["key"][f"{name}.clock"] = columns["clock"]
        return found

    def _add(
        self, found: dict[str, dict[str, Tensor]], table: str, piece: Mapping[str, Tensor]
    ) -> None:
        for kind, name, tensor in sorted_columns(table, piece):
            found.setdefault(kind, {})[name] = tensor

    def fill(self, whole: nn.Module) -> None:
        """Give a second model on rank 0 the keys and rows of all ranks; collective."""
        modules = dict(whole.named_modules())
        for name, table in self.tables.items():
            target = modules[name]
            assert isinstance(target, DynamicTable)
            first = self._rank == 0
            if first:
                target.clear()
            columns = table.columns()
            for store in _STORES:
                own = {k: t for k, t in columns.items() if k.startswith(f"{store}.")}
                rows = max(max(n) for n in self._gather([len(own[f"{store}.keys"])]))
                for start in range(0, max(1, rows), CHUNK):
                    piece = {k: t[start : start + CHUNK] for k, t in own.items()}
                    taken = piece.pop(f"{store}.taken")
                    came = self._on_first({k: t[taken] for k, t in piece.items()})
                    if first:
                        law = {key: columns[key] for key in ("clock", "law")}
                        target.take_piece({**law, **came})

    def _on_first(self, piece: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The columns of all ranks, one after the other, on rank 0."""
        if self.wire is None:
            return dict(piece)
        counts = [len(next(iter(piece.values()))), *(0 for _ in range(self.wire.size - 1))]
        return self._swapped({k: t.split(counts) for k, t in sorted(piece.items())}, counts)

    # -- the ranks -------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return 0 if self.wire is None else self.wire.rank

    @property
    def _size(self) -> int:
        return 1 if self.wire is None else self.wire.size

    def _gather(self, own: Sequence[int]) -> list[list[int]]:
        return [list(own)] if self.wire is None else self.wire.gather(own)

    def _table_of(self, name: str) -> str:
        own = name.removeprefix("model.").removeprefix("optimizer.")
        return next(str(table) for table in self.tables if own.startswith(f"{table}."))


def sorted_columns(table: str, piece: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of columns of one store, in the order of their keys."""
    store = next(iter(piece)).partition(".")[0]
    order = piece[f"{store}.keys"].argsort()
    for key, value in piece.items():
        column = value[order]
        if key.startswith(_SLOTS):
            yield "optimizer", f"{table}.weight.{key.removeprefix(_SLOTS)}", column
        elif column.is_floating_point():
            kind = "gradient" if store == "touched" else "parameter"
            yield kind, f"{table}.{key}", column
        else:
            # Of a key as float64, in which tensors are compared, the last bits would be lost.
            yield "key", f"{table}.{key}", column.contiguous().view(torch.int32)


def _saved_name(table: str, key: str) -> str:
    if key.startswith(_SLOTS):
        return f"optimizer.{table}.weight.{key.removeprefix(_SLOTS)}"
    return f"model.{table}.{key}"


def _piece_name(table: str, name: str) -> str:
    if name.startswith("optimizer."):
        return f"{_SLOTS}{name.removeprefix(f'optimizer.{table}.weight.')}"
    return name.removeprefix(f"model.{table}.")
