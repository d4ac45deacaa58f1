"""A recipe's model as input of the planner: its captured graph, and its measured cost.

The graph is captured on the meta device: nothing is allocated. The cost is measured on this
machine, with the model as a chain of equal layers: as many as the parts of the most common size,
over which the cost of the others is spread. Forward and backward together are as measured; they are
divided by the rule B = 2F of the performance model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from headway.capture.annotations import annotations_of, building
from headway.capture.fake_tensors import FakeContext
from headway.capture.model_capture import capture
from headway.data import MicroBatch
from headway.errors import PlanError
from headway.graph.annotations import Annotations
from headway.graph.model_graph import ModelGraph
from headway.graph.operator_fusion import fuse_light_operators
from headway.parallel.fsdp import fsdp_units
from headway.parallel.pipeline.partition.cut import check_cut, cut, list_units
from headway.parallel.pipeline.runtime.stage_profile import StageCost, measure_stage_costs
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe
from headway.run.step.batch import example_batch, to_device
from headway.run.step.forward_pass import autocast, float_dtype, to_float64
from headway.run.step.loss_probe import explain_split_loss
from headway.run.step.randomness import build_model, generators_restored
from headway.run.step.setup import check_components, stepped_each_step

_FORWARDS = 3
"""Of forward and backward, which takes two."""
_SAMPLES = 8
"""Of a measurement, where the recipe does not state a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A recipe's model as equal layers.

    Attributes:
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


def measure_model_costs(reference: str, ranks: int) -> ModelCosts:
    """What the layers of a model cost.

    Args:
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
    dtype = float_dtype(recipe.precision)
    if dtype is not None:
        to_float64(model)
    data = to_device(example_batch(recipe, samples), device, dtype)
    arithmetic = partial(autocast, recipe.precision, device)
    with arithmetic():
        units = _units(model, recipe, data, ranks)
        stages = cut(model, recipe.loss, data, stages=units)
    return _as_layers(
        measure_stage_costs(stages, recipe.loss, data, arithmetic=arithmetic), samples, batch
    )


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


# A recipe's model as data for the planner: captured on the meta device, nothing is allocated.


CAPTURE_SAMPLES = 64
"""Of the micro-batch with which a model is captured, so that every small divisor can be tried."""


def recipe_graph(
    reference: str | Recipe, overrides: Sequence[str] = ()
) -> tuple[ModelGraph, int, int, Annotations]:
    """A recipe's model as a fused graph, and the annotations of its modules.

    Returns:
        The graph, samples of the batch it was captured with, samples of the global batch, and the
        annotations.

    Raises:
        PlanError: The model cannot be captured, or its annotations make no sense.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference, overrides)
    batch = resolve_batch(recipe)
    samples = min(batch, CAPTURE_SAMPLES)
    with torch.device("meta"), building():
        model = recipe.model()
        said = annotations_of(model)
    graph = capture(model, example_batch(recipe, samples), loss=recipe.loss)
    return fuse_light_operators(graph), samples, batch, said


TRIAL_FLOPS = 2e9
"""Of a forward and a backward with which a cut is tried with numbers: about a second on a core."""


def check_stage_boundaries(
    recipe: Recipe, at: Sequence[str], samples: int, *, numbers: bool = False
) -> None:
    """Whether the executor can cut a recipe's model there.

    Args:
        at: Modules with which the second and all later stages begin.
        numbers: Whether the model is built and run; else nothing is allocated, and a value that the
            model changes in place behind a cut is not seen.

    Raises:
        PlanError: The forward cannot be followed, or not be cut there.
        RecipeError: The loss does not call the model exactly once.
    """
    cpu, data = torch.device("cpu"), example_batch(recipe, samples)
    with generators_restored(), autocast(recipe.precision, cpu):
        if numbers:
            dtype = float_dtype(recipe.precision)
            model = build_model(recipe)
            model, data = to_float64(model) if dtype else model, to_device(data, cpu, dtype)
        else:
            with torch.device("meta"), building():
                model = recipe.model().train()
            pretence = FakeContext()
            model, data = pretence.model(model), pretence.tree(data)
        check_cut(model, recipe.loss, data, at)


LOSS_SAMPLES = 4
"""With which a loss is looked at: enough for parts of different sizes."""


def explain_recipe_loss(recipe: Recipe) -> str:
    """Why the loss of a recipe depends on how its batch is split; "" where nothing is known.

    The model is built and run on a CPU with `LOSS_SAMPLES`.
    """
    with generators_restored():
        dtype = float_dtype(recipe.precision)
        model = build_model(recipe)
        model = to_float64(model) if dtype else model
        data = example_batch(recipe, LOSS_SAMPLES)
        micro = MicroBatch(positions=range(LOSS_SAMPLES), data=data)
        prepare = partial(to_device, device=torch.device("cpu"), dtype=dtype)
        return explain_split_loss(model, recipe.loss, [micro], prepare)


def check_recipe_components(recipe: Recipe, ranks: int) -> None:
    """Whether a step on so many ranks can drive a recipe's optimiser and scheduler; nothing is
    allocated.

    Raises:
        RecipeError: It cannot.
    """
    with torch.device("meta"), building():
        model = recipe.model()
    optimizer = recipe.optimizer(model)
    scheduler = None if recipe.scheduler is None else stepped_each_step(recipe.scheduler(optimizer))
    check_components(model, optimizer, scheduler, ranks)


def fsdp_parameter_groups(reference: str) -> list[list[str]]:
    """Names of the parameters that FSDP2 gathers together where state is kept in parts, group by
    group; all others are in one more.

    Raises:
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    with torch.device("meta"), building():
        model = recipe.model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[p] for p in module.parameters()] for module in fsdp_units(model)]
