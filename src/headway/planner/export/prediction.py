"""The search's prediction of a point, in the form in which a plan's file carries it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headway.cluster import Cluster, to_toml
from headway.planner.explain.step_parts import step_parts
from headway.planner.search.plan_point import Point, format_device_runs
from headway.planner.search.request import PlanRequest
from headway.plans import Plan
from headway.plans.prediction import Prediction


def with_prediction(plan: Plan, question: PlanRequest, point: Point, cluster: Cluster) -> Plan:
    """The plan of a point, with what is expected of it.

    Args:
        question: That the point answers, or that prices it.
        cluster: That the question's machine was made of.
    """
    # While it fills and drains, a pipeline shows a message at each border in both directions.
    edges = 2 * (len(point.stages) - 1)
    expected = prediction_of(
        cluster,
        seconds=point.seconds,
        parts={part.name: part.seconds for part in step_parts(question, point)},
        stages=tuple(stage.seconds for stage in point.stages),
        message=point.messages / edges if edges else 0.0,
        bytes=point.bytes,
        device=format_device_runs(point.rank_kinds) or question.machine.device.name,
    )
    return replace(plan, prediction=expected)


def prediction_of(cluster: Cluster, **known: Any) -> Prediction:
    """A prediction for a cluster by this version of headway.

    Args:
        known: Its other fields.
    """
    return Prediction(cluster=hash_of(cluster), version=_version(), **known)


def hash_of(cluster: Cluster) -> str:
    """Twelve hexadecimal digits that name a cluster's numbers."""
    return hashlib.sha256(to_toml(cluster).encode()).hexdigest()[:12]


def _version() -> str:
    try:
        return version("headway")
    except PackageNotFoundError:
        return ""
