"""The hands on the gradients where every rank keeps a part of the model's state (ZeRO).

FSDP2 sums gradients in the backward pass, where they are kept. What is left is the sum of the few
parameters that are not sharded, scaling, clipping by the norm of all parts, and the update, which
each rank makes of its own parts. Invariant: between steps all is sharded.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from headway.parallel.state_sharding import ShardedState
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.plan.sharding import SHARD
from headway.run.memory import give_back_freed_memory
from headway.run.part_gradients import PartGradients
from headway.run.skeleton import skeleton
from headway.run.world import World


class ShardedGradients(PartGradients):
    """As `Gradients`; the arguments are the same. The model is sharded in place."""

    def _place(self) -> None:
        plan, world = self._plan, self._world
        self._skeleton = skeleton(self._model)
        assert plan.memory.zero
        with world.explained("sharding the model's state"):
            self.sharded = ShardedState(
                self._model,
                self._optimizer,
                mesh_of(plan, world),
                plan.memory.zero,
                counted=plan.mesh.degree(SPACE),
            )
        give_back_freed_memory()


def mesh_of(plan: Plan, world: World) -> DeviceMesh:
    """The ranks that keep the state together: a line, or copies x parts; collective.

    Those that share a sample keep it together with the others; with parts of their own (hybrid)
    they are among the copies.
    """
    parts = plan.mesh.degree(SHARD)
    lines: dict[int, list[int]] = {}
    for rank in range(plan.ranks):
        lines.setdefault(plan.mesh.coordinate(rank).get(SHARD, 0), []).append(rank)
    if parts == 1:
        ranks, names = torch.tensor(lines[0], dtype=torch.int), ("data",)
        return DeviceMesh(world.device.type, ranks, mesh_dim_names=names)
    grid = torch.tensor([lines[part] for part in range(parts)], dtype=torch.int).T.contiguous()
    return DeviceMesh(world.device.type, grid, mesh_dim_names=("data", SHARD))
