"""Tree packing: from a graph of links to weighted trees that use all of it (Blink)."""

from headway.collective.packing.channels import Channel, shares
from headway.collective.packing.drift import drifted, repacked
from headway.collective.packing.graph import Direction, LinkGraph, islands
from headway.collective.packing.machines import dgx1p, dgx1v
from headway.collective.packing.pack import highest_rate, pack
from headway.collective.packing.servers import one_hop, over_servers, servers_rate
from headway.collective.packing.tree import Packing, Tree
from headway.collective.packing.tuner import ChunkTuner

__all__ = [
    "Channel",
    "ChunkTuner",
    "Direction",
    "LinkGraph",
    "Packing",
    "Tree",
    "dgx1p",
    "dgx1v",
    "drifted",
    "highest_rate",
    "islands",
    "one_hop",
    "over_servers",
    "pack",
    "repacked",
    "servers_rate",
    "shares",
]
