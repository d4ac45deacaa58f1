"""Spatial parallelism: each rank holds a part of every sample; the model is the user's own.

Begin with `spatial_tensor`. `halo_exchange` moves boxes between ranks; the other files are the
rules for functions of torch, listed in `operator_table`.
"""

from headway.parallel.spatial.halo_exchange import SpatialAxis, fetch_range
from headway.parallel.spatial.spatial_tensor import SpatialContext, SpatialTensor, gather

__all__ = ["SpatialAxis", "SpatialContext", "SpatialTensor", "fetch_range", "gather"]
