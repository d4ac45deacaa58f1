"""ranks: `headway train svm`: files, runs, refusals, reports, signals and deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits, make_classification
from sklearn.svm import SVC

from headway.report import write_report
from headway.svm.model_files import load_machine
from headway.svm.run.libsvm_data import dump
from support.commands import (
    HEADWAY,
    TORCHRUN,
    command,
    environment,
    events,
    headway_here,
    none_left,
    warm_variables,
)
from support.open_ports import descendants
from support.patience import patient

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    rows, labels = make_classification(
        600, 8, n_informative=6, n_redundant=0, flip_y=0.05, random_state=3
    )
    return rows, np.where(labels > 0, 1.0, -1.0)


@pytest.fixture
def data(samples, tmp_path) -> Path:
    path = tmp_path / "points.svm"
    dump(path, *samples)
    return path


OPTIONS = ("--C", "3", "--gamma", "0.2")


def result(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def objective(theirs: SVC, rows: np.ndarray) -> float:
    """Of the dual problem, from scikit-learn's coefficients."""
    vectors, weights = rows[theirs.support_], theirs.dual_coef_[0]
    distances = ((vectors[:, None] - vectors[None]) ** 2).sum(2)
    kernel = np.exp(-theirs._gamma * distances)
    return float(weights @ kernel @ weights / 2 - np.abs(weights).sum())


@pytest.mark.parametrize("processes", ["1", "3"])
def test_a_machine_is_that_of_scikit_learn(processes, data, samples, tmp_path):
    done = headway_here(
        "train", "svm", str(data), "-n", processes, *OPTIONS, "--test", str(data), "--json",
        cwd=tmp_path,
    )  # fmt: skip
    found = result(done)
    rows, labels = samples
    theirs = SVC(C=3, gamma=0.2, tol=1e-3).fit(rows, labels)
    assert found["finished"]
    assert found["violation"] <= 1e-3
    assert found["objective"] == pytest.approx(objective(theirs, rows), rel=1e-4)
    assert found["accuracy"] == pytest.approx(theirs.score(rows, labels), abs=0.002)
    machine = load_machine(tmp_path / found["model"], columns=8)
    assert (machine.classes[machine.predict(rows)] == theirs.predict(rows)).mean() > 0.998
    assert "memory per rank: at most" in done.err
    assert found["peak_bytes"] <= found["bound_bytes"]
    run = tmp_path / found["directory"]
    assert run == tmp_path / "runs" / "svm-points-001"
    assert [event["reason"] for event in events(run, "stop")] == ["complete"]
    assert [event["ranks"] for event in events(run, "start")] == [int(processes)]


def test_several_classes_weights_and_safetensors(tmp_path):
    rows, labels = load_digits(return_X_y=True)
    keep = labels < 4
    rows, labels = rows[keep] / 16, labels[keep]
    dump(tmp_path / "digits", rows, labels.astype(float))
    done = headway_here(
        "train", "svm", "digits", "--kernel", "linear", "--C", "0.1", "--weights", "2=5",
        "--weights", "0=0.5", "--out", "digits.safetensors", "--test", "digits", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    found = result(done)
    theirs = SVC(C=0.1, kernel="linear", class_weight={2: 5, 0: 0.5}).fit(rows, labels)
    machine = load_machine(tmp_path / "digits.safetensors")
    assert machine.classes.tolist() == [0, 1, 2, 3]
    assert (machine.classes[machine.predict(rows)] == theirs.predict(rows)).mean() > 0.998
    assert sum(found["support"]) == pytest.approx(len(theirs.support_), rel=0.02)
    run = tmp_path / found["directory"]
    assert len(events(run, "svm_pair")) == 6
    page = write_report(run).html.read_text()
    assert "Pairs of classes" in page
    assert "2, 3" in page


def test_the_same_for_any_rule_and_working_set(data, tmp_path):
    found = [
        result(
            headway_here(
                "train", "svm", str(data), *OPTIONS, "--elimination", rule, "--working-set", size,
                "--json", cwd=tmp_path,
            )
        )["objective"]
        for rule, size in (("none", "512"), ("single2", "64"), ("Multi5pc", "2"))
    ]  # fmt: skip
    assert found == pytest.approx([found[0]] * 3, rel=1e-4)


def test_a_resumed_run_goes_on_from_its_state(data, tmp_path):
    words = ("train", "svm", str(data), *OPTIONS, "--working-set", "4", "-d", "run")
    first = headway_here(*words, "--max-steps", "200", "--json", cwd=tmp_path)
    assert result(first)["finished"] is False
    again = headway_here(*words, cwd=tmp_path)
    assert again.code == 1
    assert "already holds a run" in again.err
    done = headway_here(*words, "-n", "2", "--resume", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "unfinished" not in done.out
    run = tmp_path / "run"
    assert [event["step"] for event in events(run, "resume")] == [result(first)["step"]]
    whole = headway_here("train", "svm", str(data), *OPTIONS, "-d", "whole", "--json", cwd=tmp_path)
    end = events(run, "svm_end")[-1]
    assert end["finished"]
    assert end["objective"] == pytest.approx(result(whole)["objective"], rel=1e-4)
    other = headway_here(
        "train", "svm", str(data), "--C", "5", "--gamma", "0.2", "-d", "run", "--resume",
        cwd=tmp_path,
    )  # fmt: skip
    assert other.code == 3
    assert "the run's state is of other samples" in other.err


def test_an_unfinished_machine_says_so_everywhere(data, tmp_path):
    words = ("train", "svm", str(data), *OPTIONS, "--working-set", "4", "--max-steps", "100")
    done = headway_here(*words, "-d", "run", cwd=tmp_path)
    assert done.code == 0
    assert "unfinished" in done.out
    assert "warning: the machine is unfinished" in done.err
    assert "Warning:" not in done.err  # as of a line of source
    assert (tmp_path / "run" / "machine.model").exists()
    page = write_report(tmp_path / "run").html.read_text()
    assert "unfinished" in page


def test_the_memory_of_ranks_is_what_was_said(tmp_path):
    """Beside a small run, so that what a process needs for itself hides nothing."""
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 9, (40_000, 60)).astype(float)
    labels = np.where(rows[:, 0] + rows[:, 1] + rng.integers(0, 3, len(rows)) > 9, 1.0, -1.0)
    found = {}
    for name, count in (("small", 200), ("large", len(rows))):
        dump(tmp_path / name, rows[:count], labels[:count])
        found[name] = result(
            headway_here(
                "train", "svm", name, "--gamma", "0.01", "--elimination", "multi2",
                "--max-steps", "1500", "--json", cwd=tmp_path,
            )
        )  # fmt: skip
    small, large = found["small"], found["large"]
    assert large["peak_bytes"] <= large["bound_bytes"]
    more = large["peak_bytes"] - small["peak_bytes"]
    assert rows.nbytes < more <= large["bound_bytes"] - small["bound_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--C", "-1"), "C is -1; it must be positive and finite"),
        (("--gamma", "nan"), "gamma is nan; it must be positive and finite"),
        (("--tolerance", "0"), "tolerance is 0; it must be positive"),
        (("--working-set", "2000"), "a working set has 2 to 1024 samples, not 2000"),
        (("--weights", "1=-2"), "the weight of class 1 is -2; it must be positive"),
        (("--weights", "1"), "--weights 1: write CLASS=FACTOR"),
        (("--weights", "7=2"), "there is no class 7"),
        (("--elimination", "often"), "there is no rule of elimination 'often'"),
        (("--max-steps", "-3"), "at most -3 steps"),
        (("--kernel", "cubic"), "kernel"),
        (("-n", "0"), "cannot start 0 processes"),
    ],
)
def test_what_cannot_be_trained_is_refused(words, said, data, tmp_path):
    done = headway_here("train", "svm", str(data), *words, cwd=tmp_path)
    assert done.code == 1
    assert said in done.err
    assert "Traceback" not in done.err


def test_all_problems_of_the_options_are_told_together(data, tmp_path):
    done = headway_here(
        "train", "svm", str(data), "--C", "0", "--gamma", "-1", "--working-set", "1", cwd=tmp_path
    )
    assert all(word in done.err for word in ("C is 0", "gamma is -1", "not 1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 1:2\n1 2:3\n", "there is one class only, 1"),
        ("", "there are no samples"),
        ("0.5 1:2\n1 2:3\n", "the label 0.5 is no whole number"),
        ("1 1:2\nx 2:3\n-1 0:3\n", "line 2: the label 'x' is no number"),
    ],
)
def test_data_that_cannot_be_trained_on(text, said, tmp_path):
    (tmp_path / "data").write_text(text)
    done = headway_here("train", "svm", "data", "-n", "2", cwd=tmp_path)
    assert done.code == 1, done.err
    assert said in done.err
    assert done.err.count("HW-") == 1


def test_a_missing_file_leaves_no_run(tmp_path):
    done = headway_here("train", "svm", "data.svm", cwd=tmp_path)
    assert done.code == 1
    assert "data.svm: cannot be read\n  No such file" in done.err
    assert not (tmp_path / "runs").exists()


def test_the_page_draws_the_training(data, tmp_path):
    done = headway_here("train", "svm", str(data), *OPTIONS, "-d", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    page = write_report(tmp_path / "run").html.read_text()
    for heading in ("Violation", "Active and eliminated samples", "Support vectors",
                    "Kernel values", "Dual objective", "Outer steps"):  # fmt: skip
        assert heading in page
    assert page.count("<svg") == 4
    assert "No step is logged yet" not in page


def test_the_overview_has_both_commands_and_train_keeps_its_recipes(tmp_path):
    said = headway_here("--help", cwd=tmp_path).out
    assert "train svm" in said
    assert "plan svm" in said
    helped = headway_here("train", "svm", "--help", cwd=tmp_path)
    assert "--elimination" in helped.out
    assert "headway train svm" in helped.out
    assert "RECIPE" in headway_here("train", "--help", cwd=tmp_path).out
    wrong = headway_here("train", "svm", "x", "--kernal", "rbf", cwd=tmp_path)
    assert wrong.code == 1
    assert "headway train svm --help" in wrong.err


# -- signals and deaths ---------------------------------------------------------------------------


@pytest.fixture
def long_job(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts minutes of training: noise, a few samples at a time."""
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((4000, 10)), np.sign(rng.standard_normal(4000))
    dump(tmp_path / "noise", rows, labels)
    words = ("train", "svm", "noise", "-n", "2", "--C", "100", "--gamma", "0.1", "--working-set",
             "4", "--tolerance", "1e-5", "-d", "run")  # fmt: skip
    jobs = []

    def begin(*more: str) -> subprocess.Popen[str]:
        jobs.append(
            subprocess.Popen(
                [*HEADWAY, *words, *more],
                cwd=tmp_path, env=environment(**warm_variables()), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def wait_for(run: Path, kind: str, count: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + patient(90)
    while len(events(run, kind)) < count:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(job: subprocess.Popen[str]) -> list[int]:
    """Forked from a process that the command has started; in the order of their births."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    return sorted(pid for pid in descendants(job.pid)[1:] if parent(pid) != job.pid)


@pytest.mark.parametrize("victim", [0, 1])
def test_after_the_death_of_a_worker_the_fit_goes_on_from_its_state(victim, long_job, tmp_path):
    run = tmp_path / "run"
    job = long_job()
    wait_for(run, "checkpoint", 2, job)
    os.kill(workers_of(job)[victim], signal.SIGKILL)
    wait_for(run, "resume", 1, job)
    saved = {event["step"] for event in events(run, "checkpoint") if event["attempt"] == 0}
    resumed = events(run, "resume")[0]
    assert resumed["attempt"] == 1
    assert resumed["step"] in saved
    wait_for(run, "checkpoint", len(saved) + 1, job)
    assert events(run, "checkpoint")[-1]["step"] > resumed["step"]
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=patient(60))
    assert job.returncode == 128 + signal.SIGTERM, err
    assert "was killed by SIGKILL; resumed from step" in err
    assert "unfinished" in out
    assert none_left(run)


def test_without_restarts_a_death_ends_with_one_error(long_job, tmp_path):
    run = tmp_path / "run"
    job = long_job("--restarts", "0")
    wait_for(run, "checkpoint", 1, job)
    os.kill(workers_of(job)[-1], signal.SIGKILL)
    out, err = job.communicate(timeout=patient(60))
    assert job.returncode == 3, err
    assert out == ""
    assert err.count("HW-") == 1
    assert "was killed by SIGKILL" in err
    assert none_left(run)
    assert write_report(run).html.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_order_and_the_run_can_go_on(number, long_job, tmp_path):
    run = tmp_path / "run"
    job = long_job()
    wait_for(run, "svm_step", 20, job)
    job.send_signal(number)
    out, err = job.communicate(timeout=patient(60))
    assert job.returncode == 128 + number, err
    assert "unfinished" in out
    assert "warning: the machine is unfinished" in err
    stopped = events(run, "stop")[-1]
    assert stopped["reason"] == number.name
    assert load_machine(run / "machine.model", columns=10).classes.tolist() == [-1, 1]
    assert none_left(run)
    again = long_job("--resume")
    wait_for(run, "resume", 1, again)
    assert events(run, "resume")[0]["step"] == stopped["step"]
    again.send_signal(number)
    again.communicate(timeout=patient(60))
    assert none_left(run)


def test_under_torchrun_the_ranks_join_its_world(data, samples, tmp_path):
    done = command(
        *TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", *HEADWAY,
        "train", "svm", str(data), *OPTIONS, "-d", "run", "--json",
        cwd=tmp_path, variables=warm_variables(),
    )  # fmt: skip
    found = result(done)
    assert found["finished"]
    assert [event["ranks"] for event in events(tmp_path / "run", "start")] == [2]
    alone = headway_here("train", "svm", str(data), *OPTIONS, "--json", cwd=tmp_path)
    assert found["objective"] == pytest.approx(result(alone)["objective"], rel=1e-4)
