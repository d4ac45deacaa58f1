"""The recipe and the cluster of a plan: what the command line says, else what the plan's file says.

`headway plan --out` and `--plan auto` write them beside the prediction, so that `headway explain
plan.json` and `headway simulate plan.json` need nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from headway.cli.console import note, warn
from headway.cluster import Cluster, find_cluster
from headway.errors import UsageError
from headway.plan import Plan
from headway.plan.prediction import Asked
from headway.planner.predicted import hash_of


@dataclass(frozen=True)
class Subject:
    """What a plan is priced for.

    Attributes:
        recipe: As for `headway train`.
        cluster: Found.
    """

    recipe: str
    cluster: Cluster


def with_asked(plan: Plan, recipe: str, cluster: str, nodes: int | None, out: Path) -> Plan:
    """The plan, which says what was asked.

    Args:
        plan: With a prediction, or it stays as it is.
        recipe: As on the command line; so are `cluster` and `nodes`.
        out: Where it will be written.
    """
    if plan.prediction is None:
        return plan
    asked = Asked(
        recipe=_from(recipe, out.parent), cluster=_from(cluster, out.parent), nodes=nodes or 0
    )
    return replace(plan, prediction=replace(plan.prediction, asked=asked))


def subject_of(
    file: Path | None, plan: Plan | None, recipe: str | None, cluster: str | None, nodes: int | None
) -> Subject | None:
    """What is said, and what is not said as the plan's file has it; None: nothing says anything.

    Args:
        file: Of the plan; None: there is no plan.
        plan: Loaded from there.
        recipe: As on the command line; so are `cluster` and `nodes`.

    Raises:
        UsageError: One of the two is nowhere said; or there is no such preset.
        DocumentError: The cluster's file has problems.
    """
    prediction = None if plan is None else plan.prediction
    asked = None if prediction is None else prediction.asked
    kept = cluster is None and asked is not None
    if file is not None and asked is not None:
        taken = []
        if recipe is None:
            recipe = _at(asked.recipe, file.parent)
            taken.append(f"--recipe {recipe}")
        if cluster is None:
            cluster = _at(asked.cluster, file.parent)
            nodes = nodes or asked.nodes or None
            taken.append(f"--cluster {cluster}" + (f" --nodes {nodes}" if nodes else ""))
        if taken:
            note(f"as the plan says: {' '.join(taken)}")
    if recipe is None and cluster is None:
        return None
    if recipe is None or cluster is None:
        raise without_subject("--cluster" if recipe else "--recipe")
    found = find_cluster(cluster, nodes=nodes)
    if kept and prediction is not None and prediction.cluster not in ("", hash_of(found)):
        warn(f"{cluster} is not what it was when the plan was made; its numbers count as they are")
    return Subject(recipe, found)


def without_subject(lacking: str) -> UsageError:
    """The error that names which of the two options is missing."""
    return UsageError(
        f"without {lacking} a plan has no price",
        fix="Give both: --recipe RECIPE --cluster FILE|PRESET.",
    )


def _from(said: str, folder: Path) -> str:
    """A file's path as it is from a folder; another word as it is."""
    if not Path(said).is_file():
        return said
    return Path(os.path.relpath(said, folder)).as_posix()


def _at(said: str, folder: Path) -> str:
    """The file of `_from`, seen from here."""
    path = folder / said
    return os.path.normpath(path) if path.is_file() else said
