"""The monitored metric: early stopping, the best checkpoint, and a plateau scheduler.

All ranks have the same numbers of a validation, and so come to the same decision. The state is part
of every checkpoint. A checkpoint is written before the validation of the same step: it says which
validation is the last that its state knows of, and a resumed run makes the missing one first, so
that it stops at the same step as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headway.documents import nearest
from headway.errors import RecipeError

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe


@dataclass
class Monitor:
    """Follows one value of the validations.

    Attributes:
        patience: Validations without an improvement after which training stops; 0: never.
        plateau: Stepped with the value after each validation.
        best: The best value so far, of `best_step`.
        bad: Validations since then.
        validated: The step of the last validation.
    """

    metric: str
    mode: Literal["min", "max"]
    patience: int
    plateau: ReduceLROnPlateau | None
    best: float | None = None
    best_step: int | None = None
    bad: int = 0
    validated: int = 0

    @staticmethod
    def of(recipe: Recipe, scheduler: LRScheduler | None) -> Monitor | None:
        """What a recipe monitors; None: nothing.

        Raises:
            RecipeError: There is nothing to monitor, or scheduler and recipe contradict each other.
        """
        plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        wants = {
            "early_stopping": bool(recipe.early_stopping),
            "keep_best": recipe.keep_best,
            "ReduceLROnPlateau": plateau is not None,
        }
        wanting = [name for name, wanted in wants.items() if wanted]
        if not wanting:
            return None
        if recipe.validation is None:
            raise RecipeError(
                f"{' and '.join(wanting)}: the recipe has no validation data to judge by",
                where=f"recipe {recipe.name}",
                fix="Add validation=... and validate_every=100.",
            )
        if recipe.monitor != "loss" and recipe.metrics is None:
            raise RecipeError(
                f"monitor is {recipe.monitor!r}, and the recipe has no metrics",
                where=f"recipe {recipe.name}",
                fix='Add metrics=..., or write monitor="loss".',
            )
        if plateau is not None and plateau.mode != recipe.monitor_mode:
            raise RecipeError(
                f"ReduceLROnPlateau has mode {plateau.mode!r}, the recipe monitors "
                f"{recipe.monitor} with monitor_mode {recipe.monitor_mode!r}",
                where=f"recipe {recipe.name}",
                fix=f"Write ReduceLROnPlateau(optimizer, mode={recipe.monitor_mode!r}).",
            )
        return Monitor(recipe.monitor, recipe.monitor_mode, recipe.early_stopping, plateau)

    def take(self, step: int, values: Mapping[str, float]) -> bool:
        """Take the values of a validation; returns whether it is the best so far.

        Raises:
            RecipeError: None of the values has the monitored name.
        """
        if self.metric not in values:
            raise RecipeError(
                f"monitor is {self.metric!r}, which no validation gives"
                f"{nearest(self.metric, list(values))}",
                why=f"There are {', '.join(values)}.",
            )
        value = values[self.metric]
        self.validated = step
        if self.plateau is not None:
            self.plateau.step(value)
        sign = 1.0 if self.mode == "min" else -1.0
        # NaN is never better than anything.
        better = self.best is None or sign * value < sign * self.best
        if better and not math.isnan(value):
            self.best, self.best_step, self.bad = value, step, 0
            return True
        self.bad += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether training stops here."""
        return 0 < self.patience <= self.bad

    def explain(self) -> str:
        """Why training stops."""
        best = "it never was a number" if self.best is None else (
            f"the best was {self.best:g} after step {self.best_step}"
        )  # fmt: skip
        return f"stopped early: {self.metric} has not improved in {self.bad} validations; {best}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the plateau scheduler's is saved as a scheduler's is."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "bad": self.bad,
            "validated": self.validated,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.best, self.best_step = state["best"], state["best_step"]
        self.bad, self.validated = state["bad"], state["validated"]
