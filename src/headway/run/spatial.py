"""Samples that lie in parts on several ranks: what the executor gives to the loss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from headway.collective.calls import Tell
from headway.data import Parts
from headway.parallel.spatial import SpatialContext
from headway.parallel.spatial.exchange import Axis
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.run.meshes import refined_mesh
from headway.run.recipe import Loss
from headway.run.trees import map_tensors
from headway.run.world import World


def context_of(plan: Plan, world: World) -> SpatialContext:
    """This rank's, of a plan that splits samples; collective."""
    sizes = plan.split.spatial
    axes = {f"{SPACE}_{number}": size for number, size in enumerate(sizes)}
    with world.explained("making the groups that split samples"):
        mesh = refined_mesh(plan, world, SPACE, axes)
        groups = {
            number - len(sizes): mesh.get_group(name)
            for number, (name, size) in enumerate(axes.items())
            if size > 1
        }
        together = _together(plan, world) if len(groups) > 1 else None
    return SpatialContext.of(
        groups, min_width=plan.split.min_width, head=plan.split.head, together=together
    )


def _together(plan: Plan, world: World) -> dist.ProcessGroup | None:
    """All ranks that share this one's samples; collective."""
    if plan.split.head == "gathered":
        return None
    everyone = dict.fromkeys(plan.mesh.peers(rank, SPACE) for rank in range(plan.ranks))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        ranks: dist.new_group(list(ranks)) for ranks in everyone
    }
    return made[plan.mesh.peers(world.rank, SPACE)]


def dry_context(plan: Plan, rank: int, tell: Tell) -> SpatialContext:
    """As `context_of`; nothing is moved.

    Args:
        plan: Splits samples.
        rank: Whose it is.
        tell: Told what would be started.
    """
    sizes = plan.split.spatial
    place = plan.mesh.coordinate(rank)[SPACE]
    axes, left = {}, place
    for dim, size in zip(range(-1, -len(sizes) - 1, -1), reversed(sizes), strict=True):
        left, own = divmod(left, size)
        if size > 1:
            axes[dim] = Axis(None, size, own, tell)
    apart = len(axes) > 1 and plan.split.head != "gathered"
    return SpatialContext(
        axes=dict(sorted(axes.items())),
        min_width=plan.split.min_width,
        head=plan.split.head,
        together=Axis(None, math.prod(sizes), place, tell) if apart else None,
    )


class SpatialInputs:
    """Cuts the tensors of a batch that have the dimensions that are split, or adopts their parts.

    Those are tensors with at least one dimension, the samples, in front of the split ones: [N, C,
    D, H, W] and labels [N, D, H, W], but not targets [N, 4].

    Args:
        plan: Splits samples.
        context: Of this rank.
    """

    def __init__(self, plan: Plan, context: SpatialContext) -> None:
        self._least = len(plan.split.spatial) + 1
        self.context = context

    def __call__(self, data: Any) -> Any:
        """This rank's parts of a micro-batch that it has whole, or has read in parts.

        Raises:
            PlanError: What it has read is not its part.
        """
        if isinstance(data, Parts):
            return map_tensors(data.data, partial(self._adopted, extents=data.extents))
        return map_tensors(data, self._cut)

    def _cut(self, tensor: Tensor) -> Any:
        return self.context.split(tensor) if tensor.ndim >= self._least else tensor

    def _adopted(self, tensor: Tensor, extents: tuple[int, ...]) -> Any:
        if tensor.ndim < self._least:
            return tensor
        return self.context.adopt(tensor, (*tensor.shape[: -len(extents)], *extents))


def spread(loss: Loss, plan: Plan, world: World) -> Loss:
    """The loss of samples that lie in parts, where the plan splits them; collective then."""
    if not plan.split.spatial:
        return loss
    cut = SpatialInputs(plan, context_of(plan, world))
    return lambda model, batch: loss(model, cut(batch))
