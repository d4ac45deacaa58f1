"""The result of a search, and which of its points are left.
Of points of which one is better in seconds, bytes, devices and whatever else counts, only that one
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from headway.planner.estimate.operators import Floats
from headway.planner.pareto.front import reduce_front

ALIKE = 1.001
"""Figures that are as near are equal: of such plans the one on fewest devices is of use."""


class PricedPlan(Protocol):
    """A plan with its price."""

    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> float: ...
    @property
    def devices(self) -> int: ...


P = TypeVar("P", bound=PricedPlan)


@dataclass(frozen=True, kw_only=True)
class ParetoResult(Generic[P]):
    """What was found.

    Attributes:
        points: The frontier over (seconds, bytes, devices), on devices of several types whose
            prices are known over money, too; fastest first.
        chosen: The number of the point that meets the objective.
        bound: What the objective's value is at least; `gap` compares it with the chosen point.
        opened: Of those, how many were priced.
    """

    points: tuple[P, ...]
    chosen: int
    bound: float
    considered: int
    opened: int

    @property
    def best(self) -> P:
        return self.points[self.chosen]

    @property
    def value(self) -> float:
        """The objective's, of the chosen point."""
        raise NotImplementedError

    @property
    def gap(self) -> float:
        """By which share the chosen point may be above the best there is."""
        return max(0.0, self.value / self.bound - 1.0) if self.bound > 0 else 0.0


def point_objectives(point: PricedPlan) -> tuple[float, ...]:
    """What a point is judged by, where devices of all types cost the same."""
    return point.seconds, point.bytes, float(point.devices)


def pareto_optimal(
    points: list[P], of: Callable[[P], tuple[float, ...]] = point_objectives
) -> tuple[list[P], Floats]:
    """Those that no other one beats; and (n, figures) of them, as `of` has them."""
    front = reduce_front(np.array([of(point) for point in points]))
    return [points[row] for row in front.origins[:, 0]], front.costs


def distinct_points(
    points: Iterable[P], of: Callable[[P], tuple[float, ...]] = point_objectives
) -> tuple[P, ...]:
    """Fastest first, without points that another one equals to a thousandth with fewer devices."""
    found, kept = sorted(points, key=of), []
    for point in found:
        near = np.array(of(point)) * ALIKE
        others = [other for other in found if other.devices < point.devices]
        if not any(np.all(np.array(of(other)) <= near) for other in others):
            kept.append(point)
    return tuple(kept)
