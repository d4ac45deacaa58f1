"""The data of a recipe, built, with the recipe's collate function and its loader's batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from headway.data.examples import EpochLength, as_examples, check_batch, epoch_length
from headway.data.source import Source
from headway.data.stateful_source import fit_slots
from headway.data.torch_loader import LoaderSource
from headway.errors import RecipeError
from headway.run.recipe.batch_units import resolve_batch

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe


def training_data(recipe: Recipe) -> Source:
    """The training data.

    Raises:
        DataError: They cannot be read, or a loader's batch is another one than the recipe's.
    """
    batch, where = resolve_batch(recipe), f"recipe {recipe.name}"
    examples = fit_slots(as_examples(recipe.data(), recipe.collate), batch)
    check_batch(examples, batch, drop_last=recipe.drop_last, where=where)
    return examples


def validation_data(recipe: Recipe) -> Source:
    """The validation data; a loader's batch is not asked for, its order and samples are.

    Raises:
        DataError: They cannot be read.
    """
    assert recipe.validation is not None
    return fit_slots(as_examples(recipe.validation(), recipe.collate), resolve_batch(recipe))


def with_loader_batch(recipe: Recipe) -> Recipe:
    """The recipe with the batch of its loader, where it states none.

    Raises:
        RecipeError: Nothing says how large the batch is.
    """
    if recipe.batch is not None:
        return recipe
    examples = as_examples(recipe.data(), recipe.collate)
    if not isinstance(examples, LoaderSource):
        raise RecipeError(
            "batch is missing",
            where=f"recipe {recipe.name}",
            why="Only a torch DataLoader says itself how large a batch is.",
            fix='Give batch=64 (or "64 samples"), the batch of all ranks together.',
        )
    return dataclasses.replace(
        recipe,
        batch=examples.batch,
        drop_last=recipe.drop_last or examples.drop_last,
        workers=recipe.workers or examples.workers,
    )


def recipe_epoch_length(recipe: Recipe, examples: Source) -> EpochLength:
    """How long the epochs of a recipe's run are."""
    return epoch_length(examples, recipe.seed, resolve_batch(recipe), drop_last=recipe.drop_last)
