"""ranks: tables that grow on several ranks, against one dict and loops, and restarts."""

from __future__ import annotations

import random

import pytest
import torch

from headway.nn import DynamicEmbeddingBag, split_dynamic_tables
from headway.optim import RowWiseAdagrad
from headway.parallel.tables.table_parts import hashed_parts
from support import dynamic_reference as reference
from support.dynamic_streams import DIM, as_dict, assert_rows, initial, pull, random_bags, tensors
from support.ranks import run_ranks

STEPS = 10
LAWS = {
    "adam": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1), {}),
    "evicted": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1),
                {"admit_after": 1, "evict_after": 3}),
    "row-wise": (reference.row_wise_adagrad, lambda p: RowWiseAdagrad(p, lr=0.1),
                 {"mode": "sqrtn"}),
    "mean": (reference.sgd, lambda p: torch.optim.SGD(p, lr=0.1), {"mode": "mean"}),
}  # fmt: skip


def stream(step):
    return random_bags(random.Random(step), 9, keys=40)


def shares(world, number):
    """Which bags of a batch are a rank's: uneven, and of many ranks none for the last one."""
    ends = [
        number * rank // max(1, world.size - (world.size > 4)) for rank in range(world.size + 1)
    ]
    return slice(ends[world.rank], min(ends[world.rank + 1], number))


def serial(name, steps):
    law, _, options = LAWS[name]
    table = reference.SerialTable(
        law, initial, options.get("admit_after", 0), options.get("evict_after", 10**9)
    )
    for step in range(steps):
        bags, weights, given = stream(step)
        table.step(reference.gradients_of_bags(bags, weights, given, options.get("mode", "sum")))
    return table


def made(name):
    _, optimizer_of, options = LAWS[name]
    bag = DynamicEmbeddingBag(DIM, dtype=torch.float64, **options)
    return bag, optimizer_of(bag.parameters())


def train(world, bag, optimizer, start, stop, micro=2):
    for step in range(start, stop):
        optimizer.zero_grad()
        mine = [part[shares(world, 9)] for part in stream(step)]
        for number in range(micro):
            bags, weights, given = (part[number::micro] for part in mine)
            pull(bag(**tensors(bags, weights)), given)
        optimizer.step()


def body(world, name, before, after):
    """Train a bit, after a restart with what another number of ranks has saved."""
    bag, optimizer = made(name)
    tables = split_dynamic_tables(bag)
    for file in sorted(world.directory.glob("saved-*")) if before else []:
        for piece in torch.load(file, weights_only=True):
            bag.table.take_piece(piece, optimizer)
    train(world, bag, optimizer, before, after)
    pieces = list(bag.table.pieces(optimizer, chunk=7))
    torch.save(pieces, world.directory / f"saved-{after}-{world.rank}")
    keys = torch.tensor([*as_dict(bag.table)], dtype=torch.int64)
    assert bool((hashed_parts(keys, world.size) == world.rank).all())
    return as_dict(bag.table), dict(tables.sent)


@pytest.mark.parametrize(
    ("name", "size"),
    [("adam", 1), ("adam", 2), ("evicted", 3), ("row-wise", 3), ("mean", 2), ("adam", 7)],
)
def test_tables_equal_the_definition_on_any_number_of_ranks(name, size):
    found = run_ranks(size, body, name, 0, STEPS)
    parts = [part for part, _ in found]
    union = {key: row for part in parts for key, row in part.items()}
    assert len(union) == sum(map(len, parts))
    assert_rows(union, serial(name, STEPS))
