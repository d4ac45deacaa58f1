"""The process groups of a plan's exchange: which ranks share a node, and who sums with whom."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from headway.collective import Nodes
from headway.comm import Routes
from headway.comm.carried import chooser
from headway.comm.pacing import Pace
from headway.plan import Plan
from headway.run.world import World


def routes_of(plan: Plan, world: World) -> Routes:
    """The groups of a plan's exchange; collective."""
    pace = Pace.of(*world.place.pace) if world.place.pace else None
    among = plan.alike if plan.split.tensor else None
    # The groups of a program that is not ours keep its patience: torch's.
    timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
    return Routes(find_nodes(world), pace, among, chooser(plan.exchange), timeout)


def find_nodes(world: World) -> Nodes:
    """Which ranks share a node; collective."""
    place = world.place
    own = place.node_name or f"{socket.gethostname()} {place.node_rank}"
    names: list[str | None] = [None] * world.ranks
    dist.all_gather_object(names, own, group=world.side_group)
    return Nodes.of([str(name) for name in names])
