"""The loop that the others change: one process, nothing distributed. And many that never talk."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.comparison.adapter import FrameworkJob, Reads, num_samples
from headway.run.step.batch import map_tensors


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


class SerialShares(PlainLoop):
    """One process that computes what many with a share each would: the reference of their losses.

    It differs from the plain loop where a loss or a batch normalisation looks at more than one
    sample, and then every data-parallel framework differs from the plain loop in the same way.
    """

    reads: ClassVar[Reads] = "the whole batch"

    def step(self, batch: Any) -> Tensor | float | None:
        """The mean of the shares' losses and gradients, and one update."""
        self.optimizer.zero_grad()
        losses = []
        for share in cut_batch(batch, self.job.shares):
            loss = self.job.loss(self.model, share) / self.job.shares
            loss.backward()
            losses.append(loss.detach())
        if self.job.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.recipe.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return torch.stack(losses).sum()


class SerialUlp(SerialShares):
    """The reference from parameters that differ in the last bit: how much rounding matters."""

    def prepare(self, job: FrameworkJob) -> None:
        """Move each parameter to the next larger number."""
        super().prepare(job)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))


def cut_batch(batch: Any, shares: int) -> list[Any]:
    """Equal parts of a batch along dimension 0 of each tensor, and of each list of texts."""
    size = num_samples(batch) // shares
    return [_part(batch, slice(n * size, (n + 1) * size)) for n in range(shares)]


def _part(batch: Any, part: slice) -> Any:
    return map_tensors(
        batch,
        lambda tensor: tensor[part] if tensor.ndim else tensor,
        texts=lambda texts: texts[part],
    )
