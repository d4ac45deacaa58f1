"""Models of the literature as a user would write them, for graphs: built on the meta device.

Suffixes: B samples, T positions, D width, C channels, H height, W width of an image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ids(*shape):
    return meta(*shape, dtype=torch.int64)


def convolved(inner, outer, kernel, stride=1, padding=None):
    """Convolution, batch norm."""
    padding = kernel // 2 if padding is None else padding
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, padding, bias=False), nn.BatchNorm2d(outer)
    )


class Bottleneck(nn.Module):
    def __init__(self, inner, width, stride):
        super().__init__()
        self.first = convolved(inner, width, 1)
        self.second = convolved(width, width, 3, stride)
        self.third = convolved(width, 4 * width, 1)
        changes = stride > 1 or inner != 4 * width
        self.shortcut = convolved(inner, 4 * width, 1, stride, 0) if changes else None

    def forward(self, x):
        y = F.relu(self.first(x), inplace=True)
        y = F.relu(self.second(y), inplace=True)
        short = x if self.shortcut is None else self.shortcut(x)
        return F.relu(self.third(y) + short, inplace=True)


class ResNet50(nn.Module):
    """He et al. 2016, table 1."""

    def __init__(self, classes=1000):
        super().__init__()
        self.stem = convolved(3, 64, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        layers, inner = [], 64
        for number, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for block in range(count):
                layers.append(Bottleneck(inner, width, 2 if number and not block else 1))
                inner = 4 * width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(2048, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.stem(x), inplace=True))
        return self.head(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


class UNet(nn.Module):
    """Ronneberger et al. 2015, with padding, three levels."""

    def __init__(self, width=16, levels=3):
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
    def pair(inner, outer):
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        kept = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat((skip, up(x)), 1))
        return self.head(x)


class Dlrm(nn.Module):
    """Naumov et al. 2019: tables, two perceptrons, products of all pairs."""

    def __init__(self, tables=4, rows=1000, width=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("rows", rows_)
        self.register_buffer("columns", columns)

    def forward(self, dense, indices):
        """dense [B, 13], indices [tables, B, bag]."""
        x = self.bottom(dense)
        found = [table(i) for table, i in zip(self.tables, indices, strict=True)]
        all_ = torch.stack([x, *found], 1)
        products = torch.bmm(all_, all_.transpose(1, 2))
        return self.top(torch.cat((x, products[:, self.rows, self.columns]), 1))


class Encoder(nn.Module):
    """BERT-like: one mask for all layers."""

    def __init__(self, layers=4, width=64, heads=4, words=512, window=32):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(window, width))
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens, present):
        x = self.words(tokens) + self.positions
        mask = torch.where(present, 0.0, float("-inf"))[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class EncoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) * k.shape[-1] ** -0.5 + mask
        y = torch.softmax(scores, -1) @ v
        x = self.first(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x))))


VGG_A = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512)
"""Simonyan and Zisserman 2015, table 1, column A; every convolution is 3 x 3."""

OVERFEAT_FAST = (
    (96, 11, 4, 0), "M", (256, 5, 1, 0), "M", (512, 3, 1, 1), (1024, 3, 1, 1), (1024, 3, 1, 1)
)  # fmt: skip
"""Sermanet et al. 2014, table 1: channels, kernel, stride, padding."""


def plain_convolutions(layers):
    """The convolutional part of a network: channels, or (channels, kernel, stride, padding)."""
    modules, inner = [], 3
    for layer in layers:
        if layer == "M":
            modules.append(nn.MaxPool2d(2))
            continue
        outer, kernel, stride, padding = layer if isinstance(layer, tuple) else (layer, 3, 1, 1)
        modules += [nn.Conv2d(inner, outer, kernel, stride, padding, bias=False), nn.ReLU()]
        inner = outer
    return nn.Sequential(*modules)
