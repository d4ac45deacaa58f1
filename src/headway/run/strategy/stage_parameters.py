"""Parameters of a model that is cut into stages: every rank has those of the stages it trains.

Once the model is cut, parameters, buffers and optimiser state have memory only on the ranks that
hold them. Layers of stages may be split as well (`SplitLayers`: the whole model is surveyed before
it is cut), and what is left kept in parts (`ShardedStageParameters`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from headway.checkpoint.staging import local_data
from headway.errors import PlanError
from headway.parallel.fsdp import ShardedParameterSite, rebind_optimizer_parameters
from headway.parallel.pipeline.grad_sync.zero import ShardedStageParameters, ShardingRanks
from headway.parallel.pipeline.stages import ModelStages
from headway.parallel.tensor.model.parameters import ParameterPlacement, install_parameter_access
from headway.parallel.tensor.model.split_inference import SplitDecisions
from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.pipeline import PIPE_AXIS
from headway.plans.plan import SHARD_AXIS
from headway.run.distributed.process_groups import (
    broadcast_from_rank0,
    copy_to_holders,
    gather_to_rank0,
    grid_axes,
)
from headway.run.recipe.recipe import Loss
from headway.run.step.memory import (
    PartialModelGuard,
    give_back_freed_memory,
    meta_copy,
    release_storage,
    require_meta_copy,
)
from headway.run.strategy.parameters import (
    HeldParameters,
    Numbers,
    completed,
    limit_norm,
    whole_model,
)
from headway.run.strategy.split_layers import SplitLayers, infer_plan_split, with_split_inputs

if TYPE_CHECKING:
    from headway.run.pipeline.partition import ParameterOwnership
    from headway.run.strategy.step_context import StepContext


class StageParameters(HeldParameters):
    """Those of the stages that this rank holds.

    Attributes:
        homes: Who holds what; None before the model is cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        context: StepContext,
        layers: SplitLayers | None,
    ) -> None:
        self.homes: ParameterOwnership | None = None
        self.layers = layers
        self.named = self.sources = dict(model.named_parameters())
        self.whole = model
        self._model = model
        self._optimizer = optimizer
        self._plan = plan
        self._context = context
        self._form: nn.Module | None = None
        self._guard: PartialModelGuard | None = None
        self._shards: ShardedStageParameters | None = None

    # -- once ------------------------------------------------------------------------------------

    def keep_own(
        self, homes: ParameterOwnership, stages: ModelStages, loss: Loss, data: Any
    ) -> Mapping[str, ShardedParameterSite]:
        """The model has been cut: let go of what other ranks hold; collective.

        Args:
            data: Of a micro-batch, whole, the same on all ranks.

        Returns:
            Where parameters are kept in parts, by name.
        """
        decisions: SplitDecisions | None = None
        if self.layers is not None:
            self._form = meta_copy(self._model)
            decisions = broadcast_from_rank0(
                self._context.world.rank,
                lambda: infer_plan_split(self._plan, self._model, loss, data),
                self._context.exchanging(),
            )
        self.homes = homes
        self._guard = PartialModelGuard(self._model, self._optimizer)
        self.let_go()
        self._split_own(stages, homes, decisions)
        give_back_freed_memory()
        return {} if self._shards is None else self._shards.places

    def _split_own(
        self, stages: ModelStages, homes: ParameterOwnership, decisions: SplitDecisions | None
    ) -> None:
        """Cut what is left by layers, and that by rows; the optimiser has the parts."""
        names = {parameter: name for name, parameter in self.named.items()}
        layers = self.layers
        with self._context.exchanging():
            if layers is not None and decisions is not None:
                self._context.remarks += self._split_layers(layers, stages, homes, decisions)
            if self._plan.memory.zero:
                grid = self._plan.split.grid
                rows = sharded_rows(self._plan, homes, self.named)
                axes = None if layers is None or grid is None else grid_axes(grid)
                self._shards = ShardedStageParameters(stages, rows, axes)
        if layers is not None:
            if self._shards is not None:
                _place_rows(layers, self._shards)
            layers.rebind(self._optimizer, names)
            self.named, self.sources = layers.named, layers.leaves
        elif self._shards is not None:
            self.named = self.sources = dict(self._model.named_parameters())
            rebind_optimizer_parameters(self._optimizer, names, self.named)

    def _split_layers(
        self,
        layers: SplitLayers,
        stages: ModelStages,
        homes: ParameterOwnership,
        decisions: SplitDecisions,
    ) -> list[str]:
        _check_islands(stages, decisions)
        away = frozenset(name for name in self.named if not homes.holds(name))
        # A stage is not called as a module whose weights could be gathered ahead.
        remarks = layers.apply(self._model, decisions, ahead=False, away=away)
        assert layers.split is not None
        for stage in (*stages, *(stages.evaluating or ())):
            install_parameter_access(
                stage.module, layers.split.context, layers.split.keys, root=None
            )
        return remarks

    # -- to the pipeline -------------------------------------------------------------------------

    def entering(self, model: Any) -> Any:
        """What a loss calls in place of the model, or of a stage."""
        return model if self.layers is None else with_split_inputs(model, self.layers.split)

    @property
    def own(self) -> tuple[Any, ...]:
        """What values between stages refer to; see `headway.parallel.PipelineRanks`."""
        split = None if self.layers is None else self.layers.split
        return () if split is None else (split.context,)

    def weights(self, *, each_action: bool = False) -> AbstractContextManager[None]:
        """Inside, this rank's stages have their weights; collective where those are in parts.

        Args:
            each_action: All copies carry out the same actions: weights that are in parts too
                (ZeRO 3) are gathered by each action of a stage (`at`).
        """
        if self._shards is None:
            return contextlib.nullcontext()
        return self._shards.gathered(each_action=each_action and self._plan.memory.zero == 3)

    def at(self, stage: int) -> AbstractContextManager[None]:
        """Around one action of a stage."""
        return contextlib.nullcontext() if self._shards is None else self._shards.at(stage)

    # -- to the strategy -------------------------------------------------------------------------

    @property
    def away(self) -> frozenset[Tensor]:
        if self.homes is None:
            return frozenset()
        return frozenset(t for name, t in self._tensors().items() if not self.homes.holds(name))

    def clear(self) -> None:
        if self.layers is not None:
            self.layers.clear()
        elif self._shards is not None:
            for parameter in self.named.values():
                parameter.grad = None

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        assert self.homes is not None
        found = {name: self.named[name].grad for name in self.homes.trained}
        gradients = {name: grad for name, grad in found.items() if grad is not None}
        square = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            norm = torch.linalg.vector_norm(local_data(gradient)).double().cpu()
            holders = len(self.homes.trainers[name]) * self._plan.mesh.degree(TENSOR)
            # Each of the holders adds its part: a whole tensor counts `holders` times, a sharded
            # one as often as it has copies.
            square += norm.square() * shard_count(gradient) / holders
        with self._context.exchanging():
            dist.all_reduce(square)
        return limit_norm(float(square), gradients.values(), limit)

    def complete(self, numbers: Numbers) -> Numbers:
        found: dict[str, dict[str, Tensor]] = {}
        with self._context.exchanging():
            gathered = gather_to_rank0(self._owned(numbers), self._context.world)
        for key, tensor in gathered.items():
            kind, _, name = key.partition("/")
            found.setdefault(kind, {})[name] = tensor
        return found

    def _owned(self, numbers: Numbers) -> dict[str, Tensor]:
        """What this rank owns, whole; all ranks that have parts of it come here together."""
        holds = (lambda name: True) if self.homes is None else self.homes.holds
        return {
            f"{kind}/{name}": full.to_dense() if full.is_sparse else full
            for kind, name, owner, full in completed(numbers, self.layers, holds)
            if self._owns(owner)
        }

    def _owns(self, name: str) -> bool:
        first = not self._plan.mesh.coordinate(self._context.world.rank).get(TENSOR, 0)
        return first and (self.homes is None or self.homes.owns(name))

    def make_whole(self) -> None:
        if self.homes is None or self._guard is None:
            return
        if self.layers is not None:
            self._make_copy()
            return
        with self._context.exchanging():
            if self._shards is not None:
                self._shards.gather()
            tensors = self._tensors()
            own = {name: tensor for name, tensor in tensors.items() if self.homes.owns(name)}
            found = gather_to_rank0(own, self._context.world)
        for name in (name for name in found if not self.homes.holds(name)):
            tensors[name].data = found[name].data
        self._guard.lifted = self._context.world.rank == 0

    def _make_copy(self) -> None:
        """A second model, whole, on rank 0: the stages' modules work on parts."""
        form = require_meta_copy(self._form, self._model)
        tensors = {**self.named, **dict(self._model.named_buffers())}
        with torch.no_grad():
            found = self.complete({"": tensors})
        if self._context.world.rank == 0:
            self.whole = whole_model(form, self._model, self.named, found[""])

    def let_go(self) -> None:
        if self._shards is not None:
            self._shards.release()
        self.whole = self._model
        if self._guard is not None:
            self._guard.lifted = False
        for tensor in self.away:
            release_storage(tensor)
            self._optimizer.state.pop(tensor, None)

    def share_buffers(self) -> None:
        if self.homes is not None:
            with self._context.exchanging(), torch.no_grad():
                copy_to_holders(self.homes.copied(), self._tensors(), self._context.world)

    def _tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model."""
        return dict((*self._model.named_parameters(), *self._model.named_buffers()))

    def close(self) -> None:
        """After `make_whole` the model stays whole on rank 0."""
        if self._guard is not None:
            self._guard.close(whole=self._guard.lifted)
        self.homes = self._guard = self._shards = None


def _check_islands(stages: ModelStages, decisions: SplitDecisions) -> None:
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


def _place_rows(layers: SplitLayers, shards: ShardedStageParameters) -> None:
    """Parts of layers are cut once more, by rows."""
    assert layers.split is not None
    for name, mesh in shards.meshes.items():
        copies = [n for n in mesh.mesh_dim_names or () if n.startswith("copies_")]
        inner = (*(Replicate() for _ in copies), Shard(0))
        layers.split.homes[name] = ParameterPlacement(layers.grid, mesh, inner)


def shard_count(tensor: Tensor) -> int:
    """Into how many a tensor is cut, over the ranks that have it."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(n) for n, p in enumerate(tensor.placements) if p.is_shard())


def sharded_rows(
    plan: Plan, homes: ParameterOwnership, parameters: Mapping[str, Tensor]
) -> dict[str, ShardingRanks]:
    """Who keeps what in parts, of what this rank trains: see `ShardedStageParameters`.

    Those are the ranks of the axis "shard"; without that axis, all that train a parameter. With
    ZeRO 3 they are the same stage's, where it has copies: they come to the same action together.
    What a rank holds for evaluation only, and what has no rows, stays whole.
    """
    mesh, found = plan.mesh, {}
    if mesh.degree(SHARD_AXIS) > 1:
        apart = tuple(name for name in mesh.names if name != SHARD_AXIS)
    else:
        apart = (PIPE_AXIS,) if plan.memory.zero == 3 and plan.data_degree > 1 else ()
    for name, ranks in homes.trainers.items():
        here = homes.rank in ranks and set(ranks) == set(homes.holders[name])
        if not here or not parameters[name].dim():
            continue
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(ranks):
            place = mesh.coordinate(rank)
            first = rank - place.get(TENSOR, 0)
            rows.setdefault(tuple(place[axis] for axis in apart), []).append(first)
        if len(next(iter(rows.values()))) > 1:
            found[name] = tuple(map(tuple, rows.values()))
    return found
