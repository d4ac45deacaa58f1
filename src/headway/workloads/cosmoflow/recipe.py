"""Cosmological parameters of universes made on the spot, in a size for CPUs.

    headway train cosmoflow -n 2

`--set arguments.variant=lbann`, `--set arguments.width=128` and the like give the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from headway.data.source import Source
from headway.errors import RecipeError
from headway.run.recipe import Recipe, criterion
from headway.workloads.cosmoflow.data import source
from headway.workloads.cosmoflow.model import CosmoFlow, CosmoFlowConfig, lbann, mlperf, small

NAMES = ("Omega_m", "sigma_8", "n_s", "h")
Variant = Literal["small", "lbann", "mlperf"]


def recipe(
    *,
    variant: Variant = "small",
    width: int = 32,
    dropout: float | None = None,
    batch_norm: bool = False,
    samples: int = 250,
    validation_samples: int = 64,
    batch: int = 16,
    steps: int = 60,
    learning_rate: float = 1e-3,
    order: Literal[1, 2] = 1,
    seed: int = 0,
    directory: str | Path | None = None,
) -> Recipe:
    """A regression of Omega_m, sigma_8, n_s and h.

    Args:
        variant: "small", "lbann" or "mlperf", see `model`.
        width: Cells along each side of a universe.
        dropout: None: the variant's, which is none for "small".
        batch_norm: Batch normalisation, which depends on how a batch is split into micro-batches.
        samples: Universes to train on.
        validation_samples: Further ones.
        batch: Universes of an optimiser step.
        steps: Optimiser steps.
        learning_rate: Adam's.
        order: 1: Zel'dovich's approximation; 2: second-order Lagrangian theory.
        seed: Decides initial parameters, order and universes.
        directory: Folder with `train` and `validation`, folders of .hdf5 files, in place of
            universes that are made.

    Raises:
        RecipeError: The sizes do not make a model.
    """
    config = _config(variant, width, dropout, batch_norm)
    data = partial(source, width=width, directory=directory, seed=seed, order=order)
    validation = partial(data, "validation", count=validation_samples)
    made = f"universes of order {order}, made from seed {seed}" if directory is None else directory
    return Recipe(
        name=f"cosmoflow {variant} {width}^3 on {made}",
        model=partial(CosmoFlow, config),
        data=partial(data, "train", count=samples),
        validation=validation,
        loss=criterion(nn.MSELoss()),
        optimizer=partial(adam, learning_rate=learning_rate),
        batch=batch,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=max(1, steps // 4),
        showcase=partial(errors, validation),
    )


def _config(variant: str, width: int, dropout: float | None, batch_norm: bool) -> CosmoFlowConfig:
    variants: dict[str, Callable[[int], CosmoFlowConfig]] = {
        "small": small,
        "lbann": lbann,
        "mlperf": mlperf,
    }
    if variant not in variants:
        raise RecipeError(f"no variant {variant!r}", fix=f"choose one of {', '.join(variants)}")
    try:
        config = replace(variants[variant](width), batch_norm=batch_norm)
        return config if dropout is None else replace(config, dropout=dropout)
    except ValueError as error:
        raise RecipeError("the sizes do not make a CosmoFlow", why=str(error)) from error


def adam(model: nn.Module, *, learning_rate: float) -> Optimizer:
    """Adam of all parameters."""
    return Adam(model.parameters(), lr=learning_rate)


@torch.no_grad()
def errors(data: Callable[[], Source], model: nn.Module) -> str:
    """Mean absolute error of each parameter, beside that of always saying the mean."""
    samples = data()
    found, blind = torch.zeros(len(NAMES)), torch.zeros(len(NAMES))
    like = next(model.parameters())
    targets = torch.cat([samples.read([index])[1] for index in range(len(samples))])
    for index in range(len(samples)):
        cube, target = samples.read([index])
        said = model(cube.to(device=like.device, dtype=like.dtype)).float().cpu()
        found += (said - target).abs()[0] / len(samples)
        blind += (targets.mean(dim=0) - target).abs()[0] / len(samples)
    rows = zip(NAMES, found.tolist(), blind.tolist(), strict=True)
    lines = [
        f"{name:8} {error:.3f}   ({mean:.3f} of saying the mean)" for name, error, mean in rows
    ]
    return "\n".join(["mean absolute error, parameters scaled to [-1, 1]", *lines])
