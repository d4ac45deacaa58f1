"""ranks: plans with tables over tiers train, verify and resume as the serial run."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from headway.plans import LayerSplit, data_parallel
from headway.plans.tables import TableSplit
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.strategy.split_tables import large_tables_in_files
from support import table_recipes
from support.commands import headway_here
from support.ranks import run_ranks
from support.serial import train_serially
from support.table_recipes import Clicks, clicking

STEPS = 6
TIERS = "split.tables=[{tables='users',way='hash',hot='15 rows'},{way='row',hot='100 %'}]"


def trained(world, way, hot, directory, make="adagrad"):
    """Tables after steps of which the first ones were made before a restart."""
    found = {}
    for last in (STEPS // 2, STEPS):
        torch.manual_seed(3)
        model = table_recipes.Recommender(sparse=make == "sparse_adam").double()
        split = LayerSplit(tables=(TableSplit(way=way, hot=hot),))
        plan = data_parallel(8, processes=world.size, precision="float64", split=split)
        made = getattr(table_recipes, make)(model)
        run = Executor(model, made, loss=clicking, plan=plan, seed=3, world=World.adopt(), clip=5)
        batches = run.batches(Clicks(), epochs=None)
        if last == STEPS:
            run.cut(next(batches))
            run.resume(directory)
            batches = run.batches(Clicks(), epochs=None)
        for part in batches:
            run.step(part)
            if run.steps_done == last:
                break
        run.save(directory)
        found = dict(run.strategy.tensors_by_kind()["parameter"])
        brought = sum(t.rows.brought for t in run.strategy.parameters.tables._tiers.values())
        remarks = list(run.strategy.context.remarks)
        found = {name: tensor.clone() for name, tensor in found.items()}
        run.close()
    return found, brought, remarks


@pytest.mark.parametrize(("way", "ranks"), [("row", 2), ("table", 1)])
def test_a_run_over_tiers_that_is_resumed_is_the_serial_run(tmp_path, way, ranks):
    results = run_ranks(ranks, trained, way, "23 rows", str(tmp_path))
    serial = train_serially(
        table_recipes.Recommender, Clicks(), clicking, table_recipes.adagrad, batch=8, steps=STEPS,
        clip=5.0,
    )  # fmt: skip
    for name, tensor in results[0][0].items():
        expected = serial[-1][f"parameter {name}"]
        torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-12, msg=name)
    for _, brought, remarks in results:
        assert brought > 0
        assert not remarks  # the ids of all three tables are found in the batch


@pytest.mark.slow
def test_the_command_proves_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('recipe = "support.table_recipes:clicks"\n[arguments]\noptimizer = "adagrad"')
    done = headway_here(
        "verify", str(recipe), "-n", "2", "--whole", "--set", TIERS, cwd=tmp_path
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "EQUAL to the serial run" in done.out
    assert "resumed from 1 process: ends as the serial run" in done.out


@pytest.mark.parametrize(
    ("optimizer", "hot", "said"),
    [
        ("adagrad", "4 rows", "the step needs 2 more, 226 B"),
        ("adagrad", "10 B", "218 B are missing"),
        ("adagrad", "much", "hot is 'much'"),
        ("adam", "20 rows", "the update changes rows that a step has not used"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, optimizer, hot, said):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'recipe = "support.table_recipes:clicks"\n[arguments]\noptimizer = "{optimizer}"'
    )
    split = f"split.tables=[{{tables='users',way='row',hot='{hot}'}}]"
    done = headway_here("train", str(recipe), "-n", "1", "--set", split, cwd=tmp_path)
    assert done.code == 2, done.out
    assert "rank 0" in done.err
    assert said in done.err
    assert "users.weight" in done.err or hot == "much"


def peak_of_large_run(world, directory):
    """MiB that making, training, saving, restoring and closing has added at most."""
    before = resident()
    split = LayerSplit(tables=(TableSplit(way="table", hot="8 MiB"),))
    plan = data_parallel(8, processes=1, split=split)
    for resuming in (False, True):
        with large_tables_in_files(plan):
            model = LargeTable()
            made = torch.optim.Adagrad(model.parameters(), lr=0.1)
        run = Executor(model, made, loss=squared, plan=plan, seed=3, world=World.adopt())
        data = torch.arange(160).view(80, 2) * 997
        batches = run.batches(torch.utils.data.TensorDataset(data), epochs=None)
        run.cut(next(batches))
        if resuming:
            run.resume(directory)
        for part in run.batches(torch.utils.data.TensorDataset(data), epochs=None):
            run.step(part)
            if run.steps_done % 4 == 0:
                break
        run.save(directory)
        run.close()
        del run, model, made
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before


class LargeTable(torch.nn.Module):
    """128 MiB of rows, of which Adagrad keeps as much again."""

    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(1 << 19, 64, mode="sum")

    def forward(self, data):
        return self.bag(data[0])


def squared(model, data):
    return model(data).square().mean()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


@pytest.mark.slow
def test_memory_never_holds_a_large_table(tmp_path):
    (added,) = run_ranks(1, peak_of_large_run, str(tmp_path))
    # 8 MiB of rows, a chunk of 16 MiB of some tensors at a time, and imports.
    assert added < 110
