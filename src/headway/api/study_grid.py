"""The grid of `headway.study`: what each batch and rate of it is in the recipe's own keys.

The rate is that of the optimiser's first parameter group, as the recipe states it, before a
scheduler; all groups are multiplied alike, by the recipe's `scale_rate`, and a scheduler that
multiplies follows. A scheduler or optimiser whose rate does not follow is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway.api.training import default_plan
from headway.errors import PlanError, RecipeError, UsageError
from headway.optim.lr_scaling import UNITS, Rule, Scaling
from headway.run.recipe.batch_units import resolve_batch, stop_steps
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.training_data import recipe_epoch_length, training_data
from headway.run.step.randomness import build_model
from headway.run.training.target import Target
from headway.units import Amount

JUDGEMENTS = 50
"""Of a run that uses its whole budget, where nobody says how often."""
_CHECKED = 2.0


@dataclass(frozen=True, kw_only=True)
class GridQuestion:
    """The options of a study that make its grid; see `headway.study`."""

    batches: tuple[int, ...]
    rates: tuple[Rule | float, ...]
    multipliers: tuple[float, ...]
    base: str | None
    budget: str | None
    every: str | None
    target: Target
    processes: int | None


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """A batch and a rate.

    Attributes:
        every: Steps between two judgements.
        overrides: "key=value" changes to the recipe.
    """

    batch: int
    rate: float
    every: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StudyGrid:
    """The grid, and what it was made of.

    Attributes:
        points: By batch, then rate; rates that agree to six digits once.
        base: The batch for which the recipe's rate is good.
        base_rate: That rate.
        groups: Parameter groups of the optimiser.
        seed: The recipe's.
        validates: Whether validations are judged; else means of the training loss.
        budget: The recipe's stop, or what was given for it.
    """

    name: str
    points: tuple[GridPoint, ...]
    base: Amount
    base_rate: float
    groups: int
    seed: int
    validates: bool
    budget: str


def make_grid(
    reference: Recipe | str, overrides: Sequence[str], question: GridQuestion
) -> StudyGrid:
    """The grid of a study; everything that can be refused before a run is refused here.

    Raises:
        RecipeError: The recipe has no rate that can be set, or no such metric.
        PlanError: A batch cannot be split; all are listed.
        DataError: There are fewer samples than in a batch.
        UsageError: An amount has another form.
    """
    if question.budget is not None:
        overrides = (*overrides, f"stop={question.budget}")
    recipe = load_recipe(reference, overrides)
    _check_target(recipe, question.target)
    _check_splits(recipe, question)
    base = Amount(resolve_batch(recipe), "samples")
    if recipe.scale_rate is not None:
        base = Scaling.parse(recipe.scale_rate).reference
    if question.base is not None:
        base = _amount("--base", question.base, UNITS)
    stated = _stated_rates(reference, overrides, recipe)
    every = _judgement_steps(recipe, question)
    points = [
        GridPoint(
            batch=batch,
            rate=rate,
            every=every[batch],
            overrides=(
                *((f"stop={question.budget}",) if question.budget is not None else ()),
                *((f"validate_every={every[batch]}",) if recipe.validation is not None else ()),
                f"batch={batch} samples",
                f"scale_rate={scaling}",
            ),
        )
        for batch in question.batches
        for rate, scaling in _scalings(recipe, question, batch, base, stated[0])
    ]
    return StudyGrid(
        name=recipe.name,
        points=tuple(points),
        base=base,
        base_rate=stated[0],
        groups=len(stated),
        seed=recipe.seed,
        validates=recipe.validation is not None,
        budget=str(recipe.stop),
    )


def _check_target(recipe: Recipe, target: Target) -> None:
    if target.metric != "loss" and (recipe.validation is None or recipe.metrics is None):
        lacking = "validation data" if recipe.validation is None else "metrics"
        raise RecipeError(
            f"the target is {target}, and the recipe has no {lacking}",
            where=f"recipe {recipe.name}",
            fix="Add validation=... and metrics=..., or choose a target such as loss<=0.45.",
        )


def _check_splits(recipe: Recipe, question: GridQuestion) -> None:
    """Before the first run: a study must not fail at its last batch."""
    ranks, problems = question.processes or recipe.stages, []
    for batch in question.batches:
        try:
            default_plan(replace(recipe, batch=batch), ranks)
        except PlanError as error:
            problems += [f"batch {batch}: {problem}" for problem in error.problems]
    if problems:
        raise PlanError(
            f"not every batch of the study can be split over {ranks} processes",
            problems=problems,
            where=f"recipe {recipe.name}",
            fix="Leave these batches out, or use fewer --processes.",
        )


def _stated_rates(reference: Recipe | str, overrides: Sequence[str], recipe: Recipe) -> list[float]:
    """The rate of each group as the optimiser states it, once it is known to be settable."""
    plain = Scaling("linear", Amount(resolve_batch(recipe), "samples"))
    stated, first = _rates(load_recipe(reference, (*overrides, f"scale_rate={plain}")))
    _, twice = _rates(
        load_recipe(reference, (*overrides, f"scale_rate={replace(plain, times=_CHECKED)}"))
    )
    for number, (once, scaled) in enumerate(zip(first, twice, strict=True)):
        if abs(scaled - _CHECKED * once) > 1e-9 * abs(scaled):
            raise RecipeError(
                f"the scheduler sets the learning rate of group {number} itself: {once:g}, and "
                f"{scaled:g} of an optimiser with twice the rate",
                where=f"recipe {recipe.name}",
                why="A study changes the rate that the optimiser states, and a scheduler such as "
                "OneCycleLR does not follow.",
                fix="Use a scheduler that multiplies the optimiser's rate: headway.optim.WarmUp "
                "around CosineAnnealingLR, say.",
            )
    return stated


def _rates(recipe: Recipe) -> tuple[list[float], list[float]]:
    """The rates of the groups before and after the scheduler is made."""
    optimizer = recipe.optimizer(build_model(recipe))
    stated = [float(group["lr"]) for group in optimizer.param_groups]
    if not stated[0] > 0:
        raise RecipeError(
            f"the learning rate of the optimiser's first group is {stated[0]:g}",
            where=f"recipe {recipe.name}",
            why="A study multiplies it.",
            fix="State a rate above 0.",
        )
    if recipe.scheduler is not None:
        recipe.scheduler(optimizer)
    return stated, [float(group["lr"]) for group in optimizer.param_groups]


def _scalings(
    recipe: Recipe, question: GridQuestion, batch: int, base: Amount, stated: float
) -> list[tuple[float, Scaling]]:
    """The rates of a batch in ascending order, each with the recipe's scale_rate that sets it."""
    found: dict[str, tuple[float, Scaling]] = {}
    for scaling in _all_scalings(question, batch, base, stated):
        rate = stated * scaling.factor(batch, recipe.tokens_per_sample)
        found.setdefault(f"{rate:.6g}", (rate, scaling))
    return sorted(found.values(), key=lambda one: one[0])


def _all_scalings(
    question: GridQuestion, batch: int, base: Amount, stated: float
) -> Iterator[Scaling]:
    for rate in question.rates:
        if isinstance(rate, str):
            for times in question.multipliers:
                yield Scaling(rate, base, times)
        else:
            # From its own batch a rule changes nothing; Adasum refuses the linear one.
            yield Scaling("square_root", Amount(batch, "samples"), rate / stated)


def _judgement_steps(recipe: Recipe, question: GridQuestion) -> dict[int, int]:
    """Steps between two judgements, by batch."""
    largest = replace(recipe, batch=max(question.batches))
    length = recipe_epoch_length(largest, training_data(largest))
    amount = None
    if question.every is not None:
        amount = _amount("--every", question.every, ("steps", "samples"))
    found = {}
    for batch in question.batches:
        steps = stop_steps(replace(recipe, batch=batch), length)
        if amount is None:
            found[batch] = max(1, steps // JUDGEMENTS)
        elif amount.unit == "steps":
            found[batch] = amount.value
        else:
            found[batch] = max(1, round(amount.value / batch))
    return found


def _amount(option: str, text: str, units: tuple[str, ...]) -> Amount:
    try:
        return Amount.parse(text, units)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
