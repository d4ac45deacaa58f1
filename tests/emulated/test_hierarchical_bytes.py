"""emulated: bytes of hierarchical exchanges and of Adasum on the link, counted by the kernel."""

from __future__ import annotations

import pytest
import torch

from headway.cluster import Cluster
from headway.collective.nodes import Nodes
from headway.comm.algorithms.adasum import Adasum
from headway.comm.algorithms.hierarchical import HierarchicalAllReduce
from headway.comm.algorithms.method import (
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    StatelessMethod,
    complete,
)
from headway.comm.compress.sparsification import HierarchicalTopK
from headway.comm.lanes.routes import make_route
from support.emulated import needs_root, run_nodes

pytestmark = needs_root

NUMEL = 2**20


def exchange(world, nodes: Nodes, method: ExchangeMethod) -> bool:
    route = make_route(None, nodes, hierarchical=True)
    pieces = tuple(GradientSlice(str(n), n * 2**16, (n + 1) * 2**16, (2**16,)) for n in range(16))
    fused = FusedBuffer(torch.ones(NUMEL + 16), pieces)
    fused.gradients.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank)))
    complete(method, fused, route)
    return bool((fused.flags > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "method", "expected"),
    [
        # 2 (m - 1) / m d elements of 4 bytes on each node's link
        (Cluster.of(2, 2, rate="1 Gbit/s"), HierarchicalAllReduce(), NUMEL * 4),
        # (m - 1) density d elements of 4 bytes, with an index of 4
        (Cluster.of(2, 2, rate="1 Gbit/s"), HierarchicalTopK(0.1), 0.1 * NUMEL * 8),
        (Cluster.of(3, 2, rate="1 Gbit/s"), HierarchicalTopK(0.1), 2 * 0.1 * NUMEL * 8),
        # 2 (n - 1) / n d elements, and the dot products
        (Cluster.of(2, 1, rate="1 Gbit/s"), Adasum(), NUMEL * 4 + 24 * 16),
    ],
    ids=["dense", "sparse on 2 nodes", "sparse on 3 nodes", "Adasum"],
)
def test_each_node_sends_what_the_formula_says(cluster, method, expected):
    nodes = Nodes.of(cluster.nodes_of_ranks)
    quiet = run_nodes(cluster, exchange, nodes, Quiet())
    done = run_nodes(cluster, exchange, nodes, method)
    for node in done.sent:
        # What it costs that processes meet is subtracted; packet headers stay in.
        sent = done.sent[node] - quiet.sent[node]
        assert sent == pytest.approx(expected, rel=0.03)


class Quiet(StatelessMethod):
    """Says nothing."""

    def rounds(self, fused, route):
        yield from ()
