"""emulated: channels between emulated nodes use their links, though they share a memory."""

from __future__ import annotations

from typing import Any

import torch

from headway.channel.channel import Channel
from headway.cluster import Cluster
from support.emulated import needs_root, run_nodes

ELEMENTS = 500_000


def one_tensor(world: Any) -> str:
    channel = Channel(1 - world.rank, timeout=30.0)
    if world.rank == 0:
        channel.put(torch.ones(ELEMENTS))
    else:
        with channel.get() as came:
            assert float(came.sum()) == ELEMENTS
    provider = channel.provider
    channel.close()
    return provider


@needs_root
def test_a_tensor_travels_over_the_link() -> None:
    done = run_nodes(Cluster.of(2, 1, rate="1 Gbit/s"), one_tensor)
    assert done == ["socket", "socket"]
    assert done.sent["a"] > ELEMENTS * 4
