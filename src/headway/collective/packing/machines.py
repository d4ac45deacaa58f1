"""Published machines as link graphs: NVLinks between the GPUs of a DGX-1.

The numbers of links between two GPUs are those of NVIDIA's DGX-1 with P100 (four links for each
GPU: two quads and a cube's edges between them) and with V100 (six links for each GPU, so that some
pairs have two). The unit of a rate is one link in one direction.
"""

from __future__ import annotations

from headway.collective.packing.graph import LinkGraph

DOUBLE_V = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
SINGLE_V = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))


def dgx1v(link: float = 1.0) -> LinkGraph:
    """Eight V100, six links each; `link`: the rate of one."""
    return LinkGraph.of(8, dict.fromkeys(DOUBLE_V, 2 * link) | dict.fromkeys(SINGLE_V, link))


def dgx1p(link: float = 1.0) -> LinkGraph:
    """Eight P100, four links each: the same pairs with one link each; `link`: its rate."""
    return LinkGraph.of(8, dict.fromkeys(DOUBLE_V + SINGLE_V, link))
