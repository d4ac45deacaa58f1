"""Recipes, clusters and plans in the forms in which a user has them at hand.

`headway plan --out` and `headway train --plan auto` record recipe and cluster beside a plan's
prediction, so that `explain` and `simulate` need no further option; paths are stored relative to
the plan's file.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from headway.cluster import Cluster, find_cluster
from headway.errors import RecipeError, UsageError
from headway.keywords import users_line
from headway.planner.export.prediction import hash_of
from headway.plans import Plan
from headway.plans.prediction import PlanProvenance

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe

_LOG = logging.getLogger("headway")

RecipeInput: TypeAlias = "Recipe | str | Path"
"""A `Recipe`, "module:function", the path of a recipe.toml, or a bundled workload's name."""
ClusterInput: TypeAlias = Cluster | str | Path
"""A `Cluster`, the path of a cluster.toml, or a preset such as "dgx-a100"."""
PlanInput: TypeAlias = Plan | str | Path
"""A `Plan`, or the path of a plan.json."""


def recipe_reference(recipe: RecipeInput) -> Recipe | str:
    """As `load_recipe` takes it.

    Raises:
        RecipeError: It is something else: a function, a model.
    """
    if not isinstance(recipe, str | Path) and not hasattr(recipe, "tokens_per_sample"):
        name = getattr(recipe, "__name__", "")
        written = f"{name}()" if name.isidentifier() else 'headway.Recipe(...) or "module:function"'
        raise RecipeError(
            f"{name or f'a {type(recipe).__name__}'} is not a recipe: write {written}",
            where=users_line(),
        )
    return str(recipe) if isinstance(recipe, Path) else recipe


def recipe_name(recipe: RecipeInput) -> str:
    """For people: the reference, or the name of an object."""
    return str(recipe) if isinstance(recipe, str | Path) else recipe.name


def resolve_plan(plan: PlanInput) -> Plan:
    """The plan, read where it is a file.

    Raises:
        DocumentError: The file has problems; all are listed.
        PlanError: There cannot be such a plan.
    """
    return plan if isinstance(plan, Plan) else Plan.load(Path(plan))


def resolve_cluster(cluster: ClusterInput, nodes: int | None = None) -> Cluster:
    """The cluster that an argument means.

    Raises:
        UsageError: No such preset; or `nodes` beside what says that itself.
        DocumentError: The file has problems; all are listed.
    """
    if not isinstance(cluster, Cluster):
        return find_cluster(str(cluster), nodes=nodes)
    if nodes is not None:
        raise UsageError(
            f"nodes={nodes} is for presets; a Cluster says itself how many nodes there are",
            fix="Leave nodes out.",
        )
    return cluster


def sendable_recipe(recipe: RecipeInput, overrides: Sequence[str]) -> Recipe | str:
    """A recipe as it is sent to worker processes; overrides of an object are laid over it here.

    Raises:
        RecipeError: The object holds what no other process can have.
        DocumentError: The overrides have problems.
    """
    recipe = recipe_reference(recipe)
    if isinstance(recipe, str):
        return recipe
    from headway.run.recipe.factory import override_recipe  # torch is there: the object needs it
    from headway.run.recipe.sent_recipe import send_recipe

    recipe = override_recipe(recipe, overrides)
    send_recipe(recipe)  # to find the problem before workers are started
    return recipe


@dataclass(frozen=True)
class PricingTarget:
    """What a plan is priced for."""

    recipe: Recipe | str
    cluster: Cluster


def record_provenance(
    plan: Plan,
    recipe: RecipeInput,
    cluster: ClusterInput,
    nodes: int | None,
    out: Path,
) -> Plan:
    """The plan, which says what it was made for; objects have no name that a file could hold.

    Args:
        plan: With a prediction, or it stays as it is.
        out: The file that the plan is for: paths are relative to its folder.
    """
    named = isinstance(recipe, str | Path) and isinstance(cluster, str | Path)
    if plan.prediction is None or not named:
        return plan
    asked = PlanProvenance(
        recipe=_relative_path(str(recipe), out.parent),
        cluster=_relative_path(str(cluster), out.parent),
        nodes=nodes or 0,
    )
    return replace(plan, prediction=replace(plan.prediction, asked=asked))


def pricing_target(
    file: Path | None,
    plan: Plan | None,
    recipe: RecipeInput | None,
    cluster: ClusterInput | None,
    nodes: int | None,
) -> PricingTarget | None:
    """What is said, and what is not said as the plan has it; None: nothing says anything.

    Args:
        file: Of the plan; None: it has none, and its paths are those from here.

    Raises:
        UsageError: One of the two is nowhere said; or there is no such preset.
        DocumentError: The cluster's file has problems.
    """
    prediction = None if plan is None else plan.prediction
    asked = None if prediction is None else prediction.asked
    # Only a recorded cluster may have changed without the user's knowing.
    kept = cluster is None and asked is not None
    if asked is not None:
        folder = Path() if file is None else file.parent
        taken = []
        if recipe is None:
            recipe = _resolved_path(asked.recipe, folder)
            taken.append(f"--recipe {recipe}")
        if cluster is None:
            cluster = _resolved_path(asked.cluster, folder)
            # A plan's file has 0 where no number was given.
            nodes = nodes or asked.nodes or None
            taken.append(f"--cluster {cluster}" + (f" --nodes {nodes}" if nodes else ""))
        if taken:
            _LOG.info("recorded in the plan: %s", " ".join(taken))
    if recipe is None and cluster is None:
        return None
    if recipe is None or cluster is None:
        raise missing_option_error("--cluster" if recipe is not None else "--recipe")
    found = resolve_cluster(cluster, nodes)
    if kept and prediction is not None and prediction.cluster not in ("", hash_of(found)):
        warnings.warn(
            f"{cluster} has changed since the plan was made; its present numbers are used",
            stacklevel=2,
        )
    return PricingTarget(recipe_reference(recipe), found)


def missing_option_error(lacking: str) -> UsageError:
    """The error that names which of the two options is missing."""
    return UsageError(
        f"without {lacking} a plan cannot be priced",
        fix="Give both: --recipe RECIPE --cluster FILE|PRESET.",
    )


def _relative_path(said: str, folder: Path) -> str:
    """A file's path as it is from a folder; another word as it is."""
    if not os.path.isfile(said):
        return said
    # With slashes, so that the file means the same on every system.
    return Path(os.path.relpath(said, folder)).as_posix()


def _resolved_path(said: str, folder: Path) -> str:
    """The file of `_relative_path`, seen from here."""
    path = folder / said
    return os.path.normpath(path) if os.path.isfile(path) else said
