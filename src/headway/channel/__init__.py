"""Tensors between two processes through registered memory, instead of messages.

A channel is a pair of regions; a put writes a tensor and then a flag, the receiver polls the flag
and uses the tensor where it lies. Xue et al. 2019, "Fast Distributed Deep Learning over RDMA"
(EuroSys).
"""

from headway.channel.channel import Channel, ReceivedTensor, wait_any
from headway.channel.region import MemoryRegion
from headway.channel.row_exchange import RowExchange
from headway.channel.stream import TensorStream, open_stream
from headway.graph.stage_boundaries import BoundaryTensor, BoundaryTensors, boundary_tensors

__all__ = [
    "BoundaryTensor",
    "BoundaryTensors",
    "Channel",
    "MemoryRegion",
    "ReceivedTensor",
    "RowExchange",
    "TensorStream",
    "boundary_tensors",
    "open_stream",
    "wait_any",
]  # fmt: skip
