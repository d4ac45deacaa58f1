"""The rows of the table of substitutions: models whose heads are sums over rows of tables."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from support.split_table_models import FIELDS, ROWS, WIDTH


class Bags(nn.Module):
    """A bag per field, each of several ids."""

    def __init__(self, columns=WIDTH, mode="sum"):
        super().__init__()
        self.fields = nn.ModuleList(
            nn.EmbeddingBag(ROWS, columns, mode=mode) for _ in range(FIELDS)
        )

    def forward(self, data):
        return [
            bag((data["square"] + n) % ROWS) if n % 2 else bag(data["ids"], data["offsets"])
            for n, bag in enumerate(self.fields)
        ]


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.bias = Bags(1), nn.Parameter(torch.zeros(1))

    def forward(self, data):
        return torch.sigmoid(sum(self.wide(data)) + self.bias)


class WeightedLogistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.bias = nn.Embedding(ROWS, 1), nn.Parameter(torch.zeros(()))

    def forward(self, data):
        found = self.wide(data["square"]).squeeze(-1) * data["factors"]
        return torch.sigmoid(found.sum(1, keepdim=True) + self.bias)


class Factorisation(nn.Module):
    """First and second order, over ids with values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(ROWS, 1), nn.Embedding(ROWS, WIDTH)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, data):
        x = data["factors"].unsqueeze(-1)
        rows = self.second(data["square"]) * x
        sums, squares = rows.sum(1), rows.square().sum(1)
        pairs = 0.5 * (sums**2 - squares).sum(1, keepdim=True)
        wide = (self.first(data["square"]) * x).sum(1)
        return torch.tanh(self.bias + wide + pairs)


class FactorisationOfBags(nn.Module):
    """Of one vector per field, in one sum over all of it."""

    def __init__(self):
        super().__init__()
        self.bags = Bags()

    def forward(self, data):
        rows = torch.stack(self.bags(data), 1)
        return (rows.sum(1).pow(2) - rows.pow(2).sum(1)).sum(-1, keepdim=True).mul(0.5).tanh()


class FieldAware(nn.Module):
    """For each ordered pair of fields a vector."""

    def __init__(self):
        super().__init__()
        self.bags = Bags(FIELDS * 2)

    def forward(self, data):
        rows = torch.stack([x.view(-1, FIELDS, 2) for x in self.bags(data)], 1)
        dots = (rows * rows.transpose(1, 2)).sum(-1)
        first, second = torch.triu_indices(FIELDS, FIELDS, 1)
        return dots[:, first, second]


class Pooled(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bags = Bags(mode=mode)

    def forward(self, data):
        return torch.cat(self.bags(data), dim=1).tanh()


class SquareRoot(nn.Module):
    """Divided by the root of the sum of squared weights."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")

    def forward(self, data):
        lengths = data["lengths"].clamp(min=1).to(torch.float64)
        return self.bag(data["ids"], data["offsets"]) / lengths.sqrt().unsqueeze(1)


class FirstDense(nn.Module):
    """A dense layer over fields and numbers of the sample, with fewer outputs than inputs."""

    def __init__(self):
        super().__init__()
        self.bags, self.over = Bags(), nn.Linear(FIELDS * WIDTH + FIELDS, 2)

    def forward(self, data):
        return torch.relu(self.over(torch.cat([data["factors"], *self.bags(data)], 1)) + 0.3)


class Cross(nn.Module):
    """Cross layers of Deep & Cross: x_0 (x_l . w) + b + x_l."""

    def __init__(self, low_rank=0):
        super().__init__()
        size = FIELDS * WIDTH
        self.bags = Bags()
        self.w = nn.ParameterList()
        if not low_rank:
            self.w.extend(nn.Parameter(torch.randn(size) / size) for _ in range(2))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(size) / size) for _ in range(2))
        self.matrix = nn.Linear(size, size) if low_rank else None
        self.out = nn.Linear(size, 1)

    def forward(self, data):
        start = x = torch.cat(self.bags(data), 1)
        for number, b in enumerate(self.b):
            scale = self.matrix(x) if self.matrix else (x @ self.w[number]).unsqueeze(1)
            x = start * scale + b + x
        return self.out(x).tanh()


class Dots(nn.Module):
    """DLRM's pairwise dots, with the numbers of the sample."""

    def __init__(self, product="bmm", columns=WIDTH):
        super().__init__()
        self.bags, self.bottom, self.product = Bags(columns), nn.Linear(FIELDS, columns), product

    def forward(self, data):
        rows = torch.stack([torch.relu(self.bottom(data["factors"])), *self.bags(data)], 1)
        if self.product == "einsum":
            dots = torch.einsum("bnd,bmd->bnm", rows, rows)
        else:
            dots = torch.bmm(rows, rows.transpose(1, 2))
        first, second = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        return dots[:, first, second]


class Attention(nn.Module):
    """Over a sequence of behaviour: not a sum of what ranks have."""

    def __init__(self):
        super().__init__()
        self.items, self.query = nn.Embedding(ROWS, WIDTH, padding_idx=0), nn.Linear(FIELDS, WIDTH)

    def forward(self, data):
        rows, query = self.items(data["square"]), self.query(data["factors"])
        scores = torch.softmax((rows * query.unsqueeze(1)).sum(-1), 1)
        return (scores.unsqueeze(-1) * rows).sum(1)


class Several(nn.Module):
    """Functions of many kinds, one after the other, in sums and taken."""

    def __init__(self):
        super().__init__()
        self.bags, self.scale = Bags(), nn.Parameter(torch.rand(WIDTH))

    def forward(self, data):
        a, b, c = self.bags(data)
        stacked = torch.stack([a, b - c, -c], dim=2)
        turned = stacked.permute(0, 2, 1)[:, 1:] * self.scale
        split = turned.unflatten(2, (2, 3)).flatten(1).chunk(2, 1)
        one = split[0].reshape(-1, WIDTH)[:, [0, 2, 4]] / 3 - 2 * split[1].narrow(1, 0, 3)
        two = F.linear(turned.mean(2), torch.ones(1, 2, dtype=torch.float64))
        three = stacked.sum((1, 2)).unsqueeze(1) + data["factors"].sum(1, keepdim=True)
        return torch.cat([one.sin(), two.exp(), three.cos(), a.select(1, 3)[:, None]], -1)


MODELS = {
    "logistic": Logistic,
    "weighted logistic": WeightedLogistic,
    "factorisation": Factorisation,
    "factorisation of bags": FactorisationOfBags,
    "field-aware": FieldAware,
    "pooled": lambda: Pooled("sum"),
    "means": lambda: Pooled("mean"),
    "square root": SquareRoot,
    "first dense": FirstDense,
    "cross": Cross,
    "cross v2": lambda: Cross(low_rank=1),
    "dots": Dots,
    "wide dots": lambda: Dots(columns=24),
    "wide dots by einsum": lambda: Dots("einsum", columns=24),
    "attention": Attention,
    "several": Several,
}
