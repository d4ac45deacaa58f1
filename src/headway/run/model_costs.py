"""What the layers of a recipe's model cost, measured on this machine before any plan.

The model is taken as a chain of equal layers: as many as the parts of the most common size, over
which what the others cost is spread. Invariant: forward and backward together are as measured, by
the rule B = 2F of the performance model.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headway.data import Cursor, Loader, as_source
from headway.errors import PlanError
from headway.parallel import StageCost, cut, list_units, measure
from headway.plan import BatchSplit
from headway.run.amounts import resolve_batch
from headway.run.parts import to_float64
from headway.run.recipe import Recipe
from headway.run.recipe_file import load_recipe
from headway.run.training import build_model
from headway.run.trees import to_device

_FORWARDS = 3
"""Of forward and backward, which takes two."""
_SAMPLES = 8
"""Of a measurement, where the recipe does not state a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A recipe's model as equal layers.

    Attributes:
        batch: Samples of the recipe's global batch.
        layers: How many.
        forward: Seconds of the forward of one layer for one sample.
        activation: Bytes that go from a layer to the next, per sample; the most anywhere.
        held: Bytes that a layer keeps for its backward, per sample.
        weights: Bytes of the parameters of a layer.
    """

    batch: int
    layers: int
    forward: float
    activation: float
    held: float
    weights: float

    def in_layers(self, layers: int) -> ModelCosts:
        """The same model in another number of pieces."""
        part = self.layers / layers
        return replace(
            self,
            layers=layers,
            forward=self.forward * part,
            held=self.held * part,
            weights=self.weights * part,
        )


def measure_recipe(reference: str, ranks: int) -> ModelCosts:
    """What the layers of a model cost.

    Args:
        reference: As for `headway train`.
        ranks: Most stages that the model may be cut into.

    Raises:
        PlanError: The model cannot be cut into stages.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    batch = resolve_batch(recipe)
    samples = min(batch, recipe.microbatch or _SAMPLES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(recipe).to(device)
    exact = recipe.precision == "float64"
    if exact:
        to_float64(model)
    data = to_device(example_of(recipe, samples), device, torch.float64 if exact else None)

    def arithmetic() -> AbstractContextManager[Any]:
        if recipe.precision == "bfloat16":
            return torch.autocast(device.type, dtype=torch.bfloat16)
        return nullcontext()

    with arithmetic():
        units = _units(model, recipe, data, ranks)
        stages = cut(model, recipe.loss, data, stages=units)
    return _as_layers(measure(stages, recipe.loss, data, arithmetic=arithmetic), samples, batch)


def example_of(recipe: Recipe, samples: int) -> Any:
    """The first samples of a recipe's data as one micro-batch, as its loss takes them."""
    with Loader(
        as_source(recipe.data()),
        BatchSplit(samples=samples),
        rank=0,
        ranks=1,
        cursor=Cursor(seed=recipe.seed),
        epochs=1,
    ) as loader:
        return next(iter(loader)).micros[0].data


def _units(model: nn.Module, recipe: Recipe, data: Any, ranks: int) -> int:
    """Into how many parts a cut can be, at the level that the most stages need."""
    for stages in range(ranks, 2, -1):
        if ranks % stages == 0:
            try:
                return len(list_units(model, recipe.loss, data, stages))
            except PlanError:
                continue
    return len(list_units(model, recipe.loss, data, 2))


def _as_layers(costs: tuple[StageCost, ...], samples: int, batch: int) -> ModelCosts:
    alike = Counter(cost.weight for cost in costs).most_common(1)[0][1]
    layers = alike if alike > 1 else len(costs)
    return ModelCosts(
        batch=batch,
        layers=layers,
        forward=sum(cost.seconds for cost in costs) / _FORWARDS / layers / samples,
        activation=max(cost.message for cost in costs) / samples,
        held=sum(cost.activation for cost in costs) / layers / samples,
        weights=sum(cost.weight for cost in costs) / layers,
    )
