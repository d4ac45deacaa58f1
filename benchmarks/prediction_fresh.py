"""Five models that were written after the cost model was made for small steps, and run once.

For `prediction_here.py --models prediction_fresh`; steps of ten to some hundred milliseconds.
Suffixes: B samples, L length of a text or a series, C channels, H height, W width of an image.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.run.recipe.recipe import Recipe, criterion
from prediction_models import STEPS, Made, _adam, _choices, _momentum, _numbers, _recipe

NAMES = ("speech", "squeeze", "columns", "dilated", "wide")

# -- a recurrent network in both directions --------------------------------------------------------


class Speech(nn.Module):
    """Graves et al. 2013, with gated units (Cho et al. 2014)."""

    def __init__(self, inner: int, width: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inner, width)
        self.cells = nn.GRU(width, width, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, sound: Tensor) -> Tensor:
        """sound [B, L, inner]; classes come first of the two last dimensions."""
        return self.head(self.cells(F.relu(self.enter(sound)))[0]).transpose(1, 2)


def speech(steps: int = STEPS, batch: int = 24, length: int = 40) -> Recipe:
    return _recipe(
        "speech",
        batch,
        lambda: Made(_numbers(192, length, 39), _choices(29, 192, length)),
        steps=steps,
        model=partial(Speech, 39, 112, 2),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- squeezed convolutions -------------------------------------------------------------------------


class Fire(nn.Module):
    """Iandola et al. 2016: few channels, then many by two kinds of convolutions."""

    def __init__(self, inner: int, squeezed: int, outer: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inner, squeezed, 1)
        self.one, self.three = (
            nn.Conv2d(squeezed, outer, kernel, padding=kernel // 2) for kernel in (1, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat((self.one(x), self.three(x)), 1))


def _squeezed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), Fire(40, 12, 32), Fire(64, 12, 32),
        nn.MaxPool2d(2), Fire(64, 24, 64), Fire(128, 24, 64), nn.Dropout(0.2),
        nn.Conv2d(128, 25, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def squeeze(steps: int = STEPS, batch: int = 32, side: int = 64) -> Recipe:
    return _recipe(
        "squeeze",
        batch,
        lambda: Made(_numbers(192, 3, side, side), _choices(25, 192)),
        steps=steps,
        model=_squeezed,
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )


# -- attention between the columns of a table ------------------------------------------------------


class Columns(nn.Module):
    """Huang et al. 2020: an embedding for each column, torch's encoder over them."""

    def __init__(self, columns: int, rows: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(columns))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 3 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(columns * width, 2)

    def forward(self, row: Tensor) -> Tensor:
        """row [B, columns]."""
        x = torch.stack([table(row[:, n]) for n, table in enumerate(self.tables)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def columns(steps: int = STEPS, batch: int = 128, number: int = 14) -> Recipe:
    return _recipe(
        "columns",
        batch,
        lambda: Made(_choices(450, 1024, number), _choices(2, 1024)),
        steps=steps,
        model=partial(Columns, number, 450, 60, 5, 2),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- dilated convolutions of a series --------------------------------------------------------------


class Dilated(nn.Module):
    """Bai et al. 2018, without weight norms."""

    def __init__(self, inner: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [inner, *[width] * levels]
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, 3, padding=2**n, dilation=2**n)
            for n, (a, b) in enumerate(pairwise(widths))
        )
        self.head = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, inner, L]."""
        for number, layer in enumerate(self.layers):
            made = F.relu(layer(x))
            x = made + x if number else made
        return self.head(x[:, :, -1])


def dilated(steps: int = STEPS, batch: int = 32, length: int = 180) -> Recipe:
    return _recipe(
        "dilated",
        batch,
        lambda: Made(_numbers(256, 7, length), _choices(6, 256)),
        steps=steps,
        model=partial(Dilated, 7, 72, 5),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- a wide perceptron -----------------------------------------------------------------------------


def _wide(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(300, width), nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.1),
        nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.1),
        nn.Linear(width, 100),
    )  # fmt: skip


def wide(steps: int = STEPS, batch: int = 192) -> Recipe:
    return _recipe(
        "wide",
        batch,
        lambda: Made(_numbers(1024, 300), _choices(100, 1024)),
        steps=steps,
        model=partial(_wide, 864),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )
