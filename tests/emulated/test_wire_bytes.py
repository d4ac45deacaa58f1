"""emulated: bytes counted by the kernel are those of the plan's own arithmetic, within 3 %."""

from __future__ import annotations

import pytest
import torch

import headway
from headway.cluster import Cluster
from headway.run.distributed.world import World
from support.emulated import needs_root, run_nodes
from support.sampling import sampled

pytestmark = needs_root
STEPS = 4


def body(world, choices):
    """Bytes by the kernel and by the plan, of some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), **choices)
    planned = 0

    def step():
        nonlocal planned
        model(torch.randn(2, 512)).square().mean().backward()
        exchange.step()
        exchange.flush()

    for _ in range(6):  # measuring of the link is over
        step()
    torch.distributed.barrier()
    before = world.emulated.counters(world.node)[0]
    for _ in range(STEPS):
        step()
    torch.distributed.barrier()
    sent = world.emulated.counters(world.node)[0] - before
    step()
    planned = STEPS * sum(flight.wire_bytes for flight in exchange.flights)
    exchange.close()
    return sent, planned


CHOICES = [
    {},
    {"priority": True},
    {"compress": "fp16"},
    {"compress": "bf16", "priority": True},
    {"compress": "int8"},
    {"compress": "topk:0.02"},
    {"compress": "sign"},
    {"reduce": "adasum"},
]


@pytest.mark.parametrize("choices", sampled(CHOICES, 4), ids=str)
def test_the_kernel_counts_what_the_plan_says(choices):
    for sent, planned in run_nodes(Cluster.of(2, 1, rate="1 Gbit/s"), body, choices):
        # Headers of super-packets and acknowledgements are a fixed part of small payloads.
        assert planned * 0.97 < sent < planned * 1.03 + STEPS * 20_000, (sent, planned)
