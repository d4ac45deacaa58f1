"""What a loss does with tables that are to be split: it may look up in them, and nothing else.

A rank has a piece of such a table, and a norm of all parameters or a tied output layer would take
the piece for the table. So the graph of a loss is read before the model is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from headway.errors import PlanError
from headway.plans.tables import LEFT_OUT


def check_uses(loss: Tensor, tables: Mapping[Tensor, str]) -> None:
    """Check that a loss depends on tables by lookups alone.

    Args:
        loss: With its graph.
        tables: With their names.

    Raises:
        PlanError: With each table that goes into something else.
    """
    found = {
        tables[leaf]: node
        for leaf, node in _uses(loss)
        if leaf in tables and _is_other(node.name())
    }
    if found:
        raise PlanError(
            "tables cannot be split that are used without looking up",
            problems=[
                f"{name}: the loss depends on it by {node.name()}, too, and ranks have pieces of it"
                for name, node in sorted(found.items())
            ],
            fix=f"{LEFT_OUT}.",
        )


def _is_other(node: str) -> bool:
    return not node.startswith("Embedding")  # EmbeddingBackward0, EmbeddingBagBackward0


def _uses(loss: Tensor) -> Collection[tuple[Tensor, Any]]:
    """Each leaf of a graph, with a node that it goes into."""
    found, seen, waiting = list[tuple[Tensor, Any]](), set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            found += [] if leaf is None else [(leaf, node)]
            waiting.append(following)
    return found
