"""Spatial parallelism: each rank holds a part of every sample; the model is the user's own.

Begin with `spatial_context`. `halo_exchange` moves boxes between ranks; `windows` and
`pointwise_and_reductions` say what functions of torch do.
"""

from headway.parallel.spatial.spatial_context import SpatialContext, gather
from headway.parallel.split_tensor import SpatialAxis, SplitTensor

__all__ = ["SpatialAxis", "SpatialContext", "SplitTensor", "gather"]
