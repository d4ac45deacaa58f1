"""ranks: what a dry run of lookups counts is what ranks send."""

from __future__ import annotations

import pytest
import torch

from headway import Recipe
from headway.plans import BatchSplit, LayerSplit, data_parallel
from headway.plans.tables import TableSplit, place_tables
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.measure.table_dry_run import dry_run_tables
from headway.run.strategy.split_tables import table_modules
from support import table_recipes
from support.ranks import run_ranks
from support.sampling import sampled
from support.table_recipes import Clicks, clicking

SEED, LENGTH = 3, 40
WAYS = ("copies", "table", "column", "row", "table_row", "grid", "hash")


def send(world, case, tables, batch, kept):
    """What this rank sends in the second step."""
    torch.manual_seed(SEED)
    model = getattr(table_recipes, case)().double()
    plan = data_parallel(
        batch, processes=world.size, precision="float64", split=LayerSplit(tables=tables), **kept
    )
    optimizer = table_recipes.sgd(model)
    run = Executor(model, optimizer, loss=clicking, plan=plan, seed=SEED, world=World.adopt())
    found = {}
    for _, part in zip(range(2), run.batches(Clicks(LENGTH), epochs=None), strict=False):
        if run.strategy.parameters.tables.tables is not None:
            run.strategy.parameters.tables.tables.sent.clear()
        run.step(part)
        found = dict(run.strategy.parameters.tables.tables.sent)
    run.strategy.close()
    return found


def tried(case, tables, ranks, batch):
    recipe = Recipe(
        name="clicks",
        model=getattr(table_recipes, case),
        data=lambda: Clicks(LENGTH),
        loss=clicking,
        optimizer=table_recipes.sgd,
        batch=batch.samples,
        stop="2 steps",
        seed=SEED,
        precision="float64",
    )
    modules = table_modules(recipe.model())
    shapes = {name: (m.num_embeddings, m.embedding_dim) for name, m in modules.items()}
    splits = [TableSplit(way=tables)] if isinstance(tables, str) else tables
    return dry_run_tables(recipe, place_tables(splits, shapes, ranks), batch, ranks)


@pytest.mark.parametrize(
    ("ranks", "tables"), sampled([(n, way) for n in (2, 3) for way in WAYS], 3), ids=str
)
def test_bytes_are_those_of_a_run(ranks, tables):
    sent = run_ranks(ranks, send, "Recommender", tables, 8, {})
    found = tried("Recommender", tables, ranks, BatchSplit(samples=8))
    assert [dict(own) for own in found.sent] == sent
    assert any(sent)
    # Each exchange knows what it carries, and from where to where.
    assert sum(found.total.values()) == sum(sum(one.counted.values()) for one in found.exchanges)
    for one in found.exchanges:
        told = sum(map(sum, one.bytes))
        assert told == sum(one.counted.values()) or one.kind == "sizes"


def test_micro_batches_and_ragged_shares():
    sent = run_ranks(3, send, "Recommender", "row", 8, {"microbatch": 2})
    found = tried("Recommender", "row", 3, BatchSplit(samples=8, microbatch=2))
    assert [dict(own) for own in found.sent] == sent
    # 3, 3 and 2 samples: the last rank has one micro-batch, and repeats it.
    ways = [(one.way, one.microbatch) for one in found.passes[2]]
    assert ways == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
