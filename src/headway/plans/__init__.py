"""The plan: mesh, batch arithmetic, layouts, stages, schedule, exchange, synchrony, memory."""

from headway.collective.compression import Compression, parse_compression
from headway.plans.batch import BatchSplit
from headway.plans.exchange import ExchangePart, ExchangePlan
from headway.plans.explain import explain, plan_difference
from headway.plans.layer_split import LayerSplit, ModuleSplit
from headway.plans.mesh import Axis, Mesh
from headway.plans.pipeline import PipelinePlan
from headway.plans.plan import (
    Layout,
    MemoryPolicy,
    Plan,
    data_parallel,
    data_parallel_groups,
    pipelined,
    with_collective,
)
from headway.plans.synchrony import Synchrony

__all__ = [
    "Axis",
    "BatchSplit",
    "Compression",
    "ExchangePart",
    "ExchangePlan",
    "LayerSplit",
    "Layout",
    "MemoryPolicy",
    "Mesh",
    "ModuleSplit",
    "PipelinePlan",
    "Plan",
    "Synchrony",
    "data_parallel",
    "data_parallel_groups",
    "explain",
    "parse_compression",
    "pipelined",
    "plan_difference",
    "with_collective",
]
