"""The loop that the others change: one process, nothing distributed. And many that never talk."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.comparison.adapter import FrameworkJob, Reads


class PlainLoop:
    """Plain PyTorch in one process; what is in the methods is what a user has before."""

    exact: ClassVar[bool] = True
    reads: ClassVar[Reads] = "its share"

    def start(self, job: FrameworkJob) -> None:
        """Nobody is to be met."""

    def prepare(self, job: FrameworkJob) -> None:
        """Model, optimiser, scheduler."""
        self.job = job
        self.model = job.model()
        self.optimizer = job.optimizer(self.model)
        self.scheduler = job.scheduler(self.optimizer)

    def step(self, batch: Any) -> Tensor | float | None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model, batch)
        loss.backward()
        if self.job.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.recipe.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def close(self) -> None:
        """Nobody is left behind."""


class Independent(PlainLoop):
    """As many plain loops as there are processes, each with its share: a bound, not a method.

    What they take more than one process with such a share is what sharing the machine costs.
    """

    exact: ClassVar[bool] = False
