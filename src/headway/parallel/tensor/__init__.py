"""Tensor parallelism in 1, 2, 2.5 and 3 dimensions; the user's model unchanged.

This folder has the process grid and the parallel layers; `rules` say what each function of torch
does with split tensors. `headway.parallel.split_layers` splits a whole model.
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

__all__ = [
    "CuboidAxes",
    "DimensionCut",
    "ProcessGrid",
    "SplitSettings",
    "SplitTensor",
    "column_parallel_linear",
    "cuboid_linear",
    "row_parallel_linear",
    "split_cross_entropy",
    "split_norm",
    "summa_linear",
]
