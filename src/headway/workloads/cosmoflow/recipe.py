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
from headway.optim.warmup import warmup_tenth_then_cosine
from headway.run.recipe.recipe import Recipe, criterion
from headway.workloads.cosmoflow.data import Universes, source
from headway.workloads.cosmoflow.model import CosmoFlow, CosmoFlowConfig, fit, lbann, mlperf, small

NAMES = ("Omega_m", "sigma_8", "n_s", "h")
FITTED = 32
Variant = Literal["small", "lbann", "mlperf"]


def recipe(
    *,
    variant: Variant = "small",
    width: int = 32,
    dropout: float | None = None,
    batch_norm: bool = False,
    samples: int = 240,
    validation_samples: int = 64,
    batch: int = 16,
    steps: int = 100,
    learning_rate: float = 1e-3,
    order: Literal[1, 2] = 1,
    fitted: int | None = None,
    seed: int = 0,
    directory: str | Path | None = None,
) -> Recipe:
    """A regression of Omega_m, sigma_8, n_s and h.

    Args:
        variant: "small", "lbann" or "mlperf", see `model`.
        width: Cells along each side of a universe.
        dropout: None: the variant's, which is none for "small".
        batch_norm: Batch normalisation, which depends on how a batch is split into micro-batches.
        learning_rate: Adam's at its height: it rises for a tenth of the steps, then falls as a
            cosine.
        order: 1: Zel'dovich's approximation; 2: second-order Lagrangian theory.
        fitted: Further universes, made for that, on which the initial weights are fitted (`fit`);
            0: they are He's. None: 32 for "small" where universes are made, else 0: a process may
            have no room for a whole one.
        seed: Decides initial parameters, order and universes.
        directory: Folder with `train` and `validation`, folders of files, in place of universes
            that are made.

    Raises:
        RecipeError: The sizes do not make a model.
    """
    config = _config(variant, width, dropout, batch_norm)
    if fitted is None:
        fitted = FITTED if variant == "small" and directory is None and not batch_norm else 0
    if fitted and batch_norm:
        raise RecipeError(
            "fitted initial weights with batch normalisation",
            why="It does in every step what they do once.",
            fix="Set arguments.fitted=0.",
        )
    universes = partial(Universes, fitted, width, first=2 << 32, seed=seed, order=order)
    data = partial(source, width=width, directory=directory, seed=seed, order=order)
    validation = partial(data, "validation", count=validation_samples)
    made = f"universes of order {order}, made from seed {seed}" if directory is None else directory
    return Recipe(
        name=f"cosmoflow {variant} {width}^3 on {made}",
        model=partial(build, config, universes if fitted else None),
        data=partial(data, "train", count=samples),
        validation=validation,
        loss=criterion(nn.MSELoss()),
        optimizer=partial(adam, learning_rate=learning_rate),
        scheduler=partial(warmup_tenth_then_cosine, steps=steps),
        batch=batch,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=max(1, steps // 4),
        showcase=partial(errors, validation),
    )


def build(config: CosmoFlowConfig, universes: Callable[[], Universes] | None) -> CosmoFlow:
    """The model, with initial weights fitted on universes where they are given."""
    model = CosmoFlow(config)
    if universes is not None and not next(model.parameters()).is_meta:
        samples = universes()
        fit(model, samples.read(range(len(samples)))[0])
    return model


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
    """Of each parameter the mean absolute error, that of saying the mean, and R^2."""
    samples, like = data(), next(model.parameters())
    said, targets = [], []
    for index in range(len(samples)):
        cube, target = samples.read([index])
        said.append(model(cube.to(device=like.device, dtype=like.dtype)).float().cpu())
        targets.append(target)
    left, spread = torch.cat(said) - torch.cat(targets), torch.cat(targets)
    spread = spread - spread.mean(dim=0)
    explained = 1 - left.square().sum(dim=0) / spread.square().sum(dim=0)
    figures = torch.stack((left.abs().mean(dim=0), spread.abs().mean(dim=0), explained), dim=1)
    lines = [
        f"{name:8} {error:.3f}   ({mean:.3f} of saying the mean; R^2 {share:5.2f})"
        for name, (error, mean, share) in zip(NAMES, figures.tolist(), strict=True)
    ]
    return "\n".join(["mean absolute error, parameters scaled to [-1, 1]", *lines])
