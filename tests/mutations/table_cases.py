"""Recipes and plans that reach the planted bugs of split tables."""

from __future__ import annotations

from typing import Any

from headway import Recipe
from headway.plans import LayerSplit
from headway.plans.tables import TableSplit
from mutations.cases import case
from support.table_recipes import Clicks, clicks, counted


def tables(split: Any, **more: Any) -> Recipe:
    """Two batches of 8 samples, and one of a single one: two of three ranks have none."""
    facts: dict[str, Any] = {"data": lambda: Clicks(17), "microbatch": 2, "precision": "float32"}
    return clicks(**(facts | more), split=LayerSplit(tables=split))


@case(3)
def tables_row() -> Recipe:
    return tables(TableSplit(way="row", travels="sums"))


@case(3)
def tables_hash() -> Recipe:
    """Gradients of the rows that were used."""
    return tables("hash", optimizer="adagrad", loss=counted)


@case(3)
def tables_rows() -> Recipe:
    """Rows travel, each once."""
    return tables(TableSplit(way="row", travels="rows"), optimizer="adagrad")


@case(3)
def tables_clipped() -> Recipe:
    """Some on one rank, some on all."""
    split = (TableSplit(tables="users"), TableSplit(tables="items", way="copies"))
    return tables((*split, TableSplit(way="row")), optimizer="sgd", clip=0.01)


@case(2)
def tables_column() -> Recipe:
    """A number for each row, of columns that lie apart."""
    return tables("column", optimizer="row_wise")


@case(3)
def tables_lazy() -> Recipe:
    """A row that was used moves although its gradient is zero."""
    return tables("row", optimizer="sparse_adam", model="Sparse")


@case(2, whole=True)
def trained_tables() -> Recipe:
    return tables("hash", validation=lambda: Clicks(10))


@case(2, whole=True)
def trained_columns() -> Recipe:
    return tables("column")
