"""ranks: lookups in split tables, and their gradients, equal those in whole ones."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from headway.errors import DataError, PlanError
from headway.parallel.tables import mixed_hashes, split_tables, taken
from headway.parallel.tables.table_parts import hashed_parts
from headway.parallel.tables.wire import open_table_streams
from headway.plans.tables import mixed_hash
from support.ranks import ranks
from support.split_table_models import (
    WAYS,
    EveryLookup,
    compare,
    lookup_data,
    placements,
    shares,
    table_names,
)


def batches_of(size):
    return [lookup_data(n, 10 * size + rank) for rank, n in enumerate(shares(size))]


def nothing_differs(results):
    for rank, found in enumerate(results):
        wrong = {key: value for key, value in found.items() if not value <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"


def every_way(world, **options):
    return {
        (way, key): value
        for way in WAYS
        for key, value in compare(world, EveryLookup, batches_of, way, **options)[0].items()
    }


@ranks(2, timeout=60, check=nothing_differs)
def test_every_lookup_in_every_way_on_two_ranks(world):
    return every_way(world)


@pytest.mark.slow
@ranks(3, timeout=60, check=nothing_differs)
def test_every_lookup_in_every_way_on_three_ranks(world):
    return every_way(world) | every_way(world, touched=False)


@ranks(2, timeout=60, check=nothing_differs)
def test_every_lookup_over_the_group(world):
    return every_way(world, streams={})


@ranks(3, timeout=60, check=nothing_differs)
def test_lookups_of_ranks_of_which_two_share_memory(world):
    streams = open_table_streams(world.group, torch.device("cpu"), lambda a, b: a + b == 2)
    assert [*streams] == [[2], [], [0]][world.rank]
    return {
        (way, key): value
        for way in ("table", "grid", "hash")
        for key, value in compare(world, EveryLookup, batches_of, way, streams=streams)[0].items()
    }


@ranks(2, timeout=60)
def test_bad_lookups_are_one_error_on_all_ranks(world):
    bad = torch.tensor
    calls = {
        "id 13, number 1, is not among its 13 rows": (bad([2, 13]), bad([0])),
        "id -1, number 0, is not": (bad([-1]), bad([0])),
        "offset 1, number 2, is below the one before it, 2": (bad([1, 2, 3]), bad([0, 2, 1])),
        "the first offset is 1": (bad([1, 2]), bad([1])),
        "offset 5, the last one, is behind the 2 ids": (bad([1, 2]), bad([0, 5])),
        "ids are float32": (bad([1.0]), bad([0])),
        "weight NaN, number 1, cannot": (bad([1, 2]), bad([0]), bad([1.0, float("nan")])),
        "id 40, at [1, 0], is not": (bad([[1, 2], [40, 3]]), None),
    }
    for said, call in calls.items():
        good = (bad([1, 2]), bad([0]), *([bad([1.0, 1.0])] if len(call) > 2 else []))
        module, _ = one_table(world)
        with pytest.raises(DataError, match=re.escape(f"table bag.weight: {said}")) as error:
            taken(module.bag(*(call if world.rank else good)))
        assert error.value.where == "rank 1 of those that share the batch"


@ranks(3, timeout=60)
def test_lookups_that_differ_between_ranks_are_named(world):
    module, _ = one_table(world)
    used = module.other if world.rank == 2 else module.bag
    with pytest.raises(PlanError, match="lookup 1 of a step is not the same") as error:
        taken(used(torch.tensor([1]), torch.tensor([0])))
    assert error.value.problems == ("rank 0: sum of bag.weight", "rank 2: sum of other.weight")


def one_table(world):
    model = nn.Module()
    model.bag, model.other = nn.EmbeddingBag(13, 4, mode="sum"), nn.EmbeddingBag(5, 4, mode="sum")
    return model, split_tables(model, placements(model, "row", world.size), world.group)


def test_tables_that_cannot_be_split_are_named():
    model = nn.Module()
    model.a = nn.Embedding(4, 2, max_norm=1.0)
    model.b = nn.EmbeddingBag(4, 2, mode="max")
    model.c = nn.Embedding(4, 2)
    model.d = nn.Linear(2, 4, bias=False)
    model.d.weight = model.c.weight
    model.e = nn.Embedding(4, 2, scale_grad_by_freq=True)
    with pytest.raises(PlanError) as error:
        split_tables(model, placements(model, "table", 1))
    assert [line.split(":")[0] for line in error.value.problems] == [
        "a.weight", "b.weight", "d.weight", "e.weight"
    ]  # fmt: skip


@ranks(3, timeout=60)
def test_parts_and_whole_tables_are_the_same(world):
    for way in WAYS:
        model = EveryLookup()
        whole = {name: model.get_parameter(name).detach().clone() for name in table_names(model)}
        tables = split_tables(model, placements(model, way, world.size), world.group)
        for name, part in tables.parts.items():
            assert torch.equal(tables.cut(name, whole[name]), part.parameter)
            assert torch.equal(tables.whole(name, part.parameter.detach()), whole[name])
            numbers = torch.arange(len(whole[name])) * 3
            if len(part.placement.owners) == 1:
                assert torch.equal(tables.whole(name, tables.cut(name, numbers)), numbers)


def test_hashes_are_those_of_the_plan():
    keys = [0, 1, 12345678901, 2**63 - 1, -1, -(2**63)]
    found = mixed_hashes(torch.tensor(keys)).tolist()
    assert [n % 2**64 for n in found] == [mixed_hash(key % 2**64) for key in keys]
    parts = hashed_parts(torch.tensor(keys), 7).tolist()
    assert parts == [mixed_hash(key % 2**64) % 7 for key in keys]


class Shapes(nn.Module):
    """Ids of one dimension and of three, looked up one by one in one table; bags of them, too."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(13, 4, padding_idx=2)

    def forward(self, data):
        ids = data["square"]
        one = self.rows(ids[:, 0])
        three = self.rows(ids.unsqueeze(1).expand(-1, 2, -1))
        return torch.cat([one, three.sum((1, 2)), three[:, 1, 2].sin(), one * one], 1)


@ranks(3, timeout=60, check=nothing_differs)
def test_ids_of_any_shape(world):
    return {
        (way, travels, key): value
        for way in WAYS
        for travels in ("auto", "sums", "rows")
        for key, value in compare(world, Shapes, batches_of, way, travels=travels)[0].items()
    }


@ranks(2, timeout=60)
def test_one_id_and_lookups_that_do_not_count(world):
    torch.manual_seed(5)
    whole = nn.Embedding(13, 4)
    model = nn.Sequential(nn.Embedding(13, 4))
    model[0].load_state_dict(whole.state_dict())
    tables = split_tables(
        model, placements(model, "row", world.size), world.group, touched=["0.weight"]
    )
    assert torch.equal(model(torch.tensor(7 + world.rank)), whole(torch.tensor(7 + world.rank)))
    tables.counting = world.rank == 0
    model(torch.tensor([[0, 12], [3, 4]]) + world.rank * (world.rank - 1)).sum().backward()
    part = tables.parts["0.weight"]
    expected = {0: [0, 3, 4], 1: [12]}[world.rank]
    assert part.rows[part.parameter.grad.indices()[0]].tolist() == expected
    # Those of rank 0 alone: rank 1 has looked up the same.
    assert torch.equal(part.parameter.grad.values(), torch.ones(len(expected), 4))


class AsksForItsWeights(nn.Module):
    """The code of many models asks a table for its type, and some use its numbers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 4)
        self.use = None

    def forward(self, ids):
        weight = self.table.weight
        assert weight.shape == weight.size() == (13, 4)
        assert (weight.size(1), weight.numel(), len(weight)) == (4, 52, 13)
        assert weight.dim() == weight.ndim == 2
        assert weight.requires_grad
        assert not weight.is_cuda
        found = self.table(ids).to(weight.device, weight.dtype)
        return found if self.use is None else self.use(found, weight)


@ranks(2, timeout=60)
def test_a_split_weight_knows_its_form_and_refuses_its_numbers(world):
    model = AsksForItsWeights().double()
    split_tables(model, placements(model, "column", world.size), world.group)
    assert model(torch.tensor([3, 12])).dtype == torch.float64
    for use in (
        lambda x, w: x @ w.t(),
        lambda x, w: x @ w.T,
        lambda x, w: nn.functional.linear(x, w),
        lambda x, w: x + w[0],
        lambda x, w: x * w,
        lambda x, w: torch.mm(x, w),
        lambda x, w: x + w.norm(),
        lambda x, w: x + w.data,
    ):
        model.use = use
        with pytest.raises(PlanError, match=r"table\.weight is split") as error:
            model(torch.tensor([3, 12]))
        assert __file__ in str(error.value)
