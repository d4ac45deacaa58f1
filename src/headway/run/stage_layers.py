"""Layers of a pipeline's stages, split over ranks that share their samples.

The survey looks at the whole model. Once that is cut, the parameters of this rank's stages become
parts of themselves, and stay the same objects, so that everything that knows stages takes them for
those of a smaller model. Invariant: what other ranks hold stays whole, without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from headway.errors import PlanError
from headway.parallel import Stages
from headway.parallel.tensor import Decisions, Grid, Home, Settings, Split, obey, survey
from headway.parallel.tensor.hold import by_samples, hold
from headway.plan import Plan
from headway.plan.layer_split import TENSOR
from headway.plan.tensor_layout import TensorGrid
from headway.run.first import found_by_first
from headway.run.meshes import grid_axes, refined_mesh
from headway.run.skeleton import skeleton
from headway.run.world import World


class StageLayers:
    """Of this rank; making it is collective.

    Args:
        plan: Splits layers.
        world: The processes.

    Attributes:
        axes: Names and sizes of the grid's axes.
        skeleton: The unsplit model without memory; None where it cannot be copied.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        grid = plan.split.grid
        assert grid is not None
        self.axes = grid_axes(grid)
        self._grids: dict[TensorGrid, Grid] = {}
        with world.explained("making the groups that split layers"):
            for one in dict.fromkeys((grid, *(other for _, other in plan.split.others))):
                mesh = refined_mesh(plan, world, TENSOR, grid_axes(one), first=True)
                self._grids[one] = Grid.of(one, mesh[tuple(grid_axes(one))])
        self._grid = self._grids[grid]
        self._world = world
        self._wanted = plan.split
        self._decisions: Decisions | None = None
        self._split: Split | None = None
        self.skeleton: nn.Module | None = None

    def decide(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        data: Any,
        exchanging: AbstractContextManager[None],
    ) -> None:
        """Look at the model before it is cut; collective. What rank 0 finds counts.

        Args:
            model: Whole.
            loss: Of the recipe.
            data: Of a micro-batch, whole.
            exchanging: Around messages.

        Raises:
            PlanError: It cannot be split.
        """
        self.skeleton = skeleton(model)
        wanted, plan = self._wanted, self._grid.plan
        self._decisions = found_by_first(
            self._world.rank,
            lambda: survey(
                model, loss, data, plan, whole=wanted.whole, only=wanted.only, by=wanted.others
            ),
            exchanging,
        )

    def obey(self, stages: Stages, away: frozenset[str]) -> list[str]:
        """Split what this rank holds, in place; returns remarks.

        Args:
            stages: Of the model.
            away: Names of the parameters that it does not hold.

        Raises:
            PlanError: A stage carries out the inside of a module that has a grid of its own.
        """
        assert self._decisions is not None
        _check_islands(stages, self._decisions)
        self._split = split = obey(
            stages.model,
            self._grid,
            self._decisions,
            settings=Settings(ahead=False),
            home=Home.of(self._grid),
            away=away,
            grids=self._grids,
        )
        for stage in (*stages, *(stages.evaluating or ())):
            hold(stage.module, split.context, split.keys, root=None)
        return [f"not split: {name} ({why})" for name, why in self._decisions.left.items()]

    @property
    def own(self) -> tuple[Any, ...]:
        """What values between stages refer to; see `headway.parallel.Team`."""
        return () if self._split is None else (self._split.context,)

    def entering(self, model: Any) -> Any:
        """See the function."""
        return entering(model, self._split)

    def keep(self, meshes: Mapping[str, DeviceMesh]) -> None:
        """Parameters are cut once more, by rows; see `StageShards.meshes`."""
        assert self._split is not None
        for name, mesh in meshes.items():
            copies = [n for n in mesh.mesh_dim_names or () if n.startswith("copies_")]
            inner = (*(Replicate() for _ in copies), Shard(0))
            self._split.homes[name] = Home(self._grid, mesh, inner)

    def wrapped(self, name: str, part: Tensor) -> Tensor:
        """This rank's memory as a part of the whole parameter."""
        assert self._split is not None
        return self._split.wrapped(name, part)

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """In the order of the unsplit model; collective in the group."""
        return tensor if self._split is None else self._split.logical(name, tensor)

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`."""
        return tensor if self._split is None else self._split.held(name, tensor)


def _check_islands(stages: Stages, decisions: Decisions) -> None:
    """What enters and leaves a module with a grid of its own passes through a call of it."""
    calls = {call for stage in stages for call in stage.calls}
    problems = [
        f"split.by: {island} is no call of a stage: the cut goes through the inside of it"
        for island in decisions.islands
        if not any(island == call or island.startswith(f"{call}.") for call in calls)
    ]
    if problems:
        raise PlanError(
            "the stages cannot be split so",
            problems=problems,
            fix="Name smaller modules in split.by, or modules to cut at in pipeline.cut.",
        )


def entering(model: Any, split: Split | None) -> Any:
    """What a loss calls in place of a model whose layers are split: it cuts inputs by samples."""
    return model if split is None else _Entering(model, split.context)


class _Entering:
    """The model, to a loss."""

    def __init__(self, model: Any, context: Any) -> None:
        self._model = model
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_samples(self._context, args, kwargs)
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
