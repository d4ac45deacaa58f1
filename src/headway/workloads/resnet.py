"""Images in ten classes by residual networks, in a size for CPUs.

    headway train resnet -n 2
    headway train resnet -n 2 --set arguments.images=digits

`--set arguments.variant=resnet18` or `resnet50` gives the published models: He et al. 2016, "Deep
Residual Learning for Image Recognition", with the stem of the paper's table 1 for images of 224 x
224, or the stem of its section 4.2 for small ones. As is usual since, a bottleneck's stride lies in
its 3 x 3 convolution. A sample is (image [C, H, W] float32, class int64).

Names of shapes: N samples, C channels, H W height, width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from headway.data.source import Source, TensorSource
from headway.errors import DataError, RecipeError
from headway.run.recipe.recipe import Recipe, criterion

# ruff: noqa: N803, N806 (shape suffixes)

CLASSES = 10
TRAINED_DIGITS = 1500
"""Of 1,797; the rest validate."""

Split = Literal["train", "validation"]
Images = Literal["gratings", "digits"]


class Gratings:
    """Waves in noise; the class is one of ten directions. Sample i follows from the seed and i."""

    def __init__(self, count: int, width: int, *, first: int = 0, seed: int = 0) -> None:
        self.count, self.width, self.first, self.seed = count, width, first, seed

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples as one batch: [N, 3, W, W] and [N]."""
        images, classes = zip(*(self._sample(int(index)) for index in indices), strict=True)
        return torch.from_numpy(np.stack(images)), torch.tensor(classes)

    def _sample(self, index: int) -> tuple[Any, int]:
        # Counter-based: sample i is the same in whatever order samples are read.
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.first + index]))
        chosen = int(random.integers(CLASSES))
        angle, phase = np.pi * chosen / CLASSES, random.uniform(0, 2 * np.pi)
        wave = random.uniform(0.5, 1.2)
        y, x = np.indices((self.width, self.width))
        grating = np.sin(wave * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        colours = random.uniform(0.5, 1, (3, 1, 1))
        noise = random.normal(0, 0.5, (3, self.width, self.width))
        return (colours * grating + noise).astype(np.float32), chosen


def digits(split: Split) -> Source:
    """scikit-learn's `load_digits`: 8 x 8 pixels, one channel.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError(
            "the digits are not here",
            why="they are part of scikit-learn, which is not installed",
            fix="pip install scikit-learn",
        ) from error
    found = load_digits()
    chosen = slice(None, TRAINED_DIGITS) if split == "train" else slice(TRAINED_DIGITS, None)
    images = torch.tensor(found.images[chosen] / 8 - 1, dtype=torch.float32)
    return TensorSource(images[:, None], torch.tensor(found.target[chosen], dtype=torch.int64))


def source(split: Split, images: Images, *, width: int, count: int, seed: int = 0) -> Source:
    """Training or validation samples; `width`, `count` and `seed` are of the gratings.

    Raises:
        DataError: See `digits`.
    """
    if images == "digits":
        return digits(split)
    # Numbers that no training set reaches.
    return Gratings(count, width, first=0 if split == "train" else 1 << 32, seed=seed)


GROUPS = 32
"""Of GroupNorm (Wu and He 2018, section 4.1), or as many as divide the channels."""

Stem = Literal["imagenet", "small"]
Norm = Literal["batch", "group"]


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The sizes of a model.

    Attributes:
        layers: Blocks of each stage; each stage but the first halves height and width.
        bottleneck: Blocks of three convolutions, with four times as many channels behind them.
        width: Channels of the first stage's convolutions; each further stage has twice as many.
        stem: "imagenet": 7 x 7, stride 2, then a maximum, stride 2; "small": 3 x 3.
        norm: "batch" as in the paper; "group" does not depend on how a batch is split.

    Raises:
        ValueError: A size is not positive, or a stem or norm is unknown.
    """

    layers: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    classes: int = 1000
    channels: int = 3
    stem: Stem = "imagenet"
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        if not self.layers or min(*self.layers, self.width, self.classes, self.channels) < 1:
            raise ValueError("layers, width, classes and channels must be at least 1")
        if self.stem not in ("imagenet", "small"):
            raise ValueError(f"stem is {self.stem!r}; it must be 'imagenet' or 'small'")
        if self.norm not in ("batch", "group"):
            raise ValueError(f"norm is {self.norm!r}; it must be 'batch' or 'group'")


RESNET18 = ResNetConfig(layers=(2, 2, 2, 2), bottleneck=False)
RESNET50 = ResNetConfig(layers=(3, 4, 6, 3), bottleneck=True)
SMALL = replace(RESNET18, width=16, classes=10, stem="small", norm="group")
"""ResNet-18 with a quarter of the channels, for small images: trains on a CPU."""


class ResidualBlock(nn.Module):
    """Convolutions, added to what went in."""

    def __init__(self, entering: int, width: int, stride: int, config: ResNetConfig) -> None:
        super().__init__()
        norm = norm_of(config)
        leaving = leaving_of(width, config)
        if config.bottleneck:
            sizes = [(entering, width, 1, 1), (width, width, 3, stride), (width, leaving, 1, 1)]
        else:
            sizes = [(entering, width, 3, stride), (width, leaving, 3, 1)]
        layers: list[nn.Module] = []
        for a, b, kernel, step in sizes:
            layers += [convolution(a, b, kernel, step), norm(b), nn.ReLU()]
        # The last ReLU follows the sum.
        self.body = nn.Sequential(*layers[:-1])
        self.past: nn.Module = nn.Identity()
        if stride != 1 or entering != leaving:
            past = convolution(entering, leaving, 1, stride)
            self.past = nn.Sequential(past, norm(leaving))
        self.relu = nn.ReLU()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW: Tensor = self.relu(self.body(x_NCHW) + self.past(x_NCHW))
        return y_NCHW


class ResNet(nn.Module):
    """A stem, stages of blocks, the mean over all places, one layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = stem_of(config)
        blocks: list[nn.Module] = []
        entering = config.width
        for stage, count in enumerate(config.layers):
            width = config.width << stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(ResidualBlock(entering, width, stride, config))
                entering = leaving_of(width, config)
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(entering, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """x_NCHW -> logits_NK."""
        x_NCHW = self.pool(self.blocks(self.stem(x_NCHW)))
        logits_NK: Tensor = self.head(x_NCHW.flatten(1))
        return logits_NK


def leaving_of(width: int, config: ResNetConfig) -> int:
    """Channels behind a block whose convolutions have `width`."""
    return 4 * width if config.bottleneck else width


def norm_of(config: ResNetConfig) -> Callable[[int], nn.Module]:
    """Makes a norm of a number of channels."""
    if config.norm == "batch":
        return nn.BatchNorm2d
    # The greatest number up to 32 that leaves at least four channels in each group.
    return lambda channels: nn.GroupNorm(max(1, min(GROUPS, channels // 4)), channels)


def convolution(entering: int, leaving: int, kernel: int, stride: int) -> nn.Conv2d:
    """Without a bias, padded so that height and width are divided by the stride alone."""
    return nn.Conv2d(entering, leaving, kernel, stride, padding=kernel // 2, bias=False)


def stem_of(config: ResNetConfig) -> nn.Sequential:
    large = config.stem == "imagenet"
    first = convolution(config.channels, config.width, *((7, 2) if large else (3, 1)))
    layers: list[nn.Module] = [first, norm_of(config)(config.width), nn.ReLU()]
    if large:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return nn.Sequential(*layers)


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
        norm: "group", or "batch" as in the paper, which depends on how a batch is split into
            micro-batches.
        width: Pixels along each side of a grating.
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
