"""Process groups of a plan's exchange, and tensors sent from one rank to another.

`gather_to_first` and `copy_to_holders` use the default group, from the main thread only, because
the side group belongs to a checkpoint that may be written meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.facts import gather_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.collective.nodes import Nodes
from headway.comm.backend.process_group import ChooseProgram
from headway.comm.lanes.all_reduce_program import all_reduce_program_chooser
from headway.comm.lanes.routes import RankPartition, RoutePool
from headway.comm.traffic_shaper import TrafficShaper
from headway.parallel.global_norm import GlobalNorm
from headway.plans import Plan

if TYPE_CHECKING:
    from headway.run.distributed.world import World


def exchange_routes(plan: Plan, world: World) -> RoutePool:
    """The groups of a plan's exchange; collective."""
    among = plan.alike if plan.split.tensor or plan.workers > 1 else None
    return exchange_pool(world, among, all_reduce_program_chooser(plan.exchange))


def exchange_pool(
    world: World, among: RankPartition | None, choose: ChooseProgram | None = None
) -> RoutePool:
    """The groups of an exchange on the links of this world; collective.

    Args:
        among: Who exchanges with whom; None: all with all.
        choose: As of `RoutePool`.
    """
    pace = TrafficShaper.of(*world.place.pace) if world.place.pace else None
    # A process group that the user's program has made keeps its own time-out.
    timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
    return RoutePool(find_nodes(world), pace, among, choose, timeout)


def global_norm(plan: Plan, world: World) -> GlobalNorm | None:
    """Normalisation over all ranks, where the plan wants it; collective."""
    if plan.batch.norm == "local" or world.ranks == 1:
        return None
    # A group of its own: gradients are summed on the others while backward is under way.
    with world.explained("making the group that normalises batches"), drop_later_connections():
        group: dist.ProcessGroup = dist.new_group(list(range(world.ranks)))
    return GlobalNorm(group)


def find_nodes(world: World) -> Nodes:
    """Which ranks share a node; collective."""
    place = world.place
    own = place.node_name or f"{socket.gethostname()} {place.node_rank}"
    # Small Python objects go over Gloo, also where the tensors are on GPUs.
    names = gather_facts(own, world.side_group)
    return Nodes.of([str(name) for name in names])


def gather_to_first(
    own: Mapping[str, Tensor],
    world: World,
    ranks: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """All tensors of some ranks on the first of them, one after the other; nothing on the others.

    Collective over these ranks.

    Args:
        own: Name -> tensor, dense; a name is given by one of the ranks only.
        ranks: Those of this rank's worker; None: all.
        group: Theirs; None: the default one.
    """
    if world.ranks == 1:
        return dict(own)
    first, *others = range(world.ranks) if ranks is None else ranks
    told = {name: (t.shape, t.dtype, t.device.type == "cpu") for name, t in own.items()}
    forms = gather_facts(told, group)
    found = dict(own) if world.rank == first else {}
    for place, rank in enumerate(others, 1):
        for name, (shape, dtype, on_host) in forms[place].items():
            if world.rank == rank:
                dist.send(_packed([own[name]], world.device), dst=first)
            elif world.rank == first:
                received = torch.empty(shape, dtype=dtype, device=world.device)
                _receive([received], rank, world.device)
                found[name] = received.cpu() if on_host else received
    return found


def copy_to_holders(
    pairs: Mapping[tuple[int, int], Sequence[str]], tensors: Mapping[str, Tensor], world: World
) -> None:
    """Give holders the owners' numbers.

    Args:
        pairs: (owner, holder) -> names, in an order that is the same on all ranks.
    """
    for (source, target), names in pairs.items():
        chosen = [tensors[name].detach() for name in names]
        if world.rank == source:
            dist.send(_packed(chosen, world.device), dst=target)
        elif world.rank == target:
            _receive(chosen, source, world.device)


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)


def _receive(targets: Sequence[Tensor], source: int, device: torch.device) -> None:
    sizes = [target.numel() * target.element_size() for target in targets]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.recv(flat, src=source)
    for target, part in zip(targets, flat.split(sizes), strict=True):
        # A part may begin at any byte; its clone is aligned, as `view` to a larger type requires.
        target.copy_(part.clone().view(target.dtype).view(target.shape))
