"""Device meshes of a plan: torch's `DeviceMesh` over the ranks, in the order of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headway.channel.gloo_listeners import drop_later_connections
from headway.comm.backend.process_group import register_state_backend
from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.plan import SHARD_AXIS
from headway.plans.synchrony import WORKER_AXIS
from headway.plans.tensor_layout import TensorGrid


def refined_mesh(
    plan: Plan, device: torch.device, name: str, axes: Mapping[str, int], *, first: bool = False
) -> DeviceMesh:
    """All ranks, with the plan's axis `name` split into finer ones; collective.

    Args:
        axes: Names and sizes of the finer axes, the last one innermost.
        first: Put these before the other dims of the mesh; ranks keep their coordinates.
    """
    found: dict[str, int] = {}
    for axis in plan.mesh.axes:
        found |= axes if axis.name == name else {axis.name: axis.size}
    ranks = torch.arange(plan.ranks, dtype=torch.int).view(*found.values())
    names = list(found)
    if first:
        # The sort is stable: the other dims keep the plan's order.
        order = sorted(names, key=lambda one: one not in axes)
        ranks = ranks.permute([names.index(one) for one in order]).contiguous()
        names = order
    with drop_later_connections():
        return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(names))


def grid_axes(grid: TensorGrid) -> dict[str, int]:
    """Names and sizes of the dims that take the place of the axis of the tensor split."""
    return {f"{TENSOR}_{axis}": size for axis, size in grid.sizes}


def state_mesh(plan: Plan, device: torch.device, timeout: timedelta | None = None) -> DeviceMesh:
    """The ranks that shard the state together: one dim, or copies x shards; collective.

    Where workers do not agree at every step, those of this rank's worker.

    On CPUs their groups are of the backend "headway": FSDP2 scatters sums and gathers, for which
    Gloo sends twice as much, or in one direction at a time (`benchmarks/sharded_state.py`).

    Args:
        timeout: Of a collective; None: the default group's.
    """
    # Ranks that share a sample shard the state together with the others; in hybrid sharding they
    # are among the copies.
    parts = plan.mesh.degree(SHARD_AXIS)
    lines: dict[int, list[int]] = {}
    for rank in range(plan.ranks):
        lines.setdefault(plan.mesh.coordinate(rank).get(SHARD_AXIS, 0), []).append(rank)
    ranks = torch.tensor([lines[part] for part in range(parts)], dtype=torch.int).T.contiguous()
    names = ("data",) if parts == 1 else ("data", SHARD_AXIS)
    # The ranks of a worker follow each other.
    grids = [grid.squeeze(1) if parts == 1 else grid for grid in ranks.chunk(plan.workers)]
    # Another default group (NCCL, a fake one, the user's own "headway") is what the mesh takes.
    if device.type != "cpu" or dist.get_backend() != "gloo":
        with drop_later_connections():
            if plan.workers == 1:
                return DeviceMesh(device.type, grids[0], mesh_dim_names=names)
            every = torch.stack(grids)
            return DeviceMesh(device.type, every, mesh_dim_names=(WORKER_AXIS, *names))[names]
    own = [_own_group(rows, timeout) for rows in _lines_of(grids)]
    worker = plan.mesh.coordinate(dist.get_rank()).get(WORKER_AXIS, 0)
    return DeviceMesh.from_group(
        own if parts > 1 else own[0], device.type, mesh=grids[worker], mesh_dim_names=names
    )


def _lines_of(grids: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    """For each dim of some grids of ranks the ranks of one grid that differ in it alone."""
    if grids[0].dim() == 1:
        return [[grid.tolist() for grid in grids]]
    every = torch.stack(list(grids))
    return [every.mT.flatten(0, 1).tolist(), every.flatten(0, 1).tolist()]


def _own_group(rows: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of the row that has this rank; all ranks make all of them."""
    backend, rank = register_state_backend(), dist.get_rank()
    made: list[dist.ProcessGroup] = [
        dist.new_group(row, backend=backend, timeout=timeout) for row in rows
    ]
    return next(group for group, row in zip(made, rows, strict=True) if rank in row)
