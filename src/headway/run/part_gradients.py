"""What all hands share whose ranks keep parts of parameters: numbers, norm, and the whole model.

Parameters are DTensors. A model without memory is kept beside the one that trains, so that `whole`
can be made without undoing what has been done to the modules.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import UsageError
from headway.parallel.state_sharding import square_of_norm, whole
from headway.run.gradients import Gradients


class PartGradients(Gradients):
    """As `Gradients`; `_skeleton` is set by `skeleton` before the model is changed."""

    _skeleton: nn.Module | None = None
    _whole: nn.Module | None = None

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
            for kind, tensors in super().numbers().items():
                for name, tensor in tensors.items():
                    owner = name.rpartition(".")[0] if kind == "optimizer" else name
                    found.setdefault(kind, {})[name] = whole(self.logical(owner, tensor))
        return found

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
                full = whole(self.logical(name, tensor.detach()))
                if self._world.rank == 0:
                    now[id(forms[name])] = _like(tensor, full.clone())
        if self._world.rank == 0:
            self._whole = copy.deepcopy(self._skeleton, dict(now))
            self._whole.train(self._model.training)

    def let_go(self) -> None:
        self._whole = None


def skeleton(model: nn.Module) -> nn.Module | None:
    """The model without memory for its parameters; None where it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:
        return None


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    """A parameter for a parameter."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full
