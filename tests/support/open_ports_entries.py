"""Bodies of ranks for the tests of open ports."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from headway.channel import pairing
from headway.channel.channel import Channel
from headway.channel.gloo_listeners import drop_later_connections
from headway.comm.backend.process_group import register_backend
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from support.open_ports import answering, listening

Places = set[tuple[str, int]]


def ports(place: LaunchEnv, launcher: int, backend: str) -> tuple[Places, Places]:
    """Where the launcher and this rank listen while groups and a channel by sockets are open.

    Returns:
        All of them, and those that take a stranger's call once everything is connected.
    """
    found: set[tuple[str, int]] = set()
    accept = pairing.accept

    def observed(*arguments: Any) -> Any:
        found.update(listening([os.getpid()]))
        return accept(*arguments)

    with World.join(place, timeout_seconds=30) as world:
        register_backend()
        with drop_later_connections():
            group = dist.new_group(backend=backend)
        parts = list(torch.zeros(2, 1))
        dist.all_gather(parts, torch.tensor([float(world.rank)]), group=group)
        assert [part.item() for part in parts] == [0, 1]
        found |= listening([os.getpid()]) | listening([launcher])
        before = len(found)
        with mock.patch.object(pairing, "accept", observed):
            channel = Channel(1 - world.rank, shape=(2,), provider="socket", timeout=20)
        assert (len(found) > before) == (world.rank == 0)  # the lower rank listens
        heard = answering(listening([os.getpid()]))
        channel.close()
        return found, heard
