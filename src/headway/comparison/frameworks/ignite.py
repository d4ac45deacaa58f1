"""PyTorch-Ignite's `ignite.distributed`, as its "How-to" on distributed training has it."""

from __future__ import annotations

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop


class Ignite(PlainLoop):
    """`idist.auto_model` and `idist.auto_optim`."""

    def start(self, job: FrameworkJob) -> None:
        import ignite.distributed as idist

        idist.initialize("gloo")

    def prepare(self, job: FrameworkJob) -> None:
        import ignite.distributed as idist

        self.job = job
        model = job.model()
        self.model = idist.auto_model(model)
        self.optimizer = idist.auto_optim(job.optimizer(model))
        self.scheduler = job.scheduler(self.optimizer)

    def close(self) -> None:
        import ignite.distributed as idist

        idist.finalize()
