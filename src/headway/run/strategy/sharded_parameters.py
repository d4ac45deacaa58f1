"""Strategies whose ranks hold parts of parameters: ZeRO through FSDP2, tensor parallelism.

`ShardedParameterStrategy` has what both share: the norm over all parts, and the whole model, which
is put together as a second model. `FsdpStrategy`: FSDP2 sums gradients in the backward pass; what
remains is the sum of the few parameters that are not sharded, scaling, clipping, and the update of
each rank's own parts (Rajbhandari et al., ZeRO, SC 2020).

`TensorParallelStrategy` splits the model at its first batch. The modules then hold parts as plain
parameters, so that the exchange, or FSDP2, treats them as those of a smaller model; ranks with the
same parts of other samples are its copies. The optimiser has DTensors over the same memory, which
know what they are parts of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from headway.data import RankBatch
from headway.parallel.fsdp import (
    ShardedState,
    full_tensor_of,
    rebind_optimizer_parameters,
    squared_gradient_norm,
)
from headway.parallel.tensor import (
    ParameterPlacement,
    ProcessGrid,
    SplitDecisions,
    SplitModel,
    SplitSettings,
    apply_split_decisions,
    infer_split,
)
from headway.plan import Plan
from headway.plan.layer_split import SPACE, TENSOR
from headway.plan.plan import SHARD_AXIS
from headway.run.distributed.process_groups import broadcast_from_rank0, grid_axes, refined_mesh
from headway.run.distributed.world import World
from headway.run.step.memory import (
    fill_meta_copy,
    give_back_freed_memory,
    meta_copy,
    require_meta_copy,
)
from headway.run.step.randomness import RandomDraws
from headway.run.step.record import StepRecord
from headway.run.strategy.data_parallel import DataParallelStrategy
from headway.run.strategy.training_state import LogicalLayout, TrainingState


class ShardedParameterStrategy(DataParallelStrategy):
    """As `DataParallelStrategy`; `_skeleton` is set by `skeleton` before the model is changed.

    Attributes:
        sharded: The state that FSDP2 keeps and sums; None: gradients are summed otherwise.
        layout: None: parameters are held as they are saved.
    """

    sharded: ShardedState | None = None
    layout: LogicalLayout | None = None
    _skeleton: nn.Module | None = None
    _whole: nn.Module | None = None

    def calling(self) -> contextlib.AbstractContextManager[None]:
        return super().calling() if self.sharded is None else self.sharded.called()

    def begin(self, record: StepRecord, own: int, doing: str) -> None:
        super().begin(record, own, doing)
        if self.sharded is not None:
            self.sharded.begin()

    def arm(self) -> None:
        super().arm()
        if self.sharded is not None:
            self.sharded.arm()

    def receive(self) -> None:
        super().receive()
        if self.sharded is not None:
            with self.exchanging():
                self.sharded.sum_whole(self._weight)

    @property
    def whole(self) -> nn.Module:
        return self._model if self._whole is None else self._whole

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or something of its shape, in the order of the unsplit model; collective."""
        return tensor

    def clip(self) -> None:
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        with self.exchanging():
            square = float(squared_gradient_norm(gradients))
        self._limit(square, gradients.values())

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        with self.exchanging():
            for kind, tensors in self._trained.numbers().items():
                for name, tensor in tensors.items():
                    owner = name.rpartition(".")[0] if kind == "optimizer" else name
                    found.setdefault(kind, {})[name] = full_tensor_of(self.logical(owner, tensor))
        return found

    @property
    def _trained(self) -> TrainingState:
        return TrainingState(self._model, self._optimizer, self._scheduler, layout=self.layout)

    def make_whole(self) -> None:
        """A second model, whole, on rank 0."""
        kept = require_meta_copy(self._skeleton, self._model)
        now: dict[str, Tensor] = {}
        with self.exchanging(), torch.no_grad():
            for name, tensor in (*self._all.items(), *self._model.named_buffers()):
                full = full_tensor_of(self.logical(name, tensor.detach()))
                if self._world.rank == 0:
                    now[name] = _like(tensor, full.clone())
        if self._world.rank == 0:
            self._whole = fill_meta_copy(kept, now)
            self._whole.train(self._model.training)

    def let_go(self) -> None:
        self._whole = None


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    """A parameter for a parameter."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full


# The hands on the gradients where every rank keeps a part of the model's state (ZeRO).


class FsdpStrategy(ShardedParameterStrategy):
    """As `Gradients`; the arguments are the same. The model is sharded in place."""

    def _place(self) -> None:
        plan, world = self._plan, self._world
        self._skeleton = meta_copy(self._model)
        assert plan.memory.zero
        with world.explained("sharding the model's state"):
            self.sharded = ShardedState(
                self._model,
                self._optimizer,
                state_mesh(plan, world),
                plan.memory.zero,
                counted=plan.mesh.degree(SPACE),
            )
        give_back_freed_memory()


def state_mesh(plan: Plan, world: World) -> DeviceMesh:
    """The ranks that keep the state together: a line, or copies x parts; collective.

    Those that share a sample keep it together with the others; with parts of their own (hybrid)
    they are among the copies.
    """
    parts = plan.mesh.degree(SHARD_AXIS)
    lines: dict[int, list[int]] = {}
    for rank in range(plan.ranks):
        lines.setdefault(plan.mesh.coordinate(rank).get(SHARD_AXIS, 0), []).append(rank)
    if parts == 1:
        ranks, names = torch.tensor(lines[0], dtype=torch.int), ("data",)
        return DeviceMesh(world.device.type, ranks, mesh_dim_names=names)
    grid = torch.tensor([lines[part] for part in range(parts)], dtype=torch.int).T.contiguous()
    return DeviceMesh(world.device.type, grid, mesh_dim_names=("data", SHARD_AXIS))


# The hands on the gradients where layers are split: each rank has its parts of the parameters.


class TensorParallelStrategy(ShardedParameterStrategy):
    """As `Gradients`; the arguments are the same.

    Attributes:
        split: None before the model is split.
    """

    split: SplitModel | None = None
    _sites: RandomDraws | None = None
    _leaves: Mapping[str, nn.Parameter] = {}
    _wrapped: dict[str, tuple[Tensor, Tensor]]

    def _place(self) -> None:
        plan, grid = self._plan, self._plan.split.grid
        assert grid is not None
        self.layout = self
        with self._world.explained("making the groups that split layers"):
            self._meshes = {
                one: refined_mesh(plan, self._world, TENSOR, grid_axes(one), first=True)
                for one in dict.fromkeys((grid, *(other for _, other in plan.split.others)))
            }
        self._grids = {
            one: ProcessGrid.of(one, m[tuple(grid_axes(one))]) for one, m in self._meshes.items()
        }
        self._grid = self._grids[grid]
        self._wrapped = {}

    def divide(
        self,
        batch: RankBatch | None,
        loss: Callable[[Any, Any], Any],
        prepare: Callable[[Any], Any],
        probe: Callable[[Any], RandomDraws],
    ) -> RandomDraws:
        """Split the model, where that has not been done; collective. What rank 0 finds counts.

        Args:
            batch: Any; only that of rank 0 is looked at.
            prepare: Micro-batch -> what the loss gets.
            probe: Looks at the random draws of the model, before it is split.

        Raises:
            PlanError: It cannot be split.
        """
        if self._sites is not None:
            return self._sites

        def look() -> tuple[SplitDecisions, RandomDraws]:
            assert batch is not None
            data = prepare(batch.micros[0].data)
            said = self._plan.split
            decisions = infer_split(
                self._model, loss, data, self._grid.plan,
                whole=said.whole, only=said.only, by=said.others,
            )  # fmt: skip
            return decisions, probe(data)

        decided, self._sites = broadcast_from_rank0(self._world.rank, look, self.exchanging())
        self._obey(decided)
        return self._sites

    def _obey(self, decisions: SplitDecisions) -> None:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        self._skeleton = meta_copy(self._model)
        zero = self._plan.memory.zero if self._plan.data_degree > 1 else 0
        with self.exchanging():
            homes = {plan: self._home(grid, zero > 0) for plan, grid in self._grids.items()}
            # FSDP2 gathers weights ahead, and a part that is away cannot be gathered further.
            settings = SplitSettings(ahead=not zero)
            self.split = apply_split_decisions(
                self._model, self._grid, decisions, settings=settings,
                home=homes[self._grid.plan], grids=self._grids,
            )  # fmt: skip
            for name, key in self.split.keys.items():
                self.split.homes[name] = homes[key.grid.plan]
            if zero:
                mesh = self._meshes[self._grid.plan][self._data_dims]
                self.sharded = ShardedState(self._model, None, mesh, zero)
        self._leaves = dict(self._model.named_parameters())
        self._all = {name: self._seen(name, leaf) for name, leaf in self._leaves.items()}
        rebind_optimizer_parameters(self._optimizer, names, self._all, self.split.held)
        self.follow()
        self.remarks.extend(f"not split: {n} ({why})" for n, why in decisions.left.items())
        give_back_freed_memory()

    @property
    def _data_dims(self) -> tuple[str, ...]:
        names = (self._plan.exchange.axis, SHARD_AXIS)
        return tuple(n for n in names if self._plan.mesh.degree(n) > 1)

    def _home(self, grid: ProcessGrid, sharded: bool) -> ParameterPlacement:
        """On a grid; with sharded state on the data axes as well, of which the last one cuts."""
        if not sharded:
            return ParameterPlacement.of(grid)
        *copies, _ = self._data_dims
        names = tuple(grid.held_on.mesh_dim_names or ()) + self._data_dims
        inner = (*(Replicate() for _ in copies), Shard(0))
        return ParameterPlacement(grid, self._meshes[grid.plan][names], inner)

    def _seen(self, name: str, leaf: nn.Parameter) -> nn.Parameter:
        """A parameter as the optimiser has it."""
        assert self.split is not None
        return nn.Parameter(self.split.wrapped(name, leaf), leaf.requires_grad)

    def _sources(self) -> Mapping[str, nn.Parameter]:
        return {name: self._leaves[name] for name in self._parameters}

    def follow(self) -> None:
        if self.split is None:
            return
        for name, leaf in self._leaves.items():  # the user freezes what the modules hold
            self._all[name].requires_grad_(leaf.requires_grad)
        super().follow()

    def begin(self, record: StepRecord, own: int, doing: str) -> None:
        super().begin(record, own, doing)
        for name, leaf in self._leaves.items():
            self._all[name].grad = leaf.grad = None

    def receive(self) -> None:
        """Wait for the sums; the optimiser's parameters get what the modules' have."""
        super().receive()
        assert self.split is not None
        for name, parameter in self._parameters.items():
            gradient = self._leaves[name].grad
            if gradient is None:
                continue
            if self._exchange is None:
                parameter.grad = self.split.wrapped(name, gradient)
                continue
            known = self._wrapped.get(name)
            if known is None or known[0] is not gradient:  # a bucket's memory stays the same
                known = self._wrapped[name] = gradient, self.split.wrapped(name, gradient)
            parameter.grad = known[1]

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self.split is None else self.split.logical(name, tensor)

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`."""
        return tensor if self.split is None else self.split.held(name, tensor)
