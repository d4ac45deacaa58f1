"""The hands on the gradients where every rank keeps a part of the model's state (ZeRO).

FSDP2 sums gradients in the backward pass, where they are kept. What is left is the sum of the few
parameters that are not sharded, scaling, clipping by the norm of all parts, and the update, which
each rank makes of its own parts. Invariant: between steps all is sharded.
"""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.errors import UsageError
from headway.parallel.state_sharding import ShardedState, square_of_norm, whole
from headway.plan import Plan
from headway.plan.sharding import SHARD
from headway.run.gradients import Gradients
from headway.run.memory import give_back_freed_memory
from headway.run.record import StepRecord
from headway.run.world import World


class ShardedGradients(Gradients):
    """As `Gradients`; the arguments are the same. The model is sharded in place."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        plan: Plan,
        world: World,
        clip: float | None,
        seed: int,
        weight: float = 1.0,
    ) -> None:
        self._skeleton = _skeleton(model)
        self._whole: nn.Module | None = None
        assert plan.memory.zero
        with world.explained("sharding the model's state"):
            self.sharded = ShardedState(model, optimizer, mesh_of(plan, world), plan.memory.zero)
        give_back_freed_memory()
        super().__init__(
            model, optimizer, scheduler, plan=plan, world=world, clip=clip, seed=seed, weight=weight
        )

    @property
    def whole(self) -> nn.Module:
        return self._model if self._whole is None else self._whole

    def calling(self) -> contextlib.AbstractContextManager[None]:
        return self.sharded.called()

    def begin(self, record: StepRecord, own: int, doing: str) -> None:
        super().begin(record, own, doing)
        self.sharded.begin()

    def arm(self) -> None:
        self.sharded.arm()

    def receive(self) -> None:
        """Sum the gradients of what is not sharded."""
        gradients = [p.grad for p in self.sharded.whole.values() if p.requires_grad]
        if any(gradient is not None for gradient in gradients):
            found = [torch.zeros(()) if g is None else g.cpu() for g in gradients]
            shared = torch.stack([g.double() for g in found]).to(self._world.device)
            with self.exchanging():
                dist.all_reduce(shared)
            for gradient, total in zip(gradients, shared, strict=True):
                if gradient is not None:
                    gradient.copy_(total)

    def clip(self) -> None:
        assert self._clip is not None
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        with self.exchanging():
            self._record.norm = math.sqrt(float(square_of_norm(gradients)))
        if not math.isfinite(self._record.norm):
            raise self._diverged(f"the norm of the gradients is {self._record.norm}")
        factor = self._clip / (self._record.norm + 1e-6)  # torch's
        if factor < 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        with self.exchanging():
            return {
                kind: {name: whole(tensor) for name, tensor in tensors.items()}
                for kind, tensors in super().numbers().items()
            }

    def make_whole(self) -> None:
        """A second model, whole, on rank 0."""
        if self._skeleton is None:
            raise UsageError(
                f"{type(self._model).__name__} cannot be made whole",
                why="A copy of it is needed, and copy.deepcopy fails.",
                fix="Let the model be copied, or save a checkpoint and convert that.",
            )
        forms = dict((*self._skeleton.named_parameters(), *self._skeleton.named_buffers()))
        now: dict[int, Tensor] = {}
        with self.exchanging(), torch.no_grad():
            for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
                full = whole(tensor.detach())
                if self._world.rank == 0:
                    now[id(forms[name])] = _like(tensor, full.clone())
        if self._world.rank == 0:
            self._whole = copy.deepcopy(self._skeleton, dict(now))
            self._whole.train(self._model.training)

    def let_go(self) -> None:
        self._whole = None


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    """A parameter for a parameter."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full


def mesh_of(plan: Plan, world: World) -> DeviceMesh:
    """The ranks that share the batch: a line, or copies x parts; collective."""
    sizes = [plan.mesh.degree(name) for name in (plan.exchange.axis, SHARD)]
    names = [plan.exchange.axis, SHARD]
    if sizes[1] == 1:
        sizes, names = sizes[:1], names[:1]
    grid = torch.empty(sizes, dtype=torch.int)
    for rank in range(plan.ranks):
        place = plan.mesh.coordinate(rank)
        grid[tuple(place.get(name, 0) for name in names)] = rank
    return DeviceMesh(world.device.type, grid, mesh_dim_names=tuple(names))


def _skeleton(model: nn.Module) -> nn.Module | None:
    """The model without memory for its parameters; None where it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:
        return None
