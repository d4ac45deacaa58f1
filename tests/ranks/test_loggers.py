"""ranks: loggers of a run: CSV, and whatever takes a dictionary and a step."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import MissingExtra, RecipeError
from headway.run.training import loggers
from headway.run.training.loggers import CsvLogger, check_loggers, log_method
from support import monitored

FILE = "HEADWAY_TEST_LOG"


class Run:
    """As a run of Weights & Biases; fails after a while, as a connection does."""

    def __init__(self) -> None:
        self.path = Path(os.environ[FILE])

    def log(self, data: dict[str, float], step: int) -> None:
        if step > 6:
            raise ConnectionError("no network")
        with self.path.open("a") as file:
            file.write(json.dumps([step, data, os.getpid()]) + "\n")


def recipe() -> headway.Recipe:
    made = monitored.recipe()
    return replace(made, callbacks=(), loggers=("csv", Run), stop=8, early_stopping=0)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rank_0_logs_steps_and_validations_and_a_failure_costs_the_logger_alone(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(FILE, str(tmp_path / "log"))
    directory = tmp_path / "run"
    result = headway.train(
        "test_loggers:recipe", processes=2, directory=directory, faults=["kill rank 1 at step 6"]
    )
    assert result.steps == 8
    found = rows(directory / "metrics.csv")
    assert [int(row["step"]) for row in found] == list(range(1, 9))
    steps = {row["step"]: row for row in monitored.events(directory, "step")}
    for row in found:
        assert float(row["train/loss"]) == steps[int(row["step"])]["loss"]
        assert bool(row["validation/accuracy"]) == (int(row["step"]) in (3, 6, 8))
    assert float(found[-1]["validation/accuracy"]) == result.metrics["accuracy"]
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {step for step, _, _ in told} == set(range(1, 7))
    assert len({process for _, _, process in told}) == result.attempts  # rank 0 alone
    said = [row["text"] for row in monitored.events(directory, "warning")]
    assert any("no network" in text and "nothing more is logged" in text for text in said)


def test_a_table_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "metrics.csv"
    log = CsvLogger(path)
    for step in range(1, 5):
        log.log({"loss": step / 2}, step)
    log.log({"accuracy": 0.5}, 4)
    with path.open("a") as file:
        file.write("5,2.5")  # half a line
    log = CsvLogger(path, after=3)
    log.log({"loss": 9.0, "accuracy": 1.0}, 4)
    assert [(row["step"], row["loss"], row["accuracy"]) for row in rows(path)] == [
        ("1", "0.5", ""), ("2", "1.0", ""), ("3", "1.5", ""), ("4", "9.0", "1.0")
    ]  # fmt: skip


def test_the_interfaces_of_the_field_are_known():
    class Writer:  # torch.utils.tensorboard.SummaryWriter
        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

    class Flow:  # mlflow, and Lightning's loggers
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            seen.extend((name, value, step) for name, value in metrics.items())

        def log(self, *_: Any) -> None:
            raise AssertionError

    for made in (Writer(), Flow()):
        seen: list[tuple[str, float, int]] = []
        log_method(made)({"a": 1.0, "b": 2.0}, 3)
        assert seen == [("a", 1.0, 3), ("b", 2.0, 3)]


def test_what_is_no_logger_is_refused_before_training(monkeypatch):
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(loggers.importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=r"pip install 'headway\[wandb\]'"):
        check_loggers(["wandb"])
    with pytest.raises(RecipeError, match="did you mean wandb"):
        check_loggers(["wanb"])
    with pytest.raises(RecipeError, match="is an object"):
        check_loggers([3])
    with pytest.raises(RecipeError, match="is no logger"):
        log_method(object())
