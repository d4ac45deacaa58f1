"""Five more models, for `prediction_here.py --models prediction_others`.

Nothing of the cost model was made looking at them but one thing: convolutions of lines have been
timed as a kind of their own since `sequences` was predicted 28 % too fast.

Shapes are others than those of `prediction_models.py`, and so are most kinds of layers.
Suffixes: B samples, C channels, L length of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from headway.run.recipe.recipe import Recipe, criterion
from prediction_models import STEPS, Made, _adam, _choices, _momentum, _numbers, _recipe

NAMES = ("autoencoder", "vgg", "mobile", "encoder", "sequences")

# -- an autoencoder ------------------------------------------------------------------------------


def _autoencoder(width: int) -> nn.Module:
    widths = [width, width // 2, width // 4, width // 2, width]
    inner = [
        nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in pairwise(widths)
    ]
    return nn.Sequential(*inner, nn.Linear(width, width))


def autoencoder(steps: int = STEPS, batch: int = 1024, width: int = 704) -> Recipe:
    return _recipe(
        "autoencoder",
        batch,
        lambda: Made(_numbers(2048, width), _numbers(2048, width)),
        steps=steps,
        model=partial(_autoencoder, width),
        loss=criterion(nn.MSELoss()),
        optimizer=_adam,
    )


# -- a plain convolutional network ---------------------------------------------------------------


def _blocks(widths: tuple[int, ...]) -> Iterator[nn.Module]:
    """Simonyan and Zisserman 2014, with batch norms."""
    for inner, outer in zip((3, *widths), widths, strict=False):
        yield nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.MaxPool2d(2),
        )  # fmt: skip


def _plain_network(widths: tuple[int, ...], side: int) -> nn.Module:
    last = widths[-1] * (side // 2 ** len(widths)) ** 2
    head = nn.Sequential(nn.Flatten(), nn.Linear(last, 256), nn.ReLU(), nn.Linear(256, 20))
    return nn.Sequential(*_blocks(widths), head)


def vgg(steps: int = STEPS, batch: int = 32, side: int = 48) -> Recipe:
    return _recipe(
        "vgg",
        batch,
        lambda: Made(_numbers(256, 3, side, side), _choices(20, 256)),
        steps=steps,
        model=partial(_plain_network, (24, 48, 96), side),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )


# -- depthwise convolutions ----------------------------------------------------------------------


def _separable(inner: int, outer: int, stride: int) -> nn.Module:
    """Howard et al. 2017."""
    return nn.Sequential(
        nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner),
        nn.ReLU(), nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
    )  # fmt: skip


def _mobile(width: int) -> nn.Module:
    shapes = ((1, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 8, 1))
    blocks = [_separable(a * width, b * width, stride) for a, b, stride in shapes]
    start = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width))
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 50))
    return nn.Sequential(start, *blocks, end)


def mobile(steps: int = STEPS, batch: int = 32, width: int = 24) -> Recipe:
    return _recipe(
        "mobile",
        batch,
        lambda: Made(_numbers(256, 3, 72, 72), _choices(50, 256)),
        steps=steps,
        model=partial(_mobile, width),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_momentum,
    )


# -- an encoder of texts -------------------------------------------------------------------------


class Block(nn.Module):
    """Vaswani et al. 2017, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, width]."""
        size = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (
            part.reshape(size).transpose(1, 2) for part in self.enter(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.leave(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Encoder(nn.Module):
    """Tells a text's class from the mean over its words."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 30)

    def forward(self, text: Tensor) -> Tensor:
        """text [B, L]."""
        return self.head(self.blocks(self.words(text)).mean(1))


def encoder(steps: int = STEPS, batch: int = 32, length: int = 64) -> Recipe:
    return _recipe(
        "encoder",
        batch,
        lambda: Made(_choices(4000, 512, length), _choices(30, 512)),
        steps=steps,
        model=partial(Encoder, 4000, 320, 3, 5),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )


# -- a classifier of sequences -------------------------------------------------------------------


class Sequences(nn.Module):
    """Kim 2014: words, convolutions along the text, the largest of each channel."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.first = nn.Conv1d(width, 2 * width, 5, padding=2)
        self.second = nn.Conv1d(2 * width, 2 * width, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(2 * width, 400), nn.Tanh(), nn.Linear(400, 40))

    def forward(self, text: Tensor) -> Tensor:
        """text [B, L]."""
        x = self.words(text).transpose(1, 2)
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.amax(2))


def sequences(steps: int = STEPS, batch: int = 64, length: int = 120) -> Recipe:
    return _recipe(
        "sequences",
        batch,
        lambda: Made(_choices(6000, 512, length), _choices(40, 512)),
        steps=steps,
        model=partial(Sequences, 6000, 112),
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=_adam,
    )
