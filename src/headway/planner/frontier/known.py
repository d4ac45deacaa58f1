"""The best strategies found so far.

Invariant: none of them is dominated by another or above a cap; costs are those that `evaluate`
gives, summed in the same order for all, so that the same strategy has the same cost to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headway.planner.frontier.front import reduce
from headway.planner.frontier.gaps import corners_of, cut
from headway.planner.frontier.problem import ChoiceGraph
from headway.planner.frontier.rows import Bools, Floats, Ints

_TOLERANCE = 1e-12
_CAP_MARGIN = 1e-9
_FOR_CORNERS = 64


class Known:
    """Strategies of one graph within caps.

    Args:
        graph: Costs.
        caps: (d,), infinite where there is none.
    """

    def __init__(self, graph: ChoiceGraph, caps: Floats) -> None:
        self.graph = graph
        self.caps = caps
        tables = (*graph.nodes.values(), *graph.edges.values())
        self.ends = 1.0 + np.sum([_most(costs) for costs in tables], axis=0)
        self.costs: Floats = np.zeros((0, len(graph.objectives)))
        self.strategies: dict[str, Ints] = {
            name: np.zeros(0, dtype=np.int64) for name in graph.nodes
        }

    def add(self, strategies: Mapping[str, Ints]) -> None:
        """Takes those that are allowed and not dominated; earlier ones stay where equal."""
        costs = self.evaluate(strategies)
        allowed = (costs <= self.caps * (1 + _TOLERANCE)).all(axis=1)
        allowed &= np.isfinite(costs).all(axis=1)
        front = reduce(np.concatenate([self.costs, costs[allowed]]))
        rows = front.origins[:, 0]
        self.costs = front.costs
        for name, before in self.strategies.items():
            self.strategies[name] = np.concatenate([before, strategies[name][allowed]])[rows]

    def evaluate(self, strategies: Mapping[str, Ints]) -> Floats:
        """Costs (n, d) of n strategies."""
        total: Floats = np.zeros((1, len(self.graph.objectives)))
        for name, costs in self.graph.nodes.items():
            total = total + costs[strategies[name]]
        for (source, target), costs in self.graph.edges.items():
            total = total + costs[strategies[source], strategies[target]]
        return total

    def points(self, epsilon: float = 0.0) -> Floats:
        """Their costs, divided by 1 + epsilon."""
        scaled: Floats = self.costs / (1 + epsilon)
        return scaled

    def corners(self, epsilon: float = 0.0) -> Floats:
        """Corners (m, d) of what is not within 1 + epsilon of one of them."""
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
    """Not too many: without the others the corners are higher, which is safe."""
    kept = np.linspace(0, len(points) - 1, min(_FOR_CORNERS, len(points))).round()
    return points[kept.astype(np.int64)]


def _most(costs: Floats) -> Floats:
    """The largest finite cost (d,) of each objective."""
    flat = costs.reshape(-1, costs.shape[-1])
    most: Floats = np.where(np.isfinite(flat), flat, 0.0).max(axis=0)
    return most
