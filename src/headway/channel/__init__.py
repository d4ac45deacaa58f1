"""Tensors between two processes through registered memory, instead of messages.

Xue et al. 2019, "Fast Distributed Deep Learning over RDMA" (EuroSys).
"""

from headway.channel.channel import Channel, wait_any
from headway.channel.row_exchange import RowExchange
from headway.channel.stream import open_stream
from headway.graph.stage_boundaries import boundary_tensors

__all__ = ["Channel", "RowExchange", "boundary_tensors", "open_stream", "wait_any"]
