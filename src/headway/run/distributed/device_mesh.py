"""Device meshes of a plan: torch's `DeviceMesh` over the ranks, in the order of the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.plan import SHARD_AXIS
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
    return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(names))


def grid_axes(grid: TensorGrid) -> dict[str, int]:
    """Names and sizes of the dims that take the place of the axis of the tensor split."""
    return {f"{TENSOR}_{axis}": size for axis, size in grid.sizes}


def state_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The ranks that shard the state together: one dim, or copies x shards; collective."""
    # Ranks that share a sample shard the state together with the others; in hybrid sharding they
    # are among the copies.
    parts = plan.mesh.degree(SHARD_AXIS)
    lines: dict[int, list[int]] = {}
    for rank in range(plan.ranks):
        lines.setdefault(plan.mesh.coordinate(rank).get(SHARD_AXIS, 0), []).append(rank)
    if parts == 1:
        ranks, names = torch.tensor(lines[0], dtype=torch.int), ("data",)
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)
    grid = torch.tensor([lines[part] for part in range(parts)], dtype=torch.int).T.contiguous()
    return DeviceMesh(device.type, grid, mesh_dim_names=("data", SHARD_AXIS))
