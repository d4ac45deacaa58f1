"""Tables that grow, on the ranks that share a batch: each key has its row on one of them."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from headway.errors import PlanError
from headway.nn.dynamic_table import DynamicTable
from headway.parallel.tables.split_tables import SplitTables, split_tables
from headway.plans.tables import TablePlacement


def split_dynamic_tables(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, tables: SplitTables | None = None
) -> SplitTables:
    """Deal the keys of the tables of a model that grow to the ranks, in place.

    The owner of a key is `mixed_hash(key) % ranks`. Each rank looks up bags of its own share of the
    batch; every rank makes the same lookups in the same order, for batches of any size, also of
    none, and goes backward through them. Rows are kept and stepped by their owners. Losses are to
    be divided by the samples of all ranks; the gradients of other parameters are summed by the
    caller, as ever.

    Args:
        model: Every rank has the same one; of the rows that are there, each rank keeps its own.
        group: The ranks that share the batch; None: the default one.
        tables: Of `split_tables` for the same model, if other tables of it are split as well.

    Returns:
        What says how many bytes have been sent, by table.

    Raises:
        PlanError: The model has no such table.
    """
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, DynamicTable)
    }
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no table that grows",
            problems=["nothing in it is a headway.nn.DynamicTable"],
            fix="Leave out split_dynamic_tables.",
        )
    if tables is None:
        tables = split_tables(model, {}, group)
    ranks = tuple(range(tables.wire.size))
    for name, table in found.items():
        placement = TablePlacement(
            table=name, rows=0, columns=table.dim, owners=(ranks,), cut="hash"
        )
        table.split(name, tables)
        tables.add(name, table, placement)
    return tables
