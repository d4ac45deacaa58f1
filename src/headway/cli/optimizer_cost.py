"""The recipe's own optimiser in the price of a step: which of the measured ones it is."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.capture.kernels import optimizer_name
from headway.cluster import Cluster
from headway.cost.transformer import Machine
from headway.run.recipe import Recipe

CLIP = "clip"


def with_optimizer(machine: Machine, cluster: Cluster, recipe: Recipe) -> Machine:
    """The machine with the update of a recipe's optimiser; as it is where that was not measured.

    Args:
        machine: Of the cluster.
        cluster: Whose file may have `updates`.
        recipe: Its model is built on the meta device for its optimiser.
    """
    device = machine.device
    described = cluster.devices.get(device.name)
    known = {} if described is None else described.updates
    with torch.device("meta"):
        optimizer = recipe.optimizer(recipe.model())
    name = optimizer_name(optimizer)
    if name not in known:
        return machine
    seconds = known[name] + (known.get(CLIP, 0.0) if recipe.clip is not None else 0.0)
    source = {**device.source, "update": f"{device.source.get('updates', 'cluster')} ({name})"}
    return replace(machine, device=replace(device, update=seconds, source=source))
