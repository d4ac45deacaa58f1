"""Process groups and device meshes of a plan, and small collectives over all ranks.

`exchange_routes` makes the groups of the gradient exchange, `refined_mesh` torch's DeviceMesh with
one axis of the plan taken apart. `broadcast_from_rank0` computes something on rank 0 and gives its
result, or its error, to all ranks. `gather_to_rank0` and `copy_to_holders` move tensors that lie on
different ranks; they use the default group from the main thread only, because the side group
belongs to a checkpoint that may be written meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headway.collective.nodes import Nodes
from headway.comm.lanes.all_reduce_program import all_reduce_program_chooser
from headway.comm.lanes.routes import RoutePool
from headway.comm.traffic_shaper import TrafficShaper
from headway.errors import HeadwayError, WorkerFailed
from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.tensor_layout import TensorGrid
from headway.run.distributed.failure_record import mark_reported_elsewhere, summarize_exception

if TYPE_CHECKING:
    from headway.run.distributed.world import World


def exchange_routes(plan: Plan, world: World) -> RoutePool:
    """The groups of a plan's exchange; collective."""
    pace = TrafficShaper.of(*world.place.pace) if world.place.pace else None
    among = plan.alike if plan.split.tensor else None
    # The groups of a program that is not ours keep its patience: torch's.
    timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
    return RoutePool(
        find_nodes(world), pace, among, all_reduce_program_chooser(plan.exchange), timeout
    )


def find_nodes(world: World) -> Nodes:
    """Which ranks share a node; collective."""
    place = world.place
    own = place.node_name or f"{socket.gethostname()} {place.node_rank}"
    names: list[str | None] = [None] * world.ranks
    dist.all_gather_object(names, own, group=world.side_group)
    return Nodes.of([str(name) for name in names])


# The mesh of a plan as torch's, with one axis taken apart into finer ones.


def refined_mesh(
    plan: Plan, world: World, name: str, axes: Mapping[str, int], *, first: bool = False
) -> DeviceMesh:
    """All ranks, in the order of the plan; collective.

    Args:
        axes: Names and sizes that take its place, the last one innermost.
        first: Those come first among the mesh's dims; what lies where stays as it is.
    """
    found: dict[str, int] = {}
    for axis in plan.mesh.axes:
        found |= axes if axis.name == name else {axis.name: axis.size}
    ranks = torch.arange(plan.ranks, dtype=torch.int).view(*found.values())
    names = list(found)
    if first:
        order = sorted(names, key=lambda one: one not in axes)
        ranks = ranks.permute([names.index(one) for one in order]).contiguous()
        names = order
    return DeviceMesh(world.device.type, ranks, mesh_dim_names=tuple(names))


def grid_axes(grid: TensorGrid) -> dict[str, int]:
    """Names and sizes of the dims that take the place of the axis of the tensor split."""
    return {f"{TENSOR}_{axis}": size for axis, size in grid.sizes}


# What rank 0 finds out counts for all ranks, and so does its error.


Result = TypeVar("Result")


def broadcast_from_rank0(
    rank: int, find: Callable[[], Result], exchanging: AbstractContextManager[None]
) -> Result:
    """The same on all ranks; collective.

    Args:
        find: Called on rank 0 alone; its result travels pickled.

    Raises:
        HeadwayError: What `find` raised on rank 0. Another exception, of the user's code, is raised
            there as it is, and a `WorkerFailed` on the other ranks.
    """
    found: list[Any] = [None]
    cause: Exception | None = None
    if rank == 0:
        try:
            found = [find()]
        except HeadwayError as error:
            found, cause = [error], error
        except Exception as error:
            # It may not be picklable, and its class may not exist elsewhere: its text travels.
            found, cause = [WorkerFailed(summarize_exception(error), where="rank 0")], error
    with exchanging:
        dist.broadcast_object_list(found, src=0)
    if cause is not None:
        raise cause
    if isinstance(found[0], HeadwayError):
        raise mark_reported_elsewhere(found[0])
    result: Result = found[0]
    return result


# Tensors that lie on different ranks, sent from one rank to another on the default group.


@dataclass(frozen=True)
class _TensorSpec:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool

    @staticmethod
    def of(tensor: Tensor) -> _TensorSpec:
        return _TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def gather_to_rank0(own: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """All tensors on rank 0, one after the other; nothing on the other ranks.

    Args:
        own: Name -> tensor, dense; a name is given by one rank only.
    """
    forms: list[dict[str, _TensorSpec]] = [{}] * world.ranks
    dist.all_gather_object(forms, {name: _TensorSpec.of(tensor) for name, tensor in own.items()})
    found = dict(own) if world.rank == 0 else {}
    for rank in range(1, world.ranks):
        for name, form in forms[rank].items():
            if world.rank == rank:
                dist.send(_packed([own[name]], world.device), dst=0)
            elif world.rank == 0:
                received = form.empty(world.device)
                _receive([received], rank, world.device)
                found[name] = received.cpu() if form.on_host else received
    return found


def copy_to_holders(
    pairs: Mapping[tuple[int, int], Sequence[str]], tensors: Mapping[str, Tensor], world: World
) -> None:
    """Give holders the owners' numbers.

    Args:
        pairs: (owner, holder) -> names, in an order that is the same on all ranks.
        tensors: By name; those of the holder are changed.
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
        target.copy_(part.clone().view(target.dtype).view(target.shape))
