"""Tree packing: from a graph of links to weighted trees that use all of it (Blink)."""

from headway.collective.packing.pack import pack
from headway.collective.topology import LinkGraph, dgx1v

__all__ = ["LinkGraph", "dgx1v", "pack"]
