"""A recipe as the planner sees it: captured model, batch, optimizer memory and update time.

The recipe's model and optimizer are built on the meta device; nothing is allocated. Update times
come from the `updates` that `headway cluster measure` wrote for a device.

`measure_minibatch` is Zou's procedure with times measured on this machine: every way to compute a
convolution or attention is timed on the recipe's own model, and a knapsack chooses among them
within the device's memory. The measured model is thrown away; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.capture.benchmark.kernels import optimizer_name
from headway.capture.benchmark.layer_algorithms import measure_algorithms
from headway.capture.benchmark.timer import DeviceTimer
from headway.cluster import Cluster
from headway.cost.machines import Machine
from headway.cost.memory import OPTIMISER_MEMORY, OptimiserMemory
from headway.graph.annotations import ForcedChoices
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.guidelines.layer_algorithms import Minibatch, choose_minibatch
from headway.run.measure.recipe_model import recipe_graph
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe, sum_and_count
from headway.run.recipe.training_data import training_data
from headway.run.step.batch import example_batch, to_device
from headway.run.step.randomness import seed_everything

CLIP_UPDATE = "clip"
MEASURED_SECONDS = 0.04
"""For the repetitions of one measurement of a layer."""


@dataclass(frozen=True, kw_only=True)
class RecipeWorkload:
    """What of a recipe the search needs.

    Attributes:
        batch: Samples of the global batch.
        annotations: What the model's author says of its parts.
    """

    recipe: Recipe
    work: PlanningWorkload
    batch: int
    annotations: ForcedChoices


def capture_workload(recipe: str | Recipe, overrides: Sequence[str] = ()) -> RecipeWorkload:
    """Capture a recipe's model and describe its optimizer.

    Raises:
        PlanError: The model cannot be captured, or its annotations contradict each other.
        RecipeError: The recipe cannot be used.
    """
    graph, samples, batch, annotations = recipe_graph(recipe, overrides)
    loaded = load_recipe(recipe, overrides)
    work = PlanningWorkload(
        graph=graph,
        samples=samples,
        optimiser=optimizer_footprint(loaded),
        reads=not loaded.workers,
    )
    return RecipeWorkload(
        recipe=loaded, work=work, batch=batch, annotations=annotations.forced_choices()
    )


def with_measured_optimizer(machine: Machine, cluster: Cluster, recipe: Recipe) -> Machine:
    """The machine with the update of a recipe's optimiser; as it is where that was not measured.

    Args:
        cluster: Whose file may have `updates`.
    """
    device = machine.device
    described = cluster.devices.get(device.name)
    known = {} if described is None else described.updates
    if not known:
        return machine
    optimizer = _meta_optimizer(recipe)
    name = optimizer_name(optimizer)
    if name not in known:
        return machine
    steps = [
        known[name],
        *([known[CLIP_UPDATE]] if recipe.clip is not None and CLIP_UPDATE in known else []),
    ]
    sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    seconds = sum(step.seconds(n) for step in steps for n in sizes) / max(sum(sizes), 1)
    source = {**device.source, "update": f"{device.source.get('updates', 'cluster')} ({name})"}
    return replace(machine, device=replace(device, update=seconds, source=source))


def optimizer_footprint(recipe: Recipe) -> OptimiserMemory:
    """What a recipe's optimiser keeps and needs; one that is not known counts as AdamW."""
    optimizer = _meta_optimizer(recipe)
    options = optimizer.defaults
    names = {"SGD": "momentum" if options.get("momentum") else "sgd", "Adam": "adam"}
    name = names.get(type(optimizer).__name__, "adamw")
    if name != "adamw" and options.get("weight_decay"):
        name += ", weight decay"
    found = OPTIMISER_MEMORY[name]
    together = 0 if options.get("fused") else found.together
    # AMSGrad keeps one more number per parameter, the largest second moment so far.
    return replace(found, state=found.state + bool(options.get("amsgrad")), together=together)


def _meta_optimizer(recipe: Recipe) -> torch.optim.Optimizer:
    with torch.device("meta"):
        return recipe.optimizer(recipe.model())


def measure_minibatch(reference: str, *, memory: float, most: int) -> Minibatch:
    """The minibatch of one device with the shortest epoch, and how it computes each layer.

    Args:
        memory: M_GPU, bytes of the device.
        most: The largest minibatch; powers of two up to it are tried, and itself.

    Raises:
        PlanError: No minibatch fits.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    seed_everything(recipe.seed)
    where = torch.device("cpu")
    model = recipe.model().to(where)
    # Layers that are alike are timed once; `known` goes from one minibatch to the next.
    clock, known = DeviceTimer(where, MEASURED_SECONDS), dict[object, tuple[LayerAlgorithm, ...]]()
    held = _training_state_bytes(model, recipe.optimizer(model))

    def profile(batch: int) -> AlgorithmProfile:
        data = to_device(example_batch(recipe, batch), where, None)

        def step() -> Tensor:
            total, _ = sum_and_count(recipe.loss(model, data), batch)
            return total / batch

        return measure_algorithms(model, step, clock=clock, parameters=held, known=known).profile

    samples = len(training_data(recipe))
    tried = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    return choose_minibatch(profile, tried, memory=memory, samples=samples)


def _training_state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients and what the optimiser keeps, after a step without changes."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Lazily created optimiser state exists only after a step; the measured model stays as it was.
    with torch.no_grad():
        for parameter, old in zip(trained, before, strict=True):
            parameter.copy_(old)
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    gradients = sum(p.numel() * p.element_size() for p in trained)
    optimizer.zero_grad(set_to_none=True)
    return float(weights + gradients + kept)
