"""A small recommender with tables of each kind, its data and recipes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from headway import Recipe
from headway.optim import LARS, RowWiseAdagrad
from headway.optim.row_wise import tables_by_row

USERS, ITEMS, TAGS, WIDTH = 23, 11, 7, 6


class Clicks(torch.utils.data.Dataset):
    """User, item, weighted tags, numbers; label. Few users come often, some tags twice."""

    def __init__(self, length=40):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        user = (torch.rand((), generator=draw) ** 3 * USERS).long()
        item = torch.randint(ITEMS, (2,), generator=draw)
        tags = torch.randint(TAGS, (3,), generator=draw)
        weights = torch.rand(3, generator=draw)
        numbers = torch.randn(4, generator=draw)
        label = torch.randint(2, (), generator=draw).float()
        return user, item, tags, weights, numbers, label


class Recommender(nn.Module):
    """Users looked up one by one, items twice by one table, tags in weighted bags."""

    def __init__(self, dropout=0.0, sparse=False):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, padding_idx=0, sparse=sparse)
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean", sparse=sparse)
        self.tags = nn.EmbeddingBag(TAGS, WIDTH, mode="sum", sparse=sparse)
        self.numbers = nn.Linear(4, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.top = nn.Sequential(nn.Linear(5 * WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, data):
        user, item, tags, weights, numbers, _ = data
        found = [
            self.users(user),
            self.items(item),
            self.items(item[:, :1]),
            self.tags(tags, per_sample_weights=weights.to(self.numbers.weight.dtype)),
            self.numbers(numbers),
        ]
        return self.top(self.dropout(torch.cat(found, 1)))


class Dropping(Recommender):
    def __init__(self):
        super().__init__(dropout=0.3)


class Sparse(Recommender):
    """All parameters are those of tables, with sparse gradients."""

    def __init__(self):
        super().__init__(sparse=True)
        for name in ("numbers", "top"):
            getattr(self, name).requires_grad_(False)


class Tied(Recommender):
    """Two modules look one table up."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(ITEMS, WIDTH)
        self.users.weight = self.items.weight

    def forward(self, data):
        user, *rest = data
        return super().forward((user % ITEMS, *rest))


class FrozenTable(Recommender):
    def __init__(self):
        super().__init__()
        self.tags.requires_grad_(False)


class OnlyTables(nn.Module):
    """Logistic regression: nothing is dense but a bias."""

    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(USERS, 1, mode="sum")
        self.tags = nn.EmbeddingBag(TAGS, 1, mode="sum")

    def forward(self, data):
        user, _, tags, weights, _, _ = data
        weights = weights.to(torch.float64)
        return self.users(user[:, None]) + self.tags(tags, per_sample_weights=weights)


def clicking(model, batch):
    return binary_cross_entropy_with_logits(model(batch)[:, 0], batch[-1])


def counted(model, batch):
    """A mean over the clicks that have been made, of which no rank knows the number."""
    losses = binary_cross_entropy_with_logits(model(batch)[:, 0], batch[-1], reduction="none")
    weights = batch[-1] + 0.5
    return (losses * weights).sum(), weights.sum()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3)


def grouped(model):
    """Tables with an own rate and momentum."""
    tables = [*model.users.parameters(), *model.items.parameters(), *model.tags.parameters()]
    rest = [*model.numbers.parameters(), *model.top.parameters()]
    return torch.optim.SGD(
        [{"params": rest, "lr": 0.1, "momentum": 0.9}, {"params": tables, "lr": 0.4}]
    )


def lars(model):
    return LARS(model.parameters(), lr=0.1, momentum=0.9)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters())


def row_wise(model):
    return RowWiseAdagrad(tables_by_row(model), lr=0.1)


def sparse_adam(model):
    return torch.optim.SparseAdam([p for p in model.parameters() if p.requires_grad], lr=0.05)


def clicks(optimizer="adam", model="Recommender", **options):
    """A recipe; `split.tables` says the rest."""
    made = {
        "name": "clicks",
        "model": globals()[model],
        "data": Clicks(),
        "loss": clicking,
        "optimizer": globals()[optimizer],
        "batch": 8,
        "stop": 6,
        "precision": "float64",
    }
    return Recipe(**(made | options))
