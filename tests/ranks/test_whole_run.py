"""ranks: `headway verify --whole`: training, checkpoints, resumed runs and validations."""

from __future__ import annotations

import pytest

import headway
from headway.errors import NotEqual
from headway.plans import ExchangePlan, data_parallel
from headway.run.recipe.factory import load_recipe


def ends(recipe="support.recipes:mlp", **options):
    (run,) = headway.verify(recipe, steps=2, whole=True, **{"processes": 2, **options}).runs
    assert run.comparison.equal
    return run.whole


def test_training_and_resumed_runs_end_as_the_serial_run():
    whole = ends()
    assert list(whole) == ["trained", "resumed", "resumed with 1 process"]
    for name, end in whole.items():
        assert end.equal, f"{name}: {end.first}"
        kinds = {difference.kind for difference in end.differences}
        assert kinds == {"loss", "facts", "parameter", "optimizer", "validation", "journal"}


def test_a_recipe_object_ends_as_its_reference_does():
    recipe = load_recipe("support.recipes:mlp")
    assert all(end.equal for end in ends(recipe, processes=1).values())


def test_shards_resume_with_an_optimiser_that_has_a_number_for_each_row():
    made = ["zero=3", "arguments.optimizer=row_wise"]
    found = ends("support.table_recipes:clicks", overrides=made)
    assert all(end.equal for end in found.values())


def test_a_recipe_file_without_validation_is_compared_too(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(WITHOUT_VALIDATION)
    assert all(end.equal for end in ends(str(file)).values())


WITHOUT_VALIDATION = """
name = "plain"
batch = 12
stop = 8
[model]
call = "support.recipes:Mlp"
[data]
call = "support.recipes:Points"
[loss]
criterion = "torch.nn:CrossEntropyLoss"
[optimizer]
call = "torch.optim:SGD"
lr = 0.1
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"overrides": ["zero=3"]},
        {"recipe": "support.recipes:late", "overrides": ["stages=2"]},
        {"recipe": "support.recipes:wide", "plan": data_parallel(
            12, processes=2, microbatch=4, exchange=ExchangePlan(compress="topk:0.1"))},
        {"processes": 1},
    ],
    ids=["zero 3", "pipeline", "top-k", "one process"],
)  # fmt: skip
def test_every_family_ends_as_the_serial_run(options):
    assert all(end.equal for end in ends(**options).values())


@pytest.mark.parametrize(
    ("mistake", "run", "kind"),
    [
        pytest.param(
            "forgets_a_moment", "resumed", "step 2, optimizer first", marks=pytest.mark.slow
        ),
        pytest.param(
            "skips_samples", "resumed", "step 2, facts cursor.position", marks=pytest.mark.slow
        ),
        pytest.param("counts_twice", "trained", "step 1, validation", marks=pytest.mark.slow),
    ],
)
def test_a_planted_mistake_is_named(mistake, run, kind):
    result = headway.verify(f"support.planted_runs:{mistake}", steps=2, processes=2, whole=True)
    with pytest.raises(NotEqual, match=rf"a training run \({run}\) does NOT end .*{kind}"):
        result.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unbounded", "unbounded_dropping", "endless"])
def test_streams_without_a_length_resume_where_they_were(name):
    for run, end in ends(f"support.loader_recipes:{name}").items():
        assert end.equal, f"{run}: {end.first}"
