"""Recordings: every tensor of a run's first optimiser steps, by logical name.

A recording is one safetensors file whose tensors are called `<step>/<kind>/<logical name>`, kinds
in the order in which a step makes them: loss, gradient, parameter, buffer, optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.data import Cursor
from headway.plans import Plan
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe
from headway.run.step.setup import check_components
from headway.run.strategy.training_state import TrainingState

KINDS = ("loss", "gradient", "parameter", "buffer", "optimizer")


@dataclass(frozen=True, kw_only=True)
class VerifyJob:
    """What to record.

    Attributes:
        recipe: As for `headway train`, or a `Recipe` that pickles.
        steps: Optimiser steps. They straddle the end of an epoch, so that a ragged last batch and
            the first batch of the next epoch are among them.
    """

    recipe: str | Recipe
    overrides: tuple[str, ...] = ()
    steps: int = 4
    plan: Plan | Path | None = None
    timeout_seconds: float = 120.0

    def load(self) -> Recipe:
        """The recipe in float64, in which equality can be told from rounding."""
        return replace(load_recipe(self.recipe, self.overrides), precision="float64")

    def start(self, recipe: Recipe, length: int) -> Cursor:
        """Where the recorded steps begin: so that the epoch ends one step before the last."""
        batch = resolve_batch(recipe)
        per_epoch = length // batch if recipe.drop_last else -(-length // batch)
        first = max(0, per_epoch - max(1, self.steps - 1))
        return Cursor(seed=recipe.seed, epoch=0, position=first * batch)


@dataclass(frozen=True, slots=True)
class Recording:
    """Named tensors of a run, and the order in which backward made the gradients.

    `order` is the order of execution, for naming the first difference.
    """

    tensors: Mapping[str, Tensor]
    order: tuple[str, ...]

    def save(self, path: Path) -> None:
        # safetensors refuses tensors that are not contiguous.
        clones = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(clones, path, metadata={"order": json.dumps(self.order)})

    @staticmethod
    def load(path: Path) -> Recording:
        with safe_open(path, framework="pt") as file:
            order = json.loads(file.metadata()["order"])
            names = file.keys()
            return Recording({name: file.get_tensor(name) for name in names}, tuple(order))


class Recorder:
    """Collects the tensors of a run step by step, in execution order."""

    def __init__(self, trained: TrainingState) -> None:
        self._names = [name for name, _ in trained.model.named_parameters()]
        self._tensors: dict[str, Tensor] = {}
        self._gradients: list[str] = []
        self._made: list[str] = []
        for name, parameter in trained.model.named_parameters():
            # torch raises where such a hook is registered on a parameter that requires no grad.
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, _: Tensor) -> None:
        """Backward has made a gradient."""
        self._gradients.append(name)

    def take(self, step: int, loss: float, numbers: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Record a step that has just been done.

        Args:
            numbers: As `TrainingState.tensors_by_kind` gives them; gradients must still be there.
        """
        self._put(step, "loss", "loss", torch.tensor(loss, dtype=torch.float64))
        for kind in KINDS[1:]:
            tensors = numbers.get(kind, {})
            made = self._gradients if kind == "gradient" else []
            # Where backward has noted nothing here (other kinds, stages on other ranks): the
            # model's order.
            for name in dict.fromkeys([*made, *self._names, *tensors]):
                if name in tensors:
                    self._put(step, kind, name, tensors[name])
        self._gradients.clear()

    def _put(self, step: int, kind: str, name: str, tensor: Tensor) -> None:
        key = f"{step}/{kind}/{name}"
        # Cloned in any case, because the next step overwrites this memory.
        whole = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        # safetensors knows no complex128: real and imaginary part in a last dimension.
        self._tensors[key] = (
            torch.view_as_real(whole).clone() if whole.is_complex() else whole.clone()
        )
        self._made.append(key)

    def recording(self) -> Recording:
        return Recording(self._tensors, tuple(self._made))


def build_training_state(recipe: Recipe, model: nn.Module) -> TrainingState:
    """Optimiser and scheduler of the recipe around a model."""
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    check_components(model, optimizer, scheduler, 1)
    return TrainingState(model, optimizer, scheduler)
