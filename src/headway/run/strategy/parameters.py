"""Parameters: what a rank holds of the model, under which names, and how it is made whole.

`WholeParameters`: every rank has all of them. `ShardedParameters`: every rank has parts of them,
rows that FSDP2 keeps (Rajbhandari et al., ZeRO, SC 2020), parts of split layers, or both. Of a
model that is cut into stages see `stage_parameters`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.parallel.fsdp import full_tensor_of, squared_gradient_norm
from headway.run.distributed import replica_sync
from headway.run.step.memory import (
    fill_meta_copy,
    give_back_freed_memory,
    meta_copy,
    require_meta_copy,
)
from headway.run.strategy.training_state import LogicalLayout

if TYPE_CHECKING:
    from headway.run.strategy.split_layers import SplitLayers
    from headway.run.strategy.step_context import StepContext

Numbers = Mapping[str, Mapping[str, Tensor]]
"""Kind -> logical name -> tensor; see `TrainingState.numbers`."""


class HeldParameters(ABC):
    """Of this rank.

    Attributes:
        named: What the optimiser has, by logical name; whole, or in parts.
        sources: Where backward leaves the gradients, by logical name.
        layers: Split ones, whose parameters are held otherwise than they are saved; None: none are.
        whole: The model; after `make_whole` it is whole on rank 0.
    """

    named: Mapping[str, nn.Parameter]
    sources: Mapping[str, nn.Parameter]
    layers: SplitLayers | None = None
    whole: nn.Module

    @property
    @abstractmethod
    def away(self) -> frozenset[Tensor]:
        """Parameters and buffers that other ranks hold, and this one does not."""

    def follow(self) -> None:
        """Look at what the user has frozen or thawed."""
        if self.layers is not None:
            self.layers.follow()

    @abstractmethod
    def clear(self) -> None:
        """Forget gradients that the optimiser does not see."""

    def collect(self, trained: Mapping[str, nn.Parameter], *, reuse: bool) -> None:
        """Give the optimiser's parameters the gradients, once they are summed.

        Args:
            reuse: Gradients have the same memory in each step.
        """
        if self.layers is not None:
            self.layers.collect(trained, reuse=reuse)

    @abstractmethod
    def clip(self, trained: Mapping[str, nn.Parameter], limit: float) -> float:
        """Limit the global norm, to which every element counts once; returns it as it was."""

    @abstractmethod
    def complete(self, numbers: Numbers) -> Numbers:
        """Numbers of all parameters, whole and of all ranks, on rank 0; collective."""

    @abstractmethod
    def make_whole(self) -> None:
        """Put the whole model on rank 0, until `let_go`; collective."""

    @abstractmethod
    def let_go(self) -> None:
        """Undo `make_whole`."""

    @abstractmethod
    def share_buffers(self) -> None:
        """One rank's buffers for all (running statistics differ between shares); collective."""

    @abstractmethod
    def close(self) -> None:
        """The executor leaves."""


class WholeParameters(HeldParameters):
    """Every rank has all of them."""

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

    def complete(self, numbers: Numbers) -> Numbers:
        return numbers

    def make_whole(self) -> None:
        pass

    def let_go(self) -> None:
        pass

    def share_buffers(self) -> None:
        replica_sync.broadcast_buffers(self.whole, self._world)

    def close(self) -> None:
        pass


class ShardedParameters(HeldParameters):
    """Every rank has parts of them, as DTensors.

    Args:
        form: The model before FSDP2 has sharded it, without memory; None: `divide` takes it.
        layers: Of split layers: nothing is named before `divide`.
    """

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        *,
        form: nn.Module | None = None,
        layers: SplitLayers | None = None,
    ) -> None:
        self.layers = layers
        self.named = self.sources = dict(model.named_parameters()) if layers is None else {}
        self.whole = model
        self._model = model
        self._context = context
        self._form = form

    def divide(self, optimizer: Optimizer, split: Callable[[], list[str]]) -> None:
        """Split the layers; collective.

        Args:
            split: Changes the model; returns remarks.
        """
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

    def complete(self, numbers: Numbers) -> Numbers:
        found: dict[str, dict[str, Tensor]] = {}
        with self._context.exchanging():
            for kind, name, _, full in completed(numbers, self.layers):
                found.setdefault(kind, {})[name] = full
        return found

    def make_whole(self) -> None:
        """A second model, whole, on rank 0: this one's modules work on parts."""
        form = require_meta_copy(self._form, self._model)
        first = self._context.world.rank == 0
        tensors = {**self.named, **dict(self._model.named_buffers())}
        with self._context.exchanging(), torch.no_grad():
            full = completed({"": tensors}, self.layers)
            found = {name: tensor.clone() for _, name, _, tensor in full if first}
        if first:
            self.whole = whole_model(form, self._model, self.named, found)

    def let_go(self) -> None:
        self.whole = self._model

    def share_buffers(self) -> None:
        replica_sync.broadcast_buffers(self._model, self._context.world)

    def close(self) -> None:
        pass


def completed(
    numbers: Numbers,
    layout: LogicalLayout | None,
    holds: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, str, str, Tensor]]:
    """Kind, name, name of the parameter, all of the tensor: one after the other; collective.

    Args:
        holds: Whether this rank has parts of a parameter: else it is left out here.
    """
    for kind, tensors in numbers.items():
        for name, tensor in tensors.items():
            owner = name.rpartition(".")[0] if kind == "optimizer" else name
            if holds(owner):
                part = tensor.detach()
                logical = part if layout is None else layout.logical(owner, part)
                yield kind, name, owner, full_tensor_of(logical)


def whole_model(
    form: nn.Module,
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
) -> nn.Module:
    """A model with these tensors, frozen and in training or eval mode as another one.

    Args:
        form: From `meta_copy`.
        named: The parameters of the other one.
        tensors: All of it; the new model takes their memory.
    """
    filled = fill_meta_copy(
        form,
        {
            name: nn.Parameter(tensor, named[name].requires_grad) if name in named else tensor
            for name, tensor in tensors.items()
        },
    )
    return filled.train(model.training)


def limit_norm(square: float, gradients: Collection[Tensor], limit: float) -> float:
    """Scale gradients down to the largest norm; returns it as it was.

    Args:
        square: Of the norm of all of them, over all ranks.
    """
    norm = math.sqrt(square)
    factor = limit / (norm + 1e-6)  # as `torch.nn.utils.clip_grad_norm_`
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
