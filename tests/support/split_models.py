"""Models that are split by layers, as users write them; none of their classes is known to headway.

Shape suffixes: B samples, T positions, D width, H heads, K width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HEADS, LENGTH = 32, 16, 4, 8


class SeparateAttention(nn.Module):
    """Query, key and value apart; softmax(Q K^T) V written out, with a mask in a buffer."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, drop: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.drop = nn.Dropout(drop)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.size()
        q, k, v = (
            f(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.drop(functional.softmax(scores, dim=-1)) @ v
        return self.o(y.transpose(1, 2).contiguous().view(b, t, d))


class FusedAttention(nn.Module):
    """One layer for all three, as in GPT-2; the kernel of torch."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, drop: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).split(d, dim=2)
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in (q, k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.drop if self.training else 0.0, is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class GroupedAttention(nn.Module):
    """Two heads of keys and values for four of queries, rotary positions, no biases."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, groups: int = 2) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.groups = groups

    def turn(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
        angle = t * torch.exp(-torch.arange(0, self.size, 2, dtype=x.dtype))
        a, b = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        k, v = (z.unflatten(-1, (self.groups, -1)).transpose(1, 2) for z in (k, v))
        y = functional.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Gelu(nn.Module):
    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(drop),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Swiglu(nn.Module):
    """One layer for gate and value."""

    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class OwnNorm(nn.Module):
    """RMS norm, by hand."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A GPT of two blocks: words_BT -> logits_BTV."""

    def __init__(
        self, kind: str, *, drop: float = 0.0, tied: bool = True, recompute: bool = False
    ) -> None:
        super().__init__()
        attention = {
            "separate": lambda: SeparateAttention(drop=drop),
            "fused": lambda: FusedAttention(drop=drop),
            "grouped": GroupedAttention,
        }[kind]
        mlp = Swiglu if kind == "grouped" else Gelu
        norm = {"separate": nn.LayerNorm, "fused": nn.RMSNorm, "grouped": OwnNorm}[kind]
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.h = nn.ModuleList(Block(attention(), mlp(drop=drop), norm) for _ in range(2))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, words: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device)
        x = self.drop(self.wte(words) + self.wpe(positions))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own layers, with a mask of padding: words_BT -> logits_BTV."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words), src_key_padding_mask=words == 3))


class Translator(nn.Module):
    """torch's own Transformer, which asks whether masks are causal: words_BT -> logits_BTV.

    Args:
        buffered: The mask is a buffer; else it is made from the sizes in each call.
    """

    def __init__(self, *, buffered: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Transformer(WIDTH, HEADS, 1, 1, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        mask = nn.Transformer.generate_square_subsequent_mask(32)
        self.register_buffer("mask", mask if buffered else None)

    def forward(self, words: Tensor) -> Tensor:
        long, mask = words.shape[1], self.mask
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(long)
        x = self.words(words)
        mask = mask[:long, :long].to(x.dtype)
        padding = words == 3
        return self.head(
            self.layers(
                x, x, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
            )
        )


class Tower(nn.Module):
    """An MLP with a part that no pair of layers makes: x_BD -> y_BD."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def words(samples: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    both = torch.randint(WORDS, (samples, LENGTH + 1), generator=draw)
    target = both[:, 1:].clone()
    target[0, 0] = -100
    return both[:, :-1], target


def vectors(samples: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, WIDTH, generator=draw, dtype=torch.float64)
    return x, x.flip(0)


def language_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, target = batch
    logits = model(inputs)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, target = batch
    return functional.mse_loss(model(inputs), target)
