"""Spatial parallelism: one sample lies in parts on several ranks; the model is the user's own."""

from headway.parallel.spatial.context import SpatialContext
from headway.parallel.spatial.exchange import Axis
from headway.parallel.spatial.fetch import fetch
from headway.parallel.spatial.tensor import SplitTensor, gather

__all__ = ["Axis", "SpatialContext", "SplitTensor", "fetch", "gather"]
