"""The embedding tables of a captured model."""

from __future__ import annotations

from collections.abc import Iterator

from headway.graph.model_graph import ModelGraph, Operator
from headway.planner.tables.demand import TableDemand

LOOKUPS = ("embedding", "embedding_bag")
"""Kinds of operators that look rows up."""


def model_tables(graph: ModelGraph, samples: int) -> tuple[TableDemand, ...]:
    """Parameters that are looked up and used in no other way, in the order of their first use.

    Args:
        samples: With which the model was captured.
    """
    found: dict[str, TableDemand] = {}
    elsewhere: set[str] = set()
    for operator in graph.operators:
        looked_up = set[str]()
        for name, lookups in _looked_up(graph, operator, samples):
            looked_up.add(name)
            rows, columns = graph.parameters[name].shape
            pooled = operator.kind == "embedding_bag"
            before = found.get(name)
            found[name] = TableDemand(
                table=name,
                rows=rows,
                columns=columns,
                bag=lookups + (before.bag if before else 0.0),
                pooled=pooled and (before is None or before.pooled),
                itemsize=graph.parameters[name].itemsize,
            )
        elsewhere |= {*operator.parameters} - looked_up
    return tuple(table for name, table in found.items() if name not in elsewhere)


def _looked_up(graph: ModelGraph, operator: Operator, samples: int) -> Iterator[tuple[str, float]]:
    """(parameter, lookups of a sample) of an operator; folded ones stand in front."""
    if operator.kind not in LOOKUPS:
        return
    inputs, _ = graph.specs(operator)
    weights = [
        name
        for name, spec in zip(operator.inputs, inputs, strict=True)
        if name in operator.parameters and len(spec.shape) == 2
    ]
    ids = [spec.elements for spec in inputs if spec.dtype in ("int64", "int32")]
    if len(weights) == 1 and ids:
        # The first whole numbers are the ids; offsets of bags come behind them.
        yield weights[0], ids[0] / samples
