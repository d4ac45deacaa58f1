"""The hands on the gradients where every rank trains only the stages that it holds.

Sums over the copies of a stage are made by the schedule's SYNC; what is left is scaling, clipping
by the norm over all stages, and the update. Invariant: once the model is cut, parameters, buffers
and optimiser state have memory on the ranks that hold them, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.run.gathering import copy_over, gather
from headway.run.gradients import Gradients
from headway.run.homes import Homes
from headway.run.memory import give_back_freed_memory
from headway.run.stage_memory import Guard, let_go


class StageGradients(Gradients):
    """As `Gradients`; the arguments are the same.

    Attributes:
        homes: Who holds what; None before the model is cut.
    """

    homes: Homes | None = None
    _guard: Guard | None = None

    def keep_own(self, homes: Homes) -> None:
        """The model has been cut: let go of what other ranks hold."""
        self.homes = homes
        self._guard = Guard(self._model, self._optimizer)
        self.let_go()
        give_back_freed_memory()

    @property
    def away(self) -> frozenset[Tensor]:
        if self.homes is None:
            return frozenset()
        return frozenset(t for name, t in self._tensors().items() if not self.homes.holds(name))

    def let_go(self) -> None:
        if self._guard is not None:
            self._guard.lifted = False
        for tensor in self.away:
            let_go(tensor)
            self._optimizer.state.pop(tensor, None)

    def make_whole(self) -> None:
        if self.homes is None or self._guard is None:
            return
        tensors = self._tensors()
        with self.exchanging():
            found = gather({n: t for n, t in tensors.items() if self.homes.owns(n)}, self._world)
        for name in (name for name in found if not self.homes.holds(name)):
            tensors[name].data = found[name].data
        self._guard.lifted = self._world.rank == 0

    def share_buffers(self) -> None:
        if self.homes is not None:
            with self.exchanging(), torch.no_grad():
                copy_over(self.homes.copied(), self._tensors(), self._world)

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        own = {
            f"{kind}/{name}": tensor.to_dense() if tensor.is_sparse else tensor
            for kind, tensors in super().numbers().items()
            for name, tensor in tensors.items()
            if self._owns(name, kind)
        }
        with self.exchanging():
            found = gather(own, self._world)
        numbers: dict[str, dict[str, Tensor]] = {}
        for key, tensor in found.items():
            kind, _, name = key.partition("/")
            numbers.setdefault(kind, {})[name] = tensor
        return numbers

    def _owns(self, name: str, kind: str) -> bool:
        owner = name.rpartition(".")[0] if kind == "optimizer" else name
        return self.homes is None or self.homes.owns(owner)

    def _tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model."""
        return {**self._all, **dict(self._model.named_buffers())}

    def clip(self) -> None:
        """Limit the global norm, to which every parameter counts once."""
        assert self.homes is not None
        trained = {name: self._all[name].grad for name in self.homes.trained}
        gradients = {name: grad for name, grad in trained.items() if grad is not None}
        square = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            norm = torch.linalg.vector_norm(gradient).double().cpu()
            square += norm.square() / len(self.homes.trainers[name])
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
        self.homes = self._guard = None
