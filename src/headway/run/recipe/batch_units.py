"""Batch size and stopping rule as numbers of samples and of optimiser steps.

A recipe may state them in samples, tokens, epochs or steps; here they become integers, exactly or
with an error. Imports no torch, so that recipe files can be checked with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headway.errors import DataError, RecipeError
from headway.run.recipe.schema import BATCH_UNITS, STOP_UNITS, RecipeDocument
from headway.units import Amount, counted

if TYPE_CHECKING:
    from headway.data.examples import EpochLength
    from headway.run.recipe.recipe import Recipe


def resolve_batch(recipe: Recipe | RecipeDocument) -> int:
    """Samples of the global batch.

    Raises:
        RecipeError: The batch is not an amount, or not a whole number of samples.
    """
    assert recipe.batch is not None, "that of the loader is filled in where a recipe is loaded"
    amount = _amount(recipe.batch, BATCH_UNITS, "batch")
    if amount.unit == "samples":
        return amount.value
    tokens = _tokens_per_sample(recipe, "batch")
    samples, rest = divmod(amount.value, tokens)
    if rest or not samples:
        legal = [count * tokens for count in (samples, samples + 1) if count]
        raise RecipeError(
            f"batch of {amount} is not a whole number of samples",
            where=f"recipe {recipe.name}",
            why=f"A sample has {tokens} tokens: {amount.value} = {samples} x {tokens} + {rest}.",
            fix=f"Nearest legal: {' or '.join(f'{count} tokens' for count in legal)}.",
        )
    return samples


def steps_per_epoch(recipe: Recipe, length: EpochLength) -> int:
    """Optimiser steps of one pass over the data; the ragged last batch counts unless dropped.

    Raises:
        DataError: The data does not fill one batch.
        RecipeError: How long an epoch is is not known.
    """
    if callable(length):
        return len(length(0))
    if length is None:
        raise RecipeError(
            "the length of an epoch is not known",
            where=f"recipe {recipe.name}",
            why="The stream has no length: an epoch ends where it ends.",
            fix='State stop in steps, as in stop = "10000 steps"; or give the stream a __len__.',
        )
    batch = resolve_batch(recipe)
    if length < batch:
        raise DataError(
            f"the training data has {counted(length, 'sample')}, fewer than one batch of {batch}",
            where=f"recipe {recipe.name}",
            fix=f'Use more data, or batch = "{counted(length, "sample")}" at most.'
            if length
            else "It is empty: see what its __len__ counts.",
        )
    return length // batch if recipe.drop_last else -(-length // batch)


def stop_steps(recipe: Recipe, length: EpochLength) -> int:
    """Optimiser steps after which the run is complete.

    Samples and tokens are rounded up to whole batches; ragged last batches are counted as what they
    are, so that the run ends with the first step at which the amount has been consumed.

    Raises:
        RecipeError: The rule is not an amount, or is in tokens of unknown number.
        DataError: The data does not fill one batch.
    """
    amount = _amount(recipe.stop, STOP_UNITS, "stop")
    if length is None and amount.unit == "steps":
        return amount.value
    if callable(length) and amount.unit == "epochs":
        return sum(len(length(epoch)) for epoch in range(amount.value))
    # Of a stream whose length is not known, samples can be counted if no batch is ragged.
    countable = length is None and recipe.drop_last and amount.unit != "epochs"
    per_epoch = 0 if countable else steps_per_epoch(recipe, length)
    batch = resolve_batch(recipe)
    match amount.unit:
        case "steps":
            return amount.value
        case "epochs":
            return amount.value * per_epoch
        case "samples":
            samples = amount.value
        case _:
            samples = -(-amount.value // _tokens_per_sample(recipe, "stop"))
    if length is None:  # no batch of it is ragged
        return -(-samples // batch)
    if callable(length):
        return _steps_until(samples, length)
    consumed = per_epoch * batch if recipe.drop_last else length
    epochs, rest = divmod(samples, consumed)
    return epochs * per_epoch + -(-rest // batch)


def _steps_until(samples: int, batches: Callable[[int], Sequence[int]]) -> int:
    """The batches, epoch after epoch, until so many samples were in them."""
    sizes = (size for epoch in itertools.count() for size in batches(epoch))
    steps = 0
    while samples > 0:
        samples, steps = samples - next(sizes), steps + 1
    return steps


def _amount(value: int | str, units: tuple[str, ...], key: str) -> Amount:
    try:
        return Amount.parse(value, units)
    except ValueError as error:
        raise RecipeError(f"{key}: {error}", fix=f'For example {key} = "300 {units[0]}".') from None


def _tokens_per_sample(recipe: Recipe | RecipeDocument, key: str) -> int:
    if recipe.tokens_per_sample is None:
        raise RecipeError(
            f"{key} is stated in tokens, and tokens_per_sample is not given",
            where=f"recipe {recipe.name}",
            fix="Set tokens_per_sample to the number of tokens of one sample of the data.",
        )
    return recipe.tokens_per_sample
