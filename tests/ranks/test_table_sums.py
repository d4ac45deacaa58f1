"""ranks: heads of models on split tables equal the serial ones: outputs, gradients, steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headway.errors import PlanError
from headway.parallel.global_norm import GlobalNorm
from headway.parallel.tables import split_tables, taken
from support.ranks import ranks
from support.split_table_models import (
    FIELDS,
    ROWS,
    WAYS,
    WIDTH,
    after_steps,
    compare,
    differ,
    lookup_data,
    placements,
    shares,
    with_offsets,
)
from support.substitutions import MODELS


def batches_of(size):
    return [lookup_data(n, 10 * size + rank) for rank, n in enumerate(shares(size))]


def nothing_differs(results):
    for rank, found in enumerate(results):
        wrong = {key: value for key, value in found.items() if not value <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"


def compare_all(world, names, ways=WAYS, travels=("auto", "sums", "rows")):
    return {
        (name, way, how, key): value
        for name in names
        for way in ways
        for how in travels
        for key, value in compare(world, MODELS[name], batches_of, way, travels=how)[0].items()
    }


@pytest.mark.parametrize("name", MODELS)
@ranks(2, timeout=60, check=nothing_differs)
def test_heads_on_two_ranks(world, name):
    return compare_all(world, [name])


@pytest.mark.slow
@ranks(3, timeout=120, check=nothing_differs)
def test_heads_on_three_ranks(world):
    return compare_all(world, MODELS, travels=("auto", "sums"))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
STEPPED = ("factorisation", "first dense", "cross", "wide dots", "attention", "means")


def uneven(size, step):
    return [lookup_data(n, 100 * step + rank) for rank, n in enumerate(shares(size, step))]


def steps_agree(results):
    wrong = {key: n for found in results for key, n in found.items() if not n <= 1e-9}
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_five_steps_of_optimisers(size):
    ranks(size, timeout=120, check=steps_agree)(train)()


@pytest.mark.slow
@ranks(3, timeout=120, check=steps_agree)
def test_steps_that_know_what_the_step_before_has_taken(world):
    return {
        (name, way, key): value
        for name in MODELS
        for way in WAYS
        for key, value in after_steps(
            world, MODELS[name], uneven, way, OPTIMIZERS["momentum"], steps=3
        ).items()
    }


def train(world):
    return {
        (name, kind, way, key): value
        for number, name in enumerate(STEPPED)
        for kind, optimizer in OPTIMIZERS.items()
        for way in (WAYS[number], "row", "column")
        for key, value in after_steps(world, MODELS[name], uneven, way, optimizer).items()
    }


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fields = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(2))
        self.norm = nn.BatchNorm1d(2 * WIDTH)

    def forward(self, ids):
        return self.norm(torch.cat([bag(ids) for bag in self.fields], 1))


@ranks(3, timeout=60)
def test_batch_norm_over_the_fields_of_all_ranks(world):
    torch.manual_seed(1)
    serial = Normed().double()
    split = copy.deepcopy(serial)
    tables = split_tables(split, placements(serial, "row", world.size), world.group)
    every = [lookup_data(n, n)["square"] for n in (4, 2, 5)]
    weights = torch.linspace(0, 1, 2 * WIDTH, dtype=torch.float64)
    (serial(torch.cat(every)) * weights).square().sum().backward()
    with GlobalNorm(world.group).over(counted=True):
        (split(every[world.rank]) * weights).square().sum().backward()
    assert differ(split.norm.running_var, serial.norm.running_var) < 1e-12
    for number in range(2):
        name = f"fields.{number}.weight"
        whole = tables.whole(name, tables.parts[name].parameter.grad)
        assert differ(whole, serial.get_parameter(name).grad) < 1e-12


@ranks(2, timeout=60)
def test_what_stands_for_a_lookup_answers_as_a_tensor(world):
    torch.manual_seed(2)
    whole = nn.Embedding(ROWS, WIDTH)
    model = nn.Sequential(copy.deepcopy(whole))
    split_tables(model, placements(model, "row", world.size), world.group)
    ids = torch.randint(0, ROWS, (3, FIELDS), generator=torch.Generator().manual_seed(world.rank))
    lazy, plain = model[0](ids), whole(ids)
    assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy)) == (plain.shape, plain.dtype, 3, 3)
    assert lazy.requires_grad
    assert "shape=(3, 3, 6)" in repr(lazy)
    assert torch.equal(lazy.detach(), plain)
    assert torch.equal(torch.stack(list(model[0](ids))), plain)
    assert float(model[0](ids).detach().sum()) == pytest.approx(float(plain.detach().sum()))
    changed = model[0](ids)
    changed += 1
    assert torch.equal(changed, plain + 1)
    assert taken({"a": [model[0](ids)], "b": 1})["b"] == 1
    kept = model[0](ids)
    model(ids)
    with pytest.raises(PlanError, match="a lookup of an earlier batch"):
        kept.sum()
    with torch.no_grad():
        assert not (model[0](ids).sum(1) * 2).requires_grad

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.relu(x)

    with pytest.raises(PlanError, match=r"autograd\.Function"):
        Own.apply(model[0](ids))
    assert torch.equal(model(ids), plain), "ranks go on together"


@ranks(2, timeout=60)
def test_mixed_precision_takes_sums_before_products(world):
    torch.manual_seed(4)
    serial = MODELS["first dense"]()
    split = copy.deepcopy(serial)
    split_tables(split, placements(serial, "row", world.size), world.group)
    data = with_offsets(lookup_data(6, world.rank))
    data = {key: x.float() if x.is_floating_point() else x for key, x in data.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = serial(data), split(data)
    assert found.dtype == expected.dtype
    assert differ(found.float(), expected.float()) < 0.01
