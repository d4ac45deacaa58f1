"""FairScale's sharded data parallelism (ZeRO stage 2), as its documentation of OSS has it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class FairScale(PlainLoop):
    """`ShardedDataParallel` with the sharded optimiser `OSS`."""

    optimizer: Any

    def start(self, job: FrameworkJob) -> None:
        dist.init_process_group("gloo")

    def prepare(self, job: FrameworkJob) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        self.job = job
        model = job.model()
        whole = job.optimizer(model)
        self.optimizer = OSS(whole.param_groups, optim=type(whole), lr=whole.defaults["lr"])
        self.model = ShardedDataParallel(model, self.optimizer)
        self.scheduler = job.scheduler(self.optimizer)

    def step(self, batch: Any) -> Tensor | float | None:
        # The model's, not the optimiser's, which sets gradients to None: FairScale 0.4.13 would go
        # on to exchange the buckets that they have been views of, with those of the first step.
        self.model.zero_grad()
        loss = self.job.loss(self.model, batch)
        loss.backward()
        if self.job.recipe.clip is not None:
            self.optimizer.clip_grad_norm(self.job.recipe.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def close(self) -> None:
        dist.destroy_process_group()
