"""ranks: plans that split tables train what one process trains."""

from __future__ import annotations

import pytest
import torch

from headway.errors import HeadwayError
from headway.plans import ExchangePlan, LayerSplit, data_parallel
from headway.plans.tables import TableSplit
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support import table_recipes
from support.commands import headway_here
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import flat, largest_error, train_serially
from support.table_recipes import Clicks, clicking

SEED, STEPS, WAYS = 3, 6, ("copies", "table", "column", "row", "table_row", "grid", "hash")
MIXED = (
    TableSplit(tables="users", way="hash"),
    TableSplit(tables="items", way="column", columns=2),
    TableSplit(way="row"),
)


SOME = (
    TableSplit(tables="users", way="hash", ranks=(2, 0)),
    TableSplit(tables="items", way="column", ranks=(1, 2), columns=2),
    TableSplit(way="row", ranks=(1, 0)),
)
"""Of three ranks each table lies on two."""


def train(world, case, make, tables, batch, clip, length, kept):
    torch.manual_seed(SEED)
    model = getattr(table_recipes, case)().double()
    kept = {"split": LayerSplit(tables=tables), **kept}
    plan = data_parallel(batch, processes=world.size, precision="float64", **kept)
    optimizer = getattr(table_recipes, make)(model)
    run = Executor(
        model, optimizer, loss=clicking, plan=plan, seed=SEED, clip=clip, world=World.adopt()
    )
    history = []
    for _, part in zip(range(STEPS), run.batches(Clicks(length), epochs=None), strict=False):
        found = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), found))
    with run.loader(Clicks(length), epochs=1) as loader:
        told = run.evaluate(loader)
    rows = {name: len(part.rows) for name, part in run.strategy.parameters.tables.parts.items()}
    sparse = {name: part.sparse for name, part in run.strategy.parameters.tables.parts.items()}
    with run.whole() as whole:
        ended = (
            {n: t.detach().clone() for n, t in whole.state_dict().items()} if not world.rank else {}
        )
    plain = plan.split.shared_memory
    assert len(run.strategy.parameters.tables.tables.wire.streams) == plain * (world.size - 1)
    run.strategy.close()
    return history if not world.rank else [], told, rows, sparse, ended


def compare(
    ranks, tables, *, case="Recommender", make="adam", batch=8, clip=None, length=40, **kept
):
    found = run_ranks(ranks, train, case, make, tables, batch, clip, length, kept)
    build, made = getattr(table_recipes, case), getattr(table_recipes, make)
    serial = train_serially(
        build, Clicks(length), clicking, made, batch=batch, steps=STEPS, seed=SEED, clip=clip
    )
    for step, (a, b) in enumerate(zip(serial, found[0][0], strict=True), start=1):
        a = {name: t.to_dense() if t.is_sparse else t for name, t in a.items()}
        b = {name: t.to_dense() if t.is_sparse else t for name, t in b.items()}
        error, name = largest_error(a, b)
        assert error < 1e-12, f"step {step}: {name} differs by {error:.1e}"
    for name, tensor in found[0][4].items() if case != "Tied" else ():
        assert torch.allclose(tensor, serial[-1][f"parameter {name}"], rtol=0, atol=1e-12)
    assert all(told[1] == found[0][1] for told in found)
    assert found[0][1][1] == len(Clicks(length))
    return found


@pytest.mark.parametrize(
    ("ranks", "tables"),
    sampled([(ranks, way) for ranks in (2, 3) for way in (*WAYS, MIXED)], 3),
    ids=str,
)
def test_split_tables_are_the_serial_run(ranks, tables):
    compare(ranks, tables, clip=0.05, microbatch=2)


@pytest.mark.parametrize(
    ("tables", "case", "make"),
    [
        ("row", "Dropping", "adam"),
        ("hash", "Recommender", "sgd"),
        (MIXED, "Recommender", "adagrad"),
        ("grid", "Recommender", "grouped"),
        ("copies", "Recommender", "sgd"),
        ("row", "Tied", "adam"),
        (MIXED, "FrozenTable", "adagrad"),
        ("hash", "OnlyTables", "adagrad"),
        ("row", "Recommender", "row_wise"),
        ("column", "Recommender", "row_wise"),
        (SOME, "Recommender", "row_wise"),
        ("row", "Sparse", "sparse_adam"),
        ("hash", "Sparse", "sparse_adam"),
    ],
)
def test_optimisers_and_models(tables, case, make):
    # A ragged last batch of one sample: two ranks have none.
    found = compare(3, tables, case=case, make=make, length=41, microbatch=2)
    wanted = make in ("sgd", "adagrad", "sparse_adam", "grouped", "row_wise")
    for _, _, _, sparse, _ in found:
        assert set(sparse.values()) == {wanted}


@pytest.mark.parametrize(
    ("ranks", "tables", "kept"),
    [
        (2, "row", {"zero": 1}),
        (2, MIXED, {"zero": 2, "clip": 0.05, "microbatch": 2}),
        (2, MIXED, {"split": LayerSplit(tables=MIXED, shared_memory=False)}),
        (2, "table", {"zero": 3, "clip": 0.05}),
        (4, "hash", {"zero": 3, "shards": 2, "microbatch": 1}),
        (3, "row", {"shares": (4, 1, 3)}),
        (2, "column", {"exchange": ExchangePlan(bucket="1 KiB", overlap=False)}),
        (4, "grid", {"exchange": ExchangePlan(collective="hierarchical")}),
    ],
    ids=str,
)
def test_with_what_is_done_to_the_rest(ranks, tables, kept):
    compare(ranks, tables, length=41, **kept)


def refusal(world, make, tables):
    model = table_recipes.Recommender().double()
    plan = data_parallel(8, processes=world.size, split=LayerSplit(tables=tables))
    optimizer = getattr(table_recipes, make)(model)
    with pytest.raises(HeadwayError) as caught:
        Executor(model, optimizer, loss=clicking, plan=plan, world=World.adopt())
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "tables", "words"),
    [
        ("lars", "row", "users.weight: the update of a row depends on other rows of the table"),
        ("adafactor", "column", "Adafactor cannot update these tables in pieces"),
        ("adam", (TableSplit(tables="usres"),), "no table matches 'usres'; did you mean users?"),
        ("adam", (TableSplit(tables="tags", way="column", columns=3),), "cannot be cut into 3"),
        ("sparse_adam", "row", "SparseAdam cannot be used by 2 processes for numbers.weight"),
    ],
)
def test_refusals_by_name(make, tables, words):
    for told in run_ranks(2, refusal, make, tables):
        assert words in told


def test_norms_of_tables_that_one_rank_has_are_those_of_the_whole():
    compare(2, "table", make="lars")


@pytest.mark.slow
@pytest.mark.parametrize("compress", sampled(["fp16", "topk:0.1", "powersgd:2", "int8"], 1))
def test_compressed_gradients_of_the_rest_obey_their_law(tmp_path, compress):
    words = ("split.tables=hash", f"exchange.compress={compress}", "clip=0.1")
    done = headway_here(
        "verify", "support.table_recipes:clicks", "-n", "2",
        *[word for value in words for word in ("--set", value)], cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "INEXACT by its plan, and its law holds" in done.out
