"""emulated: a link becomes ten times slower while training: it is noticed and named, packed trees
take the place of the program, the link carries less than before, and the numbers stay the serial
run's."""

from __future__ import annotations

import torch

import headway
from headway.cluster import Cluster
from headway.collective.model.bucket_cost import bucket_traffic
from headway.collective.topology import NetworkTopology
from headway.planner.collective_algorithm import choose_all_reduce
from headway.run.distributed.world import World
from support.emulated import needs_root, run_nodes

RANKS, WIDTH, LAYERS, RATE = 4, 128, 8, 12.5e6
MESH = Cluster.of(RANKS, 1, rate="100 Mbit/s", fabric="mesh")
HEALTHY, MOST, COUNTED = 6, 60, 2
FRAMES = 1514 / 1448
"""Bytes on the wire for one of a long message: packets of 1500 bytes with their headers."""


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, step, rank):
    draw = torch.Generator().manual_seed(RANKS * step + rank)
    given = torch.randn(2, WIDTH, dtype=torch.float64, generator=draw)
    return model(given).square().mean()


def body(world):
    torch.set_num_threads(1)
    found = choose_all_reduce("auto", NetworkTopology.of_cluster(MESH), 2**20)
    model, optimizer = made()
    exchange = headway.Exchange(
        model, optimizer, world=World.adopt(), collective=found.collective, carrier=found.carrier
    )
    done = 0

    def steps(count):
        nonlocal done
        for _ in range(count):
            loss_of(model, done, world.rank).backward()
            exchange.step()
            done += 1
        return flat(model)

    def counted():
        """Bytes to each other rank in a step, and those of the plan of now."""
        torch.distributed.barrier()
        before = world.emulated.sent_to(world.node)
        steps(COUNTED)
        torch.distributed.barrier()
        after = world.emulated.sent_to(world.node)
        now = exchange._strategy.exchange.description
        shapes = [[tuple(p.shape) for p in b.parameters] for b in buckets()]
        plan = {}
        for each in shapes:
            sent = bucket_traffic(
                each,
                NetworkTopology.of_cluster(MESH).nodes,
                collective=now.collective,
                carrier=now.carrier,
                element_bytes=8,
            ).sent
            for (sender, receiver), size in sent.items():
                if sender == world.rank:
                    plan[receiver] = plan.get(receiver, 0.0) + size
        return now.collective, {
            peer: ((after[name] - before[name]) / COUNTED, plan.get(peer, 0.0))
            for peer, name in enumerate(MESH.nodes_of_ranks)
            if peer != world.rank
        }

    def buckets():
        return exchange._strategy.exchange.now.buckets

    steps(HEALTHY)
    first = counted()
    if world.rank == 0:
        world.emulated.set_link("b", "c", RATE / 10)
    torch.distributed.barrier()
    while done < MOST and not any(each.startswith("re-packed") for each in exchange.remarks):
        steps(1)
    at = done
    second = counted()
    history = steps(1)
    exchange.close()
    return first, second, at, history, exchange.remarks


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def serial(count):
    """The mean over the ranks, in one process."""
    model, optimizer = made()
    for step in range(count):
        optimizer.zero_grad()
        sum(loss_of(model, step, rank) / RANKS for rank in range(RANKS)).backward()
        optimizer.step()
    return flat(model)


@needs_root
def test_a_link_that_becomes_slow_is_noticed_and_packed_around():
    found = run_nodes(MESH, body, timeout=120)
    first, second, at, history, remarks = found[0]
    assert first[0] == "direct"
    assert second[0] == "trees", remarks
    assert at < MOST
    said = " ".join(remarks)
    for sender, receiver in ((1, 2), (2, 1)):
        assert f"rank {sender} to rank {receiver}: " in said
    for rank, (_, (_, own), stopped, parameters, told) in enumerate(found):
        assert (stopped, told) == (at, remarks)
        assert torch.equal(parameters, history)
        for peer, (sent, planned) in own.items():
            where = (rank, peer, sent, planned)
            assert abs(sent - planned * FRAMES) < 0.03 * planned * FRAMES + 20_000, where
    before, after = (found[1][place][1][2][0] + found[2][place][1][1][0] for place in (0, 1))
    assert after < 0.4 * before
    expected = serial(at + COUNTED + 1)
    assert (expected - history).abs().max() < 1e-12 * expected.abs().max()
