"""single: tables that grow, as a checkpoint of a run has them; what a probe leaves of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.errors import CheckpointMismatch
from headway.nn import DynamicEmbeddingBag
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import probe_random_draws
from headway.run.strategy.growing_tables import GrowingTables


def made(make=torch.optim.Adagrad, **law):
    model = nn.Sequential(DynamicEmbeddingBag(3, seed=2, **law)).double()
    return model, make(model.parameters(), lr=0.1)


def step(model, optimizer, keys):
    optimizer.zero_grad()
    model(torch.tensor([keys])).square().sum().backward()
    optimizer.step()


def trained():
    model, optimizer = made(admit_after=1)
    for keys in ([5, 6, -7, 8], [5, 6, -7, 2**60], [6, 9, 10, 11], [5, 9, 10, 12]):
        step(model, optimizer, keys)
    # Rows, and keys that wait, which nobody has now.
    assert model[0].table.remove(torch.tensor([6, 11])) == 1
    return model, optimizer


def numbers(model, optimizer):
    found = GrowingTables(model).numbers(optimizer)
    return {f"{kind}/{name}": t for kind, named in found.items() for name, t in named.items()}


def test_what_has_been_removed_does_not_come_back():
    model, optimizer = trained()
    other, its = made(admit_after=1)
    step(other, its, [77, 78])  # forgotten when a checkpoint is taken over
    saved = GrowingTables(model).saved(optimizer)
    GrowingTables(other).restore(saved, its)
    assert other[0].table.clock == 4
    for now in range(3):
        a, b = numbers(model, optimizer), numbers(other, its)
        assert a.keys() == b.keys()
        for name, tensor in a.items():
            assert torch.equal(tensor, b[name]), (now, name)
        for one, stepped in ((model, optimizer), (other, its)):
            step(one, stepped, [0, 5, 6, 11, 12, now])
    assert a["optimizer/0.table.weight.sum"].shape == a["parameter/0.table.rows.values"].shape


@pytest.mark.parametrize(
    ("law", "make", "message"),
    [
        ({"admit_after": 2}, torch.optim.Adagrad, "a table of"),
        ({"admit_after": 1}, torch.optim.SGD, "sum of each row of 0.table, of which SGD"),
    ],
)
def test_another_law_or_optimiser_is_refused(law, make, message):
    model, optimizer = trained()
    saved = GrowingTables(model).saved(optimizer)
    other, its = made(make, **law)
    with pytest.raises(CheckpointMismatch, match=message):
        GrowingTables(other).restore(saved, its)


def test_a_probe_of_random_draws_touches_nothing():
    model = nn.Sequential(DynamicEmbeddingBag(3, evict_after=5), nn.Dropout(0.5))
    table = model[0].table
    data = torch.arange(8).view(4, 2)
    found = probe_random_draws(model, lambda m, x: m(x).square().mean(), data, resize_batch)
    assert found.forward
    assert len(table) == 0
    assert table.weight.shape == (0, 3)
    assert table.weight.grad is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert len(table) == 0
