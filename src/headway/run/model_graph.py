"""A recipe's model as data for the planner: captured on the meta device, nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.capture import capture
from headway.capture.annotations import annotations_of, building
from headway.capture.fake import Pretence
from headway.graph import ModelGraph, fold
from headway.graph.annotations import Annotations
from headway.parallel.cut import check_cut
from headway.parallel.state_sharding import groups_of
from headway.run.amounts import resolve_batch
from headway.run.model_costs import example_of
from headway.run.recipe import Recipe
from headway.run.recipe_file import load_recipe

SAMPLES = 64
"""Of the micro-batch with which a model is captured, so that every small divisor can be tried."""


def graph_of(reference: str, overrides: Sequence[str] = ()) -> tuple[ModelGraph, int, int]:
    """A recipe's model, folded; samples of the batch it was captured with, and of the global one.

    Args:
        reference: As for `headway train`.
        overrides: KEY=VALUE, likewise.

    Raises:
        PlanError: The model cannot be captured.
        RecipeError: The recipe cannot be used.
    """
    graph, samples, batch, _ = annotated_graph_of(reference, overrides)
    return graph, samples, batch


def annotated_graph_of(
    reference: str, overrides: Sequence[str] = ()
) -> tuple[ModelGraph, int, int, Annotations]:
    """As `graph_of`, and what the recipe's model says of its parts.

    Raises:
        PlanError: The model cannot be captured, or its annotations make no sense.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference, overrides)
    batch = resolve_batch(recipe)
    samples = min(batch, SAMPLES)
    with torch.device("meta"), building():
        model = recipe.model()
        said = annotations_of(model)
    graph = capture(model, example_of(recipe, samples), loss=recipe.loss)
    return fold(graph), samples, batch, said


def check_stages(recipe: Recipe, at: Sequence[str], samples: int) -> None:
    """Whether the executor can cut a recipe's model there; nothing is allocated.

    Args:
        recipe: Its model and loss.
        at: Modules with which the second and all later stages begin.
        samples: Of a micro-batch.

    Raises:
        PlanError: The forward cannot be followed, or not be cut there.
    """
    with torch.device("meta"), building():
        model = recipe.model()
    pretence = Pretence()
    model, data = pretence.model(model), pretence.tree(example_of(recipe, samples))
    check_cut(model, recipe.loss, data, at)


def gathered_of(reference: str) -> list[list[str]]:
    """Names of the parameters that FSDP2 gathers together where state is kept in parts, group by
    group; all others are in one more.

    Args:
        reference: As for `headway train`.

    Raises:
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    with torch.device("meta"), building():
        model = recipe.model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[p] for p in module.parameters()] for module in groups_of(model)]
