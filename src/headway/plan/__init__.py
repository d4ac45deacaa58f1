"""The plan: mesh, batch arithmetic, layouts, stages, schedule, exchange, synchrony, memory."""

from headway.plan.batch import BatchSplit
from headway.plan.explain import difference, explain
from headway.plan.mesh import Axis, Mesh
from headway.plan.plan import (
    Exchange,
    Layout,
    MemoryPolicy,
    Plan,
    Schedule,
    Stage,
    Synchrony,
    data_parallel,
)

__all__ = [
    "Axis",
    "BatchSplit",
    "Exchange",
    "Layout",
    "MemoryPolicy",
    "Mesh",
    "Plan",
    "Schedule",
    "Stage",
    "Synchrony",
    "data_parallel",
    "difference",
    "explain",
]
