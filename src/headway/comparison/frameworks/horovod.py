"""Horovod itself on Gloo, as "Horovod with PyTorch" in its documentation has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from headway.comparison.adapter import FrameworkJob
from headway.comparison.frameworks.plain import PlainLoop
from headway.run.distributed.launch_env import LaunchEnv


class Horovod(PlainLoop):
    """`hvd.DistributedOptimizer`."""

    optimizer: Any

    def start(self, job: FrameworkJob) -> None:
        import horovod.torch as hvd
        from horovod.common.util import env

        self.run = HorovodRun(job)
        # Horovod reads its place from the environment, and only here.
        with env(**self.run.variables):
            hvd.init()

    def prepare(self, job: FrameworkJob) -> None:
        import horovod.torch as hvd

        self.job = job
        self.model = job.model()
        self.optimizer = hvd.DistributedOptimizer(
            job.optimizer(self.model), named_parameters=self.model.named_parameters()
        )
        # Without broadcast_optimizer_state, which Horovod 0.28.1 begins with an optimiser step on
        # gradients of zero, where there is no state yet: with weight decay it changes the model.
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.scheduler = job.scheduler(self.optimizer)

    def step(self, batch: Any) -> Tensor | float | None:
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model, batch)
        loss.backward()
        if self.job.recipe.clip is not None:
            self.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.recipe.clip)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def close(self) -> None:
        import horovod.torch as hvd

        hvd.shutdown()
        self.run.end()


class HorovodRun:
    """What `horovodrun --gloo` does before a process starts: no user writes it.

    Rank 0 runs Horovod's own rendezvous server; the others learn its port from torch's store at
    the address of torchrun's variables.

    Attributes:
        variables: Of this process.
    """

    def __init__(self, job: FrameworkJob) -> None:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.gloo_run import create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer

        place = LaunchEnv.here()
        slots = get_host_assignments([HostInfo("localhost", job.ranks)], job.ranks)
        self._store, _, _ = next(rendezvous("env://", job.rank, job.ranks))
        self._server = RendezvousServer() if job.rank == 0 else None
        if self._server is not None:
            port = self._server.start()
            self._server.init(slots)
            self._store.set("horovod/port", str(port))
        self.variables = create_slot_env_vars(slots[job.rank]) | {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": place.master_address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": self._store.get("horovod/port").decode(),
            "HOROVOD_GLOO_IFACE": place.interface or None,
        }

    def end(self) -> None:
        """Leave; all have met when `hvd.init` has returned."""
        if self._server is not None:
            self._server.stop()
