"""A recipe's model as data for the planner: captured on the meta device, nothing is allocated."""

from __future__ import annotations

import torch

from headway.capture import capture
from headway.graph import ModelGraph, fold
from headway.run.amounts import resolve_batch
from headway.run.model_costs import example_of
from headway.run.recipe_file import load_recipe

SAMPLES = 64
"""Of the micro-batch with which a model is captured, so that every small divisor can be tried."""


def graph_of(reference: str) -> tuple[ModelGraph, int, int]:
    """A recipe's model, folded; samples of the batch it was captured with, and of the global one.

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
    return fold(graph), samples, batch
