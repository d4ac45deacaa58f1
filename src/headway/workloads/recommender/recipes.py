"""A recipe of a model and a data set of clicks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, Optimizer

from headway.errors import RecipeError
from headway.keywords import checks_keywords
from headway.metrics import Statistic, clicks
from headway.optim.row_wise import RowWiseAdagrad, tables_by_row
from headway.optim.warmup import warmup_hold_decay
from headway.run.recipe.recipe import Recipe
from headway.workloads.recommender.click_data import ClickData
from headway.workloads.recommender.criteo import criteo
from headway.workloads.recommender.data_sets import DATA_SETS
from headway.workloads.recommender.planted import planted

CRITEO_BINS = 1 << 16
"""Of the histograms of AUC: a day of Criteo's has too many samples to keep them all."""
STREAMED_VALIDATION = 1 << 18
"""Most samples of a validation on Criteo's."""


DATA: Mapping[str, Callable[..., ClickData]] = {**DATA_SETS, "criteo": criteo, "random": planted}
"""By name."""


@dataclass(frozen=True)
class ClickSource:
    """A data set that is loaded when it is first asked for.

    Attributes:
        name: One of `DATA`.
        options: Arguments of its function.

    Raises:
        RecipeError: There is no such data set, or its function has no such argument.
    """

    name: str
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.name not in DATA:
            raise RecipeError(f"no data {self.name!r}", fix=f"choose one of {', '.join(DATA)}")
        legal = inspect.signature(DATA[self.name]).parameters
        wrong = [option for option in self.options if option not in legal]
        if wrong:
            raise RecipeError(
                f"data {self.name!r} has no argument {' and no '.join(wrong)}",
                fix=f"It has {', '.join(legal)}.",
            )

    @cached_property
    def loaded(self) -> ClickData:
        """The data set.

        Raises:
            DataError: It is not here; with the command that fetches it.
        """
        return DATA[self.name](**self.options)

    def __str__(self) -> str:
        """What the run's record says of the data."""
        if self.name != "random":
            return self.name
        return f"random numbers made from seed {self.options.get('seed', 0)}"


def clicks_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean log loss of logits."""
    dense, ids, labels = batch
    return functional.binary_cross_entropy_with_logits(model(dense, ids), labels)


def clicks_metrics(model: nn.Module, batch: Any, *, bins: int | None) -> dict[str, Statistic]:
    """See `headway.metrics.clicks`."""
    dense, ids, labels = batch
    return clicks(model(dense, ids), labels, bins=bins)


OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], Optimizer]] = {
    "row-wise adagrad": lambda model, rate: RowWiseAdagrad(tables_by_row(model), lr=rate),
    "adagrad": lambda model, rate: Adagrad(model.parameters(), lr=rate),
    "adam": lambda model, rate: Adam(model.parameters(), lr=rate),
    "sgd": lambda model, rate: SGD(model.parameters(), lr=rate),
}
"""By name: what makes one from a model and a rate."""


@checks_keywords
def click_recipe(
    name: str,
    model: Callable[[ClickData], nn.Module],
    *,
    learning_rate: float,
    data: str = "adult",
    batch: int = 128,
    epochs: int = 2,
    steps: int | None = None,
    validate_every: int = 250,
    optimizer: str = "row-wise adagrad",
    warmup: int = 0,
    hold: int = 0,
    decay: int = 0,
    seed: int = 0,
    **options: Any,
) -> Recipe:
    """A training of a model of clicks.

    Args:
        model: Makes it for a data set.
        data: One of `DATA`.
        steps: Of the training; None: as `epochs` say.
        optimizer: One of `OPTIMIZERS`.
        warmup: With `hold` and `decay`, see `warmup_hold_decay`; all 0: a constant rate.
        seed: Decides initial parameters, order, and what is random in the data.
        options: Arguments of the data set's function: `path`, `bins`, `rows`, ...

    Raises:
        RecipeError: There is no such data set, argument or optimiser, or a stream is to stop after
            epochs.
    """
    if optimizer not in OPTIMIZERS:
        raise RecipeError(
            f"no optimiser {optimizer!r}", fix=f"choose one of {', '.join(OPTIMIZERS)}"
        )
    streams = data == "criteo"
    if streams and steps is None:
        raise RecipeError(
            "a training on criteo needs a number of steps",
            why="Its files do not say how many samples they hold.",
            fix="--set arguments.steps=10000",
        )
    seeded = "seed" in inspect.signature(DATA[data]).parameters if data in DATA else False
    source = ClickSource(data, {**options, "seed": seed} if seeded else options)
    rates = partial(warmup_hold_decay, warmup=warmup, hold=hold, decay=decay)
    return Recipe(
        name=f"{name} on {source}",
        model=lambda: model(source.loaded),
        data=lambda: source.loaded.training,
        validation=lambda: source.loaded.validation,
        validation_samples=STREAMED_VALIDATION if streams else None,
        loss=clicks_loss,
        metrics=partial(clicks_metrics, bins=CRITEO_BINS if streams else None),
        monitor="auc",
        monitor_mode="max",
        optimizer=partial(_made, optimizer, learning_rate),
        scheduler=rates if warmup or decay else None,
        batch=batch,
        stop=f"{epochs} epochs" if steps is None else f"{steps} steps",
        seed=seed,
        validate_every=validate_every,
        drop_last=True,  # a small batch at the full rate undoes a part of the training
    )


def _made(optimizer: str, learning_rate: float, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[optimizer](model, learning_rate)
