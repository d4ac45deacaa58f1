"""torch's fully sharded data parallelism, second version, as its tutorial writes it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.blocks import repeated_blocks
from headway.comparison.frameworks.plain import PlainLoop


class FullyShard(PlainLoop):
    """`fully_shard` of each repeated block, then of the model."""

    def start(self, job: FrameworkJob) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (job.ranks,))

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        self.model = job.model()
        for block in repeated_blocks(self.model).values():
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = job.optimizer(self.model)
        self.scheduler = job.scheduler(self.optimizer)

    def close(self) -> None:
        dist.destroy_process_group()
