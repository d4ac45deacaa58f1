"""Segmentation of cortex, deep grey matter and cerebellum, in a size for CPUs.

    headway train unet3d -n 2

`--set arguments.variant=cicek` or `mlperf` gives the published models. The loss is the mean of
cross-entropy and 1 - Dice (Dice 1945), as MLPerf's benchmark trains; the figure is Dice per class.

Names of shapes: N samples, C classes, D H W depth, height, width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

from headway.data.source import Source
from headway.errors import RecipeError
from headway.optim.warmup import warmup_tenth_then_cosine
from headway.run.recipe.recipe import Recipe, criterion
from headway.workloads.unet3d.data import CLASSES, source
from headway.workloads.unet3d.model import SMALL_WIDTHS, CicekUNet, MLPerfUNet

# ruff: noqa: N803, N806 (shape suffixes)


SMOOTH = 1e-6
"""Added above and below the line: a class that is in neither segmentation agrees."""


def dice(shares_NCDHW: Tensor, labels_NDHW: Tensor) -> Tensor:
    """2 |A and B| / (|A| + |B|) of each sample and class.

    Args:
        shares_NCDHW: Share of each class in each voxel, 0 or 1 or between.
        labels_NDHW: int64; the right class of each voxel.

    Returns:
        dice_NC: in [0, 1].
    """
    classes = shares_NCDHW.shape[1]
    truth_NCDHW = functional.one_hot(labels_NDHW, classes).permute(0, 4, 1, 2, 3)
    truth_NCDHW = truth_NCDHW.to(shares_NCDHW.dtype)
    common_NC = (shares_NCDHW * truth_NCDHW).sum(dim=(2, 3, 4))
    both_NC = shares_NCDHW.sum(dim=(2, 3, 4)) + truth_NCDHW.sum(dim=(2, 3, 4))
    dice_NC: Tensor = (2 * common_NC + SMOOTH) / (both_NC + SMOOTH)
    return dice_NC


def dice_of_classes(scores_NCDHW: Tensor, labels_NDHW: Tensor) -> Tensor:
    """Dice of the likeliest class of each voxel, dice_C, the mean over the samples."""
    classes = scores_NCDHW.shape[1]
    chosen = functional.one_hot(scores_NCDHW.argmax(dim=1), classes).permute(0, 4, 1, 2, 3)
    return dice(chosen.to(scores_NCDHW.dtype), labels_NDHW).mean(dim=0)


def cross_entropy_and_dice(scores_NCDHW: Tensor, labels_NDHW: Tensor) -> Tensor:
    """(cross-entropy + mean of 1 - Dice without class 0) / 2, as MLPerf's benchmark trains.

    Dice is that of each sample, so that the mean over samples weighs each equally.
    """
    shares_NCDHW = torch.softmax(scores_NCDHW, dim=1)
    missing = 1 - dice(shares_NCDHW, labels_NDHW)[:, 1:].mean()
    return (functional.cross_entropy(scores_NCDHW, labels_NDHW) + missing) / 2


# Cortex, deep grey matter and cerebellum of heads, in a size for CPUs.


IMAGES = 2
Variant = Literal["small", "cicek", "mlperf"]


def recipe(
    *,
    variant: Variant = "small",
    width: int = 32,
    samples: int = 63,
    validation_samples: int = 8,
    batch: int = 2,
    steps: int = 80,
    learning_rate: float = 3e-3,
    seed: int = 0,
    volumes: str | Path | None = None,
    directory: str | Path | None = None,
) -> Recipe:
    """A segmentation of cubes of heads.

    Args:
        variant: "small" (85,420 parameters), "cicek" (batch normalisation, which depends on how a
            batch is split into micro-batches; cross-entropy) or "mlperf" (instance normalisation;
            cross-entropy and Dice, as "small").
        width: Voxels along each side of a sample.
        samples: Heads, or cubes of the real one, to train on.
        batch: Samples of an optimiser step.
        learning_rate: Adam's at its height: it rises for a tenth of the steps, then falls as a
            cosine.
        seed: Decides initial parameters, order and samples.
        volumes: Folder of the real head, see `data`; None: phantoms.
        directory: Folder with `train` and `validation`, folders of files, in place of samples that
            are made.

    Raises:
        RecipeError: There is no such variant.
    """
    models: dict[str, Callable[[], nn.Module]] = {
        "small": partial(MLPerfUNet, IMAGES, len(CLASSES), widths=SMALL_WIDTHS),
        "cicek": partial(CicekUNet, IMAGES, len(CLASSES)),
        "mlperf": partial(MLPerfUNet, IMAGES, len(CLASSES)),
    }
    if variant not in models:
        raise RecipeError(f"no variant {variant!r}", fix=f"choose one of {', '.join(models)}")
    data = partial(source, width=width, volumes=volumes, directory=directory, seed=seed)
    validation = partial(data, "validation", count=validation_samples)
    loss = functional.cross_entropy if variant == "cicek" else cross_entropy_and_dice
    made = directory or volumes or f"phantoms made from seed {seed}"
    return Recipe(
        name=f"unet3d {variant} {width}^3 on {made}",
        model=models[variant],
        data=partial(data, "train", count=samples),
        validation=validation,
        loss=criterion(loss),
        optimizer=partial(adam, learning_rate=learning_rate),
        scheduler=partial(warmup_tenth_then_cosine, steps=steps),
        batch=batch,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=max(1, steps // 4),
        showcase=partial(scores, validation),
    )


def adam(model: nn.Module, *, learning_rate: float) -> Optimizer:
    """Adam of all parameters."""
    return Adam(model.parameters(), lr=learning_rate)


@torch.no_grad()
def scores(data: Callable[[], Source], model: nn.Module) -> str:
    """Dice of each class, the mean over validation samples, and the mean without the first."""
    samples = data()
    like = next(model.parameters())
    found = torch.zeros(len(CLASSES))
    for index in range(len(samples)):
        images, labels = samples.read([index])
        said = model(images.to(device=like.device, dtype=like.dtype)).float().cpu()
        found += dice_of_classes(said, labels) / len(samples)
    rows = zip(CLASSES, found.tolist(), strict=True)
    lines = [f"{name:10} {score:.3f}" for name, score in rows]
    mean = float(found[1:].mean())
    return "\n".join(["Dice on validation samples", *lines, f"mean of the last three {mean:.3f}"])
