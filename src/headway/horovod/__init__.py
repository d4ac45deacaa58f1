"""Horovod's interface for PyTorch: `import headway.horovod as hvd`; see docs/horovod.md."""

from headway.horovod import elastic, mpi_ops
from headway.horovod.exceptions import HostsUpdatedInterrupt
from headway.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from headway.horovod.mpi_ops import *  # noqa: F403 - its names are Horovod's, each once
from headway.horovod.optimizer import DistributedOptimizer
from headway.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__
