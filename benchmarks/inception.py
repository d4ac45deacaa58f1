"""Inception-v3 (Szegedy et al. 2015, "Rethinking the Inception architecture", table 1), without the
second classifier: 299 x 299 pictures, 1,000 classes, 23.8 million parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Unit(nn.Sequential):
    """A convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        inner: int,
        outer: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        pad: bool = True,
    ) -> None:
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (high // 2, wide // 2) if pad else 0
        super().__init__(
            nn.Conv2d(inner, outer, (high, wide), stride, padding, bias=False),
            nn.BatchNorm2d(outer, eps=1e-3),
            nn.ReLU(inplace=True),
        )


def row(inner: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Units one after another: (channels, kernel)."""
    widths = [inner, *(outer for outer, _ in steps)]
    return nn.Sequential(
        *(Unit(a, outer, kernel) for a, (outer, kernel) in zip(widths, steps, strict=False))
    )


class Pooled(nn.Module):
    """An average of neighbours, then one unit."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.unit = Unit(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.unit(F.avg_pool2d(x, 3, 1, 1))
        return result


class Fork(nn.Module):
    """One row, then two units side by side."""

    def __init__(self, before: nn.Module, inner: int) -> None:
        super().__init__()
        self.before = before
        self.wide, self.high = Unit(inner, 384, (1, 3)), Unit(inner, 384, (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return torch.cat((self.wide(x), self.high(x)), 1)


class Branches(nn.Module):
    """Branches side by side, their channels one after another."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def mixed_35(inner: int, pooled: int) -> Branches:
    return Branches(
        Unit(inner, 64, 1),
        row(inner, (48, 1), (64, 5)),
        row(inner, (64, 1), (96, 3), (96, 3)),
        Pooled(inner, pooled),
    )


def mixed_17(width: int) -> Branches:
    long, high = (1, 7), (7, 1)
    return Branches(
        Unit(768, 192, 1),
        row(768, (width, 1), (width, long), (192, high)),
        row(768, (width, 1), (width, high), (width, long), (width, high), (192, long)),
        Pooled(768, 192),
    )


def mixed_8(inner: int) -> Branches:
    return Branches(
        Unit(inner, 320, 1),
        Fork(Unit(inner, 384, 1), 384),
        Fork(row(inner, (448, 1), (384, 3)), 384),
        Pooled(inner, 192),
    )


def smaller(*rows: nn.Module) -> Branches:
    """Half as high and wide."""
    return Branches(*rows, nn.MaxPool2d(3, 2))


class InceptionV3(nn.Module):
    """The whole network."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Unit(3, 32, 3, 2, pad=False), Unit(32, 32, 3, pad=False), Unit(32, 64, 3),
            nn.MaxPool2d(3, 2),
            Unit(64, 80, 1), Unit(80, 192, 3, pad=False),
            nn.MaxPool2d(3, 2),
            mixed_35(192, 32), mixed_35(256, 64), mixed_35(288, 64),
            smaller(
                Unit(288, 384, 3, 2, pad=False),
                nn.Sequential(row(288, (64, 1), (96, 3)), Unit(96, 96, 3, 2, pad=False)),
            ),
            mixed_17(128), mixed_17(160), mixed_17(160), mixed_17(192),
            smaller(
                nn.Sequential(Unit(768, 192, 1), Unit(192, 320, 3, 2, pad=False)),
                nn.Sequential(
                    row(768, (192, 1), (192, (1, 7)), (192, (7, 1))),
                    Unit(192, 192, 3, 2, pad=False),
                ),
            ),
            mixed_8(1280), mixed_8(2048),
        )  # fmt: skip
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.body(x), 1).flatten(1)
        result: Tensor = self.head(F.dropout(x, 0.5, self.training))
        return result
