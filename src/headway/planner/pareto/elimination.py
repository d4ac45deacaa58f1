"""Elimination on fronts, with the lower bounds and known strategies that prune it.

Three things stand here because each needs the one before it:

* Least weighted costs. For each of J weightings of the objectives one sweep finds the least cost
  of a strategy, and a sweep back the strategy and the least cost of everything outside of a table
  (Shafer and Shenoy 1990, "Probability propagation"). Exact, unless the graph has hubs: nodes that
  entangle it beyond the budget. Hubs with few choices are all tried (cutset conditioning, Dechter
  1999); otherwise the bounds come from a relaxed graph.
* The search region. A corner is the upper end of a box that no known strategy, divided by
  1 + epsilon, dominates (Klamroth, Lacour and Vanderpooten 2015); it is open as long as the bounds
  do not exclude its box. Weightings between two neighbours follow Aneja and Nair 1979.
* The elimination itself (Cai et al. 2022, TensorOpt). A partial strategy is dropped only if the
  bounds of its completions exclude every open box, so the error of an epsilon does not grow with
  the depth of the graph. Each row of a table encodes the choice and the rows it was made from;
  undoing the steps in reverse recovers the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import prod

import numpy as np

from headway.planner.pareto.choice_graph import (
    ChoiceGraph,
    CostTables,
    Elimination,
    EliminationOrder,
    EliminationStep,
    align,
    order_eliminations,
)
from headway.planner.pareto.front import (
    Bools,
    Floats,
    Ints,
    concatenate_fronts,
    kept_positions,
    pad_fronts,
    reduce_front,
    reduce_rows,
    spread,
    take,
)

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
    order: EliminationOrder
    log: tuple[Elimination, ...]


def find_hubs(network: CostTables, budget: int) -> Hubs:
    """Takes nodes out until all steps fit into the budget; mostly none."""
    hubs: tuple[str, ...] = ()
    while True:
        sizes = {name: size for name, size in network.sizes.items() if name not in hubs}
        scopes = [tuple(n for n in scope if n not in hubs) for scope in network.scopes]
        order = order_eliminations(scopes, sizes, budget)
        if not order.blocked:
            break
        # Only the first one: without it the others may fit, so the order is searched anew.
        hubs = (*hubs, order.blocked[0])
    rule = "condition" if _number(network, hubs) <= _ALL_CASES else "fix"
    entries = tuple(Elimination(rule, hub, _neighbours(network, hub)) for hub in hubs)
    return Hubs(hubs, order, (*entries, *order.log))


def all_cases(network: CostTables, hubs: Hubs) -> list[dict[str, int]] | None:
    """Every combination of choices of the hubs, or None if there are too many."""
    if _number(network, hubs.nodes) > _ALL_CASES:
        return None
    ranges = (range(network.sizes[hub]) for hub in hubs.nodes)
    return [dict(zip(hubs.nodes, case, strict=True)) for case in product(*ranges)]


def likely_cases(
    network: CostTables, hubs: Hubs, weights: Floats, choices: dict[str, Ints]
) -> list[dict[str, int]]:
    """For each weighting the best choices of the hubs beside those that all others have made.

    Args:
        hubs: With more combinations than can be tried.
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
    """Scalar tables (1, ..., J) in which every table of a hub may choose for it on its own."""
    scopes, tables = list(scopes), list(tables)
    for hub in hubs:
        own = [number for number, scope in enumerate(scopes) if scope == (hub,)]
        shared = [n for n, scope in enumerate(scopes) if hub in scope and n not in own]
        # The hub's own costs are shared out evenly, so that the sum is a lower bound.
        share = sum((tables[number] for number in own), np.zeros(1)) / len(shared)
        for number in shared:
            part = align(share, (hub,), scopes[number])
            tables[number] = (tables[number] + part).min(axis=1 + scopes[number].index(hub))
            scopes[number] = tuple(name for name in scopes[number] if name != hub)
        for number in own:
            scopes[number], tables[number] = (), np.zeros_like(tables[number][:, 0])
    return scopes, tables


def _number(network: CostTables, hubs: tuple[str, ...]) -> int:
    return prod(network.sizes[hub] for hub in hubs)


def _neighbours(network: CostTables, hub: str) -> tuple[str, ...]:
    found = (name for scope in network.scopes if hub in scope for name in scope if name != hub)
    return tuple(dict.fromkeys(found))


def _costs_of(network: CostTables, hub: str, chosen: dict[str, int], weight: Floats) -> Floats:
    total: Floats = np.zeros(network.sizes[hub])
    for scope, table in zip(network.scopes, network.tables, strict=True):
        if hub in scope and all(name == hub or name in chosen for name in scope):
            place = tuple(slice(None) if name == hub else chosen[name] for name in scope)
            costs = table[(slice(None), *place, 0)]
            forbidden = np.isinf(costs[0])
            total += np.where(forbidden, np.inf, weight @ np.where(forbidden, 0.0, costs))
    return total


_CELLS = 4_000_000


@dataclass(frozen=True, slots=True)
class WeightedBounds:
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


def find_weighted_bounds(
    network: CostTables,
    order: EliminationOrder,
    weights: Floats,
    *,
    whole: bool = True,
    hubs: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
) -> WeightedBounds:
    """Sweeps there and back, as many weightings at once as memory allows.

    Args:
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
    return reduce(join_bounds, parts)


def join_bounds(some: WeightedBounds, more: WeightedBounds) -> WeightedBounds:
    return WeightedBounds(
        np.concatenate([some.weights, more.weights]),
        np.concatenate([some.least, more.least], axis=-1),
        {key: np.concatenate([c, more.choices[key]], axis=-1) for key, c in some.choices.items()},
        {key: np.concatenate([o, more.outside[key]], axis=-1) for key, o in some.outside.items()},
        {
            key: np.concatenate([m, more.marginals[key]], axis=-1)
            for key, m in some.marginals.items()
        },
    )


def weight_grid(scales: Floats, steps: int) -> Floats:
    """Weightings (J, d) from each objective alone to all equal, in units of `scales`."""
    width = len(scales)
    grid = [g for g in product(range(steps), repeat=width) if sum(g) == steps - 1]
    shares = np.array(grid, dtype=np.float64).reshape(-1, width)
    weights: Floats = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1) / scales
    return weights if steps > 1 else np.ones((1, width))


def _weighted(table: Floats, weights: Floats) -> Floats:
    """Weighted costs (1, C_1, ..., C_k, J) of a table (d, C_1, ..., C_k, 1)."""
    costs = np.moveaxis(table[..., 0], 0, -1)
    # A weight of 0 times an infinite cost would be nan, so forbidden cells are set apart.
    forbidden = np.isinf(costs[..., 0])
    some = bool(forbidden.any())
    flat = np.where(forbidden[..., None], 0.0, costs) if some else costs
    summed: Floats = flat.reshape(-1, costs.shape[-1]) @ weights.T
    summed = summed.reshape(*costs.shape[:-1], len(weights))
    if some:
        summed[forbidden] = np.inf
    return summed[np.newaxis]


def _axes(step: EliminationStep) -> tuple[str, ...]:
    return step.scope if step.node is None else (step.node, *step.scope)


def _open(
    order: EliminationOrder, scopes: Sequence[tuple[str, ...]], given: tuple[str, ...]
) -> EliminationOrder:
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


def _total(
    step: EliminationStep, scopes: Sequence[tuple[str, ...]], inside: Sequence[Floats]
) -> Floats:
    """Sum of the inputs over the node and the scope, (C_v, C_1, ..., J)."""
    axes = _axes(step)
    # Small tables first: the sums stay small as long as possible.
    small_first = sorted(step.inputs, key=lambda number: len(scopes[number]))
    total = align(inside[small_first[0]], scopes[small_first[0]], axes)
    for number in small_first[1:]:
        total = total + align(inside[number], scopes[number], axes)
    return np.asarray(total[0])


def _sweep(
    network: CostTables,
    order: EliminationOrder,
    weights: Floats,
    whole: bool,
    hubs: tuple[str, ...],
    given: tuple[str, ...],
) -> WeightedBounds:
    tables = [_weighted(table, weights) for table in network.tables]
    scopes, inside = relax(network.scopes, tables, hubs)
    scopes += [step.scope for step in order.steps]
    for step in order.steps:
        total = _total(step, scopes, inside)
        inside.append((total if step.node is None else total.min(axis=0))[None])
    # What no step has used is over no eliminated node: the last table of each component, and
    # scalars.
    used = {number for step in order.steps for number in step.inputs}
    ends = [number for number in range(len(inside)) if number not in used]
    rest = (align(inside[number], scopes[number], given)[0] for number in ends)
    least = sum(rest, np.zeros(len(weights)))
    outside = {number: _minus(least, inside[number][0]) for number in ends} if whole else {}
    found = WeightedBounds(weights, least, {}, outside, {})
    known = {
        name: np.arange(network.sizes.get(name, 1)).reshape(-1, *[1] * (len(given) - place))
        for place, name in enumerate(given)
    }
    # In reverse, a node's neighbours have made their choices before it.
    for step in reversed(order.steps):
        if step.node is not None:
            found.choices[step.node] = _best(step.node, step, scopes, inside, known, len(given))
            known[step.node] = found.choices[step.node]
        if whole:
            _back(step, scopes, inside, found, len(tables))
    return found


def _best(
    node: str,
    step: EliminationStep,
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
        # The choices and the range broadcast together: weighting j reads the cell of its own
        # choices.
        place = (choices[name] for name in others)
        part = table[(slice(None), *place, np.arange(table.shape[-1]))]
        missing = [1] * (given + 2 - part.ndim)
        costs = costs + part.reshape(len(part), *missing, *part.shape[1:])
    best: Ints = costs.argmin(axis=0)
    return best


def _back(
    step: EliminationStep,
    scopes: Sequence[tuple[str, ...]],
    inside: Sequence[Floats],
    found: WeightedBounds,
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
            # One subtraction for each input instead of the sum of all the others (Shafer and Shenoy
            # 1990).
            found.outside[number] = _minus(least, inside[number][0])
    if step.node is not None:
        found.marginals[step.node] = total.min(axis=tuple(range(1, total.ndim - 1)))


def _minus(total: Floats, part: Floats) -> Floats:
    # inf - inf would be nan. Nothing asks for the rest of a forbidden cell, so infinity serves.
    finite = np.isfinite(part)
    return np.where(finite, total - np.where(finite, part, 0.0), np.inf)


_ROUNDING = 1e-9
_TIGHT = 4
_PAIRS = 4_000_000


@dataclass(frozen=True, slots=True)
class OpenCorners:
    """Open corners, each with the few weightings that bound its box best.

    Attributes:
        corners: (m, d).
        tight: (m, q), numbers of weightings.
        limits: (m, q), weighted costs of the corner, a little raised against rounding.
    """

    corners: Floats
    tight: Ints
    limits: Floats

    def let_pass(self, least: Floats) -> Bools:
        """Which of n partial strategies may have a completion in an open box; least is (n, J)."""
        found = np.zeros(len(least), dtype=np.bool_)
        size = max(1, _PAIRS // max(1, len(self.corners)))
        for start in range(0, len(least), size):
            part = least[start : start + size]
            alive = np.ones((len(part), len(self.corners)), dtype=np.bool_)
            for weighting, limit in zip(self.tight.T, self.limits.T, strict=True):
                alive &= part[:, weighting] < limit
            found[start : start + size] = alive.any(axis=1)
        return found


def corners_of(points: Floats, start: Floats) -> Floats:
    """Corners (m, d) of what no point dominates: x is open if x < a corner in every objective.

    Args:
        points: Rows (n, d) of a front, in lexicographic order.
        start: (d,), corner of the whole region of interest.
    """
    if len(start) == 2:
        # With two objectives a corner lies between neighbours: the first cost of the next point,
        # the second cost of this one. The number of corners stays linear and no cutting is needed.
        first = np.minimum(np.append(points[:, 0], start[0]), start[0])
        second = np.minimum(np.insert(points[:, 1], 0, start[1]), start[1])
        return np.stack([first, second], axis=1)
    return cut(start[None], points)


def cut(corners: Floats, points: Floats) -> Floats:
    """The corners (m, d) of what is below one of these corners and dominated by no point."""
    for point in points:
        hit = (point < corners).all(axis=1)
        if not hit.any():
            continue
        width = corners.shape[1]
        pieces = np.repeat(corners[hit][None], width, axis=0)
        # A box above the point leaves one box for each objective, lowered to the point's value
        # (Klamroth, Lacour and Vanderpooten 2015).
        for objective, value in enumerate(point):
            pieces[objective, :, objective] = value
        corners = np.concatenate([corners[~hit], pieces.reshape(-1, width)])
        # Of nested boxes only the largest is needed: a front of the negated corners.
        corners = corners[reduce_front(-corners)]
    return corners


def find_open_corners(
    bounds: WeightedBounds, corners: Floats, used: Ints | None = None
) -> OpenCorners:
    """The corners whose boxes the bounds of whole strategies do not exclude.

    Args:
        used: Weightings to which partial strategies are to be compared; `tight` are places in it.
    """
    costs = corners @ bounds.weights.T
    corners = corners[(bounds.least < costs * (1 + _ROUNDING)).all(axis=1)]
    weights, least = bounds.weights, bounds.least
    if used is not None:
        weights, least = weights[used], least[used]
    costs = (corners @ weights.T) * (1 + _ROUNDING)
    with np.errstate(over="ignore"):  # beside nothing, anything is infinitely much
        slack = costs / np.where(least > 0, least, np.finfo(np.float64).tiny)
    # The weightings whose bounds are nearest to the corner's cost exclude the most.
    tight = np.argsort(slack, axis=1, kind="stable")[:, :_TIGHT]
    return OpenCorners(corners, tight, np.take_along_axis(costs, tight, axis=1))


def certified_factor(weights: Floats, least: Floats, corners: Floats) -> float:
    """The least f such that no strategy is below a corner divided by f.

    Args:
        least: (J,), lower bounds of the weighted costs.
        corners: (m, d), of the strategies that are known.
    """
    if not len(corners):
        return 1.0
    costs = corners @ weights.T
    # A box is empty as soon as one weighting's bound reaches the cost of its corner, hence the
    # least ratio over the weightings; the worst corner decides.
    ratios = np.divide(costs, least, out=np.full_like(costs, np.inf), where=least > 0)
    ratios = np.where(costs <= least * (1 + _ROUNDING), 1.0, ratios)
    return max(1.0, float(ratios.min(axis=1).max()))


def neighbour_weightings(points: Floats, gaps: OpenCorners) -> Floats:
    """Weightings (n, 2) under which the two known neighbours of an open corner are equal."""
    if points.shape[1] != 2 or len(points) < 2:
        return np.zeros((0, points.shape[1]))
    after = np.searchsorted(points[:, 0], gaps.corners[:, 0])
    inner = np.unique(after[(after > 0) & (after < len(points))])
    rise, fall = (points[inner] - points[inner - 1]).T
    return np.stack([-fall, rise], axis=1)


_TOLERANCE = 1e-12
_CAP_MARGIN = 1e-9
_FOR_CORNERS = 64


class Incumbents:
    """Strategies of one graph within caps.

    Args:
        caps: (d,), infinite where there is none.
    """

    def __init__(self, graph: ChoiceGraph, caps: Floats) -> None:
        self.graph = graph
        self.caps = caps
        tables = (*graph.nodes.values(), *graph.edges.values())
        # Above every finite strategy, even if all costs of an objective are 0: boxes are open.
        self.ends = 1.0 + np.sum([_most(costs) for costs in tables], axis=0)
        self.costs: Floats = np.zeros((0, len(graph.objectives)))
        self.strategies: dict[str, Ints] = {
            name: np.zeros(0, dtype=np.int64) for name in graph.nodes
        }

    def add(self, strategies: Mapping[str, Ints]) -> None:
        """Takes those that are allowed and not dominated; earlier ones stay where equal."""
        costs = self.graph.evaluate(strategies)
        allowed = (costs <= self.caps * (1 + _TOLERANCE)).all(axis=1)
        allowed &= np.isfinite(costs).all(axis=1)
        costs_of_both = np.concatenate([self.costs, costs[allowed]])
        rows = reduce_front(costs_of_both)
        self.costs = costs_of_both[rows]
        for name, before in self.strategies.items():
            self.strategies[name] = np.concatenate([before, strategies[name][allowed]])[rows]

    def points(self, epsilon: float = 0.0) -> Floats:
        """Their costs, divided by 1 + epsilon."""
        return np.asarray(self.costs / (1 + epsilon))

    def corners(self, epsilon: float = 0.0) -> Floats:
        """Corners (m, d) of what is not within 1 + epsilon of one of them."""
        # Boxes are open, so a strategy exactly at a cap must lie below the corner; `add` admits it.
        start = np.where(np.isfinite(self.caps), self.caps * (1 + _CAP_MARGIN), self.ends)
        points = self.points(epsilon)
        return corners_of(points if len(start) == 2 else _some(points), start)

    def cut(self, corners: Floats, epsilon: float) -> Floats:
        """What is left of the boxes below some corners."""
        points = self.points(epsilon)
        below: Bools = np.asarray((points[:, None, :] < corners[None, :, :]).all(axis=2))
        inside = below.any(axis=1)
        return cut(corners, _some(points[inside]))


def _some(points: Floats) -> Floats:
    # Without the others the corners are higher, which is safe.
    kept = np.linspace(0, len(points) - 1, min(_FOR_CORNERS, len(points))).round()
    return points[kept.astype(np.int64)]


def _most(costs: Floats) -> Floats:
    flat = costs.reshape(-1, costs.shape[-1])
    return np.asarray(np.where(np.isfinite(flat), flat, 0.0).max(axis=0))


_CANDIDATES = 2_000_000


@dataclass(frozen=True, slots=True)
class Pruning:
    """What may be dropped on the way.

    Attributes:
        rows: Most rows of a cell; None: all. What is dropped for this is lost.
        bounds: Least costs of completions; None: no test.
        gaps: Where a completion must be able to lie.
    """

    rows: int | None = None
    bounds: WeightedBounds | None = None
    gaps: OpenCorners | None = None


@dataclass(frozen=True, slots=True)
class EliminationRecord:
    """How a table was made.

    Attributes:
        shape: Number of choices of the node (1 if there is none), then rows of each input.
        picks: (C_1, ..., C_k, K), places in this shape; -1 where a cell has fewer rows.
    """

    step: EliminationStep
    shape: tuple[int, ...]
    picks: Ints


@dataclass(frozen=True, slots=True)
class Eliminated:
    """The frontier of a network.

    Attributes:
        costs: (K, d).
        records: Of all steps, the last of which made the frontier.
        dropped: Rows that the limit `Pruning.rows` has cost.
    """

    costs: Floats
    records: tuple[EliminationRecord, ...]
    dropped: int

    def choices(self) -> dict[str, Ints]:
        """The strategies of all rows: the choices (K,) of each node that is in a scope."""
        rows = {self.records[-1].step.result: np.arange(len(self.costs))}
        chosen: dict[str, Ints] = {}
        # In reverse: the scope's choices select the cell in which this step's picks stand.
        for record in reversed(self.records):
            step = record.step
            cell = tuple(chosen[name] for name in step.scope)
            picks = record.picks[(*cell, rows[step.result])]
            choice, *parts = np.unravel_index(picks, record.shape)
            if step.node is not None:
                chosen[step.node] = choice
            rows.update(zip(step.inputs, parts, strict=True))
        return chosen


def eliminate(
    network: CostTables, order: EliminationOrder, pruning: Pruning | None = None
) -> Eliminated:
    """The frontier of all strategies that pruning leaves."""
    work = _Elimination(network, order, pruning or Pruning())
    for step in order.steps:
        work.carry_out(step)
    return work.finish()


class _Elimination:
    def __init__(self, network: CostTables, order: EliminationOrder, pruning: Pruning) -> None:
        self.sizes = network.sizes
        self.pruning = pruning
        self.tables = dict(enumerate(network.tables))
        self.scopes = dict(enumerate(network.scopes))
        self.extra = len(network.tables) + len(order.steps)
        self.records: list[EliminationRecord] = []
        self.dropped = 0

    def carry_out(self, step: EliminationStep) -> None:
        """One step; more than two inputs of several rows are first summed in pairs."""
        # The product of more than two long fronts would not fit into memory.
        inputs = sorted(step.inputs, key=lambda n: (self.tables[n].shape[-1], self.tables[n].size))
        while len(inputs) > 2 and self.tables[inputs[-3]].shape[-1] > 1:
            first, second = inputs.pop(-3), inputs.pop(-2)
            union = dict.fromkeys((*self.scopes[first], *self.scopes[second]))
            # Bounds of the rest exist only for the results of the order's own steps.
            self._make(
                EliminationStep(None, (first, second), self.extra, tuple(union)), bounded=False
            )
            inputs.append(self.extra)
            self.extra += 1
        self._make(EliminationStep(step.node, tuple(inputs), step.result, step.scope), bounded=True)

    def finish(self) -> Eliminated:
        """The sum of the tables that are left: independent parts of the graph."""
        left = sorted(self.tables, key=lambda n: (self.tables[n].shape[-1], n))
        while len(left) > 1:
            self._make(EliminationStep(None, (left[0], left[1]), self.extra, ()), bounded=False)
            left = [*left[2:], self.extra]
            self.extra += 1
        # `Eliminated.choices` starts from the last record, so the last table needs one.
        if not self.records or self.records[-1].step.result != left[0]:
            self._make(EliminationStep(None, (left[0],), self.extra, ()), bounded=False)
            left = [self.extra]
        costs = self.tables[left[0]].T
        found = np.isfinite(costs).all(axis=1)
        return Eliminated(costs[found], tuple(self.records), self.dropped)

    def _make(self, step: EliminationStep, *, bounded: bool) -> None:
        given = [(self.tables[number], self.scopes[number]) for number in step.inputs]
        size = 1 if step.node is None else self.sizes[step.node]
        shape = (size, *(table.shape[-1] for table, _ in given))
        bounds = self.pruning.bounds if bounded else None
        rest = None if bounds is None else bounds.outside[step.result]
        cells = tuple(self.sizes[name] for name in step.scope)
        made: list[tuple[Floats, Ints]] = []
        for part in self._parts(cells, shape):
            costs = _candidates(given, step, part)
            made.append(self._front(costs, rest[part] if cells and rest is not None else rest))
        costs, picks = concatenate_fronts([c for c, _ in made], [p for _, p in made])
        self.tables[step.result] = costs.reshape(len(costs), *cells, -1)
        self.scopes[step.result] = step.scope
        self.records.append(EliminationRecord(step, shape, picks.reshape(*cells, -1)))
        for number in step.inputs:
            del self.tables[number], self.scopes[number]

    def _parts(self, cells: tuple[int, ...], shape: tuple[int, ...]) -> list[slice]:
        """Ranges of the first axis, such that the candidates of one fit into memory."""
        if not cells:
            return [slice(None)]
        size = max(1, _CANDIDATES // (prod(cells[1:]) * prod(shape)))
        return [slice(start, start + size) for start in range(0, cells[0], size)]

    def _front(self, costs: Floats, rest: Floats | None) -> tuple[Floats, Ints]:
        """Reduced, tested against the bounds and cut to the most rows; costs (d, R, n)."""
        costs, picks = reduce_rows(costs)
        if rest is not None and self.pruning.gaps is not None:
            alive = self._open(costs, rest.reshape(-1, rest.shape[-1]))
            kept = kept_positions(alive & (picks >= 0))
            costs, picks = take(costs, kept), np.take_along_axis(pad_fronts(picks), kept, axis=1)
        if self.pruning.rows is not None:
            before = int((picks >= 0).sum())
            costs, picks = spread(costs, picks, self.pruning.rows)
            self.dropped += before - int((picks >= 0).sum())
        return costs, picks

    def _open(self, costs: Floats, rest: Floats) -> Bools:
        """Which rows (R, K) may be completed in a gap; rest is (R, J)."""
        bounds, gaps = self.pruning.bounds, self.pruning.gaps
        assert bounds is not None
        assert gaps is not None
        alive: Bools = np.isfinite(costs[0])
        cell, row = np.nonzero(alive)
        alive[cell, row] = gaps.let_pass(costs[:, cell, row].T @ bounds.weights.T + rest[cell])
        return alive


def _candidates(
    given: Sequence[tuple[Floats, tuple[str, ...]]], step: EliminationStep, part: slice
) -> Floats:
    """Sums of a row of each table for each choice of the node, (d, R, n)."""
    # The node's axis stands last, before the rows: the place of a candidate then is (choice, row of
    # each input), as `EliminationRecord.shape` unravels it.
    axes = step.scope if step.node is None else (*step.scope, step.node)
    total: Floats | None = None
    for table, scope in given:
        aligned = align(table, scope, axes)
        if step.scope and aligned.shape[1] > 1:
            aligned = aligned[:, part]
        if total is None:
            total = aligned
        else:
            summed = total[..., :, None] + aligned[..., None, :]
            total = summed.reshape(*summed.shape[:-2], -1)
    assert total is not None
    cells = prod(total.shape[1 : 1 + len(step.scope)])
    return total.reshape(len(total), cells, -1)
