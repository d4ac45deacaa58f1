"""A recipe's model as data for the planner: captured on the meta device, nothing is allocated."""

from __future__ import annotations

import torch

from headway.capture import capture
from headway.graph import fold
from headway.planner.operators import Workload
from headway.run.amounts import resolve_batch
from headway.run.model_costs import example_of
from headway.run.recipe_file import load_recipe

SAMPLES = 64
"""Of the micro-batch with which a model is captured, so that every small divisor can be tried."""


def workload_of(reference: str) -> tuple[Workload, int]:
    """The model of a recipe, and the samples of its global batch.

    Args:
        reference: As for `headway train`.

    Raises:
        PlanError: The model cannot be captured.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    batch = resolve_batch(recipe)
    samples = min(batch, SAMPLES)
    with torch.device("meta"):
        model = recipe.model()
    graph = capture(model, example_of(recipe, samples), loss=recipe.loss)
    return Workload(graph=fold(graph), samples=samples), batch
