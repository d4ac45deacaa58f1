"""Parameters: what a rank holds of the model, under which names, and how it is made whole.

`WholeParameters`: every rank has all of them. `ShardedParameters`: every rank has parts of them,
rows that FSDP2 keeps (Rajbhandari et al., ZeRO, SC 2020), parts of split layers, or both. Of a
model that is cut into stages: `StageParameters`.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from headway.channel.mapped_memory import copied, file_of
from headway.channel.process_memory import give_back_freed_memory
from headway.checkpoint.staging import local_box, local_data
from headway.data import RankBatch
from headway.errors import PlanError
from headway.parallel import ModelStages
from headway.parallel.fsdp import (
    ShardedParameterSite,
    full_tensor_of,
    part_as_dtensor,
    rebind_optimizer_parameters,
    squared_gradient_norm,
)
from headway.parallel.pipeline.data_parallel import ShardedStageParameters, ShardingRanks
from headway.parallel.split_layers import ParameterPlacement, SplitDecisions
from headway.parallel.split_layers.parameters import install_parameter_access
from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.pipeline import PIPE_AXIS
from headway.plans.plan import SHARD_AXIS
from headway.run.distributed import replica_sync
from headway.run.distributed.device_mesh import grid_axes
from headway.run.distributed.process_groups import copy_to_holders, gather_to_first
from headway.run.distributed.world import broadcast_from_rank0
from headway.run.recipe.recipe import Loss
from headway.run.step.memory import (
    PartialModelGuard,
    fill_meta_copy,
    meta_copy,
    release_storage,
    require_meta_copy,
)
from headway.run.strategy.parameter_layout import ParameterLayout
from headway.run.strategy.split_layers import SplitLayers, infer_plan_split, with_split_inputs
from headway.run.strategy.split_tables import TableLayout

if TYPE_CHECKING:
    from headway.run.pipeline.stage_ownership import ParameterOwnership
    from headway.run.strategy.step_context import StepContext

TensorsByKind = Mapping[str, Mapping[str, Tensor]]
"""Kind -> logical name -> tensor; see `TrainingState.tensors_by_kind`."""


class HeldParameters(ABC):
    """The parameters that this rank holds.

    Attributes:
        named: The optimiser's parameters by logical name; whole, or in parts.
        sources: Logical name -> the parameter in whose `grad` backward leaves what a reducer sums.
        layers: Of split layers and tables, which are not held as they are saved; None: there are
            none.
        whole: The model; after `gather_whole` it is whole on rank 0.
    """

    named: Mapping[str, nn.Parameter]
    sources: Mapping[str, nn.Parameter]
    layers: ParameterLayout | None = None
    whole: nn.Module

    @property
    @abstractmethod
    def away(self) -> frozenset[Tensor]:
        """Parameters and buffers that other ranks hold, and this one does not."""

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """Those of `named` that this rank's optimiser updates."""
        return self.named

    def follow(self) -> None:
        """Adopt what the user has frozen or thawed."""
        if self.layers is not None:
            self.layers.follow()

    @abstractmethod
    def clear(self) -> None:
        """Drop gradients that the optimiser does not see."""

    def collect(self, trained: Mapping[str, nn.Parameter], *, reuse: bool) -> None:
        """Give the optimiser's parameters their gradients, once these are summed."""
        if self.layers is not None:
            self.layers.collect(trained, reuse=reuse)

    def idle(self) -> AbstractContextManager[None]:
        """Around a forward pass that counts nothing."""
        return contextlib.nullcontext()

    def scale(self, factor: float) -> None:
        """Multiply the gradients that no reducer sums."""
        if self.layers is not None:
            self.layers.scale(factor)

    @property
    def alike(self) -> Mapping[str, nn.Parameter]:
        """Those of `named` that are the same on all ranks that hold the same part of them."""
        return self.named

    @abstractmethod
    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        """Limit the global norm of the gradients; returns the norm before that."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `ahead` is of use; the same on all ranks."""
        return False

    def ahead(self, now: RankBatch, following: RankBatch) -> list[str]:
        """The forward passes of a step are over: prepare those of the next; returns remarks."""
        return []

    @abstractmethod
    def complete(self, numbers: TensorsByKind) -> TensorsByKind:
        """The tensors of all parameters, whole and of all ranks, on rank 0; collective.

        Where workers do not agree at every step: each worker's on its first rank.
        """

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that has the form of a parameter, as it holds that."""
        if self.layers is not None:
            return self.layers.held(name, whole)
        held = self.named[name]
        if not isinstance(held, DTensor):
            return whole
        box = local_box(held)
        if box is not None:
            sides = zip(box.offsets, box.shape, strict=True)
            whole = whole[tuple(slice(start, start + size) for start, size in sides)]
        return part_as_dtensor(whole.clone(), held.device_mesh, held.placements, held.shape)

    @abstractmethod
    def gather_whole(self) -> None:
        """Gather the whole model on rank 0, until `release_whole`; collective."""

    @abstractmethod
    def release_whole(self) -> None:
        """Undo `gather_whole`."""

    @abstractmethod
    def share_buffers(self, among: dist.ProcessGroup | None = None) -> None:
        """Give ranks the buffers of one; running statistics differ between shares.

        Args:
            among: The ranks of a worker; None: all ranks, of which all workers get those of one.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what belongs to the executor."""


class WholeParameters(HeldParameters):
    """All parameters on every rank."""

    def __init__(self, model: nn.Module, context: StepContext) -> None:
        self.whole = model
        self.named = self.sources = dict(model.named_parameters())
        self._world = context.world

    @property
    def away(self) -> frozenset[Tensor]:
        return frozenset()

    def clear(self) -> None:
        pass

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(trained.values(), limit))

    def complete(self, numbers: TensorsByKind) -> TensorsByKind:
        return numbers

    def gather_whole(self) -> None:
        pass

    def release_whole(self) -> None:
        pass

    def share_buffers(self, among: dist.ProcessGroup | None = None) -> None:
        replica_sync.broadcast_buffers(self.whole, self._world, among)

    def close(self) -> None:
        pass


class ShardedParameters(HeldParameters):
    """Parts of parameters on every rank, as DTensors: of FSDP2, or of split layers after `divide`.

    Args:
        form: The model before FSDP2 has sharded it, without memory; None: `divide` copies it.
    """

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        *,
        form: nn.Module | None = None,
        layers: SplitLayers | None = None,
    ) -> None:
        self.layers: SplitLayers | None = layers
        self.named = self.sources = dict(model.named_parameters()) if layers is None else {}
        self.whole = model
        self._model = model
        self._context = context
        self._form = form

    def divide(self, optimizer: Optimizer, split: Callable[[], list[str]]) -> None:
        """Split the layers by `split`, which changes the model and returns remarks; collective."""
        assert self.layers is not None
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        self._form = meta_copy(self._model)
        with self._context.exchanging():
            remarks = split()
        self.layers.rebind(optimizer, names)
        self.named, self.sources = self.layers.named, self.layers.leaves
        self._context.remarks.extend(remarks)
        give_back_freed_memory()

    @property
    def away(self) -> frozenset[Tensor]:
        return frozenset()

    def clear(self) -> None:
        if self.layers is not None:
            self.layers.clear()

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        gradients = {n: p.grad for n, p in trained.items() if p.grad is not None}
        with self._context.exchanging():
            square = float(squared_gradient_norm(gradients))
        return limit_norm(square, gradients.values(), limit)

    def complete(self, numbers: TensorsByKind) -> TensorsByKind:
        found: dict[str, dict[str, Tensor]] = {}
        with self._context.exchanging():
            for kind, name, _, full in completed(numbers, self.layers):
                found.setdefault(kind, {})[name] = full
        return found

    def gather_whole(self) -> None:
        self.whole = whole_model(
            self._form,
            self._model,
            self.named,
            self._context,
            partial(completed, layout=self.layers),
        )

    def release_whole(self) -> None:
        self.whole = self._model

    def share_buffers(self, among: dist.ProcessGroup | None = None) -> None:
        replica_sync.broadcast_buffers(self._model, self._context.world, among)

    def close(self) -> None:
        pass


Completed = Iterator[tuple[str, str, str, Tensor]]
"""Kind, name, name of the parameter, and the whole tensor, one by one."""


def whole_model(
    form: nn.Module | None,
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    context: StepContext,
    completing: Callable[[TensorsByKind], Completed],
) -> nn.Module:
    """On rank 0 a second model, because the modules of this one work on parts; collective.

    Args:
        form: Of `meta_copy`.

    Returns:
        On other ranks the model itself.
    """
    form = require_meta_copy(form, model)
    first = context.world.rank == 0
    tensors = {**named, **dict(model.named_buffers())}
    with context.exchanging(), torch.no_grad():
        # Every rank goes through all tensors, as each may take a collective. Only rank 0 keeps
        # them, as clones, because an undivided tensor is the live one.
        full = completing({"": tensors})
        found = {name: own_copy(tensor) for _, name, _, tensor in full if first}
    return fill_meta_copy(form, model, named, found) if first else model


def own_copy(tensor: Tensor) -> Tensor:
    """A copy; of what lies in a file in another one."""
    return tensor.clone() if file_of(tensor) is None else copied(tensor)


def completed(
    numbers: TensorsByKind,
    layout: ParameterLayout | None,
    holds: Callable[[str], bool] = lambda name: True,
) -> Completed:
    """The whole tensors; collective."""
    for kind, tensors in numbers.items():
        for name, tensor in tensors.items():
            owner = name.rpartition(".")[0] if kind == "optimizer" else name
            if holds(owner):
                part = tensor.detach()
                full = full_tensor_of(part) if layout is None else layout.complete(owner, part)
                yield kind, name, owner, full


def limit_norm(square: float, gradients: Collection[Tensor], limit: float) -> float:
    """Scale gradients down to a norm of `limit`; returns the norm before, the root of `square`."""
    norm = math.sqrt(square)
    factor = limit / (norm + 1e-6)  # as `torch.nn.utils.clip_grad_norm_`
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


class TableParameters(HeldParameters):
    """Tables in pieces on the ranks that share the batch; of the rest every rank has all, or rows
    that FSDP2 keeps.

    `named` is empty until `divide` has been called: gradients of whole tables are not exchanged.
    """

    def __init__(self, model: nn.Module, context: StepContext, layout: TableLayout) -> None:
        self.layers = self.tables = layout
        self.named: Mapping[str, nn.Parameter] = {}
        self.sources: Mapping[str, nn.Parameter] = {}
        self.whole = self._model = model
        self._context = context
        self._form: nn.Module | None = None

    def divide(self, shard: Callable[[Collection[nn.Parameter]], None] | None) -> None:
        """Cut the tables; collective.

        Args:
            shard: Shards the rest of the model; gets the parameters that it must leave alone.
        """
        self._form = meta_copy(self._model)
        with self._context.exchanging():
            self.tables.apply(self._model)
            if shard is not None:
                apart = [part.parameter for part in self.tables.parts.values()]
                shard([*apart, *self.tables.growing.weights.values()])
                self.tables.adopt(self._model)
        self.named, self.sources = self.tables.named, self.tables.dense
        give_back_freed_memory()

    @property
    def away(self) -> frozenset[Tensor]:
        return self.tables.away if self.named else frozenset()

    @property
    def alike(self) -> Mapping[str, nn.Parameter]:
        return self.tables.alike

    def idle(self) -> AbstractContextManager[None]:
        return self.tables.idle()

    def clear(self) -> None:
        self.tables.clear()

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        found = {name: self.sources[name].grad for name in trained if name in self.sources}
        dense = {name: gradient for name, gradient in found.items() if gradient is not None}
        with self._context.exchanging():
            square = squared_gradient_norm(dense) + self.tables.squared_norm()
        pieces = [gradient for _, gradient in self.tables.gradients()]
        return limit_norm(float(square), [*dense.values(), *pieces], limit)

    @property
    def looks_ahead(self) -> bool:
        return self.tables.tiered

    def ahead(self, now: RankBatch, following: RankBatch) -> list[str]:
        steps = ([micro.data for micro in batch.micros] for batch in (now, following))
        return self.tables.ahead(*steps)

    def complete(self, numbers: TensorsByKind) -> TensorsByKind:
        found: dict[str, dict[str, Tensor]] = {}
        with self._context.exchanging():
            for kind, name, _, full in self._completed(numbers):
                found.setdefault(kind, {})[name] = full
        return found

    def _completed(self, numbers: TensorsByKind) -> Completed:
        self.tables.settle()
        # What one rank alone has comes from there; of the rest all ranks have their part.
        single, rest = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for kind, tensors in numbers.items():
            for name, tensor in tensors.items():
                owner = name.rpartition(".")[0] if kind == "optimizer" else name
                if not self.tables.is_single(owner):
                    rest.setdefault(kind, {})[name] = tensor
                elif self.named[owner] not in self.away:
                    part = tensor.detach()
                    single[f"{kind}/{name}"] = part.to_dense() if part.is_sparse else part
        yield from completed(rest, self.tables)
        for key, tensor in gather_to_first(single, self._context.world).items():
            kind, _, name = key.partition("/")
            yield kind, name, name, tensor

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        return self.tables.held(name, whole)

    def gather_whole(self) -> None:
        if not self.named:
            return
        if self._context.world.alone and not self.tables.placements:
            return  # this process has all
        self.whole = whole_model(
            self._form, self._model, self.named, self._context, self._completed
        )
        with self._context.exchanging():
            self.tables.growing.fill(self.whole)

    def release_whole(self) -> None:
        self.whole = self._model

    def share_buffers(self, among: dist.ProcessGroup | None = None) -> None:
        replica_sync.broadcast_buffers(self._model, self._context.world, among)

    def close(self) -> None:
        self.tables.close()


class StageParameters(HeldParameters):
    """The parameters of the stages that this rank holds.

    Once the model is cut, parameters, buffers and optimiser state have memory only on the ranks
    that hold them. Layers of stages may be split as well (`SplitLayers`), and the rest sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        context: StepContext,
        layers: SplitLayers | None,
    ) -> None:
        self.ownership: ParameterOwnership | None = None
        self.layers: SplitLayers | None = layers
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
        self, ownership: ParameterOwnership, stages: ModelStages, loss: Loss, data: Any
    ) -> Mapping[str, ShardedParameterSite]:
        """The model has been cut: free the memory of what other ranks hold; collective.

        Returns:
            The sites of sharded parameters, by name.
        """
        decisions: SplitDecisions | None = None
        if self.layers is not None:
            # While the model is whole: the decisions follow its layers from the input to the loss.
            self._form = meta_copy(self._model)
            decisions = broadcast_from_rank0(
                self._context.world.rank,
                lambda: infer_plan_split(self._plan, self._model, loss, data),
                self._context.exchanging(),
            )
        self.ownership = ownership
        self._guard = PartialModelGuard(self._model, self._optimizer)
        self.release_whole()
        self._split_own(stages, ownership, decisions)
        give_back_freed_memory()
        return {} if self._shards is None else self._shards.places

    def _split_own(
        self, stages: ModelStages, ownership: ParameterOwnership, decisions: SplitDecisions | None
    ) -> None:
        """Split the layers of this rank's stages, then shard their rows."""
        names = {parameter: name for name, parameter in self.named.items()}
        layers = self.layers
        with self._context.exchanging():
            if layers is not None and decisions is not None:
                self._context.remarks += self._split_layers(layers, stages, ownership, decisions)
            if self._plan.memory.zero:
                grid = self._plan.split.grid
                rows = sharded_rows(self._plan, ownership, self.named)
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
        ownership: ParameterOwnership,
        decisions: SplitDecisions,
    ) -> list[str]:
        _check_islands(stages, decisions)
        away = frozenset(name for name in self.named if not ownership.holds(name))
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
        """The object that a loss calls in place of the model or of a stage."""
        return model if self.layers is None else with_split_inputs(model, self.layers.split)

    @property
    def own(self) -> tuple[Any, ...]:
        """The objects that values between stages refer to; see `headway.parallel.PipelineRanks`."""
        split = None if self.layers is None else self.layers.split
        return () if split is None else (split.context,)

    def weights(self, *, each_action: bool = False) -> AbstractContextManager[None]:
        """Inside, this rank's stages have their weights; collective where they are sharded.

        Args:
            each_action: All copies execute the same actions, so that each action of a stage can
                gather sharded weights for itself (ZeRO 3, `at`).
        """
        if self._shards is None:
            return contextlib.nullcontext()
        return self._shards.gathered(each_action=each_action and self._plan.memory.zero == 3)

    def at(self, stage: int) -> AbstractContextManager[None]:
        """Around one action of a stage."""
        return contextlib.nullcontext() if self._shards is None else self._shards.at(stage)

    # -- to the strategy -------------------------------------------------------------------------

    @property
    def _ranks(self) -> range:
        """Those that have the model together."""
        return self._plan.worker_ranks(self._context.world.rank)

    @property
    def away(self) -> frozenset[Tensor]:
        if self.ownership is None:
            return frozenset()
        return frozenset(t for name, t in self._tensors().items() if not self.ownership.holds(name))

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        if self.ownership is None:
            return self.named
        return {name: self.named[name] for name in self.ownership.trained}

    def clear(self) -> None:
        if self.layers is not None:
            self.layers.clear()
        elif self._shards is not None:
            for parameter in self.named.values():
                parameter.grad = None

    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        assert self.ownership is not None
        found = {name: self.named[name].grad for name in self.ownership.trained}
        gradients = {name: grad for name, grad in found.items() if grad is not None}
        square = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            norm = torch.linalg.vector_norm(local_data(gradient)).double().cpu()
            holders = len(self.ownership.trainers[name]) * self._plan.mesh.degree(TENSOR)
            # Each of the holders adds its part: a whole tensor counts `holders` times, a sharded
            # one as often as it has copies.
            square += norm.square() * shard_count(gradient) / holders
        with self._context.exchanging():
            dist.all_reduce(square, group=self._context.inside)
        return limit_norm(float(square), gradients.values(), limit)

    def complete(self, numbers: TensorsByKind) -> TensorsByKind:
        found: dict[str, dict[str, Tensor]] = {}
        with self._context.exchanging():
            gathered = self._gather(self._owned(numbers))
        for key, tensor in gathered.items():
            kind, _, name = key.partition("/")
            found.setdefault(kind, {})[name] = tensor
        return found

    def _gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the first rank that has a part of the model; see `gather_to_first`."""
        context = self._context
        return gather_to_first(own, context.world, self._ranks, context.inside)

    def _owned(self, numbers: TensorsByKind) -> dict[str, Tensor]:
        """The whole tensors that this rank owns; collective among the ranks with parts of them."""
        holds = (lambda name: True) if self.ownership is None else self.ownership.holds
        return {
            f"{kind}/{name}": full.to_dense() if full.is_sparse else full
            for kind, name, owner, full in completed(numbers, self.layers, holds)
            if self._owns(owner)
        }

    def _owns(self, name: str) -> bool:
        first = not self._plan.mesh.coordinate(self._context.world.rank).get(TENSOR, 0)
        return first and (self.ownership is None or self.ownership.owns(name))

    def gather_whole(self) -> None:
        if self.ownership is None or self._guard is None:
            return
        if self.layers is not None:
            self._make_copy()
            return
        with self._context.exchanging():
            if self._shards is not None:
                self._shards.gather()
            tensors = self._tensors()
            own = {name: tensor for name, tensor in tensors.items() if self.ownership.owns(name)}
            found = self._gather(own)
        for name in (name for name in found if not self.ownership.holds(name)):
            # Through `.data`: the optimiser, hooks and tied modules keep the same parameter object.
            tensors[name].data = found[name].data
        self._guard.lifted = self._context.world.rank == self._ranks[0]

    def _make_copy(self) -> None:
        # A second model, as in `ShardedParameters`.
        form = require_meta_copy(self._form, self._model)
        tensors = {**self.named, **dict(self._model.named_buffers())}
        with torch.no_grad():
            found = self.complete({"": tensors})
        if self._context.world.rank == self._ranks[0]:
            self.whole = fill_meta_copy(form, self._model, self.named, found[""])

    def release_whole(self) -> None:
        if self._shards is not None:
            self._shards.release()
        self.whole = self._model
        if self._guard is not None:
            self._guard.lifted = False
        for tensor in self.away:
            release_storage(tensor)
            # Else the state of a released parameter would keep its memory.
            self._optimizer.state.pop(tensor, None)

    def share_buffers(self, among: dist.ProcessGroup | None = None) -> None:
        if self.ownership is not None:
            tensors, world = self._tensors(), self._context.world
            with self._context.exchanging(), torch.no_grad():
                copy_to_holders(self.ownership.copied(), tensors, world)
                if among is None:
                    copy_to_holders(self._of_first_worker(self.ownership), tensors, world)

    def _of_first_worker(self, ownership: ParameterOwnership) -> dict[tuple[int, int], list[str]]:
        """What the ranks at this one's place in other workers get of that in the first one."""
        names = [n for n in sorted(ownership.holders) if ownership.holds(n) and ownership.varies(n)]
        place = ownership.rank - self._ranks[0]
        others = range(place, self._plan.ranks, len(self._ranks))[1:]
        return {(place, other): names for other in others if names}

    def _tensors(self) -> dict[str, Tensor]:
        return dict((*self._model.named_parameters(), *self._model.named_buffers()))

    def close(self) -> None:
        # After `gather_whole` the model stays whole on rank 0.
        if self._guard is not None:
            self._guard.close(whole=self._guard.lifted)
        self.ownership = self._guard = self._shards = None


def _check_islands(stages: ModelStages, decisions: SplitDecisions) -> None:
    # Activations change their grid at the call of such a module, so a stage must contain the call.
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
    assert layers.split is not None
    for name, mesh in shards.meshes.items():
        copies = [n for n in mesh.mesh_dim_names or () if n.startswith("copies_")]
        inner = (*(Replicate() for _ in copies), Shard(0))
        layers.split.homes[name] = ParameterPlacement(layers.grid, mesh, inner)


def shard_count(tensor: Tensor) -> int:
    """The number of different shards of a tensor, over the ranks that hold it."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(n) for n, p in enumerate(tensor.placements) if p.is_shard())


def sharded_rows(
    plan: Plan, ownership: ParameterOwnership, parameters: Mapping[str, Tensor]
) -> dict[str, ShardingRanks]:
    """The ranks that shard each parameter that this rank trains; see `ShardedStageParameters`."""
    mesh, found = plan.mesh, {}
    # Those are the ranks of the axis "shard"; without that axis, all that train a parameter. With
    # ZeRO 3 they hold the same stage, where it has copies: they come to the same action together.
    if mesh.degree(SHARD_AXIS) > 1:
        apart = tuple(name for name in mesh.names if name != SHARD_AXIS)
    else:
        apart = (PIPE_AXIS,) if plan.memory.zero == 3 and plan.copies > 1 else ()
    for name, ranks in ownership.trainers.items():
        # What a rank holds for evaluation only, and what has no rows, stays whole.
        here = ownership.rank in ranks and set(ranks) == set(ownership.holders[name])
        if not here or not parameters[name].dim():
            continue
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(ranks):
            place = mesh.coordinate(rank)
            # Ranks that split layers lie innermost: the first of them stands for all.
            first = rank - place.get(TENSOR, 0)
            rows.setdefault(tuple(place[axis] for axis in apart), []).append(first)
        if len(next(iter(rows.values()))) > 1:
            found[name] = tuple(map(tuple, rows.values()))
    return found
