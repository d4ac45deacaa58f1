"""single: targets of training as text, and the callback that judges a run."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from headway.run.training.target import Target, TargetWatch


@pytest.mark.parametrize(
    ("text", "metric", "value", "above"),
    [
        ("loss=0.45", "loss", 0.45, False),
        ("loss <= 4.5e-1", "loss", 0.45, False),
        ("top 5>=0.9", "top 5", 0.9, True),
        ("delta>=-1", "delta", -1.0, True),
    ],
)
def test_a_target_as_text(text, metric, value, above):
    found = Target.parse(text)
    assert found == Target(metric, value, above)
    assert Target.parse(str(found)) == found
    assert found.meets(value)
    assert found.meets(value + 1) == above


@pytest.mark.parametrize("text", ["", "loss", "<=3", "auc=0.9", "loss<3", "loss<=x", "loss>=inf"])
def test_another_text_is_no_target(text):
    with pytest.raises(ValueError, match=r"is not|does not say"):
        Target.parse(text)


class Run(SimpleNamespace):
    """What a callback sees of a run of twelve steps."""

    def __init__(self, directory):
        super().__init__(directory=directory, step=0, steps=12, rank=0, loss=0.0, validation={})
        self.stopped = False

    def stop(self):
        self.stopped = True

    def play(self, watch, losses):
        for loss in losses:
            self.step, self.loss = self.step + 1, loss
            watch.on_step_end(self)
        file = self.directory / "outcome.json"
        return json.loads(file.read_text()) if file.exists() else None


def test_a_metric_that_counted_nothing_is_no_divergence(tmp_path):
    run = Run(tmp_path)
    judge = TargetWatch(target=Target.parse("f1>=0.5"), every=1, validates=True)
    for step, (loss, f1) in enumerate([(0.7, math.nan), (0.6, 0.4), (math.nan, math.nan)], 1):
        assert not run.stopped
        run.step, run.validation = step, {"loss": loss, "f1": f1}
        judge.on_validation_end(run)
    assert run.play(judge, ())["end"] == "diverged"


LOSSES = (9, 9, 9, 9, 4, 8, 6, 2)
"""Means over four: 9 and 5; the single loss 4 is none."""


def watch(**more):
    options = {"target": Target.parse("loss<=5"), "every": 4, "validates": False}
    return TargetWatch(**{**options, **more})


def test_the_mean_over_some_steps_is_judged(tmp_path):
    run = Run(tmp_path)
    assert run.play(watch(), LOSSES) == {"end": "reached", "steps": 8, "value": 5}
    assert run.stopped


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_run_that_goes_on_judges_the_same_means(stop, tmp_path):
    run, first, second = Run(tmp_path), watch(), watch()
    assert run.play(first, LOSSES[:stop]) is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run.play(second, LOSSES[stop:]) == {"end": "reached", "steps": 8, "value": 5}


def test_a_run_over_the_limit_is_cut_and_goes_on_from_there(tmp_path):
    run, cut = Run(tmp_path), watch(limit=5)
    assert run.play(cut, LOSSES[:5]) is None  # as fast is not slower
    assert run.play(cut, LOSSES[5:7]) == {"end": "cut", "steps": 5, "value": 8}
    later = watch()
    later.load_state_dict(cut.state_dict())
    assert run.play(later, LOSSES[7:]) == {"end": "reached", "steps": 8, "value": 5}


def test_a_target_that_is_reached_in_the_step_after_the_cut_counts(tmp_path):
    run = Run(tmp_path)
    assert run.play(watch(limit=6), LOSSES)["end"] == "reached"


def test_the_first_end_stays_and_only_rank_0_writes(tmp_path):
    run = Run(tmp_path)
    assert run.play(watch(), (*LOSSES, 1, 1, 1, 1))["steps"] == 8
    other = Run(tmp_path / "none")
    other.rank = 1
    assert other.play(watch(), LOSSES) is None
    assert other.stopped


def test_a_validation_that_is_no_number_diverges(tmp_path):
    run, judge = Run(tmp_path), watch(validates=True)
    run.step, run.validation = 4, {"loss": float("nan")}
    judge.on_validation_end(run)
    assert json.loads((tmp_path / "outcome.json").read_text())["end"] == "diverged"
