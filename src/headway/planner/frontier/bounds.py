"""The least weighted costs of strategies, and of what completes a partial strategy.

For each of J weightings of the objectives one sweep of the eliminations finds the least cost of a
whole strategy, and a sweep back the strategy, and the least cost of everything outside of a table.
Invariant: these are exact minima of sums that are linear in the objectives, so that no strategy can
lie below them; with hubs they are lower bounds. All weightings go at once, as the last axis. Source
of the two sweeps: Shafer and Shenoy 1990, "Probability propagation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
) -> Bounds:
    """Sweeps there and back, as many weightings at once as memory allows.

    Args:
        network: Costs.
        order: Eliminations of these tables.
        weights: (J, d).
        whole: Also `outside` and `marginals`; without them it takes half of the time.
        hubs: Nodes that the order leaves out: every neighbour sees its own choice of them.
    """
    largest = max((prod(network.sizes[n] for n in _axes(step)) for step in order.steps), default=1)
    group = max(1, _CELLS // largest)
    parts = [
        _sweep(network, order, weights[start : start + group], whole, hubs)
        for start in range(0, max(1, len(weights)), group)
    ]
    return reduce(joined, parts)


def joined(some: Bounds, more: Bounds) -> Bounds:
    """The weightings of both."""
    return Bounds(
        np.concatenate([some.weights, more.weights]),
        np.concatenate([some.least, more.least]),
        {key: np.concatenate([some.choices[key], more.choices[key]]) for key in some.choices},
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
    costs = table[..., 0]
    forbidden = np.isinf(costs[0])
    summed: Floats = np.tensordot(np.where(forbidden, 0.0, costs), weights, axes=([0], [1]))
    summed[forbidden] = np.inf
    return summed[np.newaxis]


def _axes(step: Step) -> tuple[str, ...]:
    return step.scope if step.node is None else (step.node, *step.scope)


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
    network: Network, order: Order, weights: Floats, whole: bool, hubs: tuple[str, ...]
) -> Bounds:
    given = [_weighted(table, weights) for table in network.tables]
    scopes, inside = relax(network.scopes, given, hubs)
    scopes += [step.scope for step in order.steps]
    for step in order.steps:
        total = _total(step, scopes, inside)
        inside.append((total if step.node is None else total.min(axis=0))[None])
    used = {number for step in order.steps for number in step.inputs}
    ends = [number for number in range(len(inside)) if number not in used]
    least = sum((inside[number][0] for number in ends), np.zeros(len(weights)))
    outside = {number: _minus(least, inside[number][0]) for number in ends} if whole else {}
    found = Bounds(weights, least, {}, outside, {})
    for step in reversed(order.steps):
        if step.node is not None:
            found.choices[step.node] = _best(step.node, step, scopes, inside, found.choices)
        if whole:
            _back(step, scopes, inside, found, len(given))
    return found


def _best(
    node: str,
    step: Step,
    scopes: Sequence[tuple[str, ...]],
    inside: Sequence[Floats],
    choices: dict[str, Ints],
) -> Ints:
    """Choice (J,) of the node beside the choices of the scope."""
    costs: Floats = np.zeros(1)
    for number in step.inputs:
        others = [name for name in scopes[number] if name != node]
        table = align(inside[number], scopes[number], (node, *others))[0]
        place = (choices[name] for name in others)
        costs = costs + table[(slice(None), *place, np.arange(table.shape[-1]))]
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
