"""The plan: mesh, batch arithmetic, layouts, stages, schedule, exchange, synchrony, memory."""

from headway.collective.compression import Compression, parse_compression
from headway.plan.batch import BatchSplit
from headway.plan.build import data_parallel, data_parallel_groups, pipelined, with_collective
from headway.plan.exchange import ExchangePart, ExchangePlan
from headway.plan.explain import explain, plan_difference
from headway.plan.layer_split import LayerSplit, ModuleSplit
from headway.plan.mesh import Axis, Mesh
from headway.plan.pipeline import PipelinePlan
from headway.plan.plan import Layout, MemoryPolicy, Plan, Synchrony

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
