"""single: tables that grow, against a dict and loops."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import CheckpointMismatch, DataError, UsageError
from headway.nn import DynamicEmbeddingBag, DynamicTable, field_keys
from headway.nn.dynamic_initial import initial_rows
from headway.nn.dynamic_storage import KeyIndex, RowStore, distinct
from headway.optim import LAMB, RowWiseAdagrad
from support import dynamic_reference as reference
from support.dynamic_streams import (
    DIM,
    as_dict,
    assert_rows,
    initial,
    pull,
    random_bags,
    tensors,
)

EDGES = [0, -1, 2**63 - 1, -(2**63), 2**62]


# Storage.

KEYS = st.one_of(st.integers(-6, 6), st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["upsert", "remove", "look"]), st.lists(KEYS, max_size=30)),
    max_size=30,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_a_table_does_what_a_dict_does(actions):
    table, model = DynamicTable(DIM, initial="zeros", dtype=torch.float64), {}
    for number, (action, keys) in enumerate(actions):
        asked = torch.tensor(keys, dtype=torch.int64)
        if action == "upsert":
            rows = [[float(number), float(place), 1.0] for place in range(len(keys))]
            table.upsert(asked, torch.tensor(rows, dtype=torch.float64).reshape(-1, DIM))
            model |= dict(zip(keys, rows, strict=True))
        elif action == "remove":
            assert table.remove(asked) == len({k for k in keys if k in model})
            model = {k: row for k, row in model.items() if k not in keys}
        else:
            read = table.lookup(asked).tolist()
            assert read == [model.get(k, [0.0] * DIM) for k in keys]
            assert [k in table for k in keys] == [k in model for k in keys]
    assert as_dict(table) == model
    assert len(table) == len(model)


@settings(deadline=None)
@given(keys=st.lists(KEYS, max_size=200))
def test_distinct_keys_without_sorting(keys):
    asked = torch.tensor(keys, dtype=torch.int64)
    first, inverse = distinct(asked)
    assert asked[first][inverse].tolist() == keys
    assert sorted(asked[first].tolist()) == sorted(set(keys))


def test_keys_that_all_want_the_same_slot(monkeypatch):
    """Every search and every insertion of a table goes through one long stretch."""
    monkeypatch.setattr(
        "headway.nn.dynamic_storage.mixed_hashes", lambda keys: torch.zeros_like(keys)
    )
    keys = torch.arange(-100, 100)
    index = KeyIndex(torch.device("cpu"))
    index.insert(keys, torch.arange(200))
    index.remove(keys[50:150])
    assert index.find(keys).tolist() == [*range(50), *[-1] * 100, *range(150, 200)]
    first, inverse = distinct(torch.cat([keys, keys]))
    assert torch.equal(torch.cat([keys, keys])[first][inverse], torch.cat([keys, keys]))


def test_thousands_of_keys_in_long_stretches(monkeypatch):
    """Many keys look at one slot after the other, the last few at several at once."""
    monkeypatch.setattr("headway.nn.dynamic_storage.mixed_hashes", lambda keys: keys << 59)
    keys, missing = torch.arange(8000), torch.arange(8000, 12000)
    index = KeyIndex(torch.device("cpu"))
    index.insert(keys, keys + 1)
    removed = keys % 7 == 0
    assert sorted(index.remove(keys[removed]).tolist()) == (keys[removed] + 1).tolist()
    assert torch.equal(index.find(keys), torch.where(removed, -1, keys + 1))
    assert index.find(missing).tolist() == [-1] * 4000


def test_rows_are_written_in_the_type_that_the_module_has_been_moved_to():
    keys, rows = torch.tensor([5, -2]), torch.full((2, 3), 1 / 3, dtype=torch.float64)
    first, second, third = (DynamicEmbeddingBag(3).double() for _ in range(3))
    first.table.upsert(keys, rows)
    second.load_state_dict(first.state_dict())
    for piece in second.table.pieces():
        third.table.take_piece(piece)
    for bag in (first, second, third):
        assert torch.equal(bag.table.lookup(keys), rows)
    first.float()
    (exported,) = (found for _, found in first.table.export())
    assert exported.dtype == torch.float32


def test_removed_keys_do_not_fill_the_index():
    store = RowStore()
    store.add_column("values", (1,), torch.float32)
    for turn in range(200):
        keys = torch.arange(100) + 100 * turn
        store.make(keys)
        assert store.remove(keys) == 100
    assert store.index.slots == 1024
    assert store.high == 100  # row numbers are used again


# Initial values.


def test_initial_values_are_a_pure_function_of_seed_key_and_column():
    keys = torch.tensor([*EDGES, 7, 7])
    for distribution in ("uniform", "normal"):
        rows = initial_rows(keys, 5, distribution, 2.0, 1)
        order = torch.randperm(len(keys))
        assert torch.equal(initial_rows(keys[order], 5, distribution, 2.0, 1), rows[order])
        assert torch.equal(initial_rows(keys, 2, distribution, 2.0, 1), rows[:, :2])
        assert torch.equal(rows[-1], rows[-2])
        assert len({tuple(row) for row in rows.tolist()}) == len(keys) - 1
        other = initial_rows(keys, 5, distribution, 2.0, 2)
        assert not torch.isclose(rows, other).any()


def test_initial_values_to_the_bit():
    """Another machine, or another version, must not change what a key begins with."""
    keys = torch.tensor([0, 2**62, -1])
    assert initial_rows(keys, 2, "uniform", 1.0, 0).flatten().tolist() == [
        float.fromhex(x) for x in UNIFORM_BITS
    ]
    assert initial_rows(keys, 2, "normal", 1.0, 0).flatten().tolist() == [
        float.fromhex(x) for x in NORMAL_BITS
    ]


UNIFORM_BITS = [
    "0x1.ababb68568300p-3", "0x1.5334e55e4a440p-6", "-0x1.8ea536edfc12ep-1",
    "0x1.db8e0e4e650b8p-2", "0x1.b22e2a2c823c0p-3", "-0x1.ecd78020f842ep-1",
]  # fmt: skip
NORMAL_BITS = [
    "-0x1.5be88c1431a92p+0", "-0x1.6a91fc11171cfp-4", "-0x1.bac35c1060ba1p-5",
    "-0x1.ecebc6a366290p-2", "0x1.5afd7704d36d0p+0", "0x1.47d478fa7e438p-3",
]  # fmt: skip


def test_initial_values_have_their_distribution():
    keys = torch.arange(200_000) * 64
    uniform = initial_rows(keys, 2, "uniform", 3.0, 5)
    assert uniform.abs().max() <= 3
    assert (uniform.mean(0).abs() < 0.02).all()
    normal = initial_rows(keys, 3, "normal", 2.0, 5) / 2
    assert (normal.mean(0).abs() < 0.012).all()
    wanted = torch.distributions.Normal(0.0, 1.0)
    for column in normal.T:
        for point in (-3.0, -1.5, -0.5, 0.0, 0.7, 2.0, 3.5):
            share = (column < point).double().mean()
            expected = wanted.cdf(torch.tensor(point, dtype=torch.float64))
            assert abs(share - expected) < 4 * (expected * (1 - expected) / len(keys)) ** 0.5
    assert (torch.corrcoef(normal.T) - torch.eye(3)).abs().max() < 0.012


# Steps.

OPTIMIZERS = {
    "SGD": (reference.sgd, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (reference.momentum, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Adam": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1)),
    "Adam, foreach": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1, foreach=True)),
    "Adam, fused": (reference.adam, lambda p: torch.optim.Adam(p, lr=0.1, fused=True)),
    "Adagrad": (
        reference.adagrad,
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    ),
    "row-wise Adagrad": (reference.row_wise_adagrad, lambda p: RowWiseAdagrad(p, lr=0.1)),
}


def apply(bag, bags, weights=None):
    return bag(**tensors(bags, weights))


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "sum") for name in OPTIMIZERS), ("Adam", "mean"), ("SGD", "sqrtn")]
)
def test_steps_equal_the_definition(name, mode):
    law, optimizer_of = OPTIMIZERS[name]
    rng = random.Random(f"{name} {mode}")
    bag = DynamicEmbeddingBag(DIM, mode=mode, dtype=torch.float64)
    optimizer, serial = optimizer_of(bag.parameters()), reference.SerialTable(law, initial)
    for _ in range(12):
        bags, weights, given = random_bags(rng, 5)
        vectors = apply(bag, bags, weights)
        expected = reference.vectors_of_bags(serial.read, bags, weights, DIM, mode)
        torch.testing.assert_close(
            vectors.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
        )
        optimizer.zero_grad()
        pull(vectors, given)
        optimizer.step()
        serial.step(reference.gradients_of_bags(bags, weights, given, mode))
        assert_rows(as_dict(bag.table), serial)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("admit", "evict"), [(0, 2), (1, None), (2, 3), (3, 1)])
def test_admission_and_eviction_are_rules_of_the_stream(admit, evict, micro):
    """Also for several micro-batches in a step, and several lookups in a pass."""
    rng = random.Random(f"{admit} {evict}")
    bag = DynamicEmbeddingBag(DIM, admit_after=admit, evict_after=evict, dtype=torch.float64)
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)
    serial = reference.SerialTable(reference.adam, initial, admit, evict or 10**9)
    for _ in range(25):
        bags, weights, given = random_bags(rng, 3 * micro, keys=40)
        optimizer.zero_grad()
        for part in range(micro):
            vectors = apply(bag, bags[part::micro], weights[part::micro])
            again = apply(bag, bags[part::micro], weights[part::micro])
            pull(0.25 * vectors + 0.75 * again, given[part::micro])
        optimizer.step()
        serial.step(reference.gradients_of_bags(bags, weights, given))
        assert_rows(as_dict(bag.table), serial)
        assert len(bag.table) == len(serial.rows)
        assert_tidy(bag.table)
    if evict:
        assert bag.table._rows.high < 41  # row numbers are used again


def assert_tidy(table):
    """Every row number belongs to one key or to none, and a key with a row is not waiting."""
    for store in (table._rows, table._waiting):
        numbers = torch.cat([torch.arange(0), *(rows for _, rows in store.index.chunks())])
        assert sorted(numbers.tolist()) == store.taken().nonzero().squeeze(1).tolist()
        assert len(numbers) == len(store)
    assert (table._waiting.find(torch.tensor([*as_dict(table)], dtype=torch.int64)) < 0).all()


def test_a_forgotten_key_is_as_new_to_the_optimiser():
    bag = DynamicEmbeddingBag(DIM, evict_after=1, dtype=torch.float64)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.1)
    for keys in ([5], [6], [6], [6], [7], [5]):
        optimizer.zero_grad()
        bag(torch.tensor([keys])).sum().backward()
        optimizer.step()
    (state,) = optimizer.state.values()
    assert state["sum"][bag.table._find(torch.tensor([5]))].tolist() == [[1.0] * DIM]


# As torch's own module.


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_it_equals_embedding_bag_with_max_norm(mode):
    torch.manual_seed(0)
    ours = DynamicEmbeddingBag(DIM, mode=mode, max_norm=1.0, dtype=torch.float64)
    rows = torch.randn(10, DIM, dtype=torch.float64)
    ours.table.upsert(torch.arange(10), rows)
    theirs = nn.EmbeddingBag(
        10, DIM, mode=mode, max_norm=1.0, dtype=torch.float64, _weight=rows.clone()
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs)]
    for _ in range(5):
        ids, offsets = torch.randint(0, 10, (12,)), torch.tensor([0, 3, 3, 9])
        results = [m(ids, offsets) for m in (ours, theirs)]
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)
        for optimizer, result in zip(optimizers, results, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours(torch.arange(10)[:, None]), theirs(torch.arange(10)[:, None]))


def test_weights_have_gradients():
    bag = DynamicEmbeddingBag(DIM, mode="sqrtn", initial="normal", scale=1.0, dtype=torch.float64)
    keys, lengths = torch.tensor([1, 2, 2, 3, 1]), torch.tensor([2, 0, 3])
    weights = torch.tensor([0.5, 2, 1, 3, 0.25], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda w: bag(keys, per_sample_weights=w, lengths=lengths), (weights,)
    )


def test_an_empty_bag_has_zeros_or_the_vector_of_the_default():
    keys, lengths = torch.tensor([4, 4, 5]), torch.tensor([0, 2, 0, 1, 0])
    plain = DynamicEmbeddingBag(DIM)(keys, lengths=lengths)
    assert plain[0].tolist() == plain[2].tolist() == plain[4].tolist() == [0.0] * DIM
    bag = DynamicEmbeddingBag(DIM, default_id=9, mode="mean")
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    found = bag(keys, lengths=lengths, per_sample_weights=torch.tensor([1.0, 2.0, 0.5]))
    assert torch.equal(found[[0, 2, 4]], bag.table.lookup(torch.tensor([9, 9, 9])))
    torch.testing.assert_close(found[1], bag.table.lookup(torch.tensor(4)))
    found.sum().backward()
    optimizer.step()
    assert sorted(as_dict(bag.table)) == [4, 5, 9]
    assert DynamicEmbeddingBag(DIM, default_id=9)(torch.empty(0, 2, dtype=torch.int64)).shape == (
        0,
        DIM,
    )


def test_passes_without_gradients_change_nothing():
    bag = DynamicEmbeddingBag(DIM, admit_after=1)
    optimizer = torch.optim.Adam(bag.parameters())
    keys = torch.tensor([[1, 2]])
    with torch.no_grad():
        first = bag(keys)
    assert torch.equal(first, bag.eval()(keys))
    assert not bag(keys).requires_grad
    optimizer.step()
    assert len(bag.table) == 0
    assert bag.table._waiting.high == 0
    bag.train().requires_grad_(False)
    assert not bag(keys).requires_grad


def test_two_modules_share_a_table_and_copies_do_not():
    one = DynamicEmbeddingBag(DIM, dtype=torch.float64)
    two = DynamicEmbeddingBag(mode="mean", table=one.table)
    model = nn.ModuleList([one, two])
    assert len(list(model.parameters())) == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (one(torch.tensor([[1, 2]])).sum() + two(torch.tensor([[2, 3]])).sum()).backward()
    other = copy.deepcopy(model)
    optimizer.step()
    moved = {
        k: [b - a for a, b in zip(initial(k), row, strict=True)]
        for k, row in as_dict(one.table).items()
    }
    assert moved == {
        k: pytest.approx([-0.5 * by] * DIM) for k, by in {1: 1, 2: 1.5, 3: 0.5}.items()
    }
    assert other[0].table is other[1].table
    torch.optim.SGD(other.parameters(), lr=0.5).step()  # copies of parameters have no gradients
    assert len(other[0].table) == 0


def train(bag, optimizer, steps, start=0):
    for number in range(start, start + steps):
        rng = random.Random(number)
        bags, weights, given = random_bags(rng, 4, keys=30)
        optimizer.zero_grad()
        pull(apply(bag, bags, weights), given)
        optimizer.step()


@pytest.mark.parametrize("way", ["state_dict", "file", "pickle", "deepcopy"])
def test_a_saved_table_goes_on_as_if_nothing_had_been(way):
    law = {"admit_after": 1, "evict_after": 3, "dtype": torch.float64}
    bag = DynamicEmbeddingBag(DIM, **law)
    optimizer = torch.optim.Adam(bag.parameters())
    train(bag, optimizer, 9)
    if way == "pickle":
        again = pickle.loads(pickle.dumps(bag))
    elif way == "deepcopy":
        again = copy.deepcopy(bag)
    else:
        again, state = DynamicEmbeddingBag(DIM, **law), bag.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        again.load_state_dict(state)
    continued = torch.optim.Adam(again.parameters())
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert as_dict(again.table) == as_dict(bag.table)
    for each, own in ((bag, optimizer), (again, continued)):
        train(each, own, 9, start=9)
    assert as_dict(again.table) == as_dict(bag.table)


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad"])
def test_pieces_make_the_table_again_also_one_without_rows(kind):
    options = {"momentum": 0.9} if kind == "SGD" else {}
    law = {"admit_after": 1, "evict_after": 9, "dtype": torch.float64}
    for steps in (1, 6):  # of one step all keys are waiting
        tables, optimizers = [], []
        for _ in range(2):
            tables.append(DynamicEmbeddingBag(DIM, **law))
            parameters = tables[-1].parameters()
            optimizers.append(getattr(torch.optim, kind)(parameters, lr=0.1, **options))
        train(tables[0], optimizers[0], steps)
        assert bool(len(tables[0].table)) == (steps > 1)
        for piece in tables[0].table.pieces(optimizers[0], chunk=6):
            assert all(len(v) <= 6 for k, v in piece.items() if k.startswith("rows"))
            tables[1].table.take_piece(piece, optimizers[1])
        for bag, optimizer in zip(tables, optimizers, strict=True):
            train(bag, optimizer, 4, start=steps)
        assert as_dict(tables[0].table) == as_dict(tables[1].table)
        other = DynamicEmbeddingBag(DIM, seed=1, **law)
        with pytest.raises(CheckpointMismatch, match="cannot be loaded into"):
            other.table.take_piece(piece)


def test_a_state_of_another_law_is_refused():
    state = DynamicEmbeddingBag(DIM, seed=1).state_dict()
    with pytest.raises(CheckpointMismatch, match=r"'seed': 1.* cannot be loaded"):
        DynamicEmbeddingBag(DIM).load_state_dict(state)


def test_a_state_saved_between_backward_and_step_is_that_before_it():
    bag = DynamicEmbeddingBag(DIM)
    bag(torch.tensor([[1]])).sum().backward()
    fresh = DynamicEmbeddingBag(DIM)
    fresh.load_state_dict(bag.state_dict())
    assert len(fresh.table) == 0
    bag.load_state_dict(fresh.state_dict())
    assert bag.table.weight.grad is None


def test_a_step_that_is_left_out_leaves_no_trace():
    bag = DynamicEmbeddingBag(DIM, dtype=torch.float64, admit_after=1)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag(torch.tensor([[1]])).sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        bag(torch.tensor([[2]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(as_dict(bag.table)) == [2]


def test_it_is_left_out_of_compiled_code_and_can_be_computed_again():
    keys = torch.tensor([[1, 2], [2, 3]])
    found = []
    for way in ("plain", "compiled", "reentrant", "again"):
        bag = DynamicEmbeddingBag(DIM, dtype=torch.float64, admit_after=1)
        model = nn.Sequential(bag, nn.Tanh())
        optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)
        called = torch.compile(model, backend="eager") if way == "compiled" else model
        scale = torch.ones(1, requires_grad=True, dtype=torch.float64)
        for _ in range(2):
            if way in ("reentrant", "again"):
                vectors = checkpoint(
                    lambda s, model=model: model(keys) * s, scale, use_reentrant=way == "reentrant"
                )
            else:
                vectors = called(keys) * scale
            vectors.sum().backward()
            optimizer.step()
        found.append(as_dict(bag.table))
    assert len(found[0]) == 3
    assert found == [found[0]] * 4


def test_a_step_between_forward_and_backward_is_not_lost():
    """As of two losses with an update for each."""
    bag = DynamicEmbeddingBag(DIM, dtype=torch.float64)
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)
    serial = reference.SerialTable(reference.adam, initial)
    keys = torch.tensor([[1, 2], [2, 3]])
    for factor in (1.0, 2.0):
        passes = [bag(keys), bag(keys[1:])]
        for vectors, touched in zip(passes, ({1: 1, 2: 2, 3: 1}, {2: 1, 3: 1}), strict=True):
            optimizer.zero_grad()
            (vectors * factor).sum().backward()
            if factor == 2.0 and len(touched) == 2:  # nor what was set by hand
                bag.table.upsert(torch.tensor([3]), torch.ones(1, DIM, dtype=torch.float64))
                serial.rows[3] = [1.0] * DIM
            optimizer.step()
            serial.step({key: [factor * times] * DIM for key, times in touched.items()})
            assert_rows(as_dict(bag.table), serial)
    assert_tidy(bag.table)


def test_gradients_can_be_clipped():
    bag = DynamicEmbeddingBag(DIM, dtype=torch.float64)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    bag(torch.tensor([[1, 1, 2]])).sum().backward()
    norm = nn.utils.clip_grad_norm_(bag.parameters(), 1.0)
    assert norm.item() == pytest.approx((4 * DIM + DIM) ** 0.5)
    optimizer.step()
    moved = [a - b for a, b in zip(initial(1), as_dict(bag.table)[1], strict=True)]
    assert moved == pytest.approx([2 / norm.item()] * DIM, rel=1e-5)


def test_a_module_can_go_to_another_type():
    bag = DynamicEmbeddingBag(DIM).double()
    optimizer = torch.optim.Adam(bag.parameters())
    train(bag, optimizer, 2)
    assert {rows.dtype for _, rows in bag.table.export()} == {torch.float64}
    assert bag.float()(torch.tensor([[1]])).dtype == torch.float32
    assert {rows.dtype for _, rows in bag.table.export()} == {torch.float32}


def test_other_optimisers_of_torch_train_it():
    """What they keep for a row begins as they would begin it themselves."""
    for kind in ("Adadelta", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
        bag = DynamicEmbeddingBag(DIM, dtype=torch.float64)
        plain = nn.Parameter(torch.tensor([initial(1)], dtype=torch.float64))
        optimizers = [getattr(torch.optim, kind)(p, lr=0.1) for p in (bag.parameters(), [plain])]
        for turn in range(4):
            for optimizer, row in zip(optimizers, (None, plain), strict=True):
                optimizer.zero_grad()
                vector = bag(torch.tensor([[1]])) if row is None else row
                vector.mul(torch.tensor([1.0, -2.0, turn - 1.5])).sum().backward()
                optimizer.step()
        torch.testing.assert_close(
            bag.table.lookup(torch.tensor([1])), plain.detach(), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize(
    ("optimizer_of", "why"),
    [
        (lambda p: torch.optim.Adafactor(p), "depends on the other rows"),
        (lambda p: LAMB(p, lr=0.1), "depends on the other rows"),
        (lambda p: torch.optim.Muon(p), "depends on the other rows"),
        (lambda p: torch.optim.SparseAdam(p), "a trial step of it ends with"),
    ],
)
def test_optimisers_without_a_law_by_row_are_refused(optimizer_of, why):
    bag = DynamicEmbeddingBag(DIM)
    optimizer = optimizer_of(list(bag.parameters()))
    bag(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(UsageError, match=why):
        optimizer.step()
    assert len(bag.table) == 0


def test_a_step_with_a_closure_is_refused():
    bag = DynamicEmbeddingBag(DIM)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = bag(torch.tensor([[1, 2]])).sum()
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="without a closure"):
        optimizer.step(closure)


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"dim": 2, "scale": -1.0}, "scale is -1.0"),
        ({"dim": 2, "initial": "xavier"}, "initial is 'xavier'"),
        ({"dim": 2, "admit_after": -1}, "admit_after is -1"),
        ({"dim": 2, "evict_after": 0}, "evict_after is 0"),
        ({"dim": 2, "max_norm": 0.0}, "max_norm is 0.0"),
        ({"dim": 2, "mode": "max"}, "mode is 'max'"),
        ({"dim": 2, "default_id": 2**63}, "must have 64 bits"),
        ({}, "dim is missing"),
        ({"dim": 2, "combiner": "sum"}, "there is no argument combiner"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(UsageError, match=message):
        DynamicEmbeddingBag(**arguments)


def test_a_shared_table_has_its_own_law():
    table = DynamicTable(4)
    with pytest.raises(UsageError, match="has 4 columns"):
        DynamicEmbeddingBag(3, table=table)
    with pytest.raises(UsageError, match="seed, evict_after and table are given"):
        DynamicEmbeddingBag(table=table, seed=3, evict_after=2)


@pytest.mark.parametrize(
    ("keys", "rest", "message"),
    [
        (torch.tensor([[1.0]]), {}, "keys are float32"),
        ([[1]], {}, "keys are list"),
        (torch.tensor([1]), {}, "neither offsets nor lengths"),
        (torch.tensor([[1]]), {"lengths": torch.tensor([1])}, "two dimensions"),
        (torch.tensor([1, 2]), {"lengths": torch.tensor([3, -1])}, "bag 1 has -1 keys"),
        (torch.tensor([1, 2]), {"lengths": torch.tensor([1])}, "add up to 1"),
        (torch.tensor([1, 2]), {"offsets": torch.tensor([0, 2, 1])}, "bag 1 has -1 keys"),
        (torch.tensor([1, 2]), {"offsets": torch.tensor([1])}, "first offset"),
        (torch.tensor([1, 2]), {"offsets": torch.tensor([0.0])}, "offsets are float32"),
        (
            torch.tensor([[1, 2]]),
            {"per_sample_weights": torch.tensor([[1.0, float("nan")]])},
            "weight number 1 is nan",
        ),
        (torch.tensor([[1]]), {"per_sample_weights": torch.tensor([1.0])}, "weights are"),
    ],
)
def test_bad_bags(keys, rest, message):
    bag = DynamicEmbeddingBag(DIM)
    with pytest.raises(DataError, match=message):
        bag(keys, **rest)
    assert len(bag.table) == 0


def test_fields_that_share_a_table_have_keys_of_their_own():
    ids = torch.tensor([0, 1, -1, 2**60 - 1, -(2**60)])
    keys = torch.cat([field_keys(ids, field, bits=3) for field in range(8)])
    assert len(keys.unique()) == 40
    assert torch.equal(field_keys(ids, 0, bits=3)[:2], ids[:2])
    with pytest.raises(DataError, match=f"id {2**60} of field 2 has more than 61 bits"):
        field_keys(torch.tensor([5, 2**60]), 2, bits=3)
    with pytest.raises(UsageError, match="field 8 with 3 bits"):
        field_keys(ids, 8, bits=3)


def test_rows_of_another_form():
    with pytest.raises(DataError, match="There must be one key"):
        DynamicTable(DIM).upsert(torch.tensor([1, 2]), torch.zeros(1, DIM))
