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
            fix='State stop in steps or samples, as in stop = "10000 steps"; or give '
            "data=headway.data.StreamSource(stream, length=10_000).",
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
    are, so that the run ends with the first step at which the amount has been consumed. Of a stream
    without a length they are counted as whole ones; see `steps_left`.

    Raises:
        RecipeError: The rule is not an amount, or is in tokens of unknown number.
        DataError: The data does not fill one batch.
    """
    amount = _amount(recipe.stop, STOP_UNITS, "stop")
    if callable(length) and amount.unit == "epochs":
        return sum(len(length(epoch)) for epoch in range(amount.value))
    if length is None and amount.unit != "epochs":
        return steps_left(recipe, 0) if amount.unit != "steps" else amount.value
    per_epoch, batch = steps_per_epoch(recipe, length), resolve_batch(recipe)
    if amount.unit == "steps":
        return amount.value
    if amount.unit == "epochs":
        return amount.value * per_epoch
    samples = _stop_samples(recipe, amount)
    if callable(length):
        return _steps_until(samples, length)
    assert length is not None, "the end of a number of epochs"
    consumed = per_epoch * batch if recipe.drop_last else length
    epochs, rest = divmod(samples, consumed)
    return epochs * per_epoch + -(-rest // batch)


def counts_samples(recipe: Recipe, length: EpochLength) -> bool:
    """Whether a run must count its samples to know its end: the ragged batches of a stream without
    a length are known only when they come."""
    unit = _amount(recipe.stop, STOP_UNITS, "stop").unit
    return length is None and unit not in ("steps", "epochs")


def steps_left(recipe: Recipe, used: int) -> int:
    """Steps to the end of a run that has used so many samples, if each of them is a whole batch."""
    samples = _stop_samples(recipe, _amount(recipe.stop, STOP_UNITS, "stop"))
    return -(-max(samples - used, 0) // resolve_batch(recipe))


def _stop_samples(recipe: Recipe, amount: Amount) -> int:
    if amount.unit == "samples":
        return amount.value
    return -(-amount.value // _tokens_per_sample(recipe, "stop"))


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
