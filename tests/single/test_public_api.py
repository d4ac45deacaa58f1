"""single: `headway.plan`, `train`, `verify` and `simulate` as Python calls them, with objects."""

from __future__ import annotations

import json
import logging
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headway
from headway.cluster import of_preset, read_cluster
from support.mixed import devices

FEATURES, CLASSES, SAMPLES, BATCH = 6, 3, 20, 8


class Net(nn.Module):
    """Two layers; nothing in it knows of headway."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def data() -> torch.utils.data.Dataset:
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, generator=numbers)
    return torch.utils.data.TensorDataset(x, x[:, :CLASSES].argmax(1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def summed(model: nn.Module, batch) -> torch.Tensor:
    """A loss that is no mean over samples, and does not say so: it depends on the split."""
    inputs, target = batch
    return nn.functional.cross_entropy(model(inputs), target, reduction="sum")


RECIPE = headway.Recipe(
    name="blobs",
    model=Net,
    data=data,
    loss=headway.criterion(nn.CrossEntropyLoss()),
    optimizer=sgd,
    batch=BATCH,
    stop="5 steps",
)
PAIR = headway.data_parallel(BATCH, processes=2)


def recipe() -> headway.Recipe:
    return RECIPE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> headway.Cluster:
    return of_preset("cpu")


@pytest.fixture(scope="module")
def found(cluster):
    return headway.plan(RECIPE, cluster, devices=2, objective="fastest", runnable=True)


# -- from a recipe and a cluster to a verdict -----------------------------------------------------


def test_a_plan_has_a_frontier_and_a_prediction(found, cluster):
    assert found.chosen in found.frontier
    assert (found.plan.ranks, found.plan.batch.samples, found.missing) == (2, BATCH, "")
    assert found.prediction.seconds == found.chosen.seconds > 0
    others = headway.plan(RECIPE, cluster)
    assert all(others.plan_of(point).ranks == point.devices for point in others.frontier)


def test_devices_of_several_types_are_planned_and_simulated_like_those_of_one(folder):
    (folder / "mixed.toml").write_text(devices())
    mixed = read_cluster(folder / "mixed.toml")
    found = headway.plan(RECIPE, "mixed.toml", devices=4, runnable=True)
    assert found.chosen.amounts == (("fast", 2), ("slow", 2))
    assert found.prediction.device == "2 fast, 2 slow"
    assert 0 < found.outcome.floor <= found.outcome.bound * (1 + 1e-9)
    assert (found.missing, found.currency, found.length.stop) == ("", "EUR", 5)
    played = headway.simulate(found.save("plan.json"), recipe=RECIPE, cluster=mixed)
    assert played.seconds == pytest.approx(found.prediction.seconds, rel=0.2)
    assert set(played.scenarios[0].groups) == {"fast", "slow"}
    with pytest.raises(headway.NothingFits, match="every plan needs") as refused:
        headway.plan(RECIPE, mixed, memory=200)
    assert "more per device" in refused.value.fix
    with pytest.raises(headway.PlanError, match="the cluster has 4"):
        headway.plan(RECIPE, mixed, devices=5)


@pytest.mark.slow
def test_a_found_plan_trains_as_one_process_does(found, folder, capfd):
    alone = headway.train(RECIPE, directory=folder / "alone")
    split = headway.train(RECIPE, plan=found.plan, directory=folder / "split")
    assert (split.directory, split.steps, split.stopped_by) == (folder / "split", 5, None)
    assert split.loss == pytest.approx(alone.loss, rel=1e-5)
    assert split.plan == found.plan
    assert capfd.readouterr() == ("", "")
    resumed = headway.train(RECIPE, directory=folder / "alone", resume=True, overrides=["stop=7"])
    assert (resumed.steps, resumed.directory) == (7, folder / "alone")


@pytest.mark.slow
def test_the_verdict_holds_for_a_mean(found, folder, capfd):
    seen = []
    verdict = headway.verify(
        RECIPE, processes=(1, 2), steps=2, directory=folder, on_run=seen.append
    )
    assert verdict.holds
    verdict.check()
    assert [run.processes for run in verdict.runs] == [1, 2]
    assert tuple(seen) == verdict.runs
    assert all(run["equal"] for run in json.loads((folder / "verification.json").read_text()))
    assert headway.verify(RECIPE, plan=found.plan, steps=2).holds
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_the_verdict_names_what_differs_for_a_sum():
    verdict = headway.verify(replace(RECIPE, loss=summed), processes=2, steps=2)
    assert not verdict.holds
    with pytest.raises(headway.NotEqual, match="NOT the serial run"):
        verdict.check()


def test_a_simulated_step_takes_what_the_search_predicts(found, cluster, capfd):
    planned = headway.simulate(found.plan, recipe=RECIPE, cluster=cluster)
    assert planned.plan == found.plan.hash
    assert planned.seconds == pytest.approx(found.prediction.seconds, rel=0.2)
    assert planned.timeline.spans
    slow = headway.simulate(found.plan, recipe=RECIPE, cluster=cluster, fault=["rank 1 slow 4x"])
    assert [one.name for one in slow.scenarios] == ["as planned", "changed"]
    assert slow.seconds > slow.scenarios[0].step.seconds == planned.seconds
    assert capfd.readouterr() == ("", "")


# -- what they take --------------------------------------------------------------------------------


def test_a_saved_plan_knows_what_it_was_made_for(folder, caplog):
    here = "test_public_api:recipe"
    found = headway.plan(here, "cpu", nodes=1, devices="1..2", memory=10**9, price="2 USD/h")
    assert found.currency == "USD"
    saved = found.save("plan.json")
    assert saved.hash == found.plan.hash == headway.Plan.load(folder / "plan.json").hash
    with caplog.at_level(logging.INFO, logger="headway"):
        from_file = headway.simulate("plan.json")
        from_object = headway.simulate(saved)
    assert from_file.seconds == from_object.seconds > 0
    assert f"--recipe {here}" in caplog.text


def test_a_recipe_file_is_a_recipe(folder):
    (folder / "recipe.toml").write_text(
        textwrap.dedent("""
            name = "file"
            batch = "8 samples"
            stop = "2 steps"
            [model]
            call = "test_public_api:Net"
            [data]
            call = "test_public_api:data"
            [loss]
            criterion = "torch.nn:CrossEntropyLoss"
            [optimizer]
            call = "torch.optim:SGD"
            lr = 0.1
        """)
    )
    run = headway.train(folder / "recipe.toml", processes=2)
    assert (run.directory, run.steps) == (Path("runs/file-001"), 2)
    assert headway.plan("recipe.toml", of_preset("cpu")).plan.batch.samples == BATCH


def test_overrides_change_an_object(folder):
    run = headway.train(RECIPE, overrides=["stop='3 steps'", "batch=4"], directory=folder / "run")
    assert (run.steps, run.plan.batch.samples) == (3, 4)


# -- errors ----------------------------------------------------------------------------------------


def test_a_recipe_that_cannot_be_sent_is_refused_before_anything_starts(folder):
    lock = threading.Lock()
    with pytest.raises(headway.RecipeError, match="cannot be sent to worker processes") as refused:
        headway.train(replace(RECIPE, model=lambda: (lock, Net())[1]))
    assert "inside a factory" in refused.value.fix
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: headway.plan(RECIPE, "cpu", devices=9), headway.PlanError, "the cluster has 2"),
        (lambda: headway.plan(RECIPE, "cpu", memory=1000), headway.NothingFits, "no plan fits"),
        (lambda: headway.plan(RECIPE, "cpu", memory="80"), headway.UsageError, "no unit"),
        (lambda: headway.plan(RECIPE, of_preset("cpu"), nodes=2), headway.UsageError, "nodes"),
        (lambda: headway.simulate(recipe=RECIPE), headway.UsageError, "--cluster"),
        (lambda: headway.verify(RECIPE, processes=0), headway.UsageError, "positive"),
        (lambda: headway.train("nowhere:recipe"), headway.RecipeError, "nowhere"),
        (
            lambda: headway.train(RECIPE, overrides=["arguments.width=3"]),
            headway.RecipeError,
            "no arguments",
        ),
        (
            lambda: headway.train(
                RECIPE, plan=headway.data_parallel(BATCH, processes=2), processes=3
            ),
            headway.UsageError,
            "the plan is for 2 processes",
        ),
    ],
)
def test_errors_are_those_of_the_tree(call, error, words):
    with pytest.raises(error, match=words):
        call()
