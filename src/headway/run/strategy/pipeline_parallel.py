"""Strategies of a pipeline, where every rank trains only the stages that it holds.

The schedule's SYNC sums gradients over the copies of a stage; what remains is scaling, clipping by
the norm over all stages, and the update. Once the model is cut, parameters, buffers and optimiser
state have memory only on the ranks that hold them.

`StageTensorParallel` splits the layers of stages over ranks that share their samples: the whole
model is surveyed before it is cut, then this rank's parameters become parts and stay the same
objects.

`AsyncPipelineStrategy` is for schedules without a flush: a STEP in the table updates one stage by
the gradients of its group; the scheduler steps once per step of the recipe. Sources: PipeDream
(Narayanan et al., SOSP 2019), PipeDream-2BW (Narayanan et al., ICML 2021).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from headway.checkpoint.staging import local_data
from headway.errors import Diverged, PlanError
from headway.parallel import ModelStages
from headway.parallel.fsdp import ShardedParameterSite, full_tensor_of, rebind_optimizer_parameters
from headway.parallel.pipeline.grad_sync.zero import ShardedStageParameters, ShardingRanks
from headway.parallel.tensor import (
    ParameterPlacement,
    ProcessGrid,
    SplitDecisions,
    SplitModel,
    SplitSettings,
    apply_split_decisions,
    infer_split,
)
from headway.parallel.tensor.model.parameters import cut_inputs_by_samples, install_parameter_access
from headway.plan import Plan
from headway.plan.layer_split import TENSOR
from headway.plan.pipeline import PIPE_AXIS
from headway.plan.plan import SHARD_AXIS
from headway.plan.tensor_layout import TensorGrid
from headway.run.distributed.process_groups import (
    broadcast_from_rank0,
    copy_to_holders,
    gather_to_rank0,
    grid_axes,
    refined_mesh,
)
from headway.run.distributed.world import World
from headway.run.pipeline.partition import ParameterOwnership
from headway.run.step.memory import (
    PartialModelGuard,
    fill_meta_copy,
    give_back_freed_memory,
    meta_copy,
    release_storage,
    require_meta_copy,
)
from headway.run.step.record import StepRecord
from headway.run.strategy.data_parallel import DataParallelStrategy
from headway.run.strategy.training_state import TrainingState


class StageTensorParallel:
    """Of this rank; making it is collective.

    Attributes:
        axes: Names and sizes of the grid's axes.
        skeleton: The unsplit model without memory; None where it cannot be copied.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        grid = plan.split.grid
        assert grid is not None
        self.axes = grid_axes(grid)
        self._grids: dict[TensorGrid, ProcessGrid] = {}
        with world.explained("making the groups that split layers"):
            for one in dict.fromkeys((grid, *(other for _, other in plan.split.others))):
                mesh = refined_mesh(plan, world, TENSOR, grid_axes(one), first=True)
                self._grids[one] = ProcessGrid.of(one, mesh[tuple(grid_axes(one))])
        self._grid = self._grids[grid]
        self._world = world
        self._wanted = plan.split
        self._decisions: SplitDecisions | None = None
        self._split: SplitModel | None = None
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
            data: Of a micro-batch, whole.

        Raises:
            PlanError: It cannot be split.
        """
        self.skeleton = meta_copy(model)
        wanted, plan = self._wanted, self._grid.plan
        self._decisions = broadcast_from_rank0(
            self._world.rank,
            lambda: infer_split(
                model, loss, data, plan, whole=wanted.whole, only=wanted.only, by=wanted.others
            ),
            exchanging,
        )

    def obey(self, stages: ModelStages, away: frozenset[str]) -> list[str]:
        """Split what this rank holds, in place; returns remarks.

        Args:
            away: Names of the parameters that it does not hold.

        Raises:
            PlanError: A stage carries out the inside of a module that has a grid of its own.
        """
        assert self._decisions is not None
        _check_islands(stages, self._decisions)
        self._split = split = apply_split_decisions(
            stages.model,
            self._grid,
            self._decisions,
            settings=SplitSettings(ahead=False),
            home=ParameterPlacement.of(self._grid),
            away=away,
            grids=self._grids,
        )
        for stage in (*stages, *(stages.evaluating or ())):
            install_parameter_access(stage.module, split.context, split.keys, root=None)
        return [f"not split: {name} ({why})" for name, why in self._decisions.left.items()]

    @property
    def own(self) -> tuple[Any, ...]:
        """What values between stages refer to; see `headway.parallel.PipelineRanks`."""
        return () if self._split is None else (self._split.context,)

    def entering(self, model: Any) -> Any:
        """See the function."""
        return with_split_inputs(model, self._split)

    def keep(self, meshes: Mapping[str, DeviceMesh]) -> None:
        """Parameters are cut once more, by rows; see `ShardedStageParameters.meshes`."""
        assert self._split is not None
        for name, mesh in meshes.items():
            copies = [n for n in mesh.mesh_dim_names or () if n.startswith("copies_")]
            inner = (*(Replicate() for _ in copies), Shard(0))
            self._split.homes[name] = ParameterPlacement(self._grid, mesh, inner)

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


def with_split_inputs(model: Any, split: SplitModel | None) -> Any:
    """What a loss calls in place of a model whose layers are split: it cuts inputs by samples."""
    return model if split is None else _SplitInputsModel(model, split.context)


class _SplitInputsModel:
    """The model, to a loss."""

    def __init__(self, model: Any, context: Any) -> None:
        self._model = model
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cut_inputs_by_samples(self._context, args, kwargs)
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# The hands on the gradients where every rank trains only the stages that it holds.


class PipelineStrategy(DataParallelStrategy):
    """As `DataParallelStrategy`; the arguments are the same.

    Attributes:
        homes: Who holds what; None before the model is cut.
    """

    homes: ParameterOwnership | None = None
    _guard: PartialModelGuard | None = None
    _layers: StageTensorParallel | None = None
    _shards: ShardedStageParameters | None = None
    _whole: nn.Module | None = None
    _held: Mapping[str, nn.Parameter] = {}

    def _place(self) -> None:
        if self._plan.split.tensor:
            self._layers = StageTensorParallel(self._plan, self._world)
            self.layout = self

    def keep_own(
        self,
        homes: ParameterOwnership,
        stages: ModelStages,
        loss: Callable[[Any, Any], Any],
        data: Any,
    ) -> Mapping[str, ShardedParameterSite]:
        """The model has been cut: let go of what other ranks hold; collective.

        Args:
            data: Of a micro-batch, whole, the same on all ranks.

        Returns:
            Where parameters are kept in parts, by name.
        """
        if self._layers is not None:
            self._layers.decide(self._model, loss, data, self.exchanging())
        self.homes = homes
        self._guard = PartialModelGuard(self._model, self._optimizer)
        self.let_go()
        self._split_own(stages, homes)
        give_back_freed_memory()
        return {} if self._shards is None else self._shards.places

    def _split_own(self, stages: ModelStages, homes: ParameterOwnership) -> None:
        """Cut what is left by layers, and that by rows; the optimiser has the parts."""
        names = {parameter: name for name, parameter in self._all.items()}
        layers = self._layers
        with self.exchanging():
            if layers is not None:
                away = frozenset(name for name in self._all if not homes.holds(name))
                self.remarks += layers.obey(stages, away)
            if self._plan.memory.zero:
                rows = sharded_rows(self._plan, homes, self._all)
                self._shards = ShardedStageParameters(stages, rows, layers.axes if layers else None)
                if layers is not None:
                    layers.keep(self._shards.meshes)
        if layers is None and self._shards is None:
            return
        self._held = dict(self._model.named_parameters())
        self._all = {name: self._seen(name, held) for name, held in self._held.items()}
        held = None if layers is None else layers.held
        rebind_optimizer_parameters(self._optimizer, names, self._all, held)
        self._parameters = {}
        self.follow()

    def _seen(self, name: str, held: nn.Parameter) -> nn.Parameter:
        """A parameter of the model as the optimiser has it; the same memory."""
        assert self.homes is not None
        if self._layers is None or not self.homes.holds(name):
            return held
        return nn.Parameter(self._layers.wrapped(name, held), held.requires_grad)

    def follow(self) -> None:
        for name, held in self._held.items():  # the user freezes what the model holds
            self._all[name].requires_grad_(held.requires_grad)
        super().follow()

    def begin(self, record: StepRecord, own: int, doing: str) -> None:
        super().begin(record, own, doing)
        for parameter in (*self._held.values(), *self._parameters.values()):
            parameter.grad = None

    def scale(self) -> None:
        if self._layers is not None:
            for name, parameter in self._parameters.items():
                grad = self._held[name].grad
                parameter.grad = None if grad is None else self._layers.wrapped(name, grad)
        super().scale()

    def entering(self, model: Any) -> Any:
        """What a loss calls in place of the model, or of a stage."""
        return model if self._layers is None else self._layers.entering(model)

    @property
    def own(self) -> tuple[Any, ...]:
        """What values between stages refer to; see `headway.parallel.PipelineRanks`."""
        return () if self._layers is None else self._layers.own

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or something of its shape, in the order of the unsplit model; collective."""
        return tensor if self._layers is None else self._layers.logical(name, tensor)

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`."""
        return tensor if self._layers is None else self._layers.held(name, tensor)

    def weights(self, *, each_action: bool = False) -> contextlib.AbstractContextManager[None]:
        """Inside, this rank's stages have their weights; collective where those are in parts.

        Args:
            each_action: All copies carry out the same actions: weights that are in parts too
                (ZeRO 3) are gathered by each action of a stage (`at`).
        """
        if self._shards is None:
            return contextlib.nullcontext()
        return self._shards.gathered(each_action=each_action and self._plan.memory.zero == 3)

    def at(self, stage: int) -> contextlib.AbstractContextManager[None]:
        """Around one action of a stage."""
        return contextlib.nullcontext() if self._shards is None else self._shards.at(stage)

    @property
    def away(self) -> frozenset[Tensor]:
        if self.homes is None:
            return frozenset()
        return frozenset(t for name, t in self._tensors().items() if not self.homes.holds(name))

    def let_go(self) -> None:
        if self._shards is not None:
            self._shards.release()
        self._whole = None
        if self._guard is not None:
            self._guard.lifted = False
        for tensor in self.away:
            release_storage(tensor)
            self._optimizer.state.pop(tensor, None)

    @property
    def whole(self) -> nn.Module:
        return self._model if self._whole is None else self._whole

    def make_whole(self) -> None:
        if self.homes is None or self._guard is None:
            return
        if self._layers is not None:
            self._make_copy(self._layers)
            return
        with self.exchanging():
            if self._shards is not None:
                self._shards.gather()
            tensors = self._tensors()
            found = gather_to_rank0(
                {n: t for n, t in tensors.items() if self.homes.owns(n)}, self._world
            )
        for name in (name for name in found if not self.homes.holds(name)):
            tensors[name].data = found[name].data
        self._guard.lifted = self._world.rank == 0

    def _make_copy(self, layers: StageTensorParallel) -> None:
        """A second model, whole, on rank 0: the stages' modules work on parts."""
        kept = require_meta_copy(layers.skeleton, self._model)
        tensors = {**self._all, **dict(self._model.named_buffers())}
        with self.exchanging(), torch.no_grad():
            found = gather_to_rank0(self._complete({"": tensors}), self._world)
        if self._world.rank == 0:
            full = {name.removeprefix("/"): tensor for name, tensor in found.items()}
            for name, form in kept.named_parameters():
                if name in full:
                    full[name] = nn.Parameter(full[name], form.requires_grad)
            self._whole = fill_meta_copy(kept, full)
            self._whole.train(self._model.training)

    def share_buffers(self) -> None:
        if self.homes is not None:
            with self.exchanging(), torch.no_grad():
                copy_to_holders(self.homes.copied(), self._tensors(), self._world)

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        trained = TrainingState(self._model, self._optimizer, self._scheduler, layout=self.layout)
        with self.exchanging():
            found = gather_to_rank0(self._complete(trained.numbers()), self._world)
        numbers: dict[str, dict[str, Tensor]] = {}
        for key, tensor in found.items():
            kind, _, name = key.partition("/")
            numbers.setdefault(kind, {})[name] = tensor
        return numbers

    def _complete(self, numbers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What this rank owns, whole; all ranks that have parts of it come here together."""
        own: dict[str, Tensor] = {}
        for kind, tensors in numbers.items():
            for name, tensor in tensors.items():
                owner = name.rpartition(".")[0] if kind == "optimizer" else name
                if self.homes is not None and not self.homes.holds(owner):
                    continue
                full = full_tensor_of(self.logical(owner, tensor.detach()))
                if self._owns(owner):
                    own[f"{kind}/{name}"] = full.to_dense() if full.is_sparse else full
        return own

    def _owns(self, name: str) -> bool:
        first = not self._plan.mesh.coordinate(self._world.rank).get(TENSOR, 0)
        return first and (self.homes is None or self.homes.owns(name))

    def _tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model."""
        return dict((*self._model.named_parameters(), *self._model.named_buffers()))

    def clip(self) -> None:
        """Limit the global norm, to which every parameter counts once."""
        assert self.homes is not None
        trained = {name: self._all[name].grad for name in self.homes.trained}
        gradients = {name: grad for name, grad in trained.items() if grad is not None}
        square = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            norm = torch.linalg.vector_norm(local_data(gradient)).double().cpu()
            holders = len(self.homes.trainers[name]) * self._plan.mesh.degree(TENSOR)
            square += norm.square() * shard_count(gradient) / holders
        with self.exchanging():
            dist.all_reduce(square)
        self._limit(float(square), gradients.values())

    def step(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """STEP of a table with a flush: nothing, `update` steps all stages at once."""

    def close(self) -> None:
        """After `make_whole` the model stays whole on rank 0."""
        super().close()
        if self._guard is not None:
            self._guard.close(whole=self._guard.lifted)
        self.homes = self._guard = self._shards = None
        self._held = {}


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


# The hands on the gradients where a pipeline's table makes the updates: schedules without a
# flush.


class AsyncPipelineStrategy(PipelineStrategy):
    """As `PipelineStrategy`; the arguments are the same.

    Raises:
        PlanError: The gradients are to be clipped.
    """

    def step(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """STEP: the optimiser's step of one stage.

        Args:
            last: The stage's last step in the table: its gradients stay to be looked at, until the
                next step of the recipe begins.
        """
        stage = set(parameters)
        aside = {p: p.grad for p in self._all.values() if p.grad is not None and p not in stage}
        for parameter in aside:
            parameter.grad = None
        self._optimizer.step()
        if not last:
            for parameter in stage:
                parameter.grad = None
        for parameter, gradient in aside.items():
            parameter.grad = gradient

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            what,
            where=self._doing,
            why="The schedule has no flush: updates have been made with it, and no checkpoint.",
            fix="Lower the learning rate, or look at this batch's data; then go on with --resume, "
            "from the checkpoint before.",
        )


def check_clip(plan: Plan, clip: float | None) -> None:
    """A global norm is not known where each stage makes its updates by itself.

    Raises:
        PlanError: The plan has no flush, and gradients are to be clipped.
    """
    if clip is not None and not plan.flushes:
        raise PlanError(
            "the gradients of this plan cannot be clipped",
            problems=[
                f"clip is {clip:g}, the limit of the norm over all stages; "
                f"{plan.pipeline.schedule} updates each stage by itself, without a flush"
            ],
            fix="Leave out clip, or use a schedule with a flush, such as 1f1b.",
        )
