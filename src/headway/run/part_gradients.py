"""What all hands share whose ranks keep parts of parameters: numbers, norm, and the whole model.

Parameters are DTensors. `whole` is a second model, made of a `skeleton`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from headway.parallel.state_sharding import ShardedState, square_of_norm, whole
from headway.run.gradients import Gradients
from headway.run.record import StepRecord
from headway.run.skeleton import filled, require
from headway.run.training_state import Layout, Trained


class PartGradients(Gradients):
    """As `Gradients`; `_skeleton` is set by `skeleton` before the model is changed.

    Attributes:
        sharded: The state that FSDP2 keeps and sums; None: gradients are summed otherwise.
        layout: None: parameters are held as they are saved.
    """

    sharded: ShardedState | None = None
    layout: Layout | None = None
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
            square = float(square_of_norm(gradients))
        self._limit(square, gradients.values())

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        with self.exchanging():
            for kind, tensors in self._trained.numbers().items():
                for name, tensor in tensors.items():
                    owner = name.rpartition(".")[0] if kind == "optimizer" else name
                    found.setdefault(kind, {})[name] = whole(self.logical(owner, tensor))
        return found

    @property
    def _trained(self) -> Trained:
        return Trained(self._model, self._optimizer, self._scheduler, layout=self.layout)

    def make_whole(self) -> None:
        """A second model, whole, on rank 0."""
        kept = require(self._skeleton, self._model)
        now: dict[str, Tensor] = {}
        with self.exchanging(), torch.no_grad():
            for name, tensor in (*self._all.items(), *self._model.named_buffers()):
                full = whole(self.logical(name, tensor.detach()))
                if self._world.rank == 0:
                    now[name] = _like(tensor, full.clone())
        if self._world.rank == 0:
            self._whole = filled(kept, now)
            self._whole.train(self._model.training)

    def let_go(self) -> None:
        self._whole = None


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    """A parameter for a parameter."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full
