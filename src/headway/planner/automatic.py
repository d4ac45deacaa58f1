"""The plan that `headway train --plan auto` takes: the fastest that today's executor can run.

The search is that of `search`, over fewer combinations. Invariant: the chosen point has a `Plan`,
and no other point that the search opened and the executor can run is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.cluster import Cluster
from headway.errors import NothingFits
from headway.plan import Plan
from headway.planner.candidate import Point
from headway.planner.degrees import Degrees
from headway.planner.planned import candidate_of
from headway.planner.predicted import with_prediction
from headway.planner.refusal import refusal
from headway.planner.runnable import RUNS, missing, runnable, to_plan
from headway.planner.search import Outcome, Question, Search

MOST = 64
"""Combinations among which the next best is looked for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
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


class Today(Search):
    """A search among what the executor can run and the recipe leaves open."""

    def __init__(self, question: Question, limits: Limits) -> None:
        super().__init__(question)
        self.limits = limits

    def combinations(self) -> Iterator[Degrees]:
        return filter(self.limits.allow, super().combinations())


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was chosen.

    Attributes:
        outcome: Of the search.
        point: The chosen one.
        plan: The same for the executor, with its prediction.
        others: The fastest of other degrees, the next best first.
    """

    outcome: Outcome
    point: Point
    plan: Plan
    others: tuple[Point, ...]


def decide(question: Question, limits: Limits, cluster: Cluster) -> Decision:
    """The fastest plan for one number of devices.

    Args:
        question: With the numbers of the cluster; axes and objective are set here.
        limits: Of the recipe.
        cluster: For the prediction's hash.

    Raises:
        NothingFits: With what would do.
    """
    question = runnable(replace(question, schedules=RUNS, objective="fastest"))
    try:
        outcome = Today(question, limits).run()
    except NothingFits:
        raise refusal(question) from None
    point = outcome.best
    plan = with_prediction(to_plan(outcome, point), question, point, cluster)
    return Decision(
        outcome=outcome, point=point, plan=plan, others=tuple(_others(outcome.search, point))
    )


def _others(engine: Search, chosen: Point) -> Iterator[Point]:
    """Of each other way to share the ranks the fastest, and of the chosen way the next best."""
    best: dict[tuple[int, int, str], Point] = {}
    for degrees, _ in zip(engine.combinations(), range(MOST), strict=False):
        if degrees == chosen.degrees:
            continue
        point = candidate_of(engine, degrees).fastest(engine.question.cap)
        if point is None or missing(point):
            continue
        key = (degrees.data, degrees.pipeline, degrees.schedule)
        if key not in best or point.seconds < best[key].seconds:
            best[key] = point
    yield from sorted(best.values(), key=lambda point: point.seconds)
