"""ranks: recipes with tables that grow, also from a stream: the serial run, checkpoints."""

from __future__ import annotations

import pytest
import torch

from headway.errors import CheckpointMismatch, PlanError
from headway.plans import LayerSplit, data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.verification.whole_run import recorded_end
from support import growing_recipes
from support.commands import headway_here
from support.growing_recipes import Clicks, clicking
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import flat, largest_error, train_serially
from support.table_recipes import Recommender

STEPS = 6


def train(world, case, make, batch, clip, length, tables, kept, where=None, more=0):
    torch.manual_seed(3)
    model = getattr(growing_recipes, case)().double()
    split = {"split": LayerSplit(tables=tables)} if tables else {}
    plan = data_parallel(batch, processes=world.size, precision="float64", **split, **kept)
    optimizer = growing_recipes.OPTIMIZERS[make](model)
    run = Executor(model, optimizer, loss=clicking, plan=plan, seed=3, clip=clip,
                   world=World.adopt())  # fmt: skip
    history = []
    batches = run.batches(Clicks(length), epochs=None)
    if more:
        run.cut(next(iter(run.batches(Clicks(length)))))
        run.resume(where)
    for _, part in zip(range(more or STEPS), batches, strict=False):
        found = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), found))
    rows = len(model.users.table)
    with run.loader(Clicks(length), epochs=1) as loader:
        told = run.evaluate(loader)
    assert len(model.users.table) == rows  # evaluation makes none
    if where and not more:
        run.save(where)
    with run.whole() as whole:
        keys = torch.arange(-3, 23 * 2**40, 2**40)
        ended = whole.users.table.lookup(keys) if not world.rank else None
        total = len(whole.users.table)
    run.strategy.close()
    return history if not world.rank else [], told, rows, ended, total


def serially(case, make, batch, clip, length, steps=STEPS):
    build = getattr(growing_recipes, case)
    made = growing_recipes.OPTIMIZERS[make]
    return train_serially(
        build, Clicks(length), clicking, made, batch=batch, steps=steps, clip=clip
    )


def same(serial, split):
    assert any(name.startswith("key users.table.rows.keys") for name in serial)
    a = {n: t.to_dense() if t.is_sparse else t for n, t in serial.items()}
    b = {n: t.to_dense() if t.is_sparse else t for n, t in split.items()}
    for name in a:
        if name.startswith("key "):
            assert torch.equal(a[name], b[name]), name
    assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()}
    error, name = largest_error(*({n: t for n, t in x.items() if t.numel()} for x in (a, b)))
    assert error < 1e-12, f"{name} differs by {error:.1e}"


CASES = [
    (1, "Growing", "adam", None, {}),
    (2, "Growing", "adam", None, {"microbatch": 2}),
    (3, "Forgetting", "adagrad", None, {"microbatch": 1}),
    (2, "Dropping", "sgd", "row", {}),
    (3, "Forgetting", "row_wise", "hash", {"microbatch": 2}),
    (2, "Growing", "adam", None, {"zero": 2}),
    (3, "Growing", "adagrad", None, {"shares": (4, 1, 3)}),
    (7, "Forgetting", "adam", None, {}),
]


@pytest.mark.parametrize(("ranks", "case", "make", "tables", "kept"), sampled(CASES, 4), ids=str)
def test_it_is_the_serial_run(ranks, case, make, tables, kept):
    # A ragged last batch of one sample: all ranks but one have none.
    found = run_ranks(ranks, train, case, make, 8, 0.05, 41, tables, kept)
    serial = serially(case, make, 8, 0.05, 41)
    for a, b in zip(serial, found[0][0], strict=True):
        same(a, b)
    assert all(told[1] == found[0][1] for told in found)
    assert found[0][4] == sum(one[2] for one in found)
    keys = serial[-1]["key users.table.rows.keys"].view(torch.int64).tolist()
    assert found[0][4] == len(keys)
    rows = dict(zip(keys, serial[-1]["parameter users.table.rows.values"], strict=True))
    for number in range(23):
        row = rows.get(number * 2**40 - 3)
        if row is not None:
            torch.testing.assert_close(found[0][3][number], row, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "case", "make"),
    sampled([(1, 3, "Forgetting", "adam"), (3, 2, "Growing", "adagrad"),
             (2, 1, "Forgetting", "row_wise"), (2, 7, "Growing", "adam")], 2),
    ids=str,
)  # fmt: skip
def test_other_numbers_of_ranks_go_on(tmp_path, first, second, case, make):
    run_ranks(first, train, case, make, 8, 0.05, 41, None, {}, str(tmp_path))
    found = run_ranks(second, train, case, make, 8, 0.05, 41, None, {}, str(tmp_path), 3)
    serial = serially(case, make, 8, 0.05, 41, STEPS + 3)
    for a, b in zip(serial[STEPS:], found[0][0], strict=True):
        same(a, b)


def refused(world, where):
    for law in (True, False):
        model = growing_recipes.Growing(evict_after=9) if law else Recommender()
        model = model.double()
        plan = data_parallel(8, processes=world.size, precision="float64")
        optimizer = torch.optim.Adam(model.parameters())
        run = Executor(model, optimizer, loss=clicking, plan=plan, seed=3, world=World.adopt())
        if law:
            run.cut(next(iter(run.batches(Clicks()))))
        with pytest.raises(CheckpointMismatch, match=r"a table of|which the model does not have"):
            run.resume(where)
        run.strategy.close()


def test_a_checkpoint_of_other_tables_is_refused(tmp_path):
    run_ranks(2, train, "Growing", "adam", 8, None, 41, None, {}, str(tmp_path))
    run_ranks(1, refused, str(tmp_path))


def pipeline(world):
    plan = data_parallel(8, processes=2, split=LayerSplit(tensor=(2,)))
    model = growing_recipes.Growing()
    with pytest.raises(PlanError, match=r"users\.table.*grows"):
        Executor(model, torch.optim.Adam(model.parameters()), loss=clicking, plan=plan,
                 world=World.adopt())  # fmt: skip


def test_plans_that_cannot_be_are_refused_by_name():
    run_ranks(2, pipeline)


def test_an_optimiser_without_a_law_by_row_is_refused_on_all_ranks():
    with pytest.raises(Exception, match="cannot train a table that grows"):
        run_ranks(2, lamb)


def lamb(world):
    from headway.optim import LAMB

    model = growing_recipes.Growing()
    plan = data_parallel(8, processes=2)
    run = Executor(model, LAMB(model.parameters(), lr=0.1), loss=clicking, plan=plan,
                   world=World.adopt())  # fmt: skip
    run.step(next(iter(run.batches(Clicks()))))


@pytest.mark.slow
def test_a_stream_is_trained_with_restarts_on_other_numbers_of_ranks(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('recipe = "support.growing_recipes:days"\nstop = 12\n')
    stages = ((3, 2), (6, 3), (9, 1), (12, 7))
    for number, (steps, processes) in enumerate(stages):
        words = ["--set", "precision='float64'", "--set", f"stop={steps}"]
        done = headway_here("train", str(recipe), "-n", str(processes), "-d", "parts", *words,
                            *(["--resume"] if number else []), cwd=tmp_path)  # fmt: skip
        assert done.code == 0, done.err
    done = headway_here("train", str(recipe), "-n", "1", "-d", "whole",
                        "--set", "precision='float64'", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.err
    empty = recorded_none()
    parts = recorded_end(tmp_path / "parts", (12,), empty).tensors
    whole = recorded_end(tmp_path / "whole", (12,), empty).tensors
    names = [n for n in whole if n.startswith(("12/parameter", "12/optimizer", "12/key"))]
    assert any("users.table.rows.values" in name for name in names)
    for name in names:
        if "/key/" in name:
            assert torch.equal(parts[name], whole[name]), name
        else:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-10, atol=1e-12, msg=name)


def recorded_none():
    from headway.verification.recording import Recording

    return Recording({}, ())


@pytest.mark.parametrize(
    "words",
    [
        ("--whole", "--steps", "2", "--set", "arguments.model=Sharing"),
        ("--set", "exchange.compress=fp16"),
    ],
    ids=["whole", "compressed"],
)
def test_verify_proves_it(tmp_path, words):
    recipe = "support.growing_recipes:days"
    done = headway_here("verify", recipe, "-n", "2", *words, cwd=tmp_path)
    assert done.code == 0, done.err
