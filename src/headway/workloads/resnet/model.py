"""Residual networks (He et al. 2016, "Deep Residual Learning for Image Recognition").

ResNet-18 and ResNet-50 with the stem of the paper's table 1 for images of 224 x 224, or the stem of
its section 4.2 for small ones. As is usual since, a bottleneck's stride lies in its 3 x 3
convolution.

Names of shapes: N samples, C channels, H W height, width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

# ruff: noqa: N803, N806 (shape suffixes)


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
    """Convolutions, added to what went in.

    Args:
        stride: Of the first 3 x 3 convolution and of the way past it.
        config: Bottleneck or not, and the norm.
    """

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
        self.body = nn.Sequential(*layers[:-1])
        self.past: nn.Module = nn.Identity()
        if stride != 1 or entering != leaving:
            past = convolution(entering, leaving, 1, stride)
            self.past = nn.Sequential(past, norm(leaving))
        self.relu = nn.ReLU()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """x_NCHW -> y_NCHW."""
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
    """What comes before the blocks."""
    large = config.stem == "imagenet"
    first = convolution(config.channels, config.width, *((7, 2) if large else (3, 1)))
    layers: list[nn.Module] = [first, norm_of(config)(config.width), nn.ReLU()]
    if large:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    return nn.Sequential(*layers)
