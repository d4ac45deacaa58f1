"""The least weighted costs of strategies, and of what completes a partial strategy.

For each of J weightings of the objectives one sweep of the eliminations finds the least cost of a
whole strategy, and a sweep back the strategy, and the least cost of everything outside of a table.
Invariant: these are exact minima of sums that are linear in the objectives, so that no strategy can
lie below them; with hubs they are lower bounds. All weightings go at once, as the last axis. Source
of the two sweeps: Shafer and Shenoy 1990, "Probability propagation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import prod

import numpy as np

from headway.planner.frontier.hubs import relax
from headway.planner.frontier.network import Network, align
from headway.planner.frontier.rows import Floats, Ints
from headway.planner.frontier.rules import Order, Step

_CELLS = 4_000_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least weighted costs.

    Attributes:
        weights: (J, d), not negative.
        least: (J,), of a whole strategy; infinite if every strategy is forbidden.
        choices: For each node, (J,): its choice in a strategy of least cost.
        outside: For each table that a step makes, (C_1, ..., C_k, J): the least cost of the rest.
        marginals: For each node, (C_v, J): the least cost of a strategy with that choice.
    """

    weights: Floats
    least: Floats
    choices: dict[str, Ints]
    outside: dict[int, Floats]
    marginals: dict[str, Floats]


def find_bounds(
    network: Network,
    order: Order,
    weights: Floats,
    *,
    whole: bool = True,
    hubs: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
) -> Bounds:
    """Sweeps there and back, as many weightings at once as memory allows.

    Args:
        network: Costs.
        order: Eliminations of these tables.
        weights: (J, d).
        whole: Also `outside` and `marginals`; without them it takes half of the time.
        hubs: Nodes that the order leaves out: every neighbour sees its own choice of them.
        given: Nodes that the order leaves out: `least` and `choices` get one axis in front for
            each of them, of its choices (of length 1 where they make no difference).
    """
    order = _open(order, network.scopes, given)
    largest = max((prod(network.sizes[n] for n in _axes(step)) for step in order.steps), default=1)
    group = max(1, _CELLS // largest)
    parts = [
        _sweep(network, order, weights[start : start + group], whole, hubs, given)
        for start in range(0, max(1, len(weights)), group)
    ]
    return reduce(joined, parts)


def joined(some: Bounds, more: Bounds) -> Bounds:
    """The weightings of both."""
    return Bounds(
        np.concatenate([some.weights, more.weights]),
        np.concatenate([some.least, more.least], axis=-1),
        {key: np.concatenate([c, more.choices[key]], axis=-1) for key, c in some.choices.items()},
        {key: np.concatenate([o, more.outside[key]], axis=-1) for key, o in some.outside.items()},
        {
            key: np.concatenate([m, more.marginals[key]], axis=-1)
            for key, m in some.marginals.items()
        },
    )


def grid_of_weights(scales: Floats, steps: int) -> Floats:
    """Weightings (J, d) from each objective alone to all equal, in units of `scales`."""
    width = len(scales)
    grid = [g for g in product(range(steps), repeat=width) if sum(g) == steps - 1]
    shares = np.array(grid, dtype=np.float64).reshape(-1, width)
    weights: Floats = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1) / scales
    return weights if steps > 1 else np.ones((1, width))


def _weighted(table: Floats, weights: Floats) -> Floats:
    """Weighted costs (1, C_1, ..., C_k, J) of a table (d, C_1, ..., C_k, 1)."""
    costs = np.moveaxis(table[..., 0], 0, -1)
    forbidden = np.isinf(costs[..., 0])
    some = bool(forbidden.any())
    flat = np.where(forbidden[..., None], 0.0, costs) if some else costs
    summed: Floats = flat.reshape(-1, costs.shape[-1]) @ weights.T
    summed = summed.reshape(*costs.shape[:-1], len(weights))
    if some:
        summed[forbidden] = np.inf
    return summed[np.newaxis]


def _axes(step: Step) -> tuple[str, ...]:
    return step.scope if step.node is None else (step.node, *step.scope)


def _open(order: Order, scopes: Sequence[tuple[str, ...]], given: tuple[str, ...]) -> Order:
    """The order with given nodes in the scopes of all that comes from their tables."""
    if not given:
        return order
    known = list(scopes)
    steps = []
    for step in order.steps:
        seen = {name for number in step.inputs for name in known[number]}
        known.append((*step.scope, *(name for name in given if name in seen)))
        steps.append(replace(step, scope=known[-1]))
    return replace(order, steps=tuple(steps))


def _total(step: Step, scopes: Sequence[tuple[str, ...]], inside: Sequence[Floats]) -> Floats:
    """Sum of the inputs over the node and the scope, (C_v, C_1, ..., J)."""
    axes = _axes(step)
    small_first = sorted(step.inputs, key=lambda number: len(scopes[number]))
    total = align(inside[small_first[0]], scopes[small_first[0]], axes)
    for number in small_first[1:]:
        total = total + align(inside[number], scopes[number], axes)
    summed: Floats = total[0]
    return summed


def _sweep(
    network: Network,
    order: Order,
    weights: Floats,
    whole: bool,
    hubs: tuple[str, ...],
    given: tuple[str, ...],
) -> Bounds:
    tables = [_weighted(table, weights) for table in network.tables]
    scopes, inside = relax(network.scopes, tables, hubs)
    scopes += [step.scope for step in order.steps]
    for step in order.steps:
        total = _total(step, scopes, inside)
        inside.append((total if step.node is None else total.min(axis=0))[None])
    used = {number for step in order.steps for number in step.inputs}
    ends = [number for number in range(len(inside)) if number not in used]
    rest = (align(inside[number], scopes[number], given)[0] for number in ends)
    least = sum(rest, np.zeros(len(weights)))
    outside = {number: _minus(least, inside[number][0]) for number in ends} if whole else {}
    found = Bounds(weights, least, {}, outside, {})
    known = {
        name: np.arange(network.sizes.get(name, 1)).reshape(-1, *[1] * (len(given) - place))
        for place, name in enumerate(given)
    }
    for step in reversed(order.steps):
        if step.node is not None:
            found.choices[step.node] = _best(step.node, step, scopes, inside, known, len(given))
            known[step.node] = found.choices[step.node]
        if whole:
            _back(step, scopes, inside, found, len(tables))
    return found


def _best(
    node: str,
    step: Step,
    scopes: Sequence[tuple[str, ...]],
    inside: Sequence[Floats],
    choices: dict[str, Ints],
    given: int,
) -> Ints:
    """Choice of the node beside the choices of the scope, (J,) behind an axis per given node."""
    costs: Floats = np.zeros(1)
    for number in step.inputs:
        others = [name for name in scopes[number] if name != node]
        table = align(inside[number], scopes[number], (node, *others))[0]
        place = (choices[name] for name in others)
        part = table[(slice(None), *place, np.arange(table.shape[-1]))]
        missing = [1] * (given + 2 - part.ndim)
        costs = costs + part.reshape(len(part), *missing, *part.shape[1:])
    best: Ints = costs.argmin(axis=0)
    return best


def _back(
    step: Step,
    scopes: Sequence[tuple[str, ...]],
    inside: Sequence[Floats],
    found: Bounds,
    given: int,
) -> None:
    """From the table that a step made to those that it used and that are not `given` ones."""
    axes = _axes(step)
    total = _total(step, scopes, inside) + found.outside[step.result]
    for number in step.inputs:
        if number >= given:
            gone = tuple(at for at, name in enumerate(axes) if name not in scopes[number])
            kept = [name for name in axes if name in scopes[number]]
            order = [kept.index(name) for name in scopes[number]]
            least = total.min(axis=gone).transpose(*order, len(order))
            found.outside[number] = _minus(least, inside[number][0])
    if step.node is not None:
        found.marginals[step.node] = total.min(axis=tuple(range(1, total.ndim - 1)))


def _minus(total: Floats, part: Floats) -> Floats:
    finite = np.isfinite(part)
    return np.where(finite, total - np.where(finite, part, 0.0), np.inf)
