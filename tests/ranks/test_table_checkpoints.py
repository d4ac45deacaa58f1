"""ranks: checkpoints of split tables: any plan goes on from any other, none from a whole table."""

from __future__ import annotations

import pytest
import torch

from headway.checkpoint.directory import committed_steps, read_manifest, step_path
from headway.errors import UsageError
from headway.plans import LayerSplit, data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support import table_recipes
from support.commands import headway_here, resumed
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import train_serially
from support.table_recipes import Clicks, clicking

MIXED = "split.tables=[{tables='users',way='hash'},{tables='items',way='column'},{way='row'}]"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_any_plan_resumes_what_any_other_has_saved(tmp_path, optimizer):
    stages = (
        (1, 2, ("split.tables=copies",)),
        (2, 3, ("split.tables=row",)),
        (3, 2, ("split.tables=hash",)),
        (4, 3, ("split.tables=table",)),
        (5, 4, ("split.tables=grid",)),
        (6, 1, ()),
        (7, 3, (MIXED, "zero=3")),
        (8, 2, ("zero=2",)),
        (9, 2, ("split.tables=hash",)),
        (10, 2, ()),
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'recipe = "support.table_recipes:clicks"\nstop = 10\n'
        f'[arguments]\noptimizer = "{optimizer}"\n'
    )
    found, whole = resumed(tmp_path, str(recipe), stages)
    assert len(whole) > 10
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-11, msg=name)


PLACED = (("hash", 3), ("row", 3), ("column", 2), ("grid", 4), ("table", 2), ("copies", 2))


def save(world, way, directory, make="adam"):
    torch.manual_seed(3)
    model = table_recipes.Recommender().double()
    plan = data_parallel(8, processes=world.size, precision="float64", split=LayerSplit(tables=way))
    made = getattr(table_recipes, make)(model)
    run = Executor(model, made, loss=clicking, plan=plan, seed=3, world=World.adopt())
    batches = run.batches(Clicks(), epochs=None)
    with pytest.raises(UsageError, match=r"run\.cut"):
        run.save(directory)
    for _, part in zip(range(2), batches, strict=False):
        run.step(part)
    with pytest.raises(UsageError, match="a rank has pieces of this model's tables"):
        model.state_dict()
    run.save(directory)
    shapes = {n: tuple(p.parameter.shape) for n, p in run.strategy.parameters.tables.parts.items()}
    run.strategy.close()
    return shapes


@pytest.mark.parametrize(("way", "ranks"), sampled(PLACED, 2))
def test_ranks_write_boxes_and_no_rank_a_whole_table(tmp_path, way, ranks):
    shapes = run_ranks(ranks, save, way, str(tmp_path))
    (step,) = committed_steps(tmp_path)
    manifest = read_manifest(step_path(tmp_path, step))
    serial = train_serially(
        table_recipes.Recommender, Clicks(), clicking, table_recipes.adam, batch=8, steps=2
    )
    for name in ("users.weight", "items.weight", "tags.weight"):
        whole = tuple(serial[0][f"parameter {name}"].shape)
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg"):
            entry = manifest.tensors[key]
            assert tuple(entry.shape) == whole
            if way in ("table", "copies"):
                assert len(entry.chunks) == 1
                continue
            # In pieces of as many rows as a rank has, one from each.
            pieces = sorted(tuple(chunk.shape) for chunk in entry.chunks)
            assert len({chunk.file for chunk in entry.chunks}) == len(pieces) == ranks
            assert sum(a * b for a, b in pieces) == whole[0] * whole[1]
            if way != "hash":
                assert pieces == sorted(shape[name] for shape in shapes)


def test_no_rank_writes_what_an_optimiser_has_from_the_first_of_tables_that_are_away(tmp_path):
    run_ranks(2, save, "table", str(tmp_path), "adagrad")
    (step,) = committed_steps(tmp_path)
    tensors = read_manifest(step_path(tmp_path, step)).tensors
    assert {len(t.chunks) for n, t in tensors.items() if n.startswith("optimizer.")} == {1}
    assert tensors["optimizer.users.weight.sum"].shape == tensors["model.users.weight"].shape


@pytest.mark.slow
def test_the_command_proves_it(tmp_path):
    done = headway_here(
        "verify", "support.table_recipes:clicks", "-n", "3", "--whole", "--set", MIXED, cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert "EQUAL to the serial run" in done.out
    assert "resumed with 1 process: ends as the serial run" in done.out
