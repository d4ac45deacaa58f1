"""Five models with made-up data, for `prediction_here.py`; none of them is in any calibration.

Shapes are such that a step of two processes takes a tenth of a second to one second on two cores.
Suffixes: B samples, C channels, H height, W width of an image.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from headway.run.recipe.recipe import Recipe, criterion
from headway.workloads.transformer import recipe as transformer_recipe

STEPS = 40
NAMES = ("mlp", "transformer", "cnn", "unet", "dlrm")


class Made(Dataset[Any]):
    """Samples that are made once: inputs of one or several tensors, and a target."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _choices(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(2))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _recipe(name: str, batch: int, columns: Any, *, steps: int, **more: Any) -> Recipe:
    return Recipe(name=name, batch=batch, stop=f"{steps} steps", data=columns, **more)


# -- a perceptron ----------------------------------------------------------------------------------


def _perceptron(width: int, layers: int) -> nn.Module:
    inner = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), *inner, nn.Linear(width, 10))


def mlp(steps: int = STEPS, batch: int = 256, width: int = 1024) -> Recipe:
    return _recipe(
        "mlp",
        batch,
        lambda: Made(_numbers(1024, 784), _choices(10, 1024)),
        steps=steps,
        model=partial(_perceptron, width, 4),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- the bundled transformer -----------------------------------------------------------------------


def transformer(steps: int = STEPS, batch: int = 16) -> Recipe:
    return transformer_recipe(
        width=256,
        layers=4,
        heads=4,
        window=128,
        batch=batch,
        steps=steps,
        warmup=2,
        validate_every=0,
        validation_samples=2,
        checkpoint_every=0,
    )


# -- a residual network ----------------------------------------------------------------------------


class Residual(nn.Module):
    """He et al. 2016: two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outer) for _ in range(2))
        same = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def _residual_network(width: int) -> nn.Module:
    widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    blocks = [
        Residual(inner, outer, 1 if inner == outer else 2)
        for inner, outer in zip([width, *widths], widths, strict=False)
    ]
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()),
        *blocks,
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


def cnn(steps: int = STEPS, batch: int = 32, width: int = 32) -> Recipe:
    return _recipe(
        "cnn",
        batch,
        lambda: Made(_numbers(256, 3, 32, 32), _choices(10, 256)),
        steps=steps,
        model=partial(_residual_network, width),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )


# -- a U-Net ---------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Ronneberger et al. 2015, with padding, three levels."""

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            self.pair(inner, outer) for inner, outer in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * outer, outer, 2, 2) for outer in reversed(widths[:-1])
        )
        self.join = nn.ModuleList(self.pair(2 * outer, outer) for outer in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def pair(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat((skip, up(x)), 1))
        return self.head(x)


def unet(steps: int = STEPS, batch: int = 8, width: int = 16, side: int = 64) -> Recipe:
    return _recipe(
        "unet",
        batch,
        lambda: Made(_numbers(64, 3, side, side), _choices(2, 64, side, side)),
        steps=steps,
        model=partial(UNet, width),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )


# -- tables of embeddings --------------------------------------------------------------------------


class Dlrm(nn.Module):
    """Naumov et al. 2019: tables, two perceptrons, products of all pairs."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("rows", rows_)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """dense [B, 13], indices [B, tables, bag]."""
        x = self.bottom(dense)
        found = [table(indices[:, number]) for number, table in enumerate(self.tables)]
        every = torch.stack([x, *found], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        return self.top(torch.cat((x, products[:, self.rows, self.columns]), 1))


def _clicks(model: nn.Module, batch: Any) -> Tensor:
    dense, indices, clicked = batch
    return F.binary_cross_entropy_with_logits(model(dense, indices), clicked)


def dlrm(steps: int = STEPS, batch: int = 512, tables: int = 8, rows: int = 10000) -> Recipe:
    return _recipe(
        "dlrm",
        batch,
        lambda: Made(
            _numbers(2048, 13),
            _choices(rows, 2048, tables, 16),
            _choices(2, 2048, 1).float(),
        ),
        steps=steps,
        model=partial(Dlrm, tables, rows, 32),
        loss=_clicks,
        optimizer=_adam,
    )
