"""Small models, data and recipes of the golden answers; only public names of headway."""

from __future__ import annotations

import torch
from torch import nn

from headway import Recipe, criterion

FEATURES, CLASSES = 6, 4
WORDS, WINDOW, WIDTH, HEADS = 16, 6, 16, 4


class Points(torch.utils.data.Dataset):
    def __init__(self, length=40):
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, FEATURES, generator=draw)
        self.y = torch.randint(CLASSES, (length,), generator=draw)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        if not 0 <= index < len(self.y):
            raise IndexError(index)
        return self.x[index], self.y[index]


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (WINDOW + 1,), generator=made)
        return words[:-1], words[1:]


class Volumes(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        return torch.randn(2, 8, 6, 6, generator=made), torch.randint(3, (8, 6, 6), generator=made)


class Images(Points):
    def __init__(self, length=40):
        super().__init__(length)
        draw = torch.Generator().manual_seed(8)
        self.x = torch.randn(length, 1, 5, 5, generator=draw)


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 4)
        )


class Stack(nn.Sequential):
    def __init__(self, blocks=6, width=64):
        made = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        super().__init__(nn.Linear(6, width), *made, nn.Linear(width, 4))


class TinyConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, image):
        return self.head(torch.relu(self.norm(self.conv(image))).mean((2, 3)))


class Tied(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, width), nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(torch.tanh(self.mix(self.embed(words))))


class Residual(nn.Module):
    """Dropout, a skip from the first to the last block, and (tied) a layer used twice."""

    def __init__(self, twice=True):
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)
            )
            for _ in range(6)
        )
        if twice:
            self.middle = nn.Linear(8, 8)
        self.leave = nn.Linear(8, CLASSES)
        self.twice = twice

    def forward(self, x):
        first = x = self.middle(self.enter(x)) if self.twice else self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave((self.middle(x) if self.twice else x) + first)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.middle = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.perceptron = Perceptron()

    def forward(self, x):
        n, t, _ = x.shape
        parts = self.qkv(self.enter(x)).chunk(3, dim=-1)
        q, k, v = (p.view(n, t, HEADS, -1).transpose(1, 2) for p in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, -1))
        return x + self.perceptron(self.middle(x))


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Segmenter(nn.Module):
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
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 6, 3, padding=1)
        self.leave = nn.Linear(6 * 2 * 1 * 1, 3)

    def forward(self, x):
        for layer in (self.one, self.two):
            x = nn.functional.avg_pool3d(nn.functional.leaky_relu(layer(x)), 2)
        return self.leave(x.flatten(1))


def cross_entropy(model, batch):
    inputs, target = batch
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def counted(model, batch):
    target = batch[1].masked_fill(batch[1] == 1, -100)
    total = nn.functional.cross_entropy(model(batch[0]), target, reduction="sum")
    return total, (target != -100).sum()


def labelling(model, batch):
    volume, labels = batch
    return nn.functional.cross_entropy(model(volume), labels)


def estimating(model, batch):
    volume, labels = batch
    wanted = torch.stack([labels.flatten(1).to(volume.dtype).mean(1)] * 3, 1)
    return (model(volume) - wanted).square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-5)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def _recipe(name, model, data, **changes):
    usual = dict(
        name=name,
        model=model,
        data=data,
        loss=cross_entropy,
        optimizer=adamw,
        batch=12,
        stop=4,
        seed=5,
    )
    return Recipe(**(usual | changes))


def mlp(batch=12, microbatch=None, steps=5):
    """40 points in batches of 12: the fourth batch of an epoch has 4."""
    return _recipe(
        "mlp",
        Mlp,
        Points,
        loss=criterion(nn.CrossEntropyLoss()),
        scheduler=cosine,
        batch=batch,
        microbatch=microbatch,
        stop=steps,
        clip=0.5,
        validation=lambda: Points(16),
        validate_every=2,
    )


def wide(batch=12, microbatch=None):
    return _recipe("wide", Wide, Points, batch=batch, microbatch=microbatch)


def wide_sgd(batch=12):
    return _recipe("wide-sgd", Wide, Points, optimizer=momentum, batch=batch)


def stack(batch=32, blocks=6, width=64, precision="float32", microbatch=None):
    return _recipe(
        "stack",
        lambda: Stack(blocks, width),
        Points,
        batch=batch,
        precision=precision,
        microbatch=microbatch,
    )


def stack_sgd():
    return _recipe("stack-sgd", Stack, Points, optimizer=momentum, batch=32)


def conv():
    return _recipe("conv", TinyConv, Images)


def tied():
    return _recipe("tied", Tied, Lines)


def deep():
    return _recipe(
        "deep",
        Residual,
        Points,
        scheduler=cosine,
        clip=0.5,
        precision="float64",
        validation=lambda: Points(17),
        validate_every=2,
    )


def late():
    """For schedules without a flush."""
    return _recipe("late", lambda: Residual(twice=False), Points, scheduler=cosine)


def late_words():
    return _recipe("late-words", lambda: Residual(twice=False), Points, loss=counted)


def speaker():
    return _recipe("speaker", Speaker, Lines, batch=8, clip=0.5, validation=Lines,
                   validation_samples=10)  # fmt: skip


def segmenter():
    return _recipe("segmenter", Segmenter, Volumes, loss=labelling, batch=4)


def estimator():
    return _recipe("estimator", Estimator, Volumes, loss=estimating, batch=4)
