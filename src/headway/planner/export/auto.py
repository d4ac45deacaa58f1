"""The plan that `headway train --plan auto` takes: the fastest one that the executor can run.

The search is the ordinary one over fewer combinations: those that the executor can run and the
recipe leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.cluster import Cluster
from headway.errors import NothingFits
from headway.planner.estimate.degrees import Degrees
from headway.planner.explain.infeasible import infeasible_error
from headway.planner.export.prediction import with_prediction
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult
from headway.planner.search.plan_conversion import missing_in_executor, to_plan
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest, restrict_to_executor
from headway.plans import Plan
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES

MOST = 64
"""Combinations among which the next best is looked for."""


@dataclass(frozen=True, kw_only=True)
class RecipeLimits:
    """What a recipe has decided already.

    Attributes:
        microbatch: Most samples of one forward pass; None: as many as fit.
        pipeline: Whether the model may be cut into stages.
    """

    microbatch: int | None = None
    pipeline: bool = True

    def allow(self, degrees: Degrees) -> bool:
        if self.microbatch is not None and degrees.microbatch > self.microbatch:
            return False
        return self.pipeline or degrees.pipeline == 1


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """What was chosen.

    Attributes:
        plan: The same for the executor, with its prediction.
        others: The fastest of other degrees, the next best first.
    """

    outcome: SearchResult
    point: Point
    plan: Plan
    others: tuple[Point, ...]


def find_auto_plan(question: PlanRequest, limits: RecipeLimits, cluster: Cluster) -> AutoPlan:
    """The fastest plan for one number of devices.

    Args:
        question: With the numbers of the cluster; axes and objective are set here.

    Raises:
        NothingFits: With what would do.
    """
    question = restrict_to_executor(
        replace(question, schedules=RUNNABLE_SCHEDULES, objective="fastest")
    )
    try:
        outcome = PlanSearch(question, limits.allow).run()
    except NothingFits:
        raise infeasible_error(question) from None
    point = outcome.best
    plan = with_prediction(to_plan(outcome, point), question, point, cluster)
    return AutoPlan(
        outcome=outcome, point=point, plan=plan, others=tuple(_others(outcome.search, point))
    )


def _others(engine: PlanSearch, chosen: Point) -> Iterator[Point]:
    """Of each other way to share the ranks the fastest, and of the chosen way the next best."""
    best: dict[tuple[int, int, str], Point] = {}
    for combination, _ in zip(engine.combinations(), range(MOST), strict=False):
        degrees = combination.degrees
        if degrees == chosen.degrees:
            continue
        point = engine.candidate(degrees).fastest(engine.question.cap)
        # Only what could run instead is an alternative.
        if point is None or missing_in_executor(engine, point):
            continue
        key = (degrees.data, degrees.pipeline, degrees.schedule)
        if key not in best or point.seconds < best[key].seconds:
            best[key] = point
    yield from sorted(best.values(), key=lambda point: point.seconds)
