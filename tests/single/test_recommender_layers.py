"""single: layers and models of recommenders against their formulas, by loops and by einsum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headway.errors import RecipeError, UsageError
from headway.nn import (
    CrossLayer,
    CrossLayerV2,
    FactorizationMachine,
    FieldAwareFactorizationMachine,
    PairwiseDots,
    ProjectedBag,
    QuotientRemainderBag,
)
from headway.nn.compressed import mixed_width
from headway.workloads.dcn import DCN
from headway.workloads.deepfm import DeepFM
from headway.workloads.des_fm import FM
from headway.workloads.dlrm import DLRM
from headway.workloads.recommender.click_data import Field
from headway.workloads.recommender.planted import planted
from headway.workloads.wide_deep import WideDeep

FIELDS = (Field("a", 5), Field("bag", 7, 3), Field("c", 4))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def drawn(samples=6, numbers=4):
    """Numbers, and ids with empty places in the bag."""
    ids = torch.stack([torch.randint(rows, (samples,)) for rows in (5, 7, 7, 7, 4)], 1)
    ids[0, 1:4] = -1
    ids[1, 2] = -1
    ids[2, 1:3] = 3  # twice the same id
    return torch.randn(samples, numbers).double(), ids


def scattered(module):
    """With numbers of a size that shows every term."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


def by_einsum(model, dense, ids):
    """DLRM in the words of its paper."""
    z = model.bottom(dense)
    e = []
    for table, part in zip(model.tables.tables, ids.split(model.tables.places, 1), strict=True):
        bags = [table.weight[bag[bag >= 0]].sum(0) for bag in part]
        e.append(torch.stack(bags))
    t = torch.stack([z, *e], dim=1)
    if model.dots is None:
        return model.top(t.flatten(1)).squeeze(1)
    products = torch.einsum("nid,njd->nij", t, t)
    below = 1 if model.dots.features > t.shape[1] * (t.shape[1] - 1) // 2 else 0
    lower = [products[:, i, j] for i in range(t.shape[1]) for j in range(i + below)]
    return model.top(torch.cat([z, torch.stack(lower, 1)], dim=1)).squeeze(1)


@pytest.mark.parametrize(
    "options", [{}, {"itself": True}, {"interaction": "cat"}], ids=["dot", "itself", "cat"]
)
def test_dlrm_equals_its_reference(options):
    model = scattered(DLRM(4, FIELDS, width=3, bottom=(5,), top=(6,), **options))
    dense, ids = drawn()
    torch.testing.assert_close(model(dense, ids), by_einsum(model, dense, ids), rtol=1e-12, atol=0)


def test_the_triangle_is_read_row_by_row():
    vectors = torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]])
    assert PairwiseDots(4)(vectors).tolist() == [[10, 100, 1000, 1e3, 1e4, 1e5]]
    assert PairwiseDots(2, itself=True)(vectors[:, :2]).tolist() == [[1, 10, 100]]


def test_first_numbers_of_dlrm():
    model = DLRM(400, (Field("wide", 10_000),), width=64, bottom=(300,), top=(200,))
    (table,) = model.tables.tables
    assert table.weight.abs().max() <= 0.01
    assert table.weight.std().item() == pytest.approx(0.01 / math.sqrt(3), rel=0.01)
    assert model.bottom[0].weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert model.bottom[0].bias.std().item() == pytest.approx(math.sqrt(1 / 300), rel=0.2)


def test_clamped_probabilities():
    model = scattered(DLRM(4, FIELDS, clamp=0.01))
    probabilities = (100 * model(*drawn())).sigmoid()
    model.most = None
    assert not torch.equal(probabilities, (100 * model(*drawn())).sigmoid())
    model = scattered(DLRM(4, FIELDS, clamp=0.01))
    found = model(*drawn(samples=300)).sigmoid()
    assert found.min().item() == pytest.approx(0.01)
    assert found.max().item() == pytest.approx(0.99)


@pytest.mark.parametrize(
    "arguments", [{"interaction": "sum"}, {"compress": "zip"}, {"clamp": 0.5}, {"clamp": -0.1}]
)
def test_dlrm_refuses(arguments):
    with pytest.raises(RecipeError):
        DLRM(4, FIELDS, **arguments)


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_factorisation_machine_equals_its_formula(width, weighted):
    machine = scattered(FactorizationMachine(11, width))
    ids = torch.randint(11, (6, 5))
    ids[0, :3] = 4
    values = torch.randn(6, 5).double() if weighted else None
    x = values if weighted else torch.ones(6, 5).double()
    w = machine.weights.weight[:, 0]
    for n, score in enumerate(machine(ids, values)):
        expected = machine.bias[0].clone()
        for i in range(5):
            expected += w[ids[n, i]] * x[n, i]
            for j in range(i) if width else ():
                v = machine.vectors.weight
                expected += v[ids[n, i]] @ v[ids[n, j]] * x[n, i] * x[n, j]
        torch.testing.assert_close(score, expected, rtol=1e-12, atol=1e-12)


def test_a_field_aware_machine_equals_its_formula():
    places, width = (1, 3, 1), 2
    machine = scattered(FieldAwareFactorizationMachine(11, width, places))
    field = [f for f, count in enumerate(places) for _ in range(count)]
    ids, values = torch.randint(11, (6, 5)), torch.randn(6, 5).double()
    v = machine.vectors.weight.view(11, 3, width)
    for n, score in enumerate(machine(ids, values)):
        expected = machine.bias[0] + machine.weights.weight[ids[n], 0] @ values[n]
        for i in range(5):
            for j in range(i):
                product = v[ids[n, i], field[j]] @ v[ids[n, j], field[i]]
                expected = expected + product * values[n, i] * values[n, j]
        torch.testing.assert_close(score, expected, rtol=1e-12, atol=1e-12)


def test_cross_layers_equal_their_formulas():
    first, x = torch.randn(2, 6, 5).double()
    layer = scattered(CrossLayer(5))
    for n in range(6):
        expected = first[n] * (x[n] @ layer.weight.weight[0]) + layer.bias + x[n]
        torch.testing.assert_close(layer(first, x)[n], expected)
    for rank in (None, 2):
        layer = scattered(CrossLayerV2(5, rank))
        matrix = layer.up.weight if rank is None else layer.up.weight @ layer.down.weight
        expected = first * (x @ matrix.T + layer.up.bias) + x
        torch.testing.assert_close(layer(first, x), expected)


@pytest.mark.parametrize("join", ["mult", "add", "concat"])
def test_quotients_and_remainders_make_rows(join):
    bag = scattered(QuotientRemainderBag(10, 4, remainders=3, join=join))
    assert [t.num_embeddings for t in (bag.quotient, bag.remainder)] == [4, 3]
    ids, weights = torch.tensor([[9, 9, 1], [0, 5, 2]]), torch.randn(2, 3).double()
    q, r = bag.quotient.weight, bag.remainder.weight
    join_rows = {"mult": torch.mul, "add": torch.add, "concat": lambda a, b: torch.cat((a, b))}[
        join
    ]
    for n in range(2):
        rows = [join_rows(q[i // 3], r[i % 3]) for i in ids[n].tolist()]
        expected = sum(w * row for w, row in zip(weights[n], rows, strict=True))
        torch.testing.assert_close(bag(ids, per_sample_weights=weights)[n], expected)
        torch.testing.assert_close(bag(ids)[n], sum(rows))
    with pytest.raises(UsageError, match="width is even"):
        QuotientRemainderBag(10, 3, join="concat")


def test_narrow_rows_are_widened():
    bag = scattered(ProjectedBag(10, 2, 5))
    ids = torch.tensor([[9, 9, 1]])
    expected = (bag.table.weight[[9, 9, 1]] @ bag.widen.weight.T).sum(0)
    torch.testing.assert_close(bag(ids)[0], expected)
    widths = [mixed_width(rows, 10, 16, 0.5) for rows in (10, 40, 160, 1000, 10**9)]
    assert widths == [16, 8, 4, 2, 1]
    assert mixed_width(10**9, 10, 16, 0.0) == 16


@pytest.mark.parametrize(("compress", "share"), [("quotient", 0.3), ("mixed", 0.6)])
def test_compressed_dlrm_is_smaller_and_learns_every_id(compress, share):
    fields = (Field("few", 30), Field("many", 3000, 2))
    plain, small = (DLRM(4, fields, compress=c) for c in ("none", compress))
    sizes = [sum(p.numel() for p in model.tables.parameters()) for model in (plain, small)]
    assert sizes[1] < share * sizes[0]
    dense, ids = torch.randn(8, 4), torch.randint(30, (8, 3))
    small(dense, ids).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in small.tables.parameters())


@pytest.mark.parametrize(
    "make",
    [
        FM,
        lambda data: FM(data, width=0),
        lambda data: FM(data, field_aware=True),
        WideDeep,
        DeepFM,
        DCN,
        lambda data: DCN(data, version=1),
        lambda data: DLRM(len(data.numbers), data.fields),
        lambda data: DLRM(len(data.numbers), data.fields, compress="quotient"),
        lambda data: DLRM(len(data.numbers), data.fields, compress="mixed"),
    ],
)
def test_an_empty_place_counts_for_nothing(make):
    """Ids of an empty place do not matter, and neither does their order in a bag."""
    data = planted(50, tables=3, places=3, rows=300)
    model = scattered(make(data))
    dense, ids, _ = data.training.read(range(8))
    ids[:, 1] = -1
    found = model(dense.double(), ids)
    assert found.shape == (8,)
    moved = ids[:, [2, 0, 1, 3, 4, 5, 6, 7, 8]]
    torch.testing.assert_close(model(dense.double(), moved), found)
    ids[:, 1] = 0
    assert not torch.allclose(model(dense.double(), ids), found, rtol=1e-6, atol=0)


def test_deepfm_shares_its_vectors():
    data = planted(50, tables=3, rows=9)
    model = scattered(DeepFM(data))
    for parameter in (*model.deep.parameters(), *model.numbers.parameters()):
        nn.init.zeros_(parameter)
    machine = FactorizationMachine(model.ids.rows, 8).double()
    machine.weights, machine.vectors = model.weights, model.vectors
    dense, ids, _ = data.training.read(range(8))
    expected = machine(*model.ids(ids, torch.float64))
    torch.testing.assert_close(model(dense.double(), ids), expected)
    # The deep part sees them, too.
    nn.init.normal_(model.deep[0].weight)
    nn.init.normal_(model.deep[-1].weight)
    nn.init.normal_(model.deep[2].weight)
    assert not torch.allclose(model(dense.double(), ids), expected)
