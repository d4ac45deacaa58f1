"""headway itself, by its loop for users' own programs."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

import headway
from headway.comparison.adapter import FrameworkJob, Reads
from headway.comparison.frameworks.plain import PlainLoop


class HeadwayExecutor(PlainLoop):
    """`headway.Executor`: data parallelism, or the plan that a search has chosen."""

    reads: ClassVar[Reads] = "by itself"

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        self.model = job.model()
        self.optimizer = job.optimizer(self.model)
        self.run = headway.Executor(
            self.model,
            self.optimizer,
            loss=job.recipe.loss,
            **({"batch": job.batch} if job.plan is None else {"plan": job.plan}),
            scheduler=job.scheduler(self.optimizer),
            clip=job.recipe.clip,
            seed=job.recipe.seed,
        )
        self.batches = self.run.batches(
            job.data(), epochs=None, workers=job.recipe.workers, drop_last=True
        )

    def step(self, batch: Any) -> Tensor | float | None:
        return self.run.step(next(self.batches))

    def close(self) -> None:
        self.run.close()
