"""Lightning Fabric, as "Convert PyTorch code to Fabric" in its documentation has it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class LightningFabric(PlainLoop):
    """`Fabric(strategy="ddp")`."""

    def start(self, job: FrameworkJob) -> None:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment

        # The plugin takes the variables of torchrun as they are. Without it they are recognised by
        # the name of torchrun's job, and else the rank is computed from NODE_RANK and LOCAL_RANK.
        self.fabric = Fabric(
            accelerator="cpu",
            devices=job.ranks,
            strategy="ddp",
            plugins=[TorchElasticEnvironment()],
        )
        self.fabric.launch()

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        model = job.model()
        self.model, self.optimizer = self.fabric.setup(model, job.optimizer(model))
        self.scheduler = job.scheduler(self.optimizer)

    def step(self, batch: Any) -> Tensor | float | None:
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model, batch)
        self.fabric.backward(loss)
        if self.job.recipe.clip is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.job.recipe.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def close(self) -> None:
        dist.destroy_process_group()
