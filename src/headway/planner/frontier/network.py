"""The costs of a graph as tables over the nodes that still have a choice.

Invariant: a table is an array (d or J, C_1, ..., C_k, K): objectives first, then one axis per
node of its scope, then the rows of each cell. Nodes with one choice are in no scope: their
edges are costs of the other end, so that a forced choice takes an entangled node out of the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headway.planner.frontier.problem import ChoiceGraph
from headway.planner.frontier.rows import Floats, Ints


@dataclass(frozen=True, slots=True)
class Network:
    """Tables of one row per cell.

    Attributes:
        kept: The choices of each node that are still considered, by their number in the graph.
        sizes: Number of choices, of nodes with more than one.
        scopes: Nodes of each table.
        tables: Costs (d, C_1, ..., C_k, 1) of each table.
    """

    kept: Mapping[str, Ints]
    sizes: Mapping[str, int]
    scopes: tuple[tuple[str, ...], ...]
    tables: tuple[Floats, ...]

    def chosen(self, choices: Mapping[str, Ints], number: int) -> dict[str, Ints]:
        """Of this number of strategies the choices as the graph numbers them."""
        only = np.zeros(number, dtype=np.int64)
        return {name: kept[choices.get(name, only)] for name, kept in self.kept.items()}


def make_network(graph: ChoiceGraph, kept: Mapping[str, Ints]) -> Network:
    """The tables of a graph in which only some choices of each node are considered."""
    sizes = {name: len(kept[name]) for name in graph.nodes if len(kept[name]) > 1}
    scopes: list[tuple[str, ...]] = []
    tables: list[Floats] = []
    for name, costs in graph.nodes.items():
        _add(scopes, tables, (name,), costs[kept[name]], sizes)
    for (source, target), costs in graph.edges.items():
        part = costs[kept[source]][:, kept[target]]
        _add(scopes, tables, (source, target), part, sizes)
    return Network(kept, sizes, tuple(scopes), tuple(tables))


def all_choices(graph: ChoiceGraph) -> dict[str, Ints]:
    """What is considered at first: the forced choice of a node, or all."""
    return {
        name: np.array([graph.forced[name]]) if name in graph.forced else np.arange(len(costs))
        for name, costs in graph.nodes.items()
    }


def _add(
    scopes: list[tuple[str, ...]],
    tables: list[Floats],
    nodes: tuple[str, ...],
    costs: Floats,
    sizes: Mapping[str, int],
) -> None:
    scope = tuple(name for name in nodes if name in sizes)
    moved = np.moveaxis(np.asarray(costs, dtype=np.float64), -1, 0)
    infinite = np.isinf(moved)
    table = np.where(infinite.any(axis=0), np.inf, moved) if infinite.any() else moved
    scopes.append(scope)
    tables.append(table.reshape(len(moved), *(sizes[name] for name in scope), 1))


def align(table: Floats, scope: Sequence[str], axes: Sequence[str]) -> Floats:
    """A table with its axes in another order, and of length 1 where it lacks a node."""
    order, places = _aligned(tuple(scope), tuple(axes))
    shape = (*table.shape, 1)
    return table.transpose(order).reshape([shape[place] for place in places])


@lru_cache(maxsize=4096)
def _aligned(
    scope: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the order of the axes, which axis has the length of each of the result; behind all: 1)."""
    last = len(scope) + 1
    order = sorted(range(len(scope)), key=lambda place: axes.index(scope[place]))
    found = {name: 1 + place for place, name in enumerate(scope)}
    lengths = (found.get(name, last + 1) for name in axes)
    return (0, *(1 + place for place in order), last), (0, *lengths, last)
