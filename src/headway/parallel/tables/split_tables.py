"""`split_tables`: the tables of a model in parts on the ranks that share the batch.

Each module's class is replaced by a derived one whose `forward` looks the rows up where they lie;
the model's own code, names and structure stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.channel.stream import TensorStream
from headway.errors import PlanError, UsageError
from headway.parallel.split_tensor import (
    ATTRIBUTES_OF_PART,
    KnownShape,
    TorchFunctionOperand,
    map_nested,
)
from headway.parallel.stages import user_line
from headway.parallel.tables.lazy_lookups import LookupContext, taken
from headway.parallel.tables.lookups import Lookup, bag_lookup, embedding_lookup
from headway.parallel.tables.rounds import SplitTable, TableExchange
from headway.parallel.tables.table_parts import RowSource, TablePart, part_of_table, rows_of_part
from headway.parallel.tables.wire import Shape, Wire, open_table_streams
from headway.plans.tables import LEFT_OUT, TablePlacement


class SplitTables:
    """The split tables of one model.

    Attributes:
        parts: Logical name of a parameter -> what this rank has of it.
        sent: Bytes that this rank has sent to others, by table and kind: "ids" (with lengths and
            weights), "sums", "rows", "gradients". Of sums over several tables the key names all;
            "" and "samples": what samples are multiplied with has gone to where rows are.
    """

    def __init__(self, wire: Wire, parts: Mapping[str, TablePart]) -> None:
        self.parts = parts
        tables = {name: SplitTable(part.placement, part) for name, part in parts.items()}
        self._exchange = TableExchange(wire, tables)
        self.context = LookupContext(self._exchange)

    @property
    def wire(self) -> Wire:
        return self._exchange.wire

    @property
    def tables(self) -> dict[str, SplitTable]:
        """By name: where lookups find the rows that are here."""
        return self._exchange.tables

    @property
    def sent(self) -> Counter[tuple[str, str]]:
        return self._exchange.sent

    @property
    def counting(self) -> bool:
        """Whether rows that are looked up from now on count as used; if not, they get no gradient.

        It may differ between ranks.
        """
        return self._exchange.counting

    @counting.setter
    def counting(self, value: bool) -> None:
        self._exchange.counting = value

    def add(self, name: str, source: RowSource, placement: TablePlacement) -> None:
        """A table whose rows are elsewhere than in a parameter of the model; on all ranks alike."""
        if name in self._exchange.tables:
            raise UsageError(f"there is a table {name} already", fix="Give it another name.")
        self._exchange.tables[name] = SplitTable(placement, source)

    def look_up(self, lookup: Lookup) -> Any:
        """What a lookup gives, to be used as a tensor; collective, sooner or later.

        Returns:
            [*lookup.shape], which no exchange waits for until a function of torch takes it.
        """
        return self.context.look_up(lookup)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor of a table, in memory of its own.

        Args:
            whole: In logical order: [rows, columns], or [rows] of numbers that belong to rows.
        """
        return self.parts[name].cut(whole)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor, in logical order, of which each rank has a part; collective.

        Args:
            part: [rows here, columns here], or [rows here] of numbers that belong to rows; [rows
                here, 1], too, of a table that is not cut by columns.

        Raises:
            UsageError: Numbers that belong to rows, of a table that is cut by columns: each range
                of columns has its own.
        """
        placement, wire = self.parts[name].placement, self.wire
        if placement.cut == "none":
            return part
        ranges = len(placement.owners)
        # A piece may have one column, too, where there are several ranges of them.
        of_rows = ranges == 1 and placement.columns > 1 and part.shape[1:] == (1,)
        flat = part.ndim < 2 or of_rows
        if flat and ranges > 1:
            raise UsageError(
                f"table {name} is cut into {ranges} ranges of columns, and each has numbers of its "
                "own for its rows",
                fix="Ask for them before they are averaged over columns, or cut the table by rows.",
            )
        tail = tuple(part.shape[1:]) if flat else None
        pieces = []
        for number, owners in enumerate(placement.owners):
            for piece, owner in enumerate(owners):
                rows, columns = (
                    rows_of_part(placement, number, piece),
                    placement.column_range(number),
                )
                pieces.append((owner, rows, columns))
        expected: list[list[Shape]] = [[] for _ in range(wire.size)]
        for owner, rows, columns in pieces:
            shape = (len(rows), *(tail if tail is not None else (len(columns),)))
            expected[owner].append((shape, part.dtype))
        mine = any(owner == wire.rank for owner, _, _ in pieces)
        came = wire.swap([[part] if mine else []] * wire.size, expected)
        shape = (placement.rows, *(tail if tail is not None else (placement.columns,)))
        found = part.new_empty(shape)
        for owner, rows, columns in pieces:
            values, rows = came[owner][0], rows.to(part.device)
            if flat:
                found[rows] = values
            else:
                found[rows, columns.start : columns.stop] = values
        return found


class SplitWeight(KnownShape, TorchFunctionOperand):
    """What `module.weight` is where the table is split: it knows its form, and has no numbers.

    Attributes:
        shape: Of the whole table.
    """

    def __init__(self, name: str, shape: Sequence[int], part: Tensor) -> None:
        self._name, self._part, self.shape = name, part, torch.Size(shape)
        self.context = self

    def __getattr__(self, name: str) -> Any:
        """What a part and the whole have in common.

        Raises:
            PlanError: It is about the numbers of the table.
        """
        if name in ATTRIBUTES_OF_PART:
            return getattr(self._part, name)
        if hasattr(Tensor, name):
            self.call()
        raise AttributeError(name)

    def call(self, *_: Any) -> NoReturn:
        """A function of torch on it.

        Raises:
            PlanError: Always: its rows lie on several ranks.
        """
        raise PlanError(
            f"{self._name} is split, and the model uses it without looking up",
            problems=["only lookups by the module itself know where its rows lie"],
            where=user_line(),
            fix=f"Call the module (torch.arange({self.shape[0]}) means all rows). {LEFT_OUT}.",
        )


class _LooksUp:
    """Before the class of a module whose table is split."""

    def __getattr__(self, name: str) -> Any:
        if name != "weight":
            return super().__getattr__(name)  # type: ignore[misc]
        table = self.__dict__["_headway_table"][1]
        shape = self.num_embeddings, self.embedding_dim
        return SplitWeight(table, shape, self._parameters["weight"])


class SplitEmbedding(_LooksUp, nn.Embedding):
    """An `nn.Embedding` whose rows lie on several ranks."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """As of `nn.Embedding`."""
        tables, name = self.__dict__["_headway_table"]
        return tables.look_up(embedding_lookup(name, self, input, self.num_embeddings))  # type: ignore[no-any-return]


class SplitEmbeddingBag(_LooksUp, nn.EmbeddingBag):
    """An `nn.EmbeddingBag` whose rows lie on several ranks."""

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As of `nn.EmbeddingBag`."""
        tables, name = self.__dict__["_headway_table"]
        return tables.look_up(  # type: ignore[no-any-return]
            bag_lookup(name, self, input, offsets, per_sample_weights, self.num_embeddings)
        )


def split_tables(
    model: nn.Module,
    placements: Mapping[str, TablePlacement],
    group: dist.ProcessGroup | None = None,
    *,
    touched: Container[str] = (),
    streams: Mapping[int, TensorStream] | None = None,
) -> SplitTables:
    """Split tables of a model, in place; every rank has the same whole ones before.

    Each weight becomes a parameter [rows here, columns here], without rows on a rank that has no
    piece. Lookups give what the whole table would; every rank of the group makes the same ones in
    the same order, for batches of any size, also of none, and goes backward through them.

    Args:
        model: Its modules `nn.Embedding` and `nn.EmbeddingBag` that hold the tables get other
            classes.
        placements: Logical name of a parameter -> where its pieces lie, in ranks of the group.
        group: The ranks that share the batch; None: the default one.
        touched: Names of tables whose gradient is left sparse, with the rows that were used, each
            once and in order (`Tensor.is_coalesced`); `TablePart.sparse`, which may change.
        streams: By global rank, to those that get what they look up in shared memory, not over
            the group; None: to all with whom this one can share memory.

    Raises:
        PlanError: A table that cannot be split, and why.
        PeerLost: Another rank is gone.
        Stalled: One does not come in time.
    """
    users = table_users(model, placements)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if streams is None:
        streams = open_table_streams(group, device)
    wire = Wire(group, device, streams)
    parts = {}
    for name, modules in users.items():
        whole = modules[0]._parameters["weight"]
        assert whole is not None
        parts[name] = part_of_table(name, placements[name], wire.rank, whole, name in touched)
    tables = SplitTables(wire, parts)
    for name, modules in users.items():
        for module in modules:
            module._parameters["weight"] = parts[name].parameter
    look_up_in(tables, model, users)
    return tables


def look_up_in(
    tables: SplitTables,
    model: nn.Module,
    users: Mapping[str, Sequence[nn.Embedding | nn.EmbeddingBag]],
) -> None:
    """Let modules of a model look up in tables that know them by name, in place."""
    for name, modules in users.items():
        for module in modules:
            module.__dict__["_headway_table"] = tables, name
            kind = SplitEmbedding if isinstance(module, nn.Embedding) else SplitEmbeddingBag
            own = type(module)
            # Behind the user's own class, so that its `super()` comes to the lookup.
            bases = (kind,) if own in kind.__mro__ else (own, kind)
            module.__class__ = type(own.__name__, bases, {"__module__": own.__module__})
    # What is computed before the first lookup has its gradients before those of tables are awaited.
    model.register_forward_pre_hook(lambda *_: tables.context.begin())
    model.register_forward_hook(lambda *call: _finished(tables, call[-1]), always_call=True)


def _finished(tables: SplitTables, result: Any) -> Any:
    """What leaves the model, as tensors."""
    try:
        return map_nested(result, taken)
    finally:
        tables.context.end()


def table_users(
    model: nn.Module, placements: Mapping[str, TablePlacement]
) -> dict[str, list[nn.Embedding | nn.EmbeddingBag]]:
    """The modules of each table; one table may have several.

    Raises:
        PlanError: A table that cannot be split, and why.
    """
    modules = dict(model.named_modules())
    problems, found = [], {}
    for name, placement in placements.items():
        prefix, _, leaf = name.rpartition(".")
        module = modules.get(prefix)
        parameter = module._parameters.get(leaf) if module is not None else None
        if parameter is None:
            problems.append(f"{name}: the model has no such parameter")
            continue
        users = [
            (f"{path}.{own}".lstrip("."), other)
            for path, other in modules.items()
            for own, held in other._parameters.items()
            if held is parameter
        ]
        reasons = [why for path, other in users if (why := _unfit(path, other))]
        if tuple(parameter.shape) != (placement.rows, placement.columns):
            reasons.append(
                f"{name}: it has shape {list(parameter.shape)}, and was placed as "
                f"{[placement.rows, placement.columns]}"
            )
        problems += reasons
        found[name] = [other for _, other in users]
    if problems:
        raise PlanError("tables cannot be split", problems=problems, fix=f"{LEFT_OUT}.")
    return found


def _unfit(path: str, module: nn.Module) -> str:
    """Why a module's table cannot be split; "" if it can."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return f"{path}: it is used by {type(module).__name__}, which is no lookup"
    if module.max_norm is not None:
        return f"{path}: max_norm changes rows while they are looked up, on one rank alone"
    if module.scale_grad_by_freq:
        return f"{path}: scale_grad_by_freq counts ids in a batch that no rank has whole"
    if isinstance(module, nn.EmbeddingBag) and module.mode not in ("sum", "mean"):
        return f"{path}: mode {module.mode!r} is no sum of what ranks have"
    return ""
