"""A recipe as the planner sees it: captured model, batch, optimizer memory and update time.

The recipe's model and optimizer are built on the meta device; nothing is allocated. Update times
come from the `updates` that `headway cluster measure` wrote for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headway.capture.benchmark.kernels import optimizer_name
from headway.cluster import Cluster
from headway.cost.machines import Machine
from headway.cost.memory import OPTIMISER_MEMORY, OptimiserMemory
from headway.graph.annotations import ForcedChoices
from headway.planner.estimate.operators import PlanningWorkload
from headway.run.measure.recipe_model import recipe_graph
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe

CLIP_UPDATE = "clip"


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
