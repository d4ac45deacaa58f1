"""A `Recipe` object on its way to the worker processes of the same program.

Functions and classes of a notebook, of a script (`__main__`) or inside of functions have no module
that a worker could import: cloudpickle sends them by value, everything else by name. The bytes go
through the private pipe to processes that this one has started, and nowhere else: whoever can write
a pickle can run code (docs/security.md).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import cloudpickle

from headway.errors import RecipeError

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe


@dataclass(frozen=True)
class SentRecipe:
    """A recipe as bytes; `name` is the recipe's."""

    name: str
    content: bytes

    def open(self) -> Recipe:
        """The recipe, in the process that it was sent to."""
        return cast("Recipe", pickle.loads(self.content))


def send_recipe(recipe: Recipe | SentRecipe | str) -> SentRecipe | str:
    """A recipe as workers are given it; a reference is sent as it is.

    Raises:
        RecipeError: It holds what no other process can have: an open file, a lock, a connection.
    """
    if isinstance(recipe, str | SentRecipe):
        return recipe
    try:
        return SentRecipe(recipe.name, cloudpickle.dumps(recipe))
    # Objects of all kinds say in all ways that they cannot be pickled.
    except Exception as error:
        raise RecipeError(
            "the recipe cannot be sent to worker processes",
            where=f"recipe {recipe.name}",
            why=f"{type(error).__name__}: {error}",
            fix="Build what cannot be sent (an open file, a lock) inside a factory: "
            "write data=lambda: MyDataset(path).",
        ) from error
