"""Models with tables that grow, a stream of clicks with new ids every day, and a recipe."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import IterableDataset

from headway import Recipe
from headway.nn import DynamicEmbeddingBag
from support.table_recipes import Clicks, adam, row_wise, sgd

DAY = 40
"""Samples of a day."""


class Growing(nn.Module):
    """Users in a table that grows, under 64-bit keys; items in a fixed one."""

    def __init__(self, dropout=0.0, **law):
        super().__init__()
        self.users = DynamicEmbeddingBag(4, mode="mean", seed=5, scale=0.3, **law)
        self.items = nn.EmbeddingBag(11, 4)
        self.dropout = nn.Dropout(dropout)
        self.top = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, data):
        user, item, tags, *_ = data
        keys = torch.stack([user * 2**40 - 3, tags[:, 0] + user], 1)
        return self.top(self.dropout(torch.cat([self.users(keys), self.items(item)], 1)))


class Dropping(Growing):
    def __init__(self):
        super().__init__(dropout=0.3)


class Forgetting(Growing):
    def __init__(self):
        super().__init__(admit_after=1, evict_after=2)


class Sharing(Growing):
    """Two modules look up in one table that grows."""

    def __init__(self):
        super().__init__()
        self.friends = DynamicEmbeddingBag(table=self.users.table)

    def forward(self, data):
        item, tags, weights = data[1:4]
        friends = self.friends(tags[:, :1] * 2**40 - 3, per_sample_weights=weights[:, :1])
        return self.top(torch.cat([self.users(tags) + friends, self.items(item)], 1))


class Days(IterableDataset):
    """Without an end; every day has users that were never seen before."""

    def __iter__(self):
        number = 0
        while True:
            user, item, tags, weights, numbers, label = Clicks()[number]
            yield user + 15 * (number // DAY), item, tags, weights, numbers, label
            number += 1


def clicking(model, batch):
    return binary_cross_entropy_with_logits(model(batch)[:, 0], batch[-1])


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


OPTIMIZERS = {"adam": adam, "adagrad": adagrad, "sgd": sgd, "row_wise": row_wise}


def days(model: str = "Forgetting", optimizer: str = "adam") -> Recipe:
    return Recipe(
        name="days",
        model=globals()[model],
        data=Days,
        validation=Clicks,
        loss=clicking,
        optimizer=OPTIMIZERS[optimizer],
        batch="8 samples",
        stop="12 steps",
        checkpoint_every=1000,
        validate_every=5,
        clip=0.5,
        seed=3,
    )
