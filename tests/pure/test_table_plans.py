"""pure: `split.tables` in plans and recipes: what can be written, and what is refused, by name."""

from __future__ import annotations

import json

import pytest

from headway.documents import to_type
from headway.errors import DocumentError, PlanError
from headway.plans import (
    ExchangePlan,
    LayerSplit,
    Plan,
    Synchrony,
    data_parallel,
    explain,
    pipelined,
)
from headway.plans.plan import check_executable
from headway.plans.tables import TableSplit
from headway.run.recipe.schema import read_recipe

GRID = TableSplit(tables="emb.*", way="grid", columns=2)


def plan_of(tables, processes=4, **more):
    return data_parallel(16, processes=processes, split=LayerSplit(tables=tables), **more)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("row", (TableSplit(way="row"),)),
        (GRID, (GRID,)),
        ((GRID, TableSplit(way="hash")), (GRID, TableSplit(way="hash"))),
    ],
)
def test_one_way_for_all_tables_may_stand_alone(written, meant):
    assert LayerSplit(tables=written).tables == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("row", (TableSplit(way="row"),)),
        ({"tables": "emb.*", "way": "grid", "columns": 2}, (GRID,)),
        ([{"tables": "emb.*", "way": "grid", "columns": 2}], (GRID,)),
        ([], ()),
    ],
)
def test_a_plan_file_may_say_the_same(written, meant):
    data = json.loads(plan_of("hash").to_json())
    data["split"]["tables"] = written
    assert to_type(data, Plan, where="plan.json").split.tables == meant


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("rwo", "split.tables: \"rwo\" is not 'copies', 'table', 'column', 'row'"),
        (5, "split.tables: 5 is not a list"),
        ([{"tabels": "x"}], "unknown key split.tables.0.tabels; did you mean tables"),
        ([{"way": "row", "columns": "2"}], 'split.tables.0.columns: "2" is not a whole number'),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(written, words):
    data = json.loads(plan_of("hash").to_json())
    data["split"]["tables"] = written
    with pytest.raises(DocumentError) as caught:
        to_type(data, Plan, where="plan.json")
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]


def test_a_recipe_and_an_override_say_it_too(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('recipe = "mine:recipe"\n[split]\ntables = "column"\n')
    assert read_recipe(path).split == LayerSplit(tables="column")
    for text, meant in (
        ("split.tables=row", LayerSplit(tables="row")),
        ('split.tables=[{tables="emb.*", way="grid", columns=2}]', LayerSplit(tables=GRID)),
    ):
        assert read_recipe(path, [text]).split == meant


def test_a_plan_with_tables_survives_its_file_and_one_without_keeps_its_name():
    made = plan_of((GRID, TableSplit(way="hash", travels="rows")))
    again = to_type(json.loads(made.to_json()), Plan, where="plan.json")
    assert again == made
    assert again.hash == made.hash != plan_of("hash").hash
    plain = data_parallel(8, processes=2)
    assert plain.hash == "1908f1eebcb4"
    assert "tables" not in plain.to_json()


def test_a_plan_says_which_tables_lie_where():
    one = TableSplit(tables="big", way="row", ranks=(0, 2), travels="rows")
    told = explain(plan_of((GRID, one, TableSplit(way="copies"))))
    assert "split: tables: emb.* by grid (2 ranges of columns)" in told
    assert "big by row (rows travel) on ranks 0, 2, * by copies" in told


def test_all_problems_are_told_together():
    with pytest.raises(PlanError) as caught:
        plan_of(
            (
                TableSplit(way="row", columns=2, ranks=(0, 0, 5)),
                TableSplit(tables=" ", way="copies", ranks=(1,)),
                TableSplit(way="grid", columns=-1),
                TableSplit(tables="tied", way="dense", ranks=(1,), hot="20 %"),
            ),
            exchange=ExchangePlan(priority=True, reduce="sum"),
        )
    assert caught.value.problems == (
        "exchange.reduce is 'sum': with a split it can only be 'mean'",
        'split.tables.0.columns: way "row" cuts no columns; leave it out',
        "split.tables.0.ranks: [0, 0, 5] names a rank twice",
        "split.tables.0.ranks: there is no rank 5; 4 share the batch, from 0",
        'split.tables.1.tables is empty; a pattern of names, such as "embeddings.*"',
        'split.tables.1.ranks: way "copies" lies on every rank; leave it out',
        "split.tables.2.columns is -1; at least 1, or 0 for one for each rank",
        'split.tables.3.ranks: way "dense" lies on every rank; leave it out',
        'split.tables.3.hot: way "dense" is in memory as other layers are; leave it out',
        "exchange.priority with split.tables: the gradient of a table is complete where it lies "
        "and in no bucket, so that no update of a bucket would make its update",
    )


def test_ranks_are_shares_of_the_batch():
    # Of four processes two share each sample: there are ranks 0 and 1.
    with pytest.raises(PlanError, match="there is no rank 2; 2 share the batch"):
        data_parallel(
            16,
            processes=4,
            split=LayerSplit(tensor=(2,), tables=(TableSplit(way="row", ranks=(0, 2)),)),
        )
    plan_of((TableSplit(way="row", ranks=(3, 0)),), zero=1, shards=2)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda: pipelined(16, processes=4, stages=2, split=LayerSplit(tables="row")),
            "split.tables with a pipeline: all ranks",
        ),
        (
            lambda: data_parallel(16, processes=4, split=LayerSplit(tensor=(2,), tables="row")),
            "split.tables with split.tensor: what a lookup delivers has no rule",
        ),
        (
            lambda: data_parallel(16, processes=4, split=LayerSplit(spatial=(2,), tables="row")),
            "split.tables with split.spatial: ids are looked up by whole samples",
        ),
        (
            lambda: plan_of("row", synchrony=Synchrony(local_steps=2, merge="mean")),
            "split.tables with workers that do not agree at every step",
        ),
    ],
)
def test_what_the_executor_cannot_run_is_refused_by_name(made, words):
    with pytest.raises(PlanError) as caught:
        check_executable(made())
    assert words in str(caught.value)


def test_ranks_make_as_many_passes_as_any_other():
    made = plan_of("row", processes=3, microbatch=2)
    assert made.meets_in_forward
    assert [len(made.micro_sizes(rank)) for rank in range(3)] == [3, 3, 3]
    assert not plan_of("row", processes=1).meets_in_forward
