"""Samples that lie in parts on several ranks: what the executor gives to the loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headway.parallel.spatial import SpatialContext
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.run.meshes import refined_mesh
from headway.run.recipe import Loss
from headway.run.trees import map_tensors
from headway.run.world import World


class SpatialInputs:
    """Cuts the tensors of a batch that have the dimensions that are split.

    Those are tensors with at least one dimension, the samples, in front of the split ones: [N, C,
    D, H, W] and labels [N, D, H, W], but not targets [N, 4].

    Args:
        plan: Splits samples.
        world: The processes; collective.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        sizes = plan.split.spatial
        axes = {f"{SPACE}_{number}": size for number, size in enumerate(sizes)}
        with world.explained("making the groups that split samples"):
            mesh = refined_mesh(plan, world, SPACE, axes)
            groups = {
                number - len(sizes): mesh.get_group(name)
                for number, (name, size) in enumerate(axes.items())
                if size > 1
            }
        self._least = len(sizes) + 1
        self.context = SpatialContext.of(groups, min_width=plan.split.min_width)

    def __call__(self, data: Any) -> Any:
        """This rank's parts of a micro-batch that it has whole."""

        def cut(tensor: Tensor) -> Any:
            return self.context.split(tensor) if tensor.ndim >= self._least else tensor

        return map_tensors(data, cut)


def spread(loss: Loss, plan: Plan, world: World) -> Loss:
    """The loss of samples that lie in parts, where the plan splits them; collective then."""
    if not plan.split.spatial:
        return loss
    cut = SpatialInputs(plan, world)
    return lambda model, batch: loss(model, cut(batch))
