"""`headway plan show | check | diff`, and the recipe and cluster a plan file records.

`headway plan --out` and `headway train --plan auto` record recipe and cluster beside the
prediction, so that `headway explain plan.json` and `headway simulate plan.json` need no further
option. Paths are stored relative to the plan file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from headway.cli.terminal.console import note, say, say_json, warn
from headway.cluster import Cluster, find_cluster
from headway.errors import HeadwayError, PlanError, UsageError
from headway.plan import Plan, explain, plan_difference
from headway.plan.prediction import PlanProvenance
from headway.planner.export.prediction import hash_of


def show(file: Path, /, *, json: bool = False) -> None:
    """A plan in words: ranks, batch, arithmetic, exchange.

    Args:
        json: Print the plan as JSON, with every default and its hash.
    """
    plan = Plan.load(file)
    if json:
        say_json({"hash": plan.hash, "plan": plan.to_dict()})
    else:
        say(explain(plan))


def check(file: Path, /, *more: Path, json: bool = False) -> int:
    """Say whether plans can exist; all reasons against each of them are listed.

    Returns:
        0 where all are legal, else the exit code of the first that is not.
    """
    verdicts: dict[str, HeadwayError | Plan] = {}
    for path in (file, *more):
        try:
            verdicts[str(path)] = Plan.load(path)
        except HeadwayError as error:
            verdicts[str(path)] = error
    if json:
        say_json([_facts(name, verdict) for name, verdict in verdicts.items()])
    else:
        say("\n".join(_line(name, verdict) for name, verdict in verdicts.items()))
    return next((v.exit_code for v in verdicts.values() if isinstance(v, HeadwayError)), 0)


def diff(old: Path, new: Path, /, *, json: bool = False) -> int:
    """What differs between two plans, one value a line.

    Returns:
        0 for equal plans, 1 otherwise, as `diff` does.
    """
    lines = plan_difference(Plan.load(old), Plan.load(new))
    if json:
        say_json({"equal": not lines, "differences": lines})
    else:
        say("\n".join(lines) if lines else "the plans are equal")
    return 1 if lines else 0


def _line(file: str, verdict: HeadwayError | Plan) -> str:
    if isinstance(verdict, Plan):
        return f"{file}: legal; plan {verdict.hash}, {verdict.ranks} ranks"
    problems = verdict.problems if isinstance(verdict, PlanError) else [verdict.why]
    return "\n  ".join([f"{file}: {verdict.what}", *problems])


def _facts(file: str, verdict: HeadwayError | Plan) -> dict[str, object]:
    if isinstance(verdict, Plan):
        return {"file": file, "legal": True, "hash": verdict.hash}
    problems = list(getattr(verdict, "problems", [verdict.why]))
    return {"file": file, "legal": False, "code": verdict.code, "problems": problems}


# The recipe and the cluster of a plan: what the command line says, else what the plan's file
# says.


@dataclass(frozen=True)
class PricingTarget:
    """What a plan is priced for.

    Attributes:
        recipe: As for `headway train`.
    """

    recipe: str
    cluster: Cluster


def record_provenance(plan: Plan, recipe: str, cluster: str, nodes: int | None, out: Path) -> Plan:
    """The plan, which says what was asked.

    Args:
        plan: With a prediction, or it stays as it is.
        recipe: As on the command line; so are `cluster` and `nodes`.
    """
    if plan.prediction is None:
        return plan
    asked = PlanProvenance(
        recipe=_relative_path(recipe, out.parent),
        cluster=_relative_path(cluster, out.parent),
        nodes=nodes or 0,
    )
    return replace(plan, prediction=replace(plan.prediction, asked=asked))


def pricing_target(
    file: Path | None, plan: Plan | None, recipe: str | None, cluster: str | None, nodes: int | None
) -> PricingTarget | None:
    """What is said, and what is not said as the plan's file has it; None: nothing says anything.

    Args:
        file: Of the plan; None: there is no plan.
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
            recipe = _resolved_path(asked.recipe, file.parent)
            taken.append(f"--recipe {recipe}")
        if cluster is None:
            cluster = _resolved_path(asked.cluster, file.parent)
            nodes = nodes or asked.nodes or None
            taken.append(f"--cluster {cluster}" + (f" --nodes {nodes}" if nodes else ""))
        if taken:
            note(f"as the plan says: {' '.join(taken)}")
    if recipe is None and cluster is None:
        return None
    if recipe is None or cluster is None:
        raise missing_option_error("--cluster" if recipe else "--recipe")
    found = find_cluster(cluster, nodes=nodes)
    if kept and prediction is not None and prediction.cluster not in ("", hash_of(found)):
        warn(f"{cluster} is not what it was when the plan was made; its numbers count as they are")
    return PricingTarget(recipe, found)


def missing_option_error(lacking: str) -> UsageError:
    """The error that names which of the two options is missing."""
    return UsageError(
        f"without {lacking} a plan has no price",
        fix="Give both: --recipe RECIPE --cluster FILE|PRESET.",
    )


def _relative_path(said: str, folder: Path) -> str:
    """A file's path as it is from a folder; another word as it is."""
    if not Path(said).is_file():
        return said
    return Path(os.path.relpath(said, folder)).as_posix()


def _resolved_path(said: str, folder: Path) -> str:
    """The file of `_relative_path`, seen from here."""
    path = folder / said
    return os.path.normpath(path) if path.is_file() else said
