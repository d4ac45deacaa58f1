"""What a recipe says, worked out a second time: amounts, the plan made of it, the seed.

Reference and run read the same recipe by the same code, so that a mistake in it makes both wrong
alike. Imports nothing of what it checks but the types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor, nn

from headway.errors import NotEqual
from headway.plans import ExchangePlan, Plan
from headway.run.recipe.recipe import Recipe

PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def batch_samples(recipe: Recipe) -> int:
    """Samples of the global batch."""
    count, unit = _amount(recipe.batch or 0, "samples")
    return count // (recipe.tokens_per_sample or 1) if unit == "token" else count


def stop_steps(recipe: Recipe, sizes: Callable[[int], Sequence[int]], *, drawn: bool) -> int:
    """Optimiser steps until the recipe's end, counted batch by batch.

    Args:
        sizes: Samples of each batch of an epoch.
        drawn: Epochs may differ.
    """
    count, unit = _amount(recipe.stop, "steps")
    epoch = list(sizes(0)) if unit != "step" else []
    if not epoch:
        return count
    if unit == "epoch":
        return sum(len(sizes(number)) for number in range(count)) if drawn else count * len(epoch)
    samples = -(-count // (recipe.tokens_per_sample or 1)) if unit == "token" else count
    epochs, rest = (0, samples) if drawn else divmod(samples, sum(epoch))
    steps = epochs * len(epoch)
    while drawn and rest > sum(epoch):
        rest, steps, epochs = rest - sum(epoch), steps + len(epoch), epochs + 1
        epoch = list(sizes(epochs))
    for part in epoch:
        if rest <= 0:
            break
        steps, rest = steps + 1, rest - part
    return steps


def _amount(value: int | str, unit: str) -> tuple[int, str]:
    """A number and its unit, in the singular."""
    match = re.fullmatch(r"\s*([\d_.eE+-]+)\s*([kKMGTP]?)\s*(\w*)\s*", str(value))
    assert match is not None, "checked where the recipe was read"
    number, prefix, word = match.groups()
    return int(Decimal(number) * PREFIXES[prefix]), (word or unit).removesuffix("s")


def check_amounts(
    recipe: Recipe,
    sizes: Callable[[int], Sequence[int]],
    *,
    batch: int,
    steps: int | None,
    drawn: bool = False,
) -> None:
    """Compare batch and end of a run with what the recipe says.

    Args:
        sizes, drawn: See `stop_steps`.
        steps: None: the data do not fill a batch.

    Raises:
        NotEqual: One is another number.
    """
    if batch != batch_samples(recipe):
        raise NotEqual(f"the batch has {batch} samples; {recipe.batch} are {batch_samples(recipe)}")
    wanted = None if steps is None else stop_steps(recipe, sizes, drawn=drawn)
    if steps != wanted:
        raise NotEqual(f"the run ends after {steps} steps; {recipe.stop} are {wanted}")


def check_plan(recipe: Recipe, plan: Plan) -> None:
    """Compare a plan that was made of a recipe with it.

    Raises:
        NotEqual: The plan does something else.
    """
    asked, made = recipe.exchange or ExchangePlan(), plan.exchange
    shares = _whole_shares(batch_samples(recipe), recipe.shares)
    for what, wanted, found in (
        ("exchange", asked, replace(made, axis=asked.axis)),
        ("zero", recipe.zero, plan.memory.zero),
        ("precision", recipe.precision, plan.memory.precision),
        ("batch", batch_samples(recipe), plan.batch.samples),
        ("shares", shares, plan.batch.shares),
        ("norm", recipe.norm, plan.batch.norm),
    ):
        if wanted != found:
            raise NotEqual(f"the plan has {what} {found}; the recipe says {wanted}")


def _whole_shares(batch: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Largest remainders; of equal ones the first."""
    wanted = [batch * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    found = [math.floor(share) for share in wanted]
    order = sorted(range(len(found)), key=lambda n: (found[n] - wanted[n], n))
    for number in order[: batch - sum(found)]:
        found[number] += 1
    return tuple(found)


def check_seed(recipe: Recipe, build: Callable[[Recipe], nn.Module]) -> None:
    """The seed alone decides the numbers from which a model starts.

    Raises:
        NotEqual: It does not decide, or something else does as well.
    """

    def numbers(seed: int) -> Tensor:
        linear = build(replace(recipe, seed=seed, model=lambda: nn.Linear(8, 8), weights=None))
        return next(linear.parameters()).detach()

    first = numbers(recipe.seed)
    if torch.equal(first, numbers(recipe.seed + 1)):
        raise NotEqual("models start from the same numbers with another seed")
    if not torch.equal(first, numbers(recipe.seed)):
        raise NotEqual("models start from other numbers with the same seed")
