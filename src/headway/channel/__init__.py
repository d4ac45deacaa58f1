"""Tensors between two processes through registered memory, instead of messages.

A channel is a pair of regions; a put writes a tensor and then a flag, the receiver polls the flag
and uses the tensor where it lies. Xue et al. 2019, "Fast Distributed Deep Learning over RDMA"
(EuroSys).
"""

from headway.channel.channel import Channel, Held
from headway.channel.region import Region
from headway.channel.rows import RowExchange
from headway.channel.stream import Stream, open_stream
from headway.channel.waiting import wait_any
from headway.graph.placement import Placed, Placement, place_tensors

__all__ = [
    "Channel", "Held", "Placed", "Placement", "Region", "RowExchange", "Stream", "open_stream",
    "place_tensors", "wait_any",
]  # fmt: skip
