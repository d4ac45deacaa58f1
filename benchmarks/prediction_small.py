"""Six small models with made-up data, for `prediction_here.py --models prediction_small`.

Steps of a few to some tens of milliseconds: fixed costs count here, which large models hide. The
terms of the cost model that are for such steps were made looking at these.
Suffixes: B samples, L length of a text, C channels, H height, W width of an image.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.run.recipe.recipe import Recipe, criterion
from prediction_models import STEPS, Made, _adam, _choices, _momentum, _numbers, _recipe

NAMES = ("tiny", "lstm", "cells", "pairs", "grouped", "mixer")

# -- a perceptron of two layers --------------------------------------------------------------------


def _tiny() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)
    )


def tiny(steps: int = STEPS, batch: int = 64) -> Recipe:
    return _recipe(
        "tiny",
        batch,
        lambda: Made(_numbers(512, 64), _choices(8, 512)),
        steps=steps,
        model=_tiny,
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- recurrent networks ----------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Hochreiter and Schmidhuber 1997, by torch's own layer."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.cells = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 12)

    def forward(self, text: Tensor) -> Tensor:
        """text [B, L]."""
        return self.head(self.cells(self.words(text))[0][:, -1])


def lstm(steps: int = STEPS, batch: int = 32, length: int = 28) -> Recipe:
    return _recipe(
        "lstm",
        batch,
        lambda: Made(_choices(700, 512, length), _choices(12, 512)),
        steps=steps,
        model=partial(Recurrent, 700, 88),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


class Cells(nn.Module):
    """Cho et al. 2014: a cell called for each position."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(inner, width)
        self.head = nn.Linear(width, 5)

    def forward(self, series: Tensor) -> Tensor:
        """series [B, L, inner]."""
        state = series.new_zeros(series.shape[0], self.width)
        for place in range(series.shape[1]):
            state = self.cell(series[:, place], state)
        return self.head(state)


def cells(steps: int = STEPS, batch: int = 48, length: int = 20) -> Recipe:
    return _recipe(
        "cells",
        batch,
        lambda: Made(_numbers(384, length, 20), _choices(5, 384)),
        steps=steps,
        model=partial(Cells, 20, 72),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- embeddings and a product ----------------------------------------------------------------------


class Pairs(nn.Module):
    """He et al. 2017: users and things, a product and a perceptron."""

    def __init__(self, users: int, things: int, width: int) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(users, width), nn.Embedding(things, width)
        self.net = nn.Sequential(
            nn.Linear(3 * width, 80), nn.ReLU(), nn.Linear(80, 40), nn.Sigmoid(), nn.Linear(40, 1)
        )

    def forward(self, who: Tensor, what: Tensor) -> Tensor:
        """who [B], what [B]."""
        one, two = self.users(who), self.things(what)
        return self.net(torch.cat((one, two, one * two), 1))[:, 0]


def _rated(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    who, what, rated = batch
    return F.mse_loss(model(who, what), rated)


def pairs(steps: int = STEPS, batch: int = 256) -> Recipe:
    return _recipe(
        "pairs",
        batch,
        lambda: Made(_choices(3000, 2048), _choices(1200, 2048), _numbers(2048)),
        steps=steps,
        model=partial(Pairs, 3000, 1200, 36),
        loss=_rated,
        optimizer=_adam,
    )


# -- convolutions in groups ------------------------------------------------------------------------


def _grouped(width: int) -> nn.Module:
    """Xie et al. 2017, without shortcuts."""

    def block(inner: int, outer: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, stride, 1, groups=4, bias=False), nn.BatchNorm2d(outer),
            nn.ReLU(),
        )  # fmt: skip

    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        block(width, 2 * width, 2), block(2 * width, 2 * width, 1), block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def grouped(steps: int = STEPS, batch: int = 16, side: int = 28) -> Recipe:
    return _recipe(
        "grouped",
        batch,
        lambda: Made(_numbers(192, 1, side, side), _choices(10, 192)),
        steps=steps,
        model=partial(_grouped, 12),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )


# -- attention of an odd size beside convolutions of lines -----------------------------------------


class Mixer(nn.Module):
    """Gulati et al. 2020, much reduced: attention and a convolution along the text."""

    def __init__(self, inner: int, width: int, heads: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(inner, width, 3, padding=1)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.along = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.head = nn.Linear(width, 9)

    def forward(self, sound: Tensor) -> Tensor:
        """sound [B, inner, L]."""
        x = self.enter(sound).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = x + F.silu(self.along(x.transpose(1, 2)).transpose(1, 2))
        return self.head(x.mean(1))


def mixer(steps: int = STEPS, batch: int = 16, length: int = 75) -> Recipe:
    return _recipe(
        "mixer",
        batch,
        lambda: Made(_numbers(256, 26, length), _choices(9, 256)),
        steps=steps,
        model=partial(Mixer, 26, 78, 3),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )
