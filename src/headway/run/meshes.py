"""The mesh of a plan as torch's, with one axis taken apart into finer ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from headway.plan import Plan
from headway.plan.layer_split import TENSOR
from headway.plan.tensor_layout import TensorGrid
from headway.run.world import World


def refined_mesh(
    plan: Plan, world: World, name: str, axes: Mapping[str, int], *, first: bool = False
) -> DeviceMesh:
    """All ranks, in the order of the plan; collective.

    Args:
        plan: Has the axis.
        world: The processes.
        name: The axis.
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
