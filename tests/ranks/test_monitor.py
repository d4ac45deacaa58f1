"""ranks: metrics, early stopping, the best checkpoint, a plateau scheduler, callbacks."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headway
from headway.errors import HeadwayError, PlanError, RecipeError, WorkerFailed
from headway.plans import BatchSplit, PipelinePlan, data_parallel, pipelined
from headway.run.distributed.world import World
from headway.run.executor import check_metrics
from headway.run.training.callbacks import check_callback
from headway.run.training.monitor import Monitor
from support import monitored
from support.monitored import events, model, points, recipe, sgd, value_of
from support.ranks import run_ranks

RECIPE = "support.monitored:recipe"


def validated(world: Any, zero: int) -> tuple[dict[str, float], dict[str, float]]:
    """Uneven shares, micro-batches, a ragged last batch of 13 samples."""
    torch.manual_seed(0)
    net = model().double()
    expected = value_of(net)
    plan = data_parallel(6, processes=world.size, microbatch=2, zero=zero)
    if not zero:
        shares = tuple(range(1, world.size + 1))
        plan = replace(plan, batch=BatchSplit(samples=6, microbatch=2, shares=shares))
    run = headway.Executor(
        net, sgd(net), loss=monitored.double_loss, plan=plan, world=World.adopt()
    )
    found = run.validate(points(13, 2), monitored.double_metrics)
    assert found["loss"] == run.evaluate(run.validation_loader(points(13, 2)))[0]
    return found, expected


@pytest.mark.parametrize(("ranks", "zero"), [(3, 0), (2, 3)])
def test_metrics_are_exact_over_ranks(ranks, zero):
    for found, expected in run_ranks(ranks, validated, zero):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return headway.train(RECIPE, processes=1, directory=tmp_path_factory.mktemp("runs") / "serial")


def test_a_killed_run_stops_at_the_same_step_with_the_same_best_checkpoint(serial, tmp_path):
    """Killed after a step with a checkpoint and a validation, which the checkpoint precedes."""
    assert serial.steps < 60
    assert serial.steps % 3 == 0
    directory = tmp_path / "run"
    killed = headway.train(
        RECIPE, processes=2, directory=directory, faults=["kill rank 1 at step 14"]
    )
    assert killed.attempts == 2
    assert (killed.steps, killed.best_step) == (serial.steps, serial.best_step)
    assert killed.metrics == pytest.approx(serial.metrics)
    names = {path.name for path in (directory / "checkpoints").iterdir()}
    assert any(name.endswith(str(killed.best_step)) for name in names)
    said = [row["text"] for row in events(directory, "note") if "stopped early" in row["text"]]
    assert said == [
        f"stopped early: accuracy has not improved in 4 validations; the best was "
        f"{max(row['metrics']['accuracy'] for row in events(directory, 'validation')):g} after "
        f"step {serial.best_step}"
    ]
    rates = {row["step"]: row["lr"] for row in events(directory, "step")}
    assert rates == {row["step"]: row["lr"] for row in events(serial.directory, "step")}
    assert rates[serial.steps] < 0.1
    for rank in (0, 1):
        moments = (directory / f"moments-{rank}").read_text().split("\n")
        assert [line.split()[0] for line in moments if line].count("start") == 2
        # The callback's own count has gone through the checkpoint.
        assert moments[-2] == f"end of {serial.steps} {serial.steps}"


def test_resuming_a_run_that_has_stopped_early_makes_no_step(serial):
    again = headway.train(RECIPE, processes=1, directory=serial.directory, resume=True)
    assert (again.steps, again.best_step) == (serial.steps, serial.best_step)


def test_a_callback_stops_all_ranks(tmp_path):
    result = headway.train(
        RECIPE, processes=2, directory=tmp_path / "run", overrides=['arguments.what="Stopper"']
    )
    assert result.steps == 4
    assert result.stopped_by in ("a callback", "another rank")


def test_a_failing_callback_is_named(tmp_path):
    with pytest.raises(WorkerFailed, match="no room in the callback") as caught:
        headway.train(
            RECIPE, processes=1, directory=tmp_path / "run", restarts=0,
            overrides=['arguments.what="Failing"'],
        )  # fmt: skip
    assert "monitored.py" in str(caught.value)
    assert "ValueError 2" in (tmp_path / "run" / "moments-0").read_text()


@pytest.mark.slow
def test_verify_holds_metrics_and_monitor_against_the_serial_run():
    """And calls no callback: there would be nobody to tell that this is a proof."""
    (run,) = headway.verify(RECIPE, processes=2, steps=4, whole=True).runs
    assert run.comparison.equal
    for name, end in run.whole.items():
        assert end.equal, f"{name}: {end.first}"
    (run,) = headway.verify(
        RECIPE, processes=2, steps=2, whole=True, overrides=['arguments.what="doubled"']
    ).runs
    assert "margin" in str(run.whole["trained"].first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"validation": None, "metrics": None, "validate_every": 0},
            "early_stopping and keep_best and ReduceLROnPlateau: the recipe has",
        ),
        ({"metrics": None}, "monitor is 'accuracy', and the recipe has no metrics"),
        ({"monitor_mode": "min"}, "ReduceLROnPlateau has mode 'max'"),
    ],
)
def test_what_cannot_be_monitored_is_refused(change, said):
    wanted = replace(recipe(), **change)
    with pytest.raises(RecipeError, match=re.escape(said)):
        Monitor.of(wanted, wanted.scheduler(sgd(model())))


def test_wrong_callbacks_metrics_and_names_are_refused():
    class Misspelt:
        def on_epoch_end(self) -> None: ...

    with pytest.raises(RecipeError, match="on_epoch_end, which nothing calls"):
        check_callback(Misspelt())
    with pytest.raises(RecipeError, match=r"Write callbacks=\(Misspelt\(\),\)"):
        check_callback(Misspelt)
    with pytest.raises(RecipeError, match="none of the moments"):
        check_callback(3)
    monitor = Monitor("acuracy", "max", 1, None)
    with pytest.raises(RecipeError, match="did you mean accuracy"):
        monitor.take(1, {"loss": 1.0, "accuracy": 0.5})
    net = model()
    run = headway.Executor(net, sgd(net), loss=recipe().loss, batch=4)
    for made, said in [
        ([1.0], "not a dictionary"),
        ({"loss": 1.0}, "named loss"),
        ({"one": torch.ones(3)}, "mean over the samples of the batch, a pair"),
    ]:
        with pytest.raises(RecipeError, match=said):
            run.validate(points(5, 1), lambda model, batch, made=made: made)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"schedule": "chimera"}),  # each rank has a last stage
        pytest.param(4, {"schedule": "1f1b"}, marks=pytest.mark.slow),  # two copies
    ],
)
def test_metrics_of_a_pipeline_are_those_of_the_whole_model(ranks, options):
    for found, expected in run_ranks(ranks, validated_in_stages, options):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


def validated_in_stages(
    world: Any, options: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """13 samples: the last batch has other micro-batches, and fewer of them."""
    torch.manual_seed(0)
    net = model().double()
    expected = value_of(net)
    pipeline = PipelinePlan(**options)
    plan = pipelined(8, processes=world.size, stages=2, microbatch=2, pipeline=pipeline)
    run = headway.Executor(
        net, sgd(net), loss=monitored.double_loss, plan=plan, world=World.adopt()
    )
    found = run.validate(points(13, 2), monitored.double_metrics)
    assert found["loss"] == run.evaluate(run.validation_loader(points(13, 2)))[0]
    return found, expected


def test_a_recipe_with_stages_has_the_metrics_of_the_serial_run(serial, tmp_path):
    split = headway.train(
        RECIPE, processes=2, directory=tmp_path / "run",
        overrides=["stages=2", "microbatch=2", 'pipeline.schedule="1f1b"'],
    )  # fmt: skip
    assert (split.steps, split.best_step) == (serial.steps, serial.best_step)
    assert split.metrics == pytest.approx(serial.metrics)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("twice", "the metrics function calls the model more than once"),
        ("otherwise", "the metrics function calls the model in another way than the loss does"),
        ("parameters", "the metrics function uses model.parameters, which it cannot in a pipeline"),
    ],
)
def test_metrics_that_no_pipeline_can_compute_are_refused_before_the_first_step(
    what, said, tmp_path
):
    with pytest.raises(HeadwayError, match=said):
        headway.train(
            RECIPE, processes=2, directory=tmp_path / "run",
            overrides=["stages=2", "microbatch=2", f'arguments.what="{what}"'],
        )  # fmt: skip
    assert not events(tmp_path / "run", "step")


def test_metrics_of_split_samples_are_refused():
    plan = SimpleNamespace(split=SimpleNamespace(spatial={"0": ((0, 2),)}))
    with pytest.raises(PlanError, match="metrics cannot be computed with split samples"):
        check_metrics(plan)
