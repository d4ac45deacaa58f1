"""Streams of bags for tables that grow, and what a table has after them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from headway.nn import DynamicTable
from headway.nn.dynamic_initial import initial_rows
from support.dynamic_reference import Row, SerialTable

DIM = 3
Bags = list[list[int]]
Weights = list[list[float]]


def initial(key: int) -> Row:
    """What a row begins with that has the defaults."""
    row: Row = initial_rows(torch.tensor([key]), DIM, "uniform", 0.01, 0)[0].tolist()
    return row


def random_bags(
    rng: random.Random, number: int, keys: int = 12, most: int = 4
) -> tuple[Bags, Weights, list[Row]]:
    """Bags, weights, and the gradient of each bag's vector."""
    known = [*range(keys), 2**60]
    bags = [[rng.choice(known) for _ in range(rng.randrange(most))] for _ in range(number)]
    weights = [[rng.uniform(0.5, 2) for _ in bag] for bag in bags]
    return bags, weights, [[rng.gauss(0, 1) for _ in range(DIM)] for _ in bags]


def tensors(bags: Bags, weights: Weights | None = None) -> dict[str, Tensor | None]:
    """The arguments of a module for bags."""
    factors = [w for bag in weights or [] for w in bag]
    return {
        "keys": torch.tensor([key for bag in bags for key in bag], dtype=torch.int64),
        "lengths": torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
        "per_sample_weights": (
            None if weights is None else torch.tensor(factors, dtype=torch.float64)
        ),
    }


def pull(vectors: Tensor, given: Sequence[Row]) -> None:
    """Have a backward pass with these gradients of the vectors."""
    (vectors * torch.tensor(given, dtype=torch.float64).reshape(-1, DIM)).sum().backward()


def as_dict(table: DynamicTable) -> dict[int, Row]:
    """Its keys and rows."""
    return {
        int(key): row.tolist()
        for keys, rows in table.export(chunk=5)
        for key, row in zip(keys, rows, strict=True)
    }


def assert_rows(found: Mapping[int, Row], serial: SerialTable) -> None:
    """The same keys, and rows to 1e-12."""
    assert found.keys() == serial.rows.keys()
    for key, row in serial.rows.items():
        assert found[key] == pytest.approx(row, rel=1e-12, abs=1e-14)
