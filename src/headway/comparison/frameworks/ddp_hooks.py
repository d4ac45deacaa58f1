"""DistributedDataParallel with torch's lossy communication hooks, as its documentation has them."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.ddp import Ddp


class DdpFp16(Ddp):
    """`fp16_compress_hook`."""

    exact: ClassVar[bool] = False
    model: Any

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        model = job.model()
        self.model = DistributedDataParallel(model)
        self.model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
        self.optimizer = job.optimizer(model)
        self.scheduler = job.scheduler(self.optimizer)

    def close(self) -> None:
        # Gloo's threads free what the hooks have left behind, for which they need Python's lock.
        # With torch 2.13 the process hangs where the wrapper ends the group meanwhile, and aborts
        # where such a thread does: so the wrapper goes first, and all have a moment's time.
        self.model = None
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


class DdpPowerSgd(DdpFp16):
    """`powerSGD_hook` of rank 1, from the third step on."""

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        model = job.model()
        # One bucket: in torch 2.13 the hook aborts on Gloo where there are more, because their
        # chained futures start collectives in different orders on different ranks.
        self.model = DistributedDataParallel(model, bucket_cap_mb=1 << 20)
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.optimizer = job.optimizer(model)
        self.scheduler = job.scheduler(self.optimizer)
