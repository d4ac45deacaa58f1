"""The hands on the gradients where a pipeline's table makes the updates: schedules without a flush.

A STEP updates one stage by the gradients of its group; what the optimiser holds besides is left
alone, because it has no gradients at that moment. The scheduler steps once in a step of the recipe.
Sources: PipeDream (Narayanan et al., SOSP 2019), PipeDream-2BW (ICML 2021).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from headway.errors import Diverged, PlanError
from headway.plan import Plan
from headway.run.stage_gradients import StageGradients


class LateGradients(StageGradients):
    """As `StageGradients`; the arguments are the same.

    Raises:
        PlanError: The gradients are to be clipped.
    """

    def step(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """STEP: the optimiser's step of one stage.

        Args:
            parameters: Of the stage.
            last: The stage's last step in the table: its gradients stay to be looked at, until the
                next step of the recipe begins.
        """
        stage = set(parameters)
        aside = {p: p.grad for p in self._all.values() if p.grad is not None and p not in stage}
        for parameter in aside:
            parameter.grad = None
        self._optimizer.step()
        if not last:
            for parameter in stage:
                parameter.grad = None
        for parameter, gradient in aside.items():
            parameter.grad = gradient

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            what,
            where=self._doing,
            why="The schedule has no flush: updates have been made with it, and no checkpoint.",
            fix="Lower the learning rate, or look at this batch's data; then go on with --resume, "
            "from the checkpoint before.",
        )


def refuse_clip(plan: Plan, clip: float | None) -> None:
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
