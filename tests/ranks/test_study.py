"""ranks: studies of batch sizes and rates: equal after kills, with and without cuts; refusals."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import subprocess
import time

import pytest

import headway
from headway.cost.batch_scaling import StudyRun
from headway.errors import HeadwayError, RecipeError
from support.commands import (
    HEADWAY,
    environment,
    events,
    headway_here,
    none_left,
    warm_variables,
)
from support.patience import patient
from support.ranks import warm_up
from support.study_recipes import no_rate, no_validation, quadratic

QUADRATIC = "support.study_recipes:quadratic"
GRID = ("--batches", "2,4,8", "--rates", "linear", "--multipliers", "1/2,1,2,4",
        "--target", "error<=0.05", "--every", "1 step", "--budget", "800 samples",
        "-n", "1")  # fmt: skip

MEANS = ("--batches", "16", "--rates", "0.0001,0.1,3", "--target", "loss<=32.7", "--no-cut",
         "--every", "1024 samples", "--budget", "6000 samples")  # fmt: skip


def facts(directory):
    return json.loads((directory / "study.json").read_text())


def study(cwd, *words, recipe=QUADRATIC, grid=GRID):
    done = headway_here("study", recipe, *grid, *words, cwd=cwd)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("study")
    return folder / "whole", study(folder, "-d", "whole")


def test_a_study_says_best_rates_exponent_and_critical_batch(whole):
    directory, done = whole
    found = facts(directory)
    rows = [line.split() for line in done.out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["2", "4", "8"]
    assert "Critical batch" in done.out
    scaling = found["scaling"]
    # The law of the recipe: rates in proportion to the batch, here without a bend in so few.
    assert scaling["exponent"]["low"] <= 1 <= scaling["exponent"]["high"]
    assert scaling["left_out"] == []
    assert len(found["runs"]) == 12
    assert {run["end"] for run in found["runs"]} <= {"reached", "cut", "budget"}
    for run in found["runs"]:
        if run["end"] != "reached":
            continue
        assert run["samples"] == run["steps"] * run["batch"]
        path = directory / run["directory"]
        judged = {row["step"]: row["metrics"]["error"] for row in events(path, "validation")}
        # The first judgement at the target.
        assert min(step for step, value in judged.items() if value <= 0.05) == run["steps"]
        assert {row["samples"] for row in events(path, "step")} == {run["batch"]}
        assert events(path, "step")[0]["lr"] == pytest.approx(run["rate"], rel=1e-12)
    with (directory / "study.csv").open() as file:
        assert [row["steps"] for row in csv.DictReader(file)] == [
            str(run["steps"]) for run in found["runs"]
        ]
    assert (directory / "study.svg").read_text().count("</svg>") >= 3
    page = (directory / "report.html").read_text()
    assert "Batch size and learning rate" in page
    assert "Critical batch" in page
    # `headway report` makes the same page again.
    assert headway_here("report", directory.name, cwd=directory.parent).code == 0
    assert (directory / "report.html").read_text() == page


def test_a_rerun_makes_the_same_choice(whole, tmp_path):
    directory, _ = whole
    study(tmp_path, "-d", "again")
    assert facts(tmp_path / "again") == facts(directory)


def test_cut_runs_change_no_result(tmp_path):
    wide = ("--batches", "8,4", *GRID[2:5], "1/4,1/2,1,2,4", *GRID[6:])
    study(tmp_path, "-d", "cut", grid=wide)
    study(tmp_path, "-d", "all", "--no-cut", grid=wide)
    cut, whole = facts(tmp_path / "cut"), facts(tmp_path / "all")
    assert sum(run["end"] == "cut" for run in cut["runs"]) >= 3
    # Two beside the best of batch 8 have gone on to their end.
    eight = cut["scaling"]["batches"][1]
    assert eight["optimum"] != eight["best"]["rate"]
    assert not any(run["end"] == "cut" for run in whole["runs"])
    for key in cut["scaling"]:
        if key != "batches":
            assert cut["scaling"][key] == whole["scaling"][key], key
    for one, other in zip(cut["scaling"]["batches"], whole["scaling"]["batches"], strict=True):
        for key in ("batch", "best", "edge", "optimum", "spacing"):
            assert one[key] == other[key], key
    for one, other in zip(cut["runs"], whole["runs"], strict=True):
        # What was cut would have needed longer.
        assert other["steps"] > one["steps"] if one["end"] == "cut" else one == other


def test_after_kills_at_any_moment_a_study_ends_as_if_there_had_been_none(whole, tmp_path):
    directory, _ = whole
    killed = tmp_path / "killed"
    shutil.copytree(directory, killed)
    runs = [run["directory"] for run in facts(killed)["runs"]]
    for name in ("study.json", "study.csv", "study.svg", "report.html"):
        (killed / name).unlink()
    for run in (runs[4], runs[5]):  # before its first checkpoint
        (killed / run / "outcome.json").unlink()
        shutil.rmtree(killed / run / "checkpoints")
    for run in runs[6:]:  # not begun
        shutil.rmtree(killed / run)
    study(tmp_path, "-d", "killed", "--resume")
    assert facts(killed) == facts(directory)


def test_a_signal_stops_a_study_in_order_and_it_goes_on(tmp_path):
    words = ("study", QUADRATIC, "--batches", "2,4", "--rates", "0.00002,0.00004", "-n", "1",
             "--target", "error<=0.5", "--every", "2 steps", "--budget", "24 samples",
             "--set", "arguments.pause=0.05")  # fmt: skip
    job = subprocess.Popen(
        [*HEADWAY, *words, "-d", "stopped"], cwd=tmp_path, env=environment(**warm_variables()),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + patient(90)
    try:
        while sum(len(events(run, "step")) for run in (tmp_path / "stopped").glob("batch*")) < 3:
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=patient(60))
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM, err
    assert "--resume" in out
    assert none_left(tmp_path / "stopped")
    assert facts(tmp_path / "stopped")["stopped_by"] == "SIGTERM"
    fast = (*words[1:-1], "arguments.pause=0.0")
    study(tmp_path, "-d", "whole", recipe=fast[0], grid=fast[1:])
    # The pause is no option that changes a number, but one all the same.
    other = headway_here("study", *fast, "-d", "stopped", "--resume", cwd=tmp_path)
    assert other.code == 1
    assert "arguments.pause=0.05 there, arguments.pause=0.0 here" in other.err
    study(tmp_path, "-d", "stopped", "--resume", recipe=words[1], grid=words[2:])
    assert facts(tmp_path / "stopped")["runs"] == facts(tmp_path / "whole")["runs"]
    assert {run["end"] for run in facts(tmp_path / "whole")["runs"]} == {"budget"}


def test_the_number_of_processes_changes_nothing_but_rounding(whole, tmp_path):
    found = facts(whole[0])
    double = ("--set", "precision='float64'", "-n", "2")
    grid = (*GRID[:1], "4", *GRID[2:-2])
    study(tmp_path, "-d", "two", *double, grid=grid)
    alike = [run for run in found["runs"] if run["batch"] == 4]
    for one, other in zip(facts(tmp_path / "two")["runs"], alike, strict=True):
        assert {**one, "value": None} == {**other, "value": None}
        if one["end"] == "reached":
            assert one["value"] == pytest.approx(other["value"], rel=1e-4)


def test_a_larger_grid_goes_on_from_a_smaller_one(whole, tmp_path):
    directory, _ = whole
    shutil.copytree(directory, tmp_path / "grown")
    done = study(
        tmp_path, "-d", "grown", "--resume",
        grid=(*GRID[:1], "2,4,8", "--rates", "linear", "--multipliers", "1/4,1/2,1,2,4", *GRID[6:]),
    )  # fmt: skip
    said = [line for line in done.err.splitlines() if line.startswith("batch")]
    assert 3 <= len(said) <= 6  # the new ones, and what of them was cut and then needed
    assert {line.split(",")[0] for line in said} == {"batch 2", "batch 4", "batch 8"}


def test_further_seeds_are_further_runs_and_their_mean_counts(whole, tmp_path):
    directory, _ = whole
    shutil.copytree(directory, tmp_path / "seeds")
    study(tmp_path, "-d", "seeds", "--resume", "--seeds", "0,5", grid=(*GRID[:1], "8", *GRID[2:]))
    runs = facts(tmp_path / "seeds")["runs"]
    assert [run["seed"] for run in runs] == [0, 5] * 4
    assert "cut" not in {run["end"] for run in runs}
    cell = [run for run in runs if run["rate"] == pytest.approx(0.16)]
    assert cell[0]["value"] != cell[1]["value"]
    rates = facts(tmp_path / "seeds")["scaling"]["batches"][0]["rates"]
    mean = next(one["steps"] for one in rates if one["rate"] == pytest.approx(0.16))
    assert mean == pytest.approx(math.sqrt(cell[0]["steps"] * cell[1]["steps"]))


def test_what_diverges_or_runs_out_of_samples_has_its_row(tmp_path):
    done = study(tmp_path, "-d", "s", grid=MEANS, recipe="support.study_recipes:no_validation")
    ends = {f"{run['rate']:g}": run for run in facts(tmp_path / "s")["runs"]}
    assert {rate: run["end"] for rate, run in ends.items()} == {
        "0.0001": "budget", "0.1": "reached", "3": "diverged",
    }  # fmt: skip
    assert ends["0.0001"]["steps"] == 375
    assert ends["3"]["steps"] < 100
    assert ends["0.1"]["steps"] % 64 == 0  # the mean over 1024 samples
    path = tmp_path / "s" / ends["0.1"]["directory"]
    losses = [row["loss"] for row in events(path, "step")][: ends["0.1"]["steps"]]
    assert math.fsum(losses[-64:]) / 64 == pytest.approx(ends["0.1"]["value"], rel=1e-6)
    assert "1 rate over budget, 1 rate diverged" in done.out
    before = facts(tmp_path / "s")
    for rate in ("0.0001", "3"):  # killed between their end and its record
        (tmp_path / "s" / ends[rate]["directory"] / "outcome.json").unlink()
    study(tmp_path, "-d", "s", "--resume", grid=MEANS, recipe="support.study_recipes:no_validation")
    assert facts(tmp_path / "s") == before
    never = study(tmp_path, "-d", "never", grid=("--batches", "2,4", "--rates", "0.01", "--target",
                  "error<=1e-9", "--budget", "40 samples"))  # fmt: skip
    assert never.out.count("target not reached, 1 rate over budget") == 2
    assert not (tmp_path / "never" / "study.svg").exists()


def test_all_groups_are_multiplied_alike_and_a_scheduler_follows():
    from headway.api.study_grid import GridQuestion, make_grid
    from headway.run.recipe.factory import load_recipe
    from headway.run.training.target import Target

    recipe = quadratic(two_groups=True, scheduler="cosine", scale_rate="linear from 2 samples")
    question = GridQuestion(
        batches=(4, 8), rates=("linear", "square_root", 0.5), multipliers=(1.0, 2.0), base=None,
        budget=None, every=None, target=Target.parse("error<=0.1"), processes=None,
    )  # fmt: skip
    grid = make_grid(recipe, (), question)
    assert (grid.base_rate, grid.groups, str(grid.base)) == (0.08, 2, "2 samples")
    # Linear 0.16 and 0.32, square root 0.08 sqrt(2) and 0.16 sqrt(2); from 2 to 8 twice as far.
    assert [f"{p.rate:.4g}" for p in grid.points if p.batch == 4] == [
        "0.1131", "0.16", "0.2263", "0.32", "0.5",
    ]  # fmt: skip
    # Linear 0.32 and 0.64; square root 0.16 and 0.32: once.
    assert [f"{p.rate:.4g}" for p in grid.points if p.batch == 8] == ["0.16", "0.32", "0.5", "0.64"]
    for point in grid.points:
        built = load_recipe(recipe, point.overrides)
        optimizer = built.optimizer(built.model())
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([point.rate, point.rate / 80], rel=1e-12)
        assert built.scheduler(optimizer).base_lrs == rates


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        (no_rate(), {}, "no learning rate to scale"),
        (quadratic(scheduler="one cycle"), {}, "the scheduler sets the learning rate of group 0"),
        (no_validation(), {}, "has no validation data"),
        (quadratic(metrics=None), {}, "has no metrics"),
        (quadratic(), {"target": "error=0.1"}, "which side is better"),
        (quadratic(), {"target": "low error"}, "not of the form"),
        (quadratic(), {"target": "loss<=nan"}, "not a number"),
        (quadratic(), {"batches": ()}, "--batches names nothing"),
        (quadratic(), {"batches": (0, 2)}, "0 is not a number above 0"),
        (quadratic(), {"rates": ("linaer",)}, "did you mean linear"),
        (quadratic(), {"every": "2 epochs"}, "--every"),
        (quadratic(), {"base": "4 steps"}, "--base"),
        (quadratic(), {"batches": (2, 10_000)}, "fewer than one batch of 10000"),
        (quadratic(), {"batches": (1, 2), "processes": 2}, "batch 1: batch.samples is 1 for 2"),
        (quadratic(data=lambda: None), {}, "None"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_starts(recipe, words, said, tmp_path):
    options = {"batches": (2, 4), "target": "error<=0.1", "directory": tmp_path / "s"} | words
    with pytest.raises(HeadwayError) as caught:
        headway.study(recipe, **options)
    assert said in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_an_unknown_metric_is_named_at_the_first_validation(tmp_path):
    warm_up()
    with pytest.raises(RecipeError, match="no validation gives eror; did you mean error"):
        headway.study(
            quadratic(), batches=(2,), target="eror<=0.1", every="1 step",
            directory=tmp_path / "s", processes=1,
        )  # fmt: skip


def test_another_study_or_a_run_is_not_gone_on_with(whole, tmp_path):
    directory, _ = whole
    words = ("study", QUADRATIC, *GRID, "-d", str(directory))
    taken = headway_here(*words, cwd=tmp_path)
    assert "already holds a run" in taken.err
    other = headway_here(*words, "--resume", "--base", "8 samples", cwd=tmp_path)
    assert "holds another study\n  base: rate 0.08 at 4 samples there, rate 0.08 at 8" in other.err
    run = str(directory / facts(directory)["runs"][0]["directory"])
    none = headway_here(*words[:-1], run, "--resume", cwd=tmp_path)
    assert "holds a run, and no study" in none.err


def test_json_is_what_the_file_has(whole, tmp_path):
    directory, _ = whole
    done = headway_here("study", QUADRATIC, *GRID, "-d", str(directory), "--resume", "--json",
                        cwd=tmp_path)  # fmt: skip
    assert json.loads(done.out) == facts(directory)
    assert set(facts(directory)["runs"][0]) == set(StudyRun.__dataclass_fields__)


def test_a_validation_that_was_due_where_a_run_stopped_is_made_when_it_goes_on(tmp_path):
    warm_up()
    options = {"directory": tmp_path / "r", "processes": 1}
    headway.train(quadratic(stop=8, validate_every=4), callbacks=(StopAfter(3),), **options)
    assert [row["step"] for row in events(tmp_path / "r", "step")][-1] == 4
    assert events(tmp_path / "r", "validation") == []
    headway.train(
        quadratic(stop=8, validate_every=4), callbacks=(StopAfter(99),), resume=True, **options
    )
    assert [row["step"] for row in events(tmp_path / "r", "validation")] == [4, 8]


class StopAfter:
    def __init__(self, step):
        self.step = step

    def on_step_end(self, run):
        if run.step == self.step:
            run.stop()
