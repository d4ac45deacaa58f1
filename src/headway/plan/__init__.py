"""The plan: mesh, batch arithmetic, layouts, stages, schedule, exchange, synchrony, memory."""

from headway.plan.batch import BatchSplit
from headway.plan.build import carried_by, check_copies, data_parallel, pipelined
from headway.plan.compression import Compression, parse_compression
from headway.plan.exchange import Exchange, ExchangePart
from headway.plan.explain import difference, explain
from headway.plan.layer_split import LayerSplit, ModuleSplit
from headway.plan.mesh import Axis, Mesh
from headway.plan.pipeline import Pipeline
from headway.plan.plan import (
    Layout,
    MemoryPolicy,
    Plan,
    Synchrony,
)

__all__ = [
    "Axis",
    "BatchSplit",
    "Compression",
    "Exchange",
    "ExchangePart",
    "LayerSplit",
    "Layout",
    "MemoryPolicy",
    "Mesh",
    "ModuleSplit",
    "Pipeline",
    "Plan",
    "Synchrony",
    "carried_by",
    "check_copies",
    "data_parallel",
    "difference",
    "explain",
    "parse_compression",
    "pipelined",
]
