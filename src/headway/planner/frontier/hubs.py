"""Nodes that entangle a graph beyond the budget, such as a mask that all layers read.

Invariant: with every hub given its choice, the rest is solved exactly. If the hubs have few choices
together, all of them are tried and the result stays exact (cutset conditioning, Dechter 1999).
Otherwise some are, in place of the "heuristic elimination" of Cai et al. 2022, and the lower bounds
come from the relaxed graph in which each neighbour may see the hub make another choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from headway.planner.frontier.network import Network, align
from headway.planner.frontier.rows import Floats, Ints
from headway.planner.frontier.rules import Elimination, Order, order_eliminations

_ALL_CASES = 64
_SOME_CASES = 12


@dataclass(frozen=True, slots=True)
class Hubs:
    """What is in the way, and how the rest is eliminated.

    Attributes:
        nodes: Hubs, the first one the most entangled.
        order: Eliminations of the tables without the hubs.
        log: One entry for each hub, and then those of the order.
    """

    nodes: tuple[str, ...]
    order: Order
    log: tuple[Elimination, ...]


def find_hubs(network: Network, budget: int) -> Hubs:
    """Takes nodes out until all steps fit into the budget; mostly none."""
    hubs: tuple[str, ...] = ()
    while True:
        sizes = {name: size for name, size in network.sizes.items() if name not in hubs}
        scopes = [tuple(n for n in scope if n not in hubs) for scope in network.scopes]
        order = order_eliminations(scopes, sizes, budget)
        if not order.blocked:
            break
        hubs = (*hubs, order.blocked[0])
    rule = "condition" if _number(network, hubs) <= _ALL_CASES else "fix"
    entries = tuple(Elimination(rule, hub, _neighbours(network, hub)) for hub in hubs)
    return Hubs(hubs, order, (*entries, *order.log))


def all_cases(network: Network, hubs: Hubs) -> list[dict[str, int]] | None:
    """Every combination of choices of the hubs, or None if there are too many."""
    if _number(network, hubs.nodes) > _ALL_CASES:
        return None
    ranges = (range(network.sizes[hub]) for hub in hubs.nodes)
    return [dict(zip(hubs.nodes, case, strict=True)) for case in product(*ranges)]


def likely_cases(
    network: Network, hubs: Hubs, weights: Floats, choices: dict[str, Ints]
) -> list[dict[str, int]]:
    """For each weighting the best choices of the hubs beside those that all others have made.

    Args:
        network: Costs.
        hubs: With more combinations than can be tried.
        weights: (J, d).
        choices: (J,) of every other node, of the relaxed graph.
    """
    cases: dict[tuple[int, ...], dict[str, int]] = {}
    for number, weight in enumerate(weights):
        chosen = {name: int(of_all[number]) for name, of_all in choices.items()}
        for hub in hubs.nodes:
            chosen[hub] = int(_costs_of(network, hub, chosen, weight).argmin())
        cases.setdefault(tuple(chosen[h] for h in hubs.nodes), {h: chosen[h] for h in hubs.nodes})
    return list(cases.values())[:_SOME_CASES]


def relax(
    scopes: Sequence[tuple[str, ...]], tables: Sequence[Floats], hubs: tuple[str, ...]
) -> tuple[list[tuple[str, ...]], list[Floats]]:
    """Scalar tables (1, ..., J) in which every table of a hub may choose for it on its own.

    The hub's own costs are shared out evenly, so that the sum is a lower bound.
    """
    scopes, tables = list(scopes), list(tables)
    for hub in hubs:
        own = [number for number, scope in enumerate(scopes) if scope == (hub,)]
        shared = [n for n, scope in enumerate(scopes) if hub in scope and n not in own]
        share = sum((tables[number] for number in own), np.zeros(1)) / len(shared)
        for number in shared:
            part = align(share, (hub,), scopes[number])
            tables[number] = (tables[number] + part).min(axis=1 + scopes[number].index(hub))
            scopes[number] = tuple(name for name in scopes[number] if name != hub)
        for number in own:
            scopes[number], tables[number] = (), np.zeros_like(tables[number][:, 0])
    return scopes, tables


def _number(network: Network, hubs: tuple[str, ...]) -> int:
    return prod(network.sizes[hub] for hub in hubs)


def _neighbours(network: Network, hub: str) -> tuple[str, ...]:
    found = (name for scope in network.scopes if hub in scope for name in scope if name != hub)
    return tuple(dict.fromkeys(found))


def _costs_of(network: Network, hub: str, chosen: dict[str, int], weight: Floats) -> Floats:
    """Weighted costs (C,) of a hub's choices beside the choices made already."""
    total: Floats = np.zeros(network.sizes[hub])
    for scope, table in zip(network.scopes, network.tables, strict=True):
        if hub in scope and all(name == hub or name in chosen for name in scope):
            place = tuple(slice(None) if name == hub else chosen[name] for name in scope)
            costs = table[(slice(None), *place, 0)]
            forbidden = np.isinf(costs[0])
            total += np.where(forbidden, np.inf, weight @ np.where(forbidden, 0.0, costs))
    return total
