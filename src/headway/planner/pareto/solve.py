"""Solves a graph of choices for its Pareto front, exactly or within a proven factor.

The result holds, for every strategy within the caps, one that costs at most `factor` times as much
in every objective; with `exact` it is the Pareto front itself. Three passes over one elimination
order: least weighted costs, which find the lower hull and bound every partial strategy; a quick
pass with few rows, which finds strategies in between; and the pass that counts, pruned by both. The
problem and its eliminations are those of Cai et al. 2022 (TensorOpt); the pruning is headway's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.documents import nearest
from headway.errors import PlanError
from headway.planner.pareto.choice_graph import (
    BUDGET,
    ChoiceGraph,
    CostTables,
    Elimination,
    EliminationOrder,
    all_choices,
    make_cost_tables,
    order_eliminations,
)
from headway.planner.pareto.elimination import (
    Hubs,
    Incumbents,
    OpenCorners,
    Pruning,
    WeightedBounds,
    all_cases,
    certified_factor,
    eliminate,
    find_hubs,
    find_open_corners,
    find_weighted_bounds,
    join_bounds,
    likely_cases,
    neighbour_weightings,
    weight_grid,
)
from headway.planner.pareto.front import Floats, Ints

_GRID = {1: 1, 2: 7}
_GRID_OF_MORE = 4
_ROUNDS = 10
_WEIGHTS = 512
_LARGE = 16
_QUICK_ROWS = (16, 64, 256)
_PARTS = 12


@dataclass(frozen=True, slots=True)
class Solution:
    """A frontier, and how good it is.

    Attributes:
        costs: (K, d), in lexicographic order.
        strategies: For each node its choice in each of the K strategies, (K,).
        exact: It is the Pareto front itself.
        factor: No strategy within the caps is better in all objectives by more than this factor.
        log: Eliminations, by rule; those of nodes that were given their choice come first.
    """

    costs: Floats
    strategies: Mapping[str, Ints]
    exact: bool
    factor: float
    log: tuple[Elimination, ...]

    def __len__(self) -> int:
        return len(self.costs)

    def choices(self, row: int) -> dict[str, int]:
        """The strategy of a row."""
        return {name: int(choices[row]) for name, choices in self.strategies.items()}


def solve(
    problem: ChoiceGraph,
    *,
    cap: Mapping[str, float] | None = None,
    epsilon: float = 0.0,
    budget: int = BUDGET,
    rows: int | None = None,
) -> Solution:
    """The frontier of all strategies.

    Args:
        cap: Most of some objectives; strategies above are not looked at.
        epsilon: Strategies may be left out that are at most 1 + epsilon better than a kept one.
        budget: Most cells in one elimination: choices of the node times those of its neighbours.
            A graph that needs more is solved for given choices of its most entangled nodes.
        rows: Most rows that a cell of a table may hold. Of a large graph with two objectives only
            strategies of the lower hull are sought, until there are this many or all gaps are
            within epsilon. What is lost is in `factor`.

    Raises:
        PlanError: No strategy is allowed, or none within the caps.
        ValueError: A cap names no objective, or epsilon or rows make no sense.
    """
    if epsilon < 0 or (rows is not None and rows < 2):
        raise ValueError(f"epsilon {epsilon} and rows {rows} must be at least 0 and 2")
    known = Incumbents(problem, _caps(problem, cap or {}))
    kept = all_choices(problem)
    network = make_cost_tables(problem, kept)
    hubs = find_hubs(network, budget)
    cases = all_cases(network, hubs)
    complete = cases is not None
    search = _FrontierSolver(problem, known, epsilon, budget, rows)
    for case in cases or _likely(network, hubs):
        search.run({**kept, **{hub: kept[hub][[choice]] for hub, choice in case.items()}})
    if not len(known.costs):
        raise _infeasible(network, hubs, known)
    whole = complete and search.dropped == 0
    factor = 1.0 if whole else np.inf
    if epsilon or not whole:
        # The first factor holds by construction, the second is proved by bounds: both are valid.
        factor = min(factor + epsilon, _certify(network, hubs, known))
    return Solution(known.costs, known.strategies, whole and not epsilon, factor, hubs.log)


class _FrontierSolver:
    """Searches of one problem under several given choices, which share what they find."""

    def __init__(
        self, problem: ChoiceGraph, known: Incumbents, epsilon: float, budget: int, rows: int | None
    ) -> None:
        self.problem = problem
        self.known = known
        self.epsilon = epsilon
        self.budget = budget
        self.rows = rows
        self.dropped = 0

    def run(self, kept: Mapping[str, Ints]) -> None:
        """Adds all strategies with these choices that belong to the frontier."""
        network, order = self._network(kept)
        hull, gaps = self._hull(network, order)
        # What lies off the hull of a large graph is counted as dropped, not sought.
        if self._hull_only(network):
            self.dropped += len(gaps.corners)
            return
        if not len(gaps.corners):
            return
        # A whole sweep takes twice as long, so only for weightings that some gap needs.
        used = np.unique(gaps.tight)
        bounds = find_weighted_bounds(network, order, hull.weights[used])
        parts = min(_PARTS, len(gaps.corners)) if len(network.sizes) >= _LARGE else 1
        # A choice that cannot reach this part of the gaps is left out, though another part may need
        # it.
        for corners in np.array_split(gaps.corners, parts):
            chosen = find_open_corners(bounds, corners)
            fewer = dict(kept)
            for name, least in bounds.marginals.items():
                fewer[name] = kept[name][chosen.let_pass(least)]
            if all(len(choices) for choices in fewer.values()):
                self._close(fewer, hull, used[np.unique(chosen.tight)], corners)

    def _close(
        self, kept: Mapping[str, Ints], hull: WeightedBounds, used: Ints, corners: Floats
    ) -> None:
        """Adds what lies below these corners: first quickly what closes most, then what is left."""
        network, order = self._network(kept)
        bounds = find_weighted_bounds(network, order, hull.weights[used])
        dropped = 0
        large = len(network.sizes) >= _LARGE
        quick = [rows for rows in _QUICK_ROWS if large and rows < (self.rows or np.inf)]
        for rows in (*quick, self.rows):
            gaps = find_open_corners(hull, self.known.cut(corners, self.epsilon), used)
            dropped = 0
            if len(gaps.corners):
                found = eliminate(network, order, Pruning(rows, bounds, gaps))
                self.known.add(network.chosen(found.choices(), len(found.costs)))
                dropped = found.dropped
            # A pass that has dropped nothing has found everything below these corners.
            if not dropped:
                break
        self.dropped += dropped

    def _hull(
        self, network: CostTables, order: EliminationOrder
    ) -> tuple[WeightedBounds, OpenCorners]:
        """Learns strategies of the lower hull, with ever more weightings where gaps are open."""
        bounds = find_weighted_bounds(network, order, _grid(network), whole=False)
        self.known.add(network.chosen(bounds.choices, len(bounds.weights)))
        gaps = self._gaps(bounds)
        for _ in range(_ROUNDS):
            more = neighbour_weightings(self.known.points(self.epsilon), gaps)
            enough = self._hull_only(network) and len(self.known.costs) >= (self.rows or 0)
            if not len(more) or len(bounds.weights) > _WEIGHTS or enough:
                break
            before = self.known.costs
            found = find_weighted_bounds(network, order, more, whole=False)
            self.known.add(network.chosen(found.choices, len(more)))
            bounds = join_bounds(bounds, found)
            gaps = self._gaps(bounds)
            # Without a new strategy the same neighbours would give the same weightings again.
            if np.array_equal(before, self.known.costs):
                break
        return bounds, gaps

    def _hull_only(self, network: CostTables) -> bool:
        """Whether the lower hull is all that is wanted; weightings find it of two objectives."""
        two = len(self.problem.objectives) == 2
        return two and self.rows is not None and len(network.sizes) >= _LARGE

    def _network(self, kept: Mapping[str, Ints]) -> tuple[CostTables, EliminationOrder]:
        network = make_cost_tables(self.problem, kept)
        return network, order_eliminations(network.scopes, network.sizes, self.budget)

    def _gaps(self, bounds: WeightedBounds) -> OpenCorners:
        return find_open_corners(bounds, self.known.corners(self.epsilon))


def _caps(problem: ChoiceGraph, cap: Mapping[str, float]) -> Floats:
    for name in cap:
        if name not in problem.objectives:
            raise ValueError(f"no objective {name!r}{nearest(name, list(problem.objectives))}")
    return np.array([cap.get(name, np.inf) for name in problem.objectives], dtype=np.float64)


def _grid(network: CostTables) -> Floats:
    """Weightings in which the objectives of an average strategy count alike."""
    means = [
        table[:, np.isfinite(table[0])].mean(axis=1)
        for table in network.tables
        if np.isfinite(table[0]).any()
    ]
    scales = np.sum(means, axis=0) if means else np.ones(len(network.tables[0]))
    return weight_grid(np.where(scales > 0, scales, 1.0), _GRID.get(len(scales), _GRID_OF_MORE))


def _likely(network: CostTables, hubs: Hubs) -> list[dict[str, int]]:
    weights = _grid(network)
    relaxed = find_weighted_bounds(network, hubs.order, weights, whole=False, hubs=hubs.nodes)
    return likely_cases(network, hubs, weights, relaxed.choices)


def _certify(network: CostTables, hubs: Hubs, known: Incumbents) -> float:
    """What the lower bounds prove about the strategies found, whatever was left out."""
    bounds = find_weighted_bounds(network, hubs.order, _grid(network), whole=False, hubs=hubs.nodes)
    gaps = find_open_corners(bounds, known.corners())
    if len(more := neighbour_weightings(known.points(), gaps)):
        found = find_weighted_bounds(network, hubs.order, more, whole=False, hubs=hubs.nodes)
        bounds = join_bounds(bounds, found)
    return certified_factor(bounds.weights, bounds.least, known.corners())


def _infeasible(network: CostTables, hubs: Hubs, known: Incumbents) -> PlanError:
    names = known.graph.objectives
    # The least cost of each objective alone tells which cap is out of reach.
    alone = np.eye(len(names))
    least = find_weighted_bounds(network, hubs.order, alone, whole=False, hubs=hubs.nodes).least
    if not np.isfinite(least).all():
        problems = ["every strategy makes a choice, or a pair of choices, that is forbidden"]
        fix = "allow more choices, or lift a forced one"
    else:
        problems = [
            f"{name}: at least {low:g}, the cap is {most:g}"
            for name, low, most in zip(names, least, known.caps, strict=True)
            if low > most
        ] or ["each cap can be met, but no strategy was found that meets all of them"]
        fix = "raise a cap, or offer choices that cost less of it"
    return PlanError("no strategy is possible", problems=problems, fix=fix)


def mini_time(
    objectives: tuple[str, ...],
    frontier: Solution,
    *,
    cap: Mapping[str, float],
) -> int:
    """The row of the fastest strategy within the caps (mini-time of Cai et al. 2022, TensorOpt).

    Raises:
        PlanError: None is within them; says how far each cap is from being met.
    """
    place = _place(objectives, "seconds")
    within = np.ones(len(frontier), dtype=np.bool_)
    for name, most in cap.items():
        within &= frontier.costs[:, _place(objectives, name)] <= most
    if not within.any():
        raise PlanError(
            "no strategy is within the caps", problems=_missing(objectives, frontier, cap)
        )
    rows = np.flatnonzero(within)
    return int(rows[frontier.costs[rows, place].argmin()])


def _place(objectives: tuple[str, ...], name: str) -> int:
    if name not in objectives:
        raise ValueError(f"no objective {name!r}{nearest(name, list(objectives))}")
    return objectives.index(name)


def _missing(
    objectives: tuple[str, ...], frontier: Solution, cap: Mapping[str, float]
) -> list[str]:
    least = frontier.costs.min(axis=0, initial=np.inf)
    lines = [
        f"{name}: at least {least[_place(objectives, name)]:g}, the cap is {most:g}"
        for name, most in cap.items()
        if least[_place(objectives, name)] > most
    ]
    return lines or ["each cap can be met, but not all of them together"]
