"""The hands on the gradients where every rank trains only the stages that it holds.

Sums over the copies of a stage are made by the schedule's SYNC; what is left is scaling, clipping
by the norm over all stages, and the update. Invariant: once the model is cut, parameters, buffers
and optimiser state have memory on the ranks that hold them, and nowhere else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.checkpoint.staging import local
from headway.parallel import Stages
from headway.parallel.sharded import Place
from headway.parallel.stage_shards import Rows, StageShards
from headway.parallel.state_sharding import follow_parameters, whole
from headway.plan import Plan
from headway.plan.layer_split import TENSOR
from headway.plan.pipeline import AXIS
from headway.plan.sharding import SHARD
from headway.run.gathering import copy_over, gather
from headway.run.gradients import Gradients
from headway.run.homes import Homes
from headway.run.memory import give_back_freed_memory
from headway.run.record import StepRecord
from headway.run.skeleton import filled, require
from headway.run.stage_layers import StageLayers
from headway.run.stage_memory import Guard, let_go
from headway.run.training_state import Trained


class StageGradients(Gradients):
    """As `Gradients`; the arguments are the same.

    Attributes:
        homes: Who holds what; None before the model is cut.
    """

    homes: Homes | None = None
    _guard: Guard | None = None
    _layers: StageLayers | None = None
    _shards: StageShards | None = None
    _whole: nn.Module | None = None
    _held: Mapping[str, nn.Parameter] = {}

    def _place(self) -> None:
        if self._plan.split.tensor:
            self._layers = StageLayers(self._plan, self._world)
            self.layout = self

    def keep_own(
        self, homes: Homes, stages: Stages, loss: Callable[[Any, Any], Any], data: Any
    ) -> Mapping[str, Place]:
        """The model has been cut: let go of what other ranks hold; collective.

        Args:
            homes: Who holds what.
            stages: Of the model.
            loss: Of the recipe.
            data: Of a micro-batch, whole, the same on all ranks.

        Returns:
            Where parameters are kept in parts, by name.
        """
        if self._layers is not None:
            self._layers.decide(self._model, loss, data, self.exchanging())
        self.homes = homes
        self._guard = Guard(self._model, self._optimizer)
        self.let_go()
        self._split_own(stages, homes)
        give_back_freed_memory()
        return {} if self._shards is None else self._shards.places

    def _split_own(self, stages: Stages, homes: Homes) -> None:
        """Cut what is left by layers, and that by rows; the optimiser has the parts."""
        names = {parameter: name for name, parameter in self._all.items()}
        layers = self._layers
        with self.exchanging():
            if layers is not None:
                away = frozenset(name for name in self._all if not homes.holds(name))
                self.remarks += layers.obey(stages, away)
            if self._plan.memory.zero:
                rows = kept_by(self._plan, homes, self._all)
                self._shards = StageShards(stages, rows, layers.axes if layers else None)
                if layers is not None:
                    layers.keep(self._shards.meshes)
        if layers is None and self._shards is None:
            return
        self._held = dict(self._model.named_parameters())
        self._all = {name: self._seen(name, held) for name, held in self._held.items()}
        held = None if layers is None else layers.held
        follow_parameters(self._optimizer, names, self._all, held)
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
        """What values between stages refer to; see `headway.parallel.Team`."""
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
            let_go(tensor)
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
            found = gather({n: t for n, t in tensors.items() if self.homes.owns(n)}, self._world)
        for name in (name for name in found if not self.homes.holds(name)):
            tensors[name].data = found[name].data
        self._guard.lifted = self._world.rank == 0

    def _make_copy(self, layers: StageLayers) -> None:
        """A second model, whole, on rank 0: the stages' modules work on parts."""
        kept = require(layers.skeleton, self._model)
        tensors = {**self._all, **dict(self._model.named_buffers())}
        with self.exchanging(), torch.no_grad():
            found = gather(self._complete({"": tensors}), self._world)
        if self._world.rank == 0:
            full = {name.removeprefix("/"): tensor for name, tensor in found.items()}
            for name, form in kept.named_parameters():
                if name in full:
                    full[name] = nn.Parameter(full[name], form.requires_grad)
            self._whole = filled(kept, full)
            self._whole.train(self._model.training)

    def share_buffers(self) -> None:
        if self.homes is not None:
            with self.exchanging(), torch.no_grad():
                copy_over(self.homes.copied(), self._tensors(), self._world)

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        trained = Trained(self._model, self._optimizer, self._scheduler, layout=self.layout)
        with self.exchanging():
            found = gather(self._complete(trained.numbers()), self._world)
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
                full = whole(self.logical(owner, tensor.detach()))
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
            norm = torch.linalg.vector_norm(local(gradient)).double().cpu()
            holders = len(self.homes.trainers[name]) * self._plan.mesh.degree(TENSOR)
            square += norm.square() * parts(gradient) / holders
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


def parts(tensor: Tensor) -> int:
    """Into how many a tensor is cut, over the ranks that have it."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(n) for n, p in enumerate(tensor.placements) if p.is_shard())


def kept_by(plan: Plan, homes: Homes, parameters: Mapping[str, Tensor]) -> dict[str, Rows]:
    """Who keeps what in parts, of what this rank trains: see `StageShards`.

    Those are the ranks of the axis "shard"; without that axis, all that train a parameter. With
    ZeRO 3 they are the same stage's, where it has copies: they come to the same action together.
    What a rank holds for evaluation only, and what has no rows, stays whole.
    """
    mesh, found = plan.mesh, {}
    if mesh.degree(SHARD) > 1:
        apart = tuple(name for name in mesh.names if name != SHARD)
    else:
        apart = (AXIS,) if plan.memory.zero == 3 and plan.data_degree > 1 else ()
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
