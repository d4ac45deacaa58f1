"""Images in ten classes, in a size for CPUs.

    headway train resnet -n 2
    headway train resnet -n 2 --set arguments.images=digits

`--set arguments.variant=resnet18` or `resnet50` gives the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from headway.data.source import Source
from headway.errors import RecipeError
from headway.run.recipe.recipe import Recipe, criterion
from headway.workloads.resnet.data import CLASSES, Images, source
from headway.workloads.resnet.model import RESNET18, RESNET50, SMALL, ResNet

Variant = Literal["small", "resnet18", "resnet50"]
LARGE = 64
"""Images of this width and more get the stem of the large ones."""


def recipe(
    *,
    variant: Variant = "small",
    images: Images = "gratings",
    norm: Literal["batch", "group"] = "group",
    width: int = 32,
    samples: int = 1000,
    validation_samples: int = 200,
    batch: int = 32,
    steps: int = 60,
    learning_rate: float = 0.02,
    seed: int = 0,
) -> Recipe:
    """A classification of images.

    Args:
        variant: "small" (ResNet-18 with 16 to 128 channels), "resnet18" or "resnet50".
        images: "gratings" are made; "digits" are scikit-learn's.
        norm: "group", or "batch" as in the paper, which depends on how a batch is split into
            micro-batches.
        width: Pixels along each side of a grating.
        learning_rate: Of SGD with momentum 0.9.
        seed: Decides initial parameters, order and gratings.

    Raises:
        RecipeError: There is no such variant, norm or kind of images.
    """
    variants = {"small": SMALL, "resnet18": RESNET18, "resnet50": RESNET50}
    if variant not in variants:
        raise RecipeError(f"no variant {variant!r}", fix=f"choose one of {', '.join(variants)}")
    if images not in get_args(Images):
        legal = ", ".join(get_args(Images))
        raise RecipeError(f"no images {images!r}", fix=f"choose one of {legal}")
    made = images == "gratings"
    try:
        config = replace(
            variants[variant],
            classes=CLASSES,
            channels=3 if made else 1,
            stem="imagenet" if made and width >= LARGE else "small",
            norm=norm,
        )
    except ValueError as error:
        raise RecipeError("the sizes do not make a ResNet", why=str(error)) from error
    data = partial(source, images=images, width=width, seed=seed)
    validation = partial(data, "validation", count=validation_samples)
    on = f"{images} made from seed {seed}" if made else images
    return Recipe(
        name=f"resnet {variant} on {on}",
        model=partial(ResNet, config),
        data=partial(data, "train", count=samples),
        validation=validation,
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=partial(sgd, learning_rate=learning_rate),
        batch=batch,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=max(1, steps // 4),
        showcase=partial(accuracy, validation),
    )


def sgd(model: nn.Module, *, learning_rate: float) -> Optimizer:
    """SGD with momentum and the paper's decay of weights."""
    return SGD(model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=1e-4)


@torch.no_grad()
def accuracy(data: Callable[[], Source], model: nn.Module) -> str:
    """Share of validation images whose class is the likeliest one."""
    samples = data()
    like = next(model.parameters())
    right = 0
    for start in range(0, len(samples), 50):
        images, classes = samples.read(range(start, min(start + 50, len(samples))))
        said = model(images.to(device=like.device, dtype=like.dtype)).argmax(dim=1).cpu()
        right += int((said == classes).sum())
    return f"{right} of {len(samples)} validation images right ({right / len(samples):.1%})"
