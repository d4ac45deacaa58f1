"""Whether the executor can cut a model as a plan that was found says.

Invariant: a plan that is said to run today names a cut that the executor has tried on the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.cli.console import note
from headway.errors import NothingFits, PlanError, RecipeError
from headway.planner.automatic import Limits, Today
from headway.planner.degrees import describe
from headway.planner.runnable import to_plan
from headway.planner.search import Outcome

if TYPE_CHECKING:
    from headway.plan import Plan
    from headway.run.recipe import Recipe


def why_not(recipe: Recipe, plan: Plan, samples: int) -> str:
    """Why the executor cannot cut a recipe's model as a plan says; "" where it can.

    Args:
        recipe: Its model and loss; nothing is allocated.
        plan: With any pipeline, or none.
        samples: Of a micro-batch.
    """
    from headway.run.model_graph import check_stages  # imports torch

    if not plan.pipeline.cut:
        return ""
    try:
        check_stages(recipe, plan.pipeline.cut, samples)
    except (PlanError, RecipeError) as error:
        return "; ".join((error.what, *getattr(error, "problems", ())))
    return ""


def that_runs(outcome: Outcome, recipe: Recipe) -> Outcome:
    """The same answer, or without pipelines where the executor cannot cut the model so.

    Args:
        outcome: Of a question about plans that run today.
        recipe: Of its model.

    Raises:
        PlanError: Without pipelines nothing fits.
    """
    degrees = outcome.best.degrees
    if degrees.pipeline == 1:
        return outcome
    why = why_not(recipe, to_plan(outcome, outcome.best), degrees.microbatch)
    if not why:
        return outcome
    note(f"{describe(degrees)} would be chosen, but cannot run: {why}")
    try:
        return Today(outcome.question, Limits(pipeline=False)).run()
    except NothingFits:
        raise PlanError(
            "no plan that today's executor can run fits",
            problems=[why, "without a pipeline nothing fits"],
            fix="Change the model so that its forward can be followed, or allow more memory.",
        ) from None
