"""DeepSpeed, as "Getting Started" in its documentation has it, at each stage of ZeRO."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class DeepSpeed(PlainLoop):
    """An engine with ZeRO stage 1; the optimiser's state is split."""

    stage: ClassVar[int] = 1
    model: Any

    def start(self, job: FrameworkJob) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")

    def prepare(self, job: FrameworkJob) -> None:
        import deepspeed

        self.job = job
        model = job.model()
        config = {
            "train_batch_size": job.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": job.recipe.clip or 0.0,
            "zero_optimization": {"stage": self.stage},
            # The recipe's own optimiser, where DeepSpeed would have one of its own.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = job.optimizer(model)
        self.model, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=job.scheduler(optimizer), config=config
        )

    def step(self, batch: Any) -> Tensor | float | None:
        loss = self.job.loss(self.model, batch)
        self.model.backward(loss)
        self.model.step()
        return loss

    def close(self) -> None:
        self.model.destroy()
        dist.destroy_process_group()


class DeepSpeedZero2(DeepSpeed):
    """ZeRO stage 2: the gradients are split, too."""

    stage: ClassVar[int] = 2


class DeepSpeedZero3(DeepSpeed):
    """ZeRO stage 3: the parameters are split, too."""

    stage: ClassVar[int] = 3
