"""Tiny models whose layers, or whose samples, lie in parts on several ranks, and their recipes."""

from __future__ import annotations

import torch
from torch import nn

from headway import Recipe

WORDS, WINDOW, WIDTH, HEADS = 16, 6, 16, 4


class Lines(torch.utils.data.Dataset):
    """Words and the words that follow them."""

    def __init__(self, length=40):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (WINDOW + 1,), generator=made)
        return words[:-1], words[1:]


class Perceptron(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(nn.functional.gelu(self.up(x))))


class Block(nn.Module):
    """Attention with fused queries, keys and values, and a perceptron."""

    def __init__(self, dropout):
        super().__init__()
        self.enter, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.middle = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.perceptron = Perceptron(dropout)

    def forward(self, x):
        n, t, _ = x.shape
        parts = self.qkv(self.enter(x)).chunk(3, dim=-1)
        q, k, v = (p.view(n, t, HEADS, -1).transpose(1, 2) for p in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, -1))
        return x + self.perceptron(self.middle(x))


class Speaker(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Dropping(Speaker):
    def __init__(self):
        super().__init__(0.25)


def speaking(model, batch):
    words, following = batch
    return nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


class Volumes(torch.utils.data.Dataset):
    """Samples of 2 channels, 8 x 6 x 6, and a label for each voxel."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        return (
            torch.randn(2, 8, 6, 6, generator=made),
            torch.randint(3, (8, 6, 6), generator=made),
        )


class Segmenter(nn.Module):
    """A step down and up again, with what was skipped."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv3d(4, 6, 3, padding=1), nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.leave = nn.Conv3d(8, 3, 1)

    def forward(self, x):
        x = nn.functional.relu(self.norm(self.enter(x)))
        y = nn.functional.relu(self.down(nn.functional.max_pool3d(x, 2)))
        return self.leave(torch.cat([x, self.up(y)], 1))


class Estimator(nn.Module):
    """Convolutions, then whole vectors."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 6, 3, padding=1)
        self.leave = nn.Linear(6 * 2 * 1 * 1, 3)

    def forward(self, x):
        for layer in (self.one, self.two):
            x = nn.functional.avg_pool3d(nn.functional.leaky_relu(layer(x)), 2)
        return self.leave(x.flatten(1))


def labelling(model, batch):
    volume, labels = batch
    return nn.functional.cross_entropy(model(volume), labels)


def estimating(model, batch):
    volume, labels = batch
    wanted = torch.stack([labels.flatten(1).to(volume.dtype).mean(1)] * 3, 1)
    return (model(volume) - wanted).square().mean()


def adamw(model):
    # The gradient of the keys' bias is 0 but for rounding, and AdamW divides that by eps.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-5)


def _recipe(name, model, data, loss, batch):
    return Recipe(
        name=name,
        model=model,
        data=data,
        loss=loss,
        optimizer=adamw,
        batch=batch,
        stop=8,
        clip=0.5,
        validation=data,
        validation_samples=10,
        checkpoint_every=3,
    )


def speaker() -> Recipe:
    return _recipe("speaker", Speaker, Lines, speaking, 8)


def segmenter() -> Recipe:
    return _recipe("segmenter", Segmenter, Volumes, labelling, 4)


def estimator() -> Recipe:
    return _recipe("estimator", Estimator, Volumes, estimating, 4)
