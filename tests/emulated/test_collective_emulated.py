"""emulated: training whose sums packed trees carry: fewer bytes on the slow link than a ring, and
on each link those of the plan."""

from __future__ import annotations

from dataclasses import replace

import torch

import headway
from headway.cluster import Cluster
from headway.cluster.cluster import Pair
from headway.collective.model.bucket_cost import bucket_traffic
from headway.collective.topology import NetworkTopology
from headway.planner.collective_algorithm import choose_all_reduce
from headway.run.distributed.world import World
from support.emulated import needs_root, run_nodes

STEPS, WIDTH, LAYERS = 2, 512, 4
FRAMES = 1514 / 1448
"""Bytes on the wire for one of a long message: packets of 1500 bytes with their headers."""
MESH = replace(
    Cluster.of(4, 1, rate="500 Mbit/s", fabric="mesh"),
    links=(Pair(nodes=("b", "c"), rate=6.25e6),),
)


def body(world):
    """By exchange: the bytes that this node sent to each other one in a step, counted and planned;
    and a sum of the parameters."""
    found = choose_all_reduce("auto", NetworkTopology.of_cluster(MESH), 2**22)
    assert found.collective == "trees"
    choices = {"all_reduce": {}, "trees": {"collective": "trees", "carrier": found.carrier}}
    return {name: steps(world, choice) for name, choice in choices.items()}


def steps(world, choice):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), **choice)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]

    def step():
        model(torch.randn(2, WIDTH)).square().mean().backward()
        exchange.step()
        exchange.flush()

    step()
    torch.distributed.barrier()
    before = world.emulated.sent_to(world.node)
    for _ in range(STEPS):
        step()
    torch.distributed.barrier()
    after = world.emulated.sent_to(world.node)
    exchange.close()
    plan = bucket_traffic(shapes, NetworkTopology.of_cluster(MESH).nodes, **choice).sent
    counts = {
        peer: ((after[name] - before[name]) / STEPS, plan.get((world.rank, peer), 0.0))
        for peer, name in enumerate(MESH.nodes_of_ranks)
        if peer != world.rank
    }
    return counts, sum(parameter.detach().double().sum().item() for parameter in model.parameters())


@needs_root
def test_trees_send_less_than_the_ring_over_the_slow_link():
    """Ranks 1 and 2 are neighbours in Gloo's ring: 1.5 of the model crosses their link, one way."""
    ranks = run_nodes(MESH, body, timeout=90)
    for rank, found in enumerate(ranks):
        for peer, (sent, planned) in found["trees"][0].items():
            where = (rank, peer, sent, planned)
            assert planned, where
            assert abs(sent - planned * FRAMES) < 0.03 * planned * FRAMES + 20_000, where
    slow = {
        name: ranks[1][name][0][2][0] + ranks[2][name][0][1][0] for name in ("all_reduce", "trees")
    }
    assert slow["trees"] < 0.2 * slow["all_reduce"]
    for name in ("all_reduce", "trees"):
        assert len({found[name][1] for found in ranks}) == 1
    ring, trees = (ranks[0][name][1] for name in ("all_reduce", "trees"))
    assert abs(ring - trees) < 1e-4 * abs(ring)
