"""Model parallelism that runs the user's own model: pipelines, split layers, split samples.

This package exports the pipeline for users without a recipe: cut a model into stages, then let
`Pipeline` run any schedule table. `tensor` splits layers, `spatial` splits samples, and `fsdp`
shards parameters, gradients and optimiser state.
"""

from headway.parallel.pipeline.data_parallel import StageGradientSync
from headway.parallel.pipeline.partition.cut import (
    cut,
    cut_module_chain,
    list_units,
    record_call,
    run_stages,
)
from headway.parallel.pipeline.partition.stage_modules import balanced_partition
from headway.parallel.pipeline.runtime.executor import (
    GradientSync,
    Pipeline,
    PipelineCallbacks,
    PipelineRanks,
    open_shared_memory_streams,
)
from headway.parallel.pipeline.runtime.stage_profile import (
    StageCost,
    measure_stage_costs,
    measure_unit_seconds,
)
from headway.parallel.stages import (
    ModelCall,
    ModelStages,
    Stage,
    StageInput,
    StageOutput,
)

__all__ = [
    "GradientSync",
    "ModelCall",
    "ModelStages",
    "Pipeline",
    "PipelineCallbacks",
    "PipelineRanks",
    "Stage",
    "StageCost",
    "StageGradientSync",
    "StageInput",
    "StageOutput",
    "balanced_partition",
    "cut",
    "cut_module_chain",
    "list_units",
    "measure_stage_costs",
    "measure_unit_seconds",
    "open_shared_memory_streams",
    "record_call",
    "run_stages",
]
