"""Hugging Face Accelerate, as its quick tour has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class HuggingFaceAccelerate(PlainLoop):
    """`Accelerator(cpu=True)`."""

    def start(self, job: FrameworkJob) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        # Split batches: a batch is the global one, and a prepared scheduler moves on by one step
        # after each; without it by as many steps as there are processes.
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
        )

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        model = job.model()
        optimizer = job.optimizer(model)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, job.scheduler(optimizer)
        )

    def step(self, batch: Any) -> Tensor | float | None:
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model, batch)
        self.accelerator.backward(loss)
        if self.job.recipe.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.job.recipe.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def close(self) -> None:
        self.accelerator.end_training()
