"""Tree packing: from a graph of links to weighted trees that use all of it (Blink)."""

from headway.collective.packing.chunk_tuner import ChunkTuner
from headway.collective.packing.pack import drifted_links, highest_rate, pack, repack_trees
from headway.collective.packing.tree import Packing, WeightedTree
from headway.collective.topology import Direction, LinkGraph, dgx1p, dgx1v, islands

__all__ = [
    "ChunkTuner",
    "Direction",
    "LinkGraph",
    "Packing",
    "WeightedTree",
    "dgx1p",
    "dgx1v",
    "drifted_links",
    "highest_rate",
    "islands",
    "pack",
    "repack_trees",
]
