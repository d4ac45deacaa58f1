"""The mesh of a plan as torch's, with one axis taken apart into finer ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from headway.plan import Plan
from headway.run.world import World


def refined_mesh(plan: Plan, world: World, name: str, axes: Mapping[str, int]) -> DeviceMesh:
    """All ranks, in the order of the plan; collective.

    Args:
        plan: Has the axis.
        world: The processes.
        name: The axis.
        axes: Names and sizes that take its place, the last one innermost.
    """
    found: dict[str, int] = {}
    for axis in plan.mesh.axes:
        found |= axes if axis.name == name else {axis.name: axis.size}
    ranks = torch.arange(plan.ranks, dtype=torch.int).view(*found.values())
    return DeviceMesh(world.device.type, ranks, mesh_dim_names=tuple(found))
