"""Dry run of lookups in split tables: what ranks would exchange in a step, and compute in between.

Runs the executor's own mechanism (`parallel.tables`) on the samples that the ranks would read: each
rank is a thread of this process, and what it sends is handed over in memory. No table is allocated:
a row that is looked up is a row of zeros. The second step counts, because in the first one ranks
learn what is taken as it was found.
"""

from __future__ import annotations

import copy
import mmap
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from headway.capture.annotations import building
from headway.collective.table_traffic import (
    ExchangeMark,
    KernelWork,
    RankPass,
    TableExchange,
    TableTraffic,
    Way,
)
from headway.data import Cursor, Loader
from headway.errors import PlanError
from headway.parallel.tables import SplitTables
from headway.parallel.tables.split_tables import look_up_in, table_users
from headway.parallel.tables.wire import Flight, Shape, Wire
from headway.plans import BatchSplit
from headway.plans.tables import TablePlacement
from headway.run.recipe.recipe import Recipe, sum_and_count
from headway.run.recipe.training_data import training_data
from headway.run.step.batch import to_device
from headway.run.step.forward_pass import autocast, float_dtype, to_float64
from headway.run.step.randomness import build_model, generators_restored

STEPS = 2
"""That are run; the last one counts."""
BUILT = 1 << 28
"""Bytes of a model up to which it is built as the recipe does it; a larger one on the meta device,
and its buffers are zeros then."""
MOST_RANKS = 64
MOST_FLOPS = 2e10
"""Of all ranks in a dry run; of larger batches so many samples are taken as can be had for it."""


def dry_run_tables(
    recipe: Recipe,
    placements: Mapping[str, TablePlacement],
    batch: BatchSplit,
    ranks: int,
    *,
    precision: str = "",
    flops: float = 0.0,
) -> TableTraffic:
    """What looking up in tables that lie so takes in a step.

    Args:
        placements: Logical name of a parameter -> where its pieces lie, in shares of the batch.
        batch: Samples of a step, their shares and micro-batches.
        ranks: That share the batch.
        precision: As of a recipe; "": the recipe's.
        flops: Of the model for one sample; see `MOST_FLOPS`.

    Raises:
        PlanError: A table cannot be split, or there are more than `MOST_RANKS`.
        DataError: Ids that a table does not have.
        RecipeError: The recipe cannot be used.
    """
    if ranks > MOST_RANKS:
        raise PlanError(
            f"lookups of {ranks} ranks are not tried",
            problems=[f"each is a thread here, and there are at most {MOST_RANKS}"],
        )
    return _DryRun(recipe, placements, batch, ranks, precision, flops).found()


@dataclass(eq=False)
class _Meeting:
    """Where the threads of all ranks hand over what they send.

    Attributes:
        board: By rank, what it gives to each.
    """

    size: int
    barrier: threading.Barrier
    board: list[Any] = field(default_factory=list)

    @staticmethod
    def of(size: int) -> _Meeting:
        return _Meeting(size, threading.Barrier(size), [None] * size)

    def swap(self, rank: int, given: Sequence[Any]) -> list[Any]:
        """Give each rank something; what each has given to this one."""
        self.board[rank] = given
        self.barrier.wait()
        found = [theirs[rank] for theirs in self.board]
        self.barrier.wait()
        return found


class _Meter(TorchDispatchMode):
    """Counts what kernels do in its thread.

    Attributes:
        tables: Addresses of tables, of which only what is looked up is read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.tables = KernelWork(), set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.is_view or func._overloadpacket in _NO_KERNELS:
            return found
        out = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        flops = 0
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=found)
        made = sum(x.nbytes for x in out if not x.is_sparse)
        read = 0
        for x in tree_leaves((args, kwargs or {})):
            # What is looked up is as much as is made of it, at least.
            if isinstance(x, Tensor) and not x.is_sparse:
                read += made if x.data_ptr() in self.tables else x.nbytes
        self.now += KernelWork(1, flops, read + made)
        return found

    def taken(self) -> KernelWork:
        """What was done since it was asked last."""
        found, self.now = self.now, KernelWork()
        return found


_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Of Linux; Python names it from 3.13 on."""
_NO_KERNELS = {torch.ops.aten.detach, torch.ops.aten.empty, torch.ops.aten.empty_like}


@dataclass(eq=False)
class _Landed(Flight):
    """Messages that have arrived."""

    wire: DryWire
    number: int
    found: list[list[Tensor]]

    def wait(self) -> list[list[Tensor]]:
        self.wire.mark(self.number, starts=False)
        return self.found


class DryWire(Wire):
    """A rank that is a thread, and notes what it sends."""

    def __init__(self, meeting: _Meeting, rank: int, meter: _Meter) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.group, self.device = None, torch.device("cpu")
        self.meter, self.tables = meter, SplitTables(self, {})
        self.clear()

    def clear(self) -> None:
        """A step begins."""
        self.exchanges: list[tuple[tuple[float, ...], Counter[tuple[str, str]]]] = []
        self.marks: list[ExchangeMark] = []
        self.passes: list[RankPass] = []
        self.tables.sent.clear()
        self._counted: Counter[tuple[str, str]] = Counter()

    def mark(self, number: int, *, starts: bool) -> None:
        self.marks.append(ExchangeMark(self.meter.taken(), number, starts))

    def end_pass(self, way: Way, microbatch: int) -> None:
        """A pass is over."""
        self.passes.append(RankPass(way, microbatch, tuple(self.marks), self.meter.taken()))
        self.marks = []

    def _noted(self, sizes: Sequence[int]) -> int:
        """The number of an exchange that starts now."""
        now = self.tables.sent
        self.exchanges.append((tuple(map(float, sizes)), now - self._counted))
        self._counted = now.copy()
        self.mark(len(self.exchanges) - 1, starts=True)
        return len(self.exchanges) - 1

    def start(
        self, parts: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Shape]]
    ) -> Flight:
        given = [[x.detach() for x in part] for part in parts]
        sizes = [0 if r == self.rank else sum(x.nbytes for x in p) for r, p in enumerate(given)]
        number = self._noted(sizes)
        came = self.meeting.swap(self.rank, given)
        # As messages do: in the form that is expected.
        found = [
            [x.contiguous().view(shape) for x, (shape, _) in zip(part, shapes, strict=True)]
            for part, shapes in zip(came, expected, strict=True)
        ]
        return _Landed(self, number, found)

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        sizes = [0 if rank == self.rank else 8 * len(own) for rank in range(self.size)]
        number = self._noted(sizes)
        found = self.meeting.swap(self.rank, [list(own)] * self.size)
        self.mark(number, starts=False)
        return found


class _ZeroRows:
    """A part of a table: every row is zeros, and no memory is behind them until it is read.

    Attributes:
        leaf: Without entries.
    """

    def __init__(self, name: str, rows: int, columns: int, like: Tensor) -> None:
        self.name = name
        self.leaf = nn.Parameter(
            torch.empty(0, columns, dtype=like.dtype), requires_grad=like.requires_grad
        )
        self._values = self.leaf.detach()
        if rows * columns:
            size = rows * columns * like.element_size()
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
            self._values = torch.frombuffer(memory, dtype=like.dtype).view(rows, columns)

    def open(self) -> _ZeroRows:
        return self

    def places(self, keys: Tensor) -> Tensor:
        # Behind them lies nothing, so that each has the place of its number in the whole table.
        return keys

    def values(self) -> Tensor:
        return self._values

    def gradient(self, places: Tensor, gradients: Tensor) -> None:
        """Nobody wants it."""


class _DryRun:
    """See `dry_run_tables`."""

    def __init__(
        self,
        recipe: Recipe,
        placements: Mapping[str, TablePlacement],
        batch: BatchSplit,
        ranks: int,
        precision: str,
        flops: float,
    ) -> None:
        self._recipe, self._placements, self._ranks = recipe, placements, ranks
        self._precision = precision or recipe.precision
        most = max(ranks, int(MOST_FLOPS / (3 * flops * ranks)) * ranks if flops else batch.samples)
        self._batch, self._scale = batch, 1.0
        if batch.samples > most:
            self._batch, self._scale = BatchSplit(samples=most), batch.samples / most

    def found(self) -> TableTraffic:
        """See `dry_run_tables`."""
        with generators_restored(), building():
            model = self._model()
            wires = self._split(model)
            alone = self._alone(model)
        exchanges = []
        for each in zip(*(wire.exchanges for wire in wires), strict=True):
            counted = sum((counts for _, counts in each), Counter[tuple[str, str]]())
            exchanges.append(TableExchange(tuple(sizes for sizes, _ in each), counted))
        return TableTraffic(
            exchanges=tuple(exchanges),
            passes=tuple(tuple(wire.passes) for wire in wires),
            alone=alone,
            sent=tuple(dict(wire.tables.sent) for wire in wires),
            scale=self._scale,
        )

    def _model(self) -> nn.Module:
        """With tables of a row."""
        with torch.device("meta"), building():
            model: nn.Module = self._recipe.model()
        tensors = [*model.parameters(), *model.buffers()]
        if sum(x.nbytes for x in tensors) <= BUILT:
            model = build_model(self._recipe)
        self._users = table_users(model, self._placements)
        for modules in self._users.values():
            row = nn.Parameter(torch.zeros_like(modules[0].weight[:1], device="cpu"))
            row.requires_grad_(modules[0].weight.requires_grad)
            for module in modules:
                module.weight = row
        if any(x.is_meta for x in model.parameters()):
            model.to_empty(device="cpu")
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data.zero_()
        if float_dtype(self._precision) is not None:
            to_float64(model)
        return model.train()

    def _micros(self, rank: int, ranks: int) -> list[tuple[Any, ...]]:
        """The data of a rank's micro-batches, step by step."""
        cursor = Cursor(seed=self._recipe.seed)
        source = training_data(self._recipe)
        dtype, found = float_dtype(self._precision), []
        with Loader(source, self._batch, rank=rank, ranks=ranks, cursor=cursor) as loader:
            for _, batch in zip(range(STEPS), loader, strict=False):
                own = [to_device(m.data, torch.device("cpu"), dtype) for m in batch.micros]
                # A rank that has fewer repeats its last one, counting nothing.
                own += [None] * (batch.passes - len(own))
                found.append(tuple(own))
        return found

    def _split(self, model: nn.Module) -> list[DryWire]:
        """Every rank in a thread of its own."""
        meeting, ranks = _Meeting.of(self._ranks), range(self._ranks)
        data = [self._micros(rank, self._ranks) for rank in ranks]
        wires = [DryWire(meeting, rank, _Meter()) for rank in ranks]
        models = [copy.deepcopy(model) for _ in ranks]
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                self._steps(models[rank], wires[rank], data[rank])
            except threading.BrokenBarrierError:
                pass  # another rank has said why
            except BaseException as error:  # to be raised where it is awaited
                errors.append(error)
                meeting.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return wires

    def _steps(self, model: nn.Module, wire: DryWire, data: Sequence[Sequence[Any]]) -> None:
        users = table_users(model, {name: self._row(p) for name, p in self._placements.items()})
        for name, placed in self._placements.items():
            piece = placed.piece_of(wire.rank)
            columns = 0 if piece is None else len(placed.column_range(piece[0]))
            rows = _ZeroRows(name, placed.rows if columns else 0, columns, users[name][0].weight)
            wire.meter.tables.add(rows.values().data_ptr())
            wire.tables.add(name, rows, placed)
            for module in users[name]:
                module._parameters["weight"] = rows.leaf
        look_up_in(wire.tables, model, users)
        last: Any = None
        for micros in data:
            wire.clear()
            for number, micro in enumerate(micros):
                wire.tables.counting = micro is not None
                last = micro if micro is not None else last
                self._pass(model, wire, number, last)

    def _pass(self, model: nn.Module, wire: DryWire, number: int, data: Any) -> None:
        with wire.meter:
            with autocast(self._precision, torch.device("cpu")):
                total, _ = sum_and_count(self._recipe.loss(model, data), 1)
            wire.end_pass("forward", number)
            total.backward()
            wire.end_pass("backward", number)
        model.zero_grad()

    @staticmethod
    def _row(placed: TablePlacement) -> TablePlacement:
        return replace(placed, rows=1)

    def _alone(self, model: nn.Module) -> tuple[KernelWork, KernelWork]:
        """Both passes of the first micro-batch where nothing is exchanged."""
        data = next(micro for micro in self._micros(0, self._ranks)[0] if micro is not None)
        for modules in self._users.values():
            for module in modules:
                module.register_forward_pre_hook(_without_ids)
        with _Meter() as meter:
            with autocast(self._precision, torch.device("cpu")):
                total, _ = sum_and_count(self._recipe.loss(model, data), 1)
            ahead = meter.taken()
            total.backward()
        return ahead, meter.taken()


def _without_ids(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same lookups in a table of one row."""
    return torch.zeros_like(given[0]), *given[1:]
