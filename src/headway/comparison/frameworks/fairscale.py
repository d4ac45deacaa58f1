"""FairScale's sharded data parallelism (ZeRO stage 2), as its documentation of OSS has it."""

from __future__ import annotations

import torch.distributed as dist

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class FairScale(PlainLoop):
    """`ShardedDataParallel` with the sharded optimiser `OSS`."""

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

    def close(self) -> None:
        dist.destroy_process_group()
