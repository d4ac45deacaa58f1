"""torch's DistributedDataParallel, as its tutorial writes it."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class Ddp(PlainLoop):
    """`DistributedDataParallel` on Gloo."""

    def start(self, job: FrameworkJob) -> None:
        dist.init_process_group("gloo")

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        model = job.model()
        self.model = DistributedDataParallel(model)
        self.optimizer = job.optimizer(model)
        self.scheduler = job.scheduler(self.optimizer)

    def close(self) -> None:
        dist.destroy_process_group()
