"""torch's ZeroRedundancyOptimizer under DistributedDataParallel, as its tutorial writes it."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class ZeroRedundancy(PlainLoop):
    """Each process updates a part of the parameters and broadcasts it (ZeRO stage 1)."""

    def start(self, job: FrameworkJob) -> None:
        dist.init_process_group("gloo")

    def prepare(self, job: FrameworkJob) -> None:
        # torch 2.13 warns of its own use of torch.jit when this is imported.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.job = job
        model = job.model()
        self.model = DistributedDataParallel(model)
        whole = job.optimizer(model)
        # The groups hold every option but the rate, which some optimisers want by itself.
        self.optimizer = ZeroRedundancyOptimizer(
            whole.param_groups, optimizer_class=type(whole), lr=whole.defaults["lr"]
        )
        self.scheduler = job.scheduler(self.optimizer)

    def close(self) -> None:
        dist.destroy_process_group()
