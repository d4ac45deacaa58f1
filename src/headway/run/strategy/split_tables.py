"""Tables of rows in pieces on the ranks that share the batch: placed, cut, and given to the rest.

A piece is a plain parameter. Its gradient is complete where it lies, and no exchange has it; of a
table whose other rows an update leaves as they are it has only the rows that were used, so that an
update takes no longer than these. For a checkpoint a piece is a box of the table; rows that are
dealt by a hash are dealt again, in ranges, so that no rank ever has a whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.channel.gloo_listeners import drop_later_connections
from headway.channel.mapped_memory import file_of, large_tensors_in_files, mapped_tensor
from headway.channel.stream import TensorStream
from headway.checkpoint.tensor_part import TensorPart
from headway.collective.nodes import Nodes
from headway.documents import nearest
from headway.errors import PlanError, UsageError
from headway.nn import split_dynamic_tables
from headway.optim.row_law import RowLaw, law_options, row_law
from headway.parallel.fsdp import full_tensor_of
from headway.parallel.tables import SplitTables, TablePart, split_tables
from headway.parallel.tables.ids_ahead import IdsAhead
from headway.parallel.tables.table_parts import parts_of_rows
from headway.parallel.tables.tiered_table import TieredTable, tier_tables
from headway.parallel.tables.wire import open_table_streams
from headway.plans import Plan
from headway.plans.tables import TablePlacement, even_range, place_tables
from headway.run.distributed.process_groups import find_nodes
from headway.run.recipe.recipe import Loss, sum_and_count
from headway.run.strategy.growing_tables import GrowingTables
from headway.run.strategy.row_sums import share_row_sums, shares_row_sums, whole_of_rows
from headway.run.strategy.table_uses import check_uses

if TYPE_CHECKING:
    from headway.run.distributed.world import World


def table_modules(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The tables of a model: logical name of the parameter -> the first module that looks it up."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    for module in model.modules():
        # A weight that is computed from other parameters is none of them.
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight in names:
            found.setdefault(names[module.weight], module)
    return found


def place_model_tables(plan: Plan, model: nn.Module, node: int | None) -> dict[str, TablePlacement]:
    """Where the pieces of a model's tables lie, in shares of the batch.

    Args:
        node: How many of these one node has; None: all, or not as many each.

    Raises:
        PlanError: With every split that means no table, and what does not fit one.
    """
    shapes = {
        name: (module.num_embeddings, module.embedding_dim)
        for name, module in table_modules(model).items()
    }
    splits = tuple(split for split in plan.split.tables if split.way != "grow")
    meant = [{name for name in shapes if split.matches(name)} for split in splits]
    problems = [
        f"split.tables.{number}: no table matches {split.tables!r}{_known(split.tables, shapes)}"
        for number, split in enumerate(splits)
        if not meant[number]
    ]
    problems += [
        f"split.tables.{number}: {split.tables!r} counts for no table, as split.tables.{first} "
        f"({splits[first].tables!r}) means these and more; write it before that"
        for number, split in enumerate(splits)
        for first in range(number)
        if meant[number] and meant[number] < meant[first]
    ]
    placed: dict[str, TablePlacement] = {}
    try:
        placed = place_tables(splits, shapes, plan.data_degree, node=node)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise PlanError(
            "the tables of this model cannot be split so",
            problems=problems,
            fix="Correct split.tables: patterns mean names of nn.Embedding and nn.EmbeddingBag.",
        )
    return placed


def _known(pattern: str, shapes: Mapping[str, tuple[int, int]]) -> str:
    if not shapes:
        return (
            "; the model has no nn.Embedding and no nn.EmbeddingBag (a DynamicEmbeddingBag is dealt"
            " to the ranks without being named)"
        )
    return nearest(pattern, [name.rpartition(".")[0] or name for name in shapes])


def _streams(
    plan: Plan, world: World, nodes: Nodes | None, group: dist.ProcessGroup | None
) -> dict[int, TensorStream]:
    """To the ranks of the same node; collective."""
    if nodes is None or not plan.split.shared_memory:
        return {}
    with world.explained("sharing memory to look rows up in"):
        return open_table_streams(
            group, world.device, lambda a, b: b in nodes.inside(a), world.timeout_seconds
        )


def _node_size(plan: Plan, nodes: Nodes) -> int | None:
    """How many shares of the batch one node has; None: all, or not all as many."""
    following = [rank for members in nodes.members for rank in members] == list(range(nodes.ranks))
    if nodes.count == 1 or not nodes.uniform or not following:
        return None
    return len(nodes.members[0]) * plan.data_degree // plan.ranks or None


_LARGE = 16 << 20
"""Bytes from which a tensor is made in a file, where memory is not to hold all of some table."""


def large_tables_in_files(plan: Plan) -> AbstractContextManager[None]:
    """Around the making of a model and its optimiser: memory never holds a table as a whole."""
    folders = [split.cold for split in plan.split.tables if split.hot]
    return large_tensors_in_files(_LARGE, folders[0]) if folders else nullcontext()


class TableLayout:
    """The tables of this rank; a `ParameterLayout`.

    Attributes:
        tables: None before `apply`.
        growing: Tables without a number of rows; see `GrowingTables`.
        named: All parameters of the model, those of other layers as they are.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        """Place the tables; collective.

        Raises:
            PlanError: They cannot lie so, or the optimiser would update pieces otherwise.
            RecipeError: What the optimiser does to rows cannot be found out.
        """
        self.tables: SplitTables | None = None
        self.growing = GrowingTables(model)
        self.named: Mapping[str, nn.Parameter] = {}
        self._optimizer, self._laws = optimizer, dict[tuple[int, str], RowLaw]()
        with world.explained("placing tables"):
            nodes = None if world.alone else find_nodes(world)
            size = None if nodes is None else _node_size(plan, nodes)
            placed = place_model_tables(plan, model, size)
        # Mesh axes may lie in any order: from numbers of shares to ranks of the group.
        ranks = sorted(range(plan.ranks), key=plan.data_rank)
        self.placements = {
            name: replace(one, owners=tuple(tuple(ranks[r] for r in parts) for parts in one.owners))
            for name, one in placed.items()
        }
        modules = table_modules(model)
        self._wants_sparse = {name for name in placed if modules[name].sparse}
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._check_laws()
        timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
        # A group of its own: gradients are summed on others while backward looks rows up.
        with world.explained("making the group that looks rows up"), drop_later_connections():
            ranks = list(range(plan.ranks))
            self._group = None if world.alone else dist.new_group(ranks, timeout=timeout)
        self._streams = _streams(plan, world, nodes, self._group)
        self._tiers: dict[str, TieredTable] = {}

    def watched(self, loss: Loss) -> Loss:
        """A loss that is computed to try the whole model.

        It raises PlanError where a table that is to be split is used without looking up.
        """

        tables = {p: name for p, name in self._names.items() if name in self.placements}

        def watching(model: nn.Module, data: Any) -> Any:
            found = loss(model, data)
            check_uses(sum_and_count(found, 1)[0], tables)
            return found

        return watching

    @contextmanager
    def tried(self, model: nn.Module) -> Iterator[None]:
        """Inside, the whole model may go backward: no gradient is as large as a table of `hot`."""
        tables = table_modules(model).items()
        hot = {name for name, placed in self.placements.items() if placed.hot}
        modules = [module for name, module in tables if name in hot and not module.sparse]
        for module in modules:
            module.sparse = True
        try:
            yield
        finally:
            for module in modules:
                module.sparse = False

    def apply(self, model: nn.Module) -> None:
        """Cut the tables, in place, and let the optimiser hold the pieces; collective."""
        self.tables = split_tables(model, self.placements, self._group, streams=self._streams)
        names, now = self._names, dict(model.named_parameters())
        for group in self._optimizer.param_groups:
            before = group["params"]
            group["params"] = [now[names[parameter]] for parameter in before]
            for old, new in zip(before, group["params"], strict=True):
                if old is not new:
                    state = self._optimizer.state.pop(old, {})
                    own = {key: self._cut(names[old], value) for key, value in state.items()}
                    if own:
                        self._optimizer.state[new] = own
        self.adopt(model)
        self._deal_growing(model)
        share_row_sums(self._optimizer, self.tables.wire, self.placements, self._name_of)
        tiers, self._updates = tier_tables(self.tables, self._optimizer)
        self._tiers = {table.name: table for table in tiers}
        users = {
            name: [m for m in model.modules() if m._parameters.get("weight") is table.leaf]
            for name, table in self._tiers.items()
        }
        self._ids = IdsAhead(users)
        for parameter in self.dense.values():
            if file_of(parameter) is not None:  # it was large, and is no table of `hot`
                parameter.data = parameter.data.clone()
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        self._optimizer.state[parameter][key] = value.clone()
        if self.placements or self._group is not None:
            model.register_state_dict_pre_hook(_refuse_state_dict)

    def _deal_growing(self, model: nn.Module) -> None:
        """Let each key of tables that grow have its row on one rank."""
        assert self.tables is not None
        for table in self.growing.tables.values():
            table.check(self._optimizer)
        if self.growing.tables and self._group is not None:
            split_dynamic_tables(model, self._group, tables=self.tables)
            self.growing = GrowingTables(model, self.tables.wire)

    def _name_of(self, parameter: Tensor) -> str | None:
        return self._names.get(parameter)

    def adopt(self, model: nn.Module) -> None:
        """The model's parameters have been replaced."""
        self.named = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self.named.items()}

    @property
    def tiered(self) -> bool:
        """Whether a part of some table lies in a file; the same on all ranks."""
        return any(placed.hot for placed in self.placements.values())

    def ahead(self, now: Sequence[Any], following: Sequence[Any]) -> list[str]:
        """Begin to read rows that the next step will use.

        Args:
            now: This rank's micro-batches of the step whose last lookup has been made.
            following: Those of the next step.

        Returns:
            Remarks.
        """
        remarks = []
        if self._tiers and self._ids.is_learning:
            remarks = [
                f"rows of {name} are read when they are looked up, not ahead: its ids are not "
                "among the tensors of a batch"
                for name in self._ids.learn(now)
            ]
        for name, ids in self._ids.ids_of(following).items():
            self._tiers[name].ahead(ids)
        return remarks

    def close(self) -> None:
        """Let the parameters be whole, and their optimiser step on them."""
        for table in self._tiers.values():
            table.rows.close()

    def settle(self) -> None:
        """Parameters and state in files say what is true until the next update."""
        for table in self._tiers.values():
            table.rows.settle()

    @property
    def parts(self) -> Mapping[str, TablePart]:
        """The pieces of this rank, by logical name; none before `apply`."""
        return {} if self.tables is None else self.tables.parts

    @property
    def dense(self) -> dict[str, nn.Parameter]:
        """All parameters but those of tables."""
        apart = {*self.placements, *self.growing.weights}
        return {name: p for name, p in self.named.items() if name not in apart}

    @property
    def away(self) -> frozenset[Tensor]:
        """Parameters of tables that another rank has whole."""
        return frozenset(self.named[name] for name in self.placements if self._is_away(name))

    @property
    def alike(self) -> dict[str, nn.Parameter]:
        """Those that all ranks have."""
        grow = self.growing.weights
        return {n: p for n, p in self.named.items() if n not in grow and not self._is_cut(n)}

    def _is_cut(self, name: str) -> bool:
        return name in self.placements and self.placements[name].cut != "none"

    def is_single(self, name: str) -> bool:
        """Whether a parameter is a table that one rank has whole."""
        return name in self.placements and self.placements[name].is_whole

    def _is_boxed(self, name: str) -> bool:
        """Whether what a rank has of it is a part; else all of it, or it is away."""
        return self._is_cut(name) and not self.is_single(name)

    def _is_away(self, name: str) -> bool:
        return self.is_single(name) and not self._is_here(name)

    def _is_here(self, name: str) -> bool:
        return name in self.parts and bool(self.parts[name].columns)

    # -- gradients -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Nothing: the optimiser has what the modules have."""

    def clear(self) -> None:
        """Drop the gradients of tables, and see which will be sparse in the step that begins."""
        self.growing.clear()
        for part in self.parts.values():
            part.parameter.grad = None
        for name, law in self._check_laws().items():
            sparse = name in self._wants_sparse if law.only_sparse else law.touched
            if name in self.parts:
                self.parts[name].sparse = sparse

    def collect(self, trained: Mapping[str, nn.Parameter], *, reuse: bool) -> None:
        """Each used row once, also where several micro-batches have used it."""
        for name, part in self.parts.items():
            gradient = part.parameter.grad
            if self._is_away(name):
                part.parameter.grad = None  # an optimiser may make something of no rows
            elif gradient is not None and gradient.is_sparse and not gradient.is_coalesced():
                part.parameter.grad = gradient.coalesce()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, rows that are looked up do not count as used: some optimisers change a row that
        was used although its gradient is zero."""
        assert self.tables is not None
        self.tables.counting = False
        try:
            yield
        finally:
            self.tables.counting = True

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and gradient of the pieces here that have one."""
        for name, part in self.parts.items():
            if part.parameter.grad is not None:
                yield name, part.parameter.grad
        for name, weight in self.growing.weights.items():
            if weight.grad is not None:
                yield name, weight.grad

    def scale(self, factor: float) -> None:
        for _, gradient in self.gradients():
            gradient.mul_(factor)

    def squared_norm(self) -> Tensor:
        """Of the gradients of all tables, float64, each entry once; collective."""
        assert self.tables is not None
        total = torch.zeros((), dtype=torch.float64)
        for name, gradient in self.gradients():
            apart = self._is_cut(name) or name in self.growing.weights
            if apart or self.tables.wire.rank == 0:
                values = gradient.values() if gradient.is_sparse else gradient
                total += torch.linalg.vector_norm(values).double().square().cpu()
        shared = total.to(self.tables.wire.device)
        if self._group is not None:
            dist.all_reduce(shared, group=self._group)
        return shared.cpu()

    def _check_laws(self) -> dict[str, RowLaw]:
        """Of each table that is trained, what its optimiser does to rows.

        Raises:
            PlanError: Pieces would be updated otherwise than the whole.
        """
        found: dict[str, RowLaw] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            names = [self._names[p] for p in group["params"] if self._names[p] in self.placements]
            if names:
                key = number, law_options(group)
                if key not in self._laws:  # options may change between steps
                    device = group["params"][0].device
                    self._laws[key] = row_law(self._optimizer, group, device)
                found |= dict.fromkeys(names, self._laws[key])
        problems = [*self._problems(found)]
        if problems:
            raise PlanError(
                f"{type(self._optimizer).__name__} cannot update these tables in pieces",
                problems=problems,
                fix='Use another optimiser for tables, or way = "table", with which one rank has '
                "all of a table; without hot memory holds all its rows.",
            )
        return found

    def _problems(self, laws: Mapping[str, RowLaw]) -> Iterator[str]:
        for name, law in laws.items():
            placed = self.placements[name]
            if placed.hot and not (law.touched or law.only_sparse):
                yield (
                    f"{name}: memory holds a part of its rows (hot), and the update changes rows "
                    "that a step has not used, by momentum, moments or weight decay, or has no "
                    "step with sparse gradients; SGD, Adagrad, RowWiseAdagrad and SparseAdam do "
                    "without"
                )
            if placed.is_whole or placed.cut == "none":
                continue
            if not law.rows:
                yield (
                    f"{name}: the update of a row depends on other rows of the table (a norm, or "
                    "factors of it), and those lie on other ranks"
                )
            elif len(placed.owners) > 1 and not (law.columns or self._shares_rows(name)):
                yield (
                    f"{name}: the update of an entry depends on other columns of its row, and "
                    'those lie on other ranks; way = "row" or "hash" keeps a row together'
                )

    # -- as checkpoints have it ------------------------------------------------------------------

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """A box of the table; collective where rows are dealt by a hash."""
        self.settle()
        if not self._is_boxed(name) or not tensor.dim():
            return tensor
        part, placed = self.parts[name], self.placements[name]
        by_rows = self._belongs_to_rows(name, tensor.shape[1:], len(part.columns))
        if placed.cut == "hash":
            tensor = self._dealt(name, tensor.detach(), to_ranges=True)
        rows, columns = self._box(name)
        if by_rows:
            return TensorPart.of(tensor.detach(), (placed.rows,), (rows.start,))
        whole = placed.rows, placed.columns
        return TensorPart.of(tensor.detach(), whole, (rows.start, columns.start))

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse; a whole tensor is cut."""
        if not self._is_boxed(name) or not tensor.dim():
            return tensor
        if not isinstance(tensor, TensorPart):
            return self.parts[name].cut(tensor)
        if self.placements[name].cut == "hash":
            return self._dealt(name, tensor.local, to_ranges=False)
        return tensor.local

    def complete(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of it, on every rank that has some; collective."""
        tensor = tensor.to_dense() if tensor.is_sparse else tensor
        if not self._is_boxed(name) or not tensor.dim():
            return full_tensor_of(tensor)
        assert self.tables is not None
        placed = self.placements[name]
        if tensor.dim() == 1 and len(placed.owners) > 1 and self._shares_rows(name):
            return whole_of_rows(self.tables.wire, placed, tensor)
        return self.tables.whole(name, tensor)

    def saved(self, name: str, tensor: Tensor) -> Tensor:
        """Pieces as boxes, the rest as it is."""
        return self.logical(name, tensor)

    def target(self, name: str, tensor: Tensor) -> Tensor:
        """Boxes of tables are read into memory of their own."""
        if name not in self.placements:
            return tensor
        placed = self.placements[name]
        shape = placed.rows, placed.columns
        if self._is_away(name):
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        room = self.room(name, shape, tensor.dtype) if self._is_boxed(name) else None
        return tensor if room is None else room

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Of a table the box that this rank reads."""
        placed = self.placements.get(name)
        if placed is None or not shape or not self._is_here(name):
            return None
        if not self._is_boxed(name):
            return mapped_tensor(shape, dtype, placed.cold, what=name) if placed.hot else None
        rows, columns = self._box(name)
        by_rows = self._belongs_to_rows(name, shape[1:], self.placements[name].columns)
        sides = (rows,) if by_rows else (rows, columns)
        sizes = [len(side) for side in sides]
        device = self.parts[name].parameter.device
        local = (
            mapped_tensor(sizes, dtype, placed.cold, what=name)
            if placed.hot
            else torch.empty(sizes, dtype=dtype, device=device)
        )
        return TensorPart.of(local, shape, [side.start for side in sides])

    def _shares_rows(self, name: str) -> bool:
        return shares_row_sums(self._optimizer, self.placements[name])

    def _belongs_to_rows(self, name: str, tail: Sequence[int], columns: int) -> bool:
        """Whether something of a table has a number for each row, not one for each entry.

        Raises:
            UsageError: It has something else.
        """
        if not tail and (len(self.placements[name].owners) == 1 or self._shares_rows(name)):
            return True
        if tuple(tail) != (columns,):
            raise UsageError(
                f"what {type(self._optimizer).__name__} keeps of the table {name} has neither its "
                "shape nor a number for each of its rows",
                why="Which rank has which part of it is not known.",
                fix='Let one rank have the table, with way = "table" in split.tables.',
            )
        return False

    def _box(self, name: str) -> tuple[range, range]:
        """Rows and columns that this rank reads and writes."""
        assert self.tables is not None
        placed = self.placements[name]
        piece = placed.piece_of(self.tables.wire.rank)
        if piece is None:
            return range(0), range(0)
        number, part = piece
        rows = even_range(part, len(placed.owners[number]), placed.rows)
        return rows, placed.column_range(number)

    def _dealt(self, name: str, tensor: Tensor, *, to_ranges: bool) -> Tensor:
        """Rows that are dealt by a hash, dealt in ranges to the same ranks, or back; collective."""
        assert self.tables is not None
        wire, placed = self.tables.wire, self.placements[name]
        piece = placed.piece_of(wire.rank)
        none: list[list[Tensor]] = [[] for _ in range(wire.size)]
        if piece is None:
            wire.swap(none, [[] for _ in range(wire.size)])
            return tensor
        number, _ = piece
        owners, (box, _) = placed.owners[number], self._box(name)
        own = self.parts[name].rows  # ascending, so that those of a range follow each other
        ends = [even_range(n, len(owners), placed.rows).stop for n in range(len(owners))]
        cuts = torch.searchsorted(own, torch.tensor(ends)).diff(prepend=torch.zeros(1).long())
        here = parts_of_rows(placed, number, torch.arange(box.start, box.stop))
        order = here.argsort(stable=True).to(tensor.device)
        counts = torch.bincount(here, minlength=len(owners)).tolist()
        sending, coming = (cuts.tolist(), counts) if to_ranges else (counts, cuts.tolist())
        tail = tuple(tensor.shape[1:])
        ready = tensor if to_ranges else tensor[order]
        expected: list[list[tuple[tuple[int, ...], torch.dtype]]] = [[] for _ in none]
        for owner, rows, count in zip(owners, ready.split(sending), coming, strict=True):
            none[owner], expected[owner] = [rows], [((count, *tail), tensor.dtype)]
        came = wire.swap(none, expected)
        found = torch.cat([came[owner][0] for owner in owners])
        return torch.empty_like(found).index_copy_(0, order, found) if to_ranges else found

    def _cut(self, name: str, value: Any) -> Any:
        """This rank's part of something of a whole parameter; numbers for all of it stay."""
        if not self._is_cut(name) or not isinstance(value, Tensor) or not value.dim():
            return value
        return self.parts[name].cut(value)


def _refuse_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise UsageError(
            "a rank has pieces of this model's tables: its state_dict cannot be used here",
            why="Saved as it is, it would be that of a smaller model.",
            fix="Use Executor.whole, inside of which the model is whole on rank 0, or "
            "Executor.save.",
        )
