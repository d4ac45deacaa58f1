"""emulated: packed trees on a mesh of links: the same sums, and the bytes that the program says."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import headway
from headway.cluster import Cluster
from headway.cluster.cluster import Pair
from headway.collective.generators import trees
from headway.collective.packing.pack import pack
from headway.collective.topology import NetworkTopology
from support.emulated import needs_root, run_nodes

ELEMENTS = 750_001
FRAMES = 1514 / 1448
"""Bytes on the wire for one of a long message: packets of 1500 bytes with their headers."""


class Packed:
    """Packed trees for every all-reduce; keeps what it has made."""

    def __init__(self, packing):
        self.weighted = [(tree.parent, tree.weight) for tree in packing.trees]
        self.made = {}

    def __call__(self, task, ranks, element_bytes):
        if task.op != "all_reduce":
            return None
        self.made[task.elements] = trees(task, self.weighted, chunk=100_000)
        return self.made[task.elements]


def body(world):
    packed = Packed(pack(NetworkTopology.of_cluster(world.emulated.cluster).graph, "all_reduce"))
    headway.register_backend(choose=packed)
    group = dist.new_group(backend="headway")
    for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        for size in (1, 2, 3, 1001):
            tensor = (torch.arange(size) % 7 + world.rank).to(dtype)
            expected = tensor.clone()
            dist.all_reduce(tensor, group=group)
            dist.all_reduce(expected)
            torch.testing.assert_close(tensor, expected, rtol=close, atol=0.0)
    counts = [sent_by_a_sum(world, group) for _ in range(3)]
    planned = packed.made[ELEMENTS].sent()
    names = world.emulated.cluster.nodes_of_ranks
    # What else is on the links (segments sent again, acknowledgements) only ever adds to a count.
    return {
        peer: (min(sent[name] for sent in counts), 4 * planned.get((world.rank, peer), 0))
        for peer, name in enumerate(names)
        if peer != world.rank
    }


def sent_by_a_sum(world, group):
    """The bytes that this node sends to each other one for one sum."""
    tensor = torch.ones(ELEMENTS)
    dist.barrier()
    before = world.emulated.sent_to(world.node)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    after = world.emulated.sent_to(world.node)
    assert (tensor == world.size).all()
    return {name: after[name] - before[name] for name in after}


@needs_root
def test_each_link_carries_what_the_packed_trees_say():
    """Four nodes, a link between each two, one of them ten times slower: the sums are Gloo's, and
    the bytes of each direction of each link the program's own, with headers, within 3 %."""
    mesh = Cluster.of(4, 1, rate="500 Mbit/s", fabric="mesh")
    slow = replace(mesh, links=(Pair(nodes=("b", "c"), rate=6.25e6),))
    for counts in run_nodes(slow, body):
        assert len(counts) == 3
        for sent, planned in counts.values():
            assert planned > 0
            assert abs(sent - planned * FRAMES) < 0.03 * planned * FRAMES
