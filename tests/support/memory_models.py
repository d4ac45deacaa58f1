"""Eight models with their losses, for what a step needs in memory.

Suffixes as in `big_models`; F features of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import Dlrm, Encoder, ResNet50, UNet, ids, meta


class Gpt2(nn.Module):
    """Radford et al. 2019: learned positions, GELU, dropout, the head's weights are the tokens'.

    Args:
        again: Every block is computed again in backward, by torch.utils.checkpoint.
    """

    def __init__(self, words=2048, window=128, width=128, layers=6, heads=4, *, again=False):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(window, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        self.again = again

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


class Gpt2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Block(nn.Module):
    """A layer as Megatron-LM counts it: scores are kept, dropout on them and on both branches."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drops = nn.ModuleList(nn.Dropout(0.1) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) * k.shape[-1] ** -0.5, -1)
        y = (self.drops[0](scores) @ v).transpose(1, 2).flatten(2)
        x = x + self.drops[1](self.out(y))
        return x + self.drops[2](self.down(F.gelu(self.up(self.second(x)))))


class Recurrent(nn.Module):
    """Two layers of LSTM over tokens, by torch's own module."""

    def __init__(self, words=1000, width=128):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens))[0])


class Hybrid(nn.Module):
    """Convolutions over a signal, then two layers of torch's own transformer, a mean, a class."""

    def __init__(self, channels=16, width=128, classes=10):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(channels, 64, 5, 2, 2), nn.BatchNorm1d(64), nn.SiLU(),
            nn.Conv1d(64, width, 5, 2, 2), nn.GroupNorm(8, width), nn.GELU(),
        )  # fmt: skip
        layer = nn.TransformerEncoderLayer(width, 4, 512, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(self.convolutions(x).transpose(1, 2)).mean(1))


class Perceptron(nn.Sequential):
    def __init__(self, width=1024):
        super().__init__(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(),
            nn.Dropout(0.5), nn.Linear(width, 10),
        )  # fmt: skip


def per_token(model, data):
    """Mean cross-entropy of the last tensor's numbers, after the model of all others."""
    return F.cross_entropy(model(*data[:-1]).flatten(0, -2), data[-1].flatten())


def per_point(model, data):
    """Classes along dimension 1."""
    return F.cross_entropy(model(*data[:-1]), data[-1])


def squared(model, data):
    return F.mse_loss(model(*data[:-1]), data[-1])


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss.

    Attributes:
        make: The model; large enough that tensors and not counters fill the memory.
        data: On the meta device.
        loss: `loss(model, data)`.
        blocks: The modules that are computed again, if the model is told to.
    """

    make: Callable[..., nn.Module]
    data: list[torch.Tensor]
    loss: Callable[[nn.Module, Any], Any]
    blocks: str = ""


BUNDLED = TransformerConfig(vocabulary=512, window=128, width=128, layers=4, heads=4, dropout=0.1)

CASES = {
    "GPT-2": Case(Gpt2, [ids(8, 128), ids(8, 128)], per_token, "blocks"),
    "bundled": Case(lambda: TransformerLM(BUNDLED), [ids(16, 128), ids(16, 128)], per_token),
    "BERT": Case(
        Encoder, [ids(16, 32), meta(16, 32, dtype=torch.bool), ids(16, 32)], per_token, "layers"
    ),
    "ResNet-50": Case(ResNet50, [meta(16, 3, 64, 64), ids(16)], per_point),
    "U-Net": Case(UNet, [meta(4, 3, 64, 64), ids(4, 64, 64)], per_point),
    "DLRM": Case(Dlrm, [meta(256, 13), ids(4, 256, 3), meta(256, 1)], squared),
    "perceptron": Case(Perceptron, [meta(512, 256), ids(512)], per_point),
    "LSTM": Case(Recurrent, [ids(16, 32), ids(16, 32)], per_token),
    "hybrid": Case(Hybrid, [meta(16, 16, 256), ids(16)], per_point),
}
