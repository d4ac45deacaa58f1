"""Updaters: when the optimiser steps, and what has been updated where a loss is not finite.

`StepUpdater` updates all parameters together at the end of a step. `StageUpdater` is for schedules
without a flush: a STEP in the table updates one stage by the gradients of its group. Sources:
PipeDream (Narayanan et al., SOSP 2019), PipeDream-2BW (Narayanan et al., ICML 2021).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from headway.errors import Diverged, PlanError
from headway.plans import Plan


class Updater(ABC):
    """Makes the updates from summed gradients."""

    @abstractmethod
    def update(self) -> None:
        """All parameters, at the end of a step."""

    @abstractmethod
    def update_stage(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """STEP of a pipeline's table.

        Args:
            parameters: Of the stage.
            last: The stage's last STEP in the table: its gradients stay to be looked at, until the
                next step of the recipe begins.
        """

    @abstractmethod
    def diverged(self, what: str, where: str) -> Diverged:
        """The error of a loss or a norm that is not finite."""


class StepUpdater(Updater):
    """One step of the optimiser per step of the recipe."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def update(self) -> None:
        self._optimizer.step()

    def update_stage(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        pass  # `update` steps all stages at once

    def diverged(self, what: str, where: str) -> Diverged:
        return Diverged(
            what,
            where=where,
            why="The update was not made: parameters are those of the step before.",
            fix="Lower the learning rate, clip the gradients, or look at this batch's data.",
        )


class StageUpdater(Updater):
    """Each stage is updated by the table, several times per step of the recipe."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def update(self) -> None:
        pass  # the table has made the updates

    def update_stage(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        stage = set(parameters)
        everything = (p for group in self._optimizer.param_groups for p in group["params"])
        # The optimiser steps whatever has a gradient: the other stages' are set aside.
        aside = {p: p.grad for p in everything if p.grad is not None and p not in stage}
        for parameter in aside:
            parameter.grad = None
        self._optimizer.step()
        if not last:
            for parameter in stage:
                parameter.grad = None
        for parameter, gradient in aside.items():
            parameter.grad = gradient

    def diverged(self, what: str, where: str) -> Diverged:
        return Diverged(
            what,
            where=where,
            why="The schedule has no flush: updates have been made with it, and no checkpoint.",
            fix="Lower the learning rate, or look at this batch's data; then go on with --resume, "
            "from the checkpoint before.",
        )


def check_clip(plan: Plan, clip: float | None) -> None:
    """A global norm is not known where each stage makes its updates by itself.

    Raises:
        PlanError: The plan has no flush, and gradients are to be clipped.
    """
    if clip is not None and not plan.flushes:
        raise PlanError(
            "the gradients of this plan cannot be clipped",
            problems=[
                f"clip is {clip:g}, the limit of the norm over all stages; "
                f"{plan.pipeline.schedule} updates each stage by itself, without a flush"
            ],
            fix="Leave out clip, or use a schedule with a flush, such as 1f1b.",
        )
