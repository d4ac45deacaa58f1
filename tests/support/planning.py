"""Answers of the search in the form in which `headway.plan` gives them."""

from __future__ import annotations

from headway.api.plan_request import TrainingLength
from headway.api.planning import PlanningResult
from headway.cluster.presets import of_preset
from headway.planner.search.branch_and_bound import SearchResult


def planning_result(outcome: SearchResult) -> PlanningResult:
    """An answer without prices, as if asked by names."""
    return PlanningResult(
        recipe="r",
        cluster=of_preset("cpu"),
        cluster_input="c",
        nodes=None,
        outcome=outcome,
        currency="",
        length=TrainingLength(),
        capture_seconds=0.0,
        search_seconds=0.0,
    )
