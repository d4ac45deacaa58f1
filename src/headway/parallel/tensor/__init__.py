"""Tensor parallelism in 1, 2, 2.5 and 3 dimensions; the user's model unchanged.

Begin with `split_model`. This folder has the process grid, the split tensor and the parallel
layers; `rules` say what each function of torch does with split tensors; `model` finds out how a
model can be split, and splits it. Imports go from `model` to `rules` to this folder only.
"""

from headway.parallel.split_tensor import DimensionCut, SplitTensor
from headway.parallel.tensor.functional import (
    CuboidAxes,
    column_parallel_linear,
    cuboid_linear,
    row_parallel_linear,
    split_cross_entropy,
    split_norm,
    summa_linear,
)
from headway.parallel.tensor.grid import ProcessGrid
from headway.parallel.tensor.layer_context import SplitSettings
from headway.parallel.tensor.model.parameters import ParameterPlacement
from headway.parallel.tensor.model.split_inference import SplitDecisions, infer_split
from headway.parallel.tensor.model.split_model import SplitModel, apply_split_decisions, split_model

__all__ = [
    "CuboidAxes",
    "DimensionCut",
    "ParameterPlacement",
    "ProcessGrid",
    "SplitDecisions",
    "SplitModel",
    "SplitSettings",
    "SplitTensor",
    "apply_split_decisions",
    "column_parallel_linear",
    "cuboid_linear",
    "infer_split",
    "row_parallel_linear",
    "split_cross_entropy",
    "split_model",
    "split_norm",
    "summa_linear",
]
